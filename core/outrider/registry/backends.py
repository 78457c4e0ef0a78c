"""Registry: select a backend by name, and create it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from outrider.device.errors import AmbiguousBackend, BackendError, BackendNotFound, ConfigError
from outrider.device.plugin import (
    ENTRY_POINT_GROUP,
    INTERFACE_VERSION,
    KERNELS_GROUP,
    BackendHooks,
    BackendInfo,
    KernelHooks,
    KernelInfo,
)
from outrider.registry.plugins import PluginGroup, Plugins, distribution_of, sentence
from outrider.registry.probing import PluginProbe

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from outrider.device.backend import Backend

AUTO = "auto"
_HOW_TO_CHOOSE = "choose one with --backend NAME, OUTRIDER_BACKEND=NAME or get_backend(NAME)"

KERNELS_OPTION = "kernels"
"""The option of every backend that selects a kernel-set plugin: ``cpu:kernels=NAME``."""

BACKENDS = PluginGroup(
    entry_points=ENTRY_POINT_GROUP,
    noun="backend",
    hooks=BackendHooks,
    describe="backend_info",
    create="create_backend",
    product="outrider.device.Backend",
    info=BackendInfo,
    version=INTERFACE_VERSION,
)
KERNELS = PluginGroup(
    entry_points=KERNELS_GROUP,
    noun="kernel set",
    hooks=KernelHooks,
    describe="kernel_info",
    create="create_kernels",
    product="outrider.device.KernelSet",
    info=KernelInfo,
    version=INTERFACE_VERSION,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """The parts of a backend name such as ``cuda:1``, ``sim:seed=7,like=npu``, ``sim:0,seed=7`` or ``auto``."""

    name: str
    ordinal: int = 0
    """The device number."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the backend plugin, in the order of the text."""
    chosen_by: Literal["name", "environment", "probe"] = "name"
    """The source of the name: the caller, ``OUTRIDER_BACKEND`` or probing."""

    def __str__(self) -> str:
        if self.name == AUTO:
            return AUTO
        options = "".join(f",{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{self.ordinal}{options}"


def parse_spec(text: str) -> BackendSpec:
    """Return the parts of a backend name. Raises :class:`ConfigError` that names the part that isn't valid."""
    name, colon, arguments = text.strip().partition(":")
    expected = "expected NAME, NAME:DEVICE or NAME:key=value,… such as 'cpu', 'cpu:0' or 'sim:seed=7'"
    if not name or not all(c.isalnum() or c in "_-" for c in name):
        raise ConfigError(f"backend {text!r}: {name!r} isn't a name; {expected}")
    if colon and not arguments:
        raise ConfigError(f"backend {text!r}: nothing follows the colon; {expected}")
    ordinal = 0
    options: dict[str, str] = {}
    for position, part in enumerate(arguments.split(",") if arguments else []):
        key, equals, value = part.partition("=")
        if not equals and position == 0 and part.isascii() and part.isdigit():
            ordinal = int(part)
        elif equals and key.isidentifier() and value:
            if key in options:
                raise ConfigError(f"backend {text!r}: option {key!r} is given twice")
            options[key] = value
        else:
            raise ConfigError(f"backend {text!r}: can't read {part!r}; {expected}")
    if name == AUTO and arguments:
        raise ConfigError(f"backend {text!r}: 'auto' takes no device and no options; name the backend that they are for")
    return BackendSpec(name=name, ordinal=ordinal, options=options)


class Registry:
    """The installed backends and kernel sets, and the creation of a backend by name."""

    _observers: ClassVar[tuple[Callable[[Backend], None], ...]] = ()

    def __init__(
        self,
        entry_points: Iterable[EntryPoint] | None = None,
        *,
        backends: PluginGroup[BackendInfo] = BACKENDS,
        probe: PluginProbe | None = None,
        once: bool = False,
    ) -> None:
        """Create a registry; it reads the installed entry points at each use.

        ``entry_points`` replaces them in tests. ``once`` reads them at the first use only. ``backends`` is a group with
        another interface version, for tests. ``probe`` is the check in a child process of plugins that aren't selected by
        name.
        """
        known = None if entry_points is None else tuple(entry_points)
        self.backends = Plugins(backends, known, probe=probe, once=once)
        """The installed backends."""
        self.kernels = Plugins(KERNELS, known, probe=probe, once=once)
        """The installed kernel sets."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each distribution whose backend or kernel-set entry points can't be read."""
        return tuple(dict.fromkeys((*self.backends.notes, *self.kernels.notes)))

    def select(self, explicit: str | None = None, environment: str | None = None) -> BackendSpec:
        """Return the spec of the explicit name, else of the environment's, else of the usable backend of highest priority.

        ``environment`` is the value of ``OUTRIDER_BACKEND``. ``auto`` in either place selects by priority. The method parses
        a named backend without loading its plugin. Raises :class:`AmbiguousBackend` for two candidates of equal priority,
        and :class:`BackendNotFound` if no backend is usable.
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
        """Create the backend of a spec. Loads only the named plugin and never falls back to another one.

        Raises :class:`BackendNotFound`, :class:`PluginContractError`, :class:`ConfigError` for invalid options, and
        :class:`BackendLoadError` if the backend can't run on this machine.
        """
        spec = self.select(spec) if isinstance(spec, str) else spec
        try:
            backend = self._create(spec)
        except BackendError as error:
            if spec.chosen_by == "name":
                raise
            how = "OUTRIDER_BACKEND asks for it" if spec.chosen_by == "environment" else f"it was probed; {_HOW_TO_CHOOSE}"
            raise type(error)(f"{error} ({how})") from error
        backend.spec = str(spec)
        for observer in Registry._observers:
            observer(backend)
        return backend

    @staticmethod
    @contextmanager
    def observing(observer: Callable[[Backend], None]) -> Generator[None]:
        """Call ``observer`` with each backend that any registry of this process creates within the scope.

        Tools that run a script use this to access a backend before the script does. An error of ``observer`` reaches the
        caller of :meth:`create`.
        """
        Registry._observers += (observer,)
        try:
            yield
        finally:
            Registry._observers = tuple(each for each in Registry._observers if each is not observer)

    def _create(self, spec: BackendSpec) -> Backend:
        plugins = self.backends
        info = plugins.usable_info(spec.name)
        options = {key: value for key, value in spec.options.items() if key != KERNELS_OPTION}
        backend: Backend = plugins.create(
            info,
            failure=f"backend {spec.name!r} is installed but device {spec.ordinal} couldn't be opened",
            advice=info.advice or "--debug shows the traceback",
            ordinal=spec.ordinal,
            options=options,
        )
        if KERNELS_OPTION in spec.options:
            self._choose_kernels(backend, spec.name, spec.options[KERNELS_OPTION])
        return backend

    def _choose_kernels(self, backend: Backend, backend_name: str, name: str) -> None:
        """Load the kernel set called ``name``, and let ``backend`` use it. ``backend_name`` is for error messages."""
        plugins = self.kernels
        info = plugins.usable_info(name)
        if info.backends and backend_name not in info.backends:
            raise ConfigError(
                f"kernel set {name!r} of {distribution_of(plugins.offer(name))} is for {', '.join(info.backends)}, not for "
                f"{backend_name!r}"
            )
        kernels = plugins.create(
            info,
            failure=f"kernel set {name!r} is installed but couldn't be made for {backend.label}",
            advice=info.advice,
            backend=backend,
        )
        backend.use_kernels(kernels)

    def _probe(self) -> BackendSpec:
        candidates = self.backends.candidates()
        for candidate in candidates:
            if candidate.status in ("broken", "duplicate"):
                # The candidate's priority is unknown and may be the highest, so the user gets a warning.
                _log.warning("backend %r was passed over: %s", candidate.name, candidate.reason)
        for note in self.backends.notes:
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
    """Create the backend of a name such as ``cuda:1`` or ``sim:seed=7``; ``auto`` selects by priority.

    Loads only the named plugin and never falls back to another one. Raises a :class:`BackendError` with the requested name,
    the installed names and the reason. Each call creates a separate backend.
    """
    return Registry().create(spec)
