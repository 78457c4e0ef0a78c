"""Finding, checking and choosing backends.

Plugins are entry points of the group ``outrider.backends``. They are filtered by name *before* anything is loaded, each
is loaded behind its own guard, and its hooks are audited, because pluggy itself accepts a plugin that lacks a hook or an
argument. This is the only place that holds a pluggy manager; a created backend is a plain object.

Nothing here reads the environment: the command line reads ``OUTRIDER_BACKEND`` and passes it in.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from outrider.device.errors import (
    AmbiguousBackend,
    BackendError,
    BackendLoadError,
    BackendNotFound,
    ConfigError,
    OutriderError,
    PluginContractError,
)
from outrider.device.plugin import ENTRY_POINT_GROUP, SEAM_VERSION, BackendHooks, BackendInfo

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from outrider.device.backend import Backend

AUTO = "auto"
_HOW_TO_CHOOSE = "choose one with --backend NAME, OUTRIDER_BACKEND=NAME or get_backend(NAME)"

Status = Literal["usable", "unusable", "broken", "duplicate"]
"""``usable``: can be chosen. ``unusable``: the plugin knows that it can't run here. ``broken``: it can't be loaded or
breaks the contract. ``duplicate``: two distributions offer the name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """A name as people type it, taken apart: ``cuda:1``, ``sim:seed=7,like=npu``, ``sim:0,seed=7``, ``auto``."""

    name: str
    ordinal: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    chosen_by: Literal["name", "environment", "probe"] = "name"

    def __str__(self) -> str:
        options = "".join(f",{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{self.ordinal}{options}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One name that an installed distribution offers, and whether it can be used here."""

    name: str
    distribution: str
    entry_point: str
    status: Status
    reason: str = ""
    advice: str = ""
    info: BackendInfo | None = None


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


@dataclass(frozen=True, slots=True)
class _Offer:
    """An entry point with the distribution that declares it."""

    entry_point: EntryPoint
    distribution: str

    @classmethod
    def of(cls, entry_point: EntryPoint) -> _Offer:
        dist = entry_point.dist
        return cls(entry_point, f"{dist.name} {dist.version}" if dist is not None else "(unknown distribution)")

    @property
    def label(self) -> str:
        return f"{self.entry_point.name!r} of {self.distribution} ({self.entry_point.value})"


class Registry:
    """The backends that are installed.

    ``entry_points`` is for tests; by default the environment's own are read, each time that they are needed, so a
    registry made before an installation sees it.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._given = None if entry_points is None else tuple(entry_points)
        self._manager = pluggy.PluginManager("outrider")
        self._manager.add_hookspecs(BackendHooks)

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Every name on offer, sorted; nothing is loaded for it."""
        return tuple(sorted({offer.entry_point.name for offer in self._offers()}))

    def candidates(self, *, load: bool = True) -> tuple[Candidate, ...]:
        """Every name on offer with its status. Loads each plugin, and never raises because of one.

        ``load=False`` loads none, where even that isn't safe: those that could be loaded are then "broken", without a
        reason.
        """
        return tuple(self._examine(name, load=load) for name in self.names)

    def info(self, name: str) -> BackendInfo:
        """What the named plugin says about itself; loads that plugin alone."""
        return self._describe(self._single_offer(name))

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
            return self._create(spec)
        except BackendError as error:
            if spec.chosen_by == "name":
                raise
            how = "OUTRIDER_BACKEND asks for it" if spec.chosen_by == "environment" else f"it was probed; {_HOW_TO_CHOOSE}"
            raise type(error)(f"{error} ({how})") from error

    def _create(self, spec: BackendSpec) -> Backend:
        offer = self._single_offer(spec.name)
        info = self._describe(offer)
        if not info.usable:
            raise BackendLoadError(
                _sentence(f"backend {spec.name!r} is installed but can't run here", info.reason, info.advice)
            )
        try:
            results = self._hook("create_backend", spec.name)(ordinal=spec.ordinal, options=spec.options)
        except OutriderError:
            raise
        except (Exception, SystemExit) as error:
            raise BackendLoadError(
                _sentence(
                    f"backend {spec.name!r} is installed but device {spec.ordinal} couldn't be opened",
                    _describe_error(error),
                    info.advice or "run `outrider doctor`",
                )
            ) from error
        from outrider.device.backend import Backend

        # pluggy drops a result of None.
        backend = results[0] if results else None
        if not isinstance(backend, Backend):
            raise PluginContractError(
                f"plugin {offer.label}: hook create_backend returned {_type_name(backend)}, expected a Backend; the class "
                "must subclass outrider.device.Backend"
            )
        return backend

    def _probe(self) -> BackendSpec:
        candidates = self.candidates()
        for candidate in candidates:
            if candidate.status in ("broken", "duplicate"):
                # Its priority can't be known, so it might have been the one that was meant: say so, aloud.
                _log.warning("backend %r was passed over: %s", candidate.name, candidate.reason)
        usable = [(c.info.priority, c) for c in candidates if c.status == "usable" and c.info and c.info.priority >= 0]
        if not usable:
            listed = "".join(f"\n  {c.name}: {_sentence(c.reason or 'never chosen unless named')}" for c in candidates)
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

    # -- loading and auditing --------------------------------------------------------------------------------------

    def _offers(self, name: str | None = None) -> list[_Offer]:
        selected: Iterable[EntryPoint]
        if self._given is not None:
            selected = [ep for ep in self._given if ep.group == ENTRY_POINT_GROUP and name in (None, ep.name)]
        elif name is None:
            selected = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        else:
            selected = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        # One distribution may be visible twice, through its source tree and its installation.
        unique = {
            (offer.distribution, offer.entry_point.name, offer.entry_point.value): offer for offer in map(_Offer.of, selected)
        }
        return list(unique.values())

    def _single_offer(self, name: str) -> _Offer:
        offers = self._offers(name)
        if not offers:
            names = self.names
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise BackendNotFound(
                f"no backend named {name!r} is installed; {hint}installed: {', '.join(names) or 'none'}. A backend is a "
                f"distribution with an entry point in the group {ENTRY_POINT_GROUP!r}"
            )
        if len(offers) > 1:
            raise AmbiguousBackend(_duplicate_reason(name, offers) + "; uninstall one of them")
        return offers[0]

    def _examine(self, name: str, *, load: bool) -> Candidate:
        offers = self._offers(name)
        found = Candidate(
            name=name,
            distribution=" and ".join(offer.distribution for offer in offers),
            entry_point=" and ".join(offer.entry_point.value for offer in offers),
            status="duplicate",
            reason=_duplicate_reason(name, offers),
            advice="uninstall one of them",
        )
        if len(offers) > 1:
            return found
        if not load:
            return replace(found, status="broken", reason="", advice="")
        try:
            info = self._describe(offers[0])
        except BackendError as error:
            advice = f"repair or uninstall {found.distribution}"
            return replace(found, status="broken", reason=str(error), advice=advice)
        status: Status = "usable" if info.usable else "unusable"
        reason = info.reason if info.usable else info.reason or "the plugin says that it can't run here, and not why"
        return replace(found, status=status, reason=reason, advice=info.advice, info=info)

    def _describe(self, offer: _Offer) -> BackendInfo:
        self._load(offer)
        name = offer.entry_point.name
        try:
            results = self._hook("backend_info", name)()
        except (Exception, SystemExit) as error:
            raise BackendLoadError(
                f"plugin {offer.label}: hook backend_info failed: {_describe_error(error)}; the hook must be cheap and must "
                "not need the vendor's package"
            ) from error
        info = results[0] if results else None
        if not isinstance(info, BackendInfo):
            raise PluginContractError(
                f"plugin {offer.label}: hook backend_info returned {_type_name(info)}, expected a BackendInfo"
            )
        if info.name != name:
            raise PluginContractError(
                f"plugin {offer.label}: backend_info says name={info.name!r}, expected {name!r}, the name of its entry point"
            )
        if not info.seam_min <= SEAM_VERSION <= info.seam_max:
            side = "a newer plugin" if info.seam_max < SEAM_VERSION else "a newer outrider"
            raise PluginContractError(
                f"plugin {offer.label} supports interface versions {info.seam_min} to {info.seam_max}, this outrider has "
                f"version {SEAM_VERSION}; install {side}"
            )
        return info

    def _load(self, offer: _Offer) -> None:
        """Load and register one plugin, behind a guard: what it raises never reaches another."""
        name = offer.entry_point.name
        if self._manager.has_plugin(name):
            return
        try:
            plugin = offer.entry_point.load()
        except (Exception, SystemExit) as error:
            raise BackendLoadError(f"plugin {offer.label} can't be loaded: {_describe_error(error)}") from error
        _audit(self._manager, plugin, offer.label)
        try:
            self._manager.register(plugin, name=name)
        except ValueError as error:
            raise PluginContractError(
                f"plugin {offer.label} can't be registered: {error}; expected one module for one name"
            ) from error

    def _hook(self, hook: str, name: str) -> pluggy.HookCaller:
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name and plugin is not None]
        return self._manager.subset_hook_caller(hook, others)


def get_backend(spec: str = AUTO) -> Backend:
    """The backend of a name such as ``cuda:1`` or ``sim:seed=7``; ``auto`` probes.

    Loads the named plugin alone. Raises a :class:`BackendError` that says what was asked, what is installed and why that
    one failed; there is no silent fallback. Two calls make two backends, which share nothing.
    """
    return Registry().create(spec)


def _audit(manager: pluggy.PluginManager, plugin: object, label: str) -> None:
    """Check what pluggy doesn't: that every hook is there, with every argument, under its own name."""
    expected = _hook_signatures()
    if inspect.isclass(plugin):
        raise PluginContractError(
            f"plugin {label} is a class, expected a module (or an object) with the hooks {_listed(expected)}"
        )
    found: dict[str, Any] = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            continue
        hook = options.get("specname") or attribute
        if hook not in expected:
            close = get_close_matches(hook, expected, n=1)
            raise PluginContractError(
                f"plugin {label}: {hook!r} is marked as a hook but there is none of that name; "
                f"{f'did you mean {close[0]!r}? ' if close else ''}hooks: {_listed(expected)}"
            )
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginContractError(f"plugin {label}: hook {hook!r} is a wrapper, expected a plain implementation")
        found[hook] = getattr(plugin, attribute)
    for hook, signature in expected.items():
        if hook not in found:
            undecorated = callable(getattr(plugin, hook, None))
            cause = "is there but isn't marked with @hookimpl" if undecorated else "is missing"
            raise PluginContractError(f"plugin {label}: hook {hook!r} {cause}; expected @hookimpl def {signature}")
        wanted = list(inspect.signature(getattr(BackendHooks, hook)).parameters)[1:]
        parameters = inspect.signature(found[hook]).parameters.values()
        # pluggy passes by name, and never to a parameter that has a default.
        given = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        if sorted(given) != sorted(wanted) or len(given) != len(parameters):
            raise PluginContractError(
                f"plugin {label}: hook {hook!r} has the signature {hook}{inspect.signature(found[hook])}, expected "
                f"{signature}: the same argument names, without defaults"
            )


def _hook_signatures() -> dict[str, str]:
    """Each hook of the specification with its signature, as a plugin must write it."""
    signatures = {}
    for name, function in inspect.getmembers(BackendHooks, inspect.isfunction):
        if not name.startswith("_"):
            signature = inspect.signature(function)
            text = f"{name}{signature.replace(parameters=list(signature.parameters.values())[1:])}"
            signatures[name] = text.replace("'", "")  # annotations are strings here
    return signatures


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _duplicate_reason(name: str, offers: Sequence[_Offer]) -> str:
    return f"{' and '.join(offer.distribution for offer in offers)} both offer a backend named {name!r}"


def _sentence(*parts: str) -> str:
    """Parts that are there, as ``what: why; what to do``."""
    what, *rest = [part for part in parts if part]
    return f"{what}: {'; '.join(rest)}" if rest else what


def _describe_error(error: BaseException) -> str:
    """Type and text, with the causes: an import fails because of a library that only the cause names."""
    texts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(texts) < 4:
        texts.append(str(seen) if isinstance(seen, OutriderError) else f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__
    return " (caused by ".join(texts) + ")" * (len(texts) - 1)


def _type_name(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
