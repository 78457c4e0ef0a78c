"""The plugins of one entry-point group: found by name, loaded one at a time, audited, described.

pluggy finds and calls the hooks, and does nothing else: it accepts a plugin that lacks a hook or drops an argument, and
loads all of them or none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import pluggy

from outrider.device.errors import (
    AmbiguousBackend,
    BackendError,
    BackendLoadError,
    BackendNotFound,
    OutriderError,
    PluginContractError,
)
from outrider.device.plugin import PluginInfo
from outrider.registry.discovery import Installed, installed
from outrider.registry.info_check import wrong_field
from outrider.registry.probing import Probe, Verdict, in_child

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Info = TypeVar("Info", bound=PluginInfo)

Status = Literal["usable", "unusable", "broken", "duplicate"]
"""``usable``: can be chosen. ``unusable``: the plugin knows that it can't run here. ``broken``: it can't be loaded or
breaks the contract. ``duplicate``: two distributions offer the name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginGroup(Generic[Info]):
    """What plugins of one kind are: where they're found, and which hooks they have.

    ``entry_points``: the group. ``noun``: what one is called in messages. ``hooks``: the class of hook specifications.
    ``describe``: the hook that returns an ``info``, the class of descriptions. ``version`` is that of the interface.
    ``adapters``: by an older version, a function that adapts a plugin's product to this one.
    """

    entry_points: str
    noun: str
    hooks: type
    describe: str
    info: type[Info]
    version: int
    adapters: Mapping[int, Callable[[Any], Any]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate(Generic[Info]):
    """One name that an installed distribution offers, and whether it can be used here."""

    name: str
    distribution: str
    entry_point: str
    status: Status
    reason: str = ""
    advice: str = ""
    info: Info | None = None
    changes: tuple[str, ...] = ()
    """Global state of the process that loading the plugin changes, in words."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An entry point with the distribution that declares it."""

    entry_point: EntryPoint
    distribution: str

    @classmethod
    def of(cls, entry_point: EntryPoint) -> Offer:
        """The entry point's own distribution, as far as it's known."""
        if entry_point.dist is None:
            return cls(entry_point, "(unknown distribution)")
        metadata = entry_point.dist.metadata  # parsed each time that it's asked for
        return cls(entry_point, f"{metadata['Name']} {metadata['Version']}")

    @property
    def label(self) -> str:
        """Name, distribution and module, for messages."""
        return f"{self.entry_point.name!r} of {self.distribution} ({self.entry_point.value})"


class Plugins(Generic[Info]):
    """The installed plugins of a group.

    ``entry_points`` is for tests; by default the environment's own are read, each time that they are needed, so plugins
    that are installed later are seen; ``once``: the first time alone. ``probe``: how plugins that weren't named are tried
    before they are loaded here.
    """

    def __init__(
        self,
        group: PluginGroup[Info],
        entry_points: Iterable[EntryPoint] | None = None,
        *,
        probe: Probe | None = None,
        once: bool = False,
    ) -> None:
        self.group = group
        self._probe = probe or Probe()
        self._known = None if entry_points is None else Installed(tuple(entry_points))
        self._once = once
        self._manager = pluggy.PluginManager("outrider")
        self._manager.add_hookspecs(group.hooks)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name on offer, sorted; nothing is loaded for it."""
        return tuple(sorted({offer.entry_point.name for offer in self._offers()}))

    def candidates(self, *, load: bool = True) -> tuple[Candidate[Info], ...]:
        """Every name on offer with its status. Loads each plugin, and never raises because of one.

        A plugin that hangs or ends the process when it's loaded is found out in a child process, and isn't loaded here.
        ``load=False`` loads none, where even that isn't safe: those that could be loaded are then "broken", without a
        reason.
        """
        offered: dict[str, list[Offer]] = {}
        for offer in self._offers():
            offered.setdefault(offer.entry_point.name, []).append(offer)
        single = [offers[0].entry_point for offers in offered.values() if len(offers) == 1]
        verdicts = self._probe.verdicts(single, self.group.describe) if load else {}
        return tuple(self._examine(name, offered[name], verdicts, load=load) for name in sorted(offered))

    def tried(self, name: str) -> Verdict:
        """What loading the plugin of that name does to a process, found out in a child."""
        entry_point = self.offer(name).entry_point
        return in_child([entry_point], self.group.describe, limit_s=self._probe.limit_s)[entry_point]

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each distribution whose entry points can't be read, so that its plugins are missing here."""
        return self._installed().notes

    def offer(self, name: str) -> Offer:
        """The one entry point of that name, not loaded. Raises :class:`BackendNotFound` or :class:`AmbiguousBackend`."""
        offers = self._offers(name)
        if not offers:
            noun, names = self.group.noun, self.names
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            notes = "".join(f"; {note}" for note in self.notes)
            raise BackendNotFound(
                f"no {noun} named {name!r} is installed; {hint}installed: {', '.join(names) or 'none'}. A {noun} is a "
                f"distribution with an entry point in the group {self.group.entry_points!r}{notes}"
            )
        if len(offers) > 1:
            raise AmbiguousBackend(self._duplicate_reason(name, offers) + "; uninstall one of them")
        return offers[0]

    def info(self, name: str) -> Info:
        """What the named plugin says about itself; loads that plugin alone."""
        return self.describe(self.offer(name))

    def usable_info(self, offer: Offer) -> Info:
        """What a plugin that can run here says of itself; raises :class:`BackendLoadError` with its reason otherwise."""
        info = self.describe(offer)
        if not info.usable:
            what = f"{self.group.noun} {offer.entry_point.name!r} is installed but can't run here"
            raise BackendLoadError(sentence(what, info.reason, info.advice))
        return info

    def call(self, hook: str, name: str, **arguments: Any) -> Any:
        """Call a hook of one plugin that is loaded; None when it returned None."""
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name and plugin is not None]
        results = self._manager.subset_hook_caller(hook, others)(**arguments)
        return results[0] if results else None  # pluggy drops a result of None

    def adapt(self, made: Any, info: Info) -> Any:
        """Adapt what a plugin made to this version of the interface."""
        version = self.group.version
        return made if info.interface_max >= version else self.group.adapters[info.interface_max](made)

    def describe(self, offer: Offer) -> Info:
        """Load one plugin, audit it and ask it what it is."""
        group, name = self.group, offer.entry_point.name
        self._load(offer)
        try:
            info = self.call(group.describe, name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise BackendLoadError(
                f"plugin {offer.label}: hook {group.describe} failed: {describe_error(error)}; the hook must be cheap and "
                "must not need the vendor's package"
            ) from error
        if not isinstance(info, group.info):
            raise PluginContractError(
                f"plugin {offer.label}: hook {group.describe} returned {type_name(info)}, expected a {group.info.__name__}"
            )
        wrong = wrong_field(info, group.info)
        if wrong:
            raise PluginContractError(f"plugin {offer.label}: hook {group.describe} says {wrong}")
        if info.name != name:
            raise PluginContractError(
                f"plugin {offer.label}: {group.describe} says name={info.name!r}, expected {name!r}, the name of its entry "
                "point"
            )
        if not info.interface_min <= group.version <= info.interface_max and info.interface_max not in group.adapters:
            side = "a newer plugin" if info.interface_max < group.version else "a newer outrider"
            raise PluginContractError(
                f"plugin {offer.label} supports interface versions {info.interface_min} to {info.interface_max}, "
                f"this outrider has "
                f"version {group.version}; install {side}"
            )
        return info

    # -- finding and loading ---------------------------------------------------------------------------------------

    def _installed(self) -> Installed:
        if self._known is not None:
            return self._known
        found = installed(self.group.entry_points)
        if self._once:
            self._known = found
        return found

    def _offers(self, name: str | None = None) -> list[Offer]:
        group = self.group.entry_points
        selected = [ep for ep in self._installed().entry_points if ep.group == group and name in (None, ep.name)]
        # One distribution may be visible twice, through its source tree and its installation.
        unique = {
            (offer.distribution, offer.entry_point.name, offer.entry_point.value): offer for offer in map(Offer.of, selected)
        }
        return list(unique.values())

    def _examine(
        self, name: str, offers: Sequence[Offer], verdicts: Mapping[EntryPoint, Verdict], *, load: bool
    ) -> Candidate[Info]:
        found: Candidate[Info] = Candidate(
            name=name,
            distribution=" and ".join(offer.distribution for offer in offers),
            entry_point=" and ".join(offer.entry_point.value for offer in offers),
            status="duplicate",
            reason=self._duplicate_reason(name, offers),
            advice="uninstall one of them",
        )
        if len(offers) > 1:
            return found
        if not load:
            return replace(found, status="broken", reason="", advice="")
        verdict = verdicts[offers[0].entry_point]
        found = replace(found, changes=verdict.changes)
        advice = f"repair or uninstall {found.distribution}"
        if verdict.harm:
            return replace(found, status="broken", reason=f"plugin {offers[0].label}: {verdict.harm}", advice=advice)
        try:
            info = self.describe(offers[0])
        except BackendError as error:
            return replace(found, status="broken", reason=str(error), advice=advice)
        status: Status = "usable" if info.usable else "unusable"
        reason = info.reason if info.usable else info.reason or "the plugin says that it can't run here, and not why"
        return replace(found, status=status, reason=reason, advice=info.advice, info=info)

    def _load(self, offer: Offer) -> None:
        """Load and register one plugin, behind a guard: what it raises never reaches another."""
        name = offer.entry_point.name
        if self._manager.has_plugin(name):
            return
        try:
            plugin = offer.entry_point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, and classes that aren't meant to be caught
            raise BackendLoadError(f"plugin {offer.label} can't be loaded: {describe_error(error)}") from error
        try:
            _audit(self._manager, plugin, offer.label, self.group.hooks)
            self._manager.register(plugin, name=name)
        except BackendError:
            raise
        except Exception as error:  # the plugin's own attributes can raise when they're looked at
            raise PluginContractError(
                f"plugin {offer.label} can't be registered: {error}; expected one module for one name"
            ) from error

    def _duplicate_reason(self, name: str, offers: Sequence[Offer]) -> str:
        return f"{' and '.join(offer.distribution for offer in offers)} both offer a {self.group.noun} named {name!r}"


def _audit(manager: pluggy.PluginManager, plugin: object, label: str, hooks: type) -> None:
    """Check what pluggy doesn't: that every hook is there, with every argument, under its own name."""
    expected = _hook_signatures(hooks)
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
        wanted = list(inspect.signature(getattr(hooks, hook)).parameters)[1:]
        parameters = inspect.signature(found[hook]).parameters.values()
        # pluggy passes by name, and never to a parameter that has a default.
        given = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        if sorted(given) != sorted(wanted) or len(given) != len(parameters):
            raise PluginContractError(
                f"plugin {label}: hook {hook!r} has the signature {hook}{inspect.signature(found[hook])}, expected "
                f"{signature}: the same argument names, without defaults"
            )


def _hook_signatures(hooks: type) -> dict[str, str]:
    """Each hook of the specification with its signature, as a plugin must write it."""
    signatures = {}
    for name, function in inspect.getmembers(hooks, inspect.isfunction):
        if not name.startswith("_"):
            signature = inspect.signature(function)
            text = f"{name}{signature.replace(parameters=list(signature.parameters.values())[1:])}"
            signatures[name] = text.replace("'", "")  # annotations are strings here
    return signatures


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def sentence(*parts: str) -> str:
    """Parts that are there, as ``what: why; what to do``."""
    what, *rest = [part for part in parts if part]
    return f"{what}: {'; '.join(rest)}" if rest else what


def describe_error(error: BaseException) -> str:
    """Type and text, with the causes: an import fails because of a library that only the cause names."""
    texts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(texts) < 4:
        texts.append(str(seen) if isinstance(seen, OutriderError) else f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__
    return " (caused by ".join(texts) + ")" * (len(texts) - 1)


def type_name(value: object) -> str:
    """A value's type, for messages."""
    return "None" if value is None else f"a {type(value).__name__}"
