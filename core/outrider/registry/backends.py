"""Choosing a backend by the name that people type, and making it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from outrider.device.errors import (
    AmbiguousBackend,
    BackendError,
    BackendLoadError,
    BackendNotFound,
    ConfigError,
    OutriderError,
    PluginContractError,
)
from outrider.device.plugin import (
    ENTRY_POINT_GROUP,
    INTERFACE_VERSION,
    KERNELS_GROUP,
    BackendHooks,
    BackendInfo,
    KernelHooks,
    KernelInfo,
)
from outrider.registry.plugins import Candidate, PluginGroup, Plugins, describe_error, sentence, type_name
from outrider.registry.probing import Probe, Verdict

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from outrider.device.backend import Backend

AUTO = "auto"
_HOW_TO_CHOOSE = "choose one with --backend NAME, OUTRIDER_BACKEND=NAME or get_backend(NAME)"

KERNELS_OPTION = "kernels"
"""The option of every backend that names a plugin of kernels: ``cpu:kernels=NAME``."""

BACKENDS = PluginGroup(
    entry_points=ENTRY_POINT_GROUP,
    noun="backend",
    hooks=BackendHooks,
    describe="backend_info",
    info=BackendInfo,
    version=INTERFACE_VERSION,
)
KERNELS = PluginGroup(
    entry_points=KERNELS_GROUP,
    noun="kernel set",
    hooks=KernelHooks,
    describe="kernel_info",
    info=KernelInfo,
    version=INTERFACE_VERSION,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """A name as people type it, taken apart: ``cuda:1``, ``sim:seed=7,like=npu``, ``sim:0,seed=7``, ``auto``."""

    name: str
    ordinal: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    chosen_by: Literal["name", "environment", "probe"] = "name"

    def __str__(self) -> str:
        if self.name == AUTO:
            return AUTO
        options = "".join(f",{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{self.ordinal}{options}"


def parse_spec(text: str) -> BackendSpec:
    """Take a backend name apart; raises :class:`ConfigError` saying which part can't be read."""
    name, colon, rest = text.strip().partition(":")
    expected = "expected NAME, NAME:DEVICE or NAME:key=value,… such as 'cpu', 'cpu:0' or 'sim:seed=7'"
    if not name or not all(c.isalnum() or c in "_-" for c in name):
        raise ConfigError(f"backend {text!r}: {name!r} isn't a name; {expected}")
    if colon and not rest:
        raise ConfigError(f"backend {text!r}: nothing follows the colon; {expected}")
    ordinal = 0
    options: dict[str, str] = {}
    for position, part in enumerate(rest.split(",") if rest else []):
        key, equals, value = part.partition("=")
        if not equals and position == 0 and part.isascii() and part.isdigit():
            ordinal = int(part)
        elif equals and key.isidentifier() and value:
            if key in options:
                raise ConfigError(f"backend {text!r}: option {key!r} is given twice")
            options[key] = value
        else:
            raise ConfigError(f"backend {text!r}: can't read {part!r}; {expected}")
    if name == AUTO and rest:
        raise ConfigError(f"backend {text!r}: 'auto' takes no device and no options; name the backend that they are for")
    return BackendSpec(name=name, ordinal=ordinal, options=options)


class Registry:
    """The backends that are installed, and the kernel sets.

    ``entry_points`` is for tests; by default the environment's own are read, each time that they are needed, so a
    registry made before an installation sees it; ``once``: the first time alone, for who makes many backends of one plugin.
    ``backends``, a group of another version, is for tests too. ``probe``: how plugins are tried in a child process before
    they are loaded here; a backend that is named isn't.
    """

    _observers: ClassVar[tuple[Callable[[Backend], None], ...]] = ()

    def __init__(
        self,
        entry_points: Iterable[EntryPoint] | None = None,
        *,
        backends: PluginGroup[BackendInfo] = BACKENDS,
        probe: Probe | None = None,
        once: bool = False,
    ) -> None:
        given = None if entry_points is None else tuple(entry_points)
        self._backends = Plugins(backends, given, probe=probe, once=once)
        self.kernels = Plugins(KERNELS, given, probe=probe, once=once)

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Every name on offer, sorted; nothing is loaded for it."""
        return self._backends.names

    def candidates(self, *, load: bool = True) -> tuple[Candidate[BackendInfo], ...]:
        """Every backend on offer with its status; see :meth:`Plugins.candidates`."""
        return self._backends.candidates(load=load)

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each distribution whose backends or kernels can't be read."""
        return tuple(dict.fromkeys((*self._backends.notes, *self.kernels.notes)))

    def info(self, name: str) -> BackendInfo:
        """What the named plugin says about itself; loads that plugin alone."""
        return self._backends.info(name)

    def tried(self, name: str) -> Verdict:
        """What loading the named plugin does to a process, found out in a child, whatever this process has loaded."""
        return self._backends.tried(name)

    # -- choosing --------------------------------------------------------------------------------------------------

    def select(self, explicit: str | None = None, environment: str | None = None) -> BackendSpec:
        """The backend to use: the explicit name, else the environment's, else the usable one of highest priority.

        ``environment`` is the value of ``OUTRIDER_BACKEND`` as the command line read it. ``auto`` in either place asks
        for probing. Raises :class:`AmbiguousBackend` for two equal candidates and :class:`BackendNotFound` where none
        can be used. A named backend is only parsed here; :meth:`create` says why it can't be had.
        """
        if explicit is not None:
            spec = parse_spec(explicit)
        elif environment:
            try:
                spec = replace(parse_spec(environment), chosen_by="environment")
            except ConfigError as error:
                raise ConfigError(f"OUTRIDER_BACKEND={environment}: {error}") from None
        else:
            spec = BackendSpec(name=AUTO)
        return self._probe() if spec.name == AUTO else spec

    def create(self, spec: BackendSpec | str) -> Backend:
        """Make the backend of a spec; loads the named plugin alone, and never falls back to another one.

        Raises :class:`BackendNotFound`, :class:`PluginContractError`, :class:`ConfigError` for its options and
        :class:`BackendLoadError` for everything that keeps it from running here.
        """
        spec = self.select(spec) if isinstance(spec, str) else spec
        try:
            made = self._create(spec)
        except BackendError as error:
            if spec.chosen_by == "name":
                raise
            how = "OUTRIDER_BACKEND asks for it" if spec.chosen_by == "environment" else f"it was probed; {_HOW_TO_CHOOSE}"
            raise type(error)(f"{error} ({how})") from error
        for observer in Registry._observers:
            observer(made)
        return made

    @staticmethod
    @contextmanager
    def observing(observer: Callable[[Backend], None]) -> Generator[None]:
        """Call ``observer`` with each backend that any registry of this process creates while the scope lasts.

        It's for tools that run a script and must see its backends before the script does. An error that it raises reaches
        the caller of :meth:`create`.
        """
        Registry._observers += (observer,)
        try:
            yield
        finally:
            Registry._observers = tuple(each for each in Registry._observers if each is not observer)

    def _create(self, spec: BackendSpec) -> Backend:
        plugins = self._backends
        offer = plugins.offer(spec.name)
        info = plugins.usable_info(offer)
        options = {key: value for key, value in spec.options.items() if key != KERNELS_OPTION}
        try:
            backend = plugins.adapt(plugins.call("create_backend", spec.name, ordinal=spec.ordinal, options=options), info)
        except OutriderError:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise BackendLoadError(
                sentence(
                    f"backend {spec.name!r} is installed but device {spec.ordinal} couldn't be opened",
                    describe_error(error),
                    info.advice or "run `outrider doctor`",
                )
            ) from error
        from outrider.device.backend import Backend

        if not isinstance(backend, Backend):
            raise PluginContractError(
                f"plugin {offer.label}: hook create_backend returned {type_name(backend)}, expected a Backend; the class "
                "must subclass outrider.device.Backend"
            )
        if KERNELS_OPTION in spec.options:
            self._choose_kernels(backend, spec.name, spec.options[KERNELS_OPTION])
        return backend

    def _choose_kernels(self, backend: Backend, backend_name: str, name: str) -> None:
        """Let the backend compute with the kernel set of that name: loads that plugin alone."""
        plugins = self.kernels
        offer = plugins.offer(name)
        info = plugins.usable_info(offer)
        if info.backends and backend_name not in info.backends:
            raise ConfigError(
                f"kernel set {name!r} of {offer.distribution} is for {', '.join(info.backends)}, not for {backend_name!r}"
            )
        try:
            made = plugins.adapt(plugins.call("create_kernels", name, backend=backend), info)
        except OutriderError:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            what = f"kernel set {name!r} is installed but couldn't be made for {backend.label}"
            raise BackendLoadError(sentence(what, describe_error(error), info.advice)) from error
        from outrider.device.kernels import KernelSet

        if not isinstance(made, KernelSet):
            raise PluginContractError(
                f"plugin {offer.label}: hook create_kernels returned {type_name(made)}, expected a KernelSet; the class "
                "must subclass outrider.device.KernelSet"
            )
        backend.use_kernels(made)

    def _probe(self) -> BackendSpec:
        candidates = self.candidates()
        for candidate in candidates:
            if candidate.status in ("broken", "duplicate"):
                # Its priority can't be known, so it might have been the one that was meant: say so, aloud.
                _log.warning("backend %r was passed over: %s", candidate.name, candidate.reason)
        for note in self._backends.notes:
            _log.warning("%s", note)
        usable = [(c.info.priority, c) for c in candidates if c.status == "usable" and c.info and c.info.priority >= 0]
        if not usable:
            listed = "".join(f"\n  {c.name}: {sentence(c.reason or 'never chosen unless named')}" for c in candidates)
            raise BackendNotFound(
                f"no installed backend can be chosen automatically{':' + listed if listed else '; none is installed'}\n"
                "install one or name one with --backend NAME; `outrider doctor` says more"
            )
        highest = max(priority for priority, _ in usable)
        best = [candidate for priority, candidate in usable if priority == highest]
        if len(best) > 1:
            listed = " and ".join(f"{c.name!r} ({c.distribution})" for c in best)
            raise AmbiguousBackend(f"{listed} can both run here with the same priority {highest}; {_HOW_TO_CHOOSE}")
        return BackendSpec(name=best[0].name, chosen_by="probe")


def get_backend(spec: str = AUTO) -> Backend:
    """The backend of a name such as ``cuda:1`` or ``sim:seed=7``; ``auto`` probes.

    Loads the named plugin alone. Raises a :class:`BackendError` that says what was asked, what is installed and why that
    one failed; there is no silent fallback. Two calls make two backends, which share nothing.
    """
    return Registry().create(spec)
