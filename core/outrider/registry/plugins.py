"""Plugins: discovery, loading and audit of the plugins of one entry-point group.

Entry points are read separately for each distribution, so that a damaged distribution doesn't hide others. pluggy only finds
and calls the hooks. It would accept a plugin without a hook or without an argument of a hook.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

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
from outrider.errors import shown
from outrider.registry.probing import PluginProbe, ProbeVerdict, in_child

_ENTRY_POINTS_FILE = "entry_points.txt"
_MISSPELT_SIMILARITY = 0.85  # 'outrider_backend' has 0.91 of 'outrider.backends', 'outrider.kernels' 0.79


@dataclass(frozen=True, slots=True)
class InstalledEntryPoints:
    """The entry points of one group in all installed distributions, and notes about unreadable or misspelt ones."""

    entry_points: tuple[EntryPoint, ...]
    notes: tuple[str, ...] = ()
    """One line for each distribution that can't be read, or whose group has almost this name."""


def installed_entry_points(group: str) -> InstalledEntryPoints:
    """Return the entry points of ``group`` in every installed distribution.

    If two distributions have the same name, the first one on the import path counts, as in
    :func:`importlib.metadata.entry_points`.
    """
    labels: dict[str, str] = {}
    notes: dict[str, None] = {}
    for distribution in importlib.metadata.distributions():
        try:
            lines = (distribution.read_text(_ENTRY_POINTS_FILE) or "").splitlines()
            groups = [line.strip()[1:-1] for line in lines if line.startswith("[")]
            if group in groups:
                labels.setdefault(distribution.name, _label(distribution))
            for close in get_close_matches(group, set(groups) - {group}, cutoff=_MISSPELT_SIMILARITY):
                notes[
                    f"{_label(distribution)} has entry points in the group {close!r}, which Outrider doesn't read; did you "
                    f"mean {group!r}? Correct the group in its pyproject.toml and install it again"
                ] = None
        except Exception as error:
            notes[f"{_label(distribution)} was passed over: {_cause(error)}"] = None
    entry_points: list[EntryPoint] = []
    for name, label in labels.items():
        try:
            entry_points += importlib.metadata.distribution(name).entry_points.select(group=group)
        except Exception as error:  # the type depends on the damage: a line without "=" raises TypeError
            notes[f"{label} was passed over: {_cause(error)}"] = None
    return InstalledEntryPoints(tuple(entry_points), tuple(notes))


def _label(distribution: Distribution) -> str:
    try:
        name = f"distribution {distribution.name!r}"
    except Exception:
        name = "a distribution"
    return f"{name} in {distribution.locate_file('')}"


def _cause(error: Exception) -> str:
    problem = f"its metadata ({_ENTRY_POINTS_FILE}, METADATA) can't be read: {type(error).__name__}: {error}"
    return f"{problem}; repair or uninstall it"


Info = TypeVar("Info", bound=PluginInfo)

Status = Literal["usable", "unusable", "broken", "duplicate"]
"""The status of a plugin.

- ``usable``: can be selected.
- ``unusable``: reports that it can't run on this machine.
- ``broken``: can't be loaded or violates the plugin contract.
- ``duplicate``: two distributions have an entry point of this name.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginGroup(Generic[Info]):
    """One kind of plugin: its entry-point group and its hooks."""

    entry_points: str
    """The name of the entry-point group."""
    noun: str
    """The word for one plugin of this kind in error messages, such as ``backend``."""
    hooks: type
    """The class whose methods are the hook specifications."""
    describe: str
    """The name of the hook that returns a plugin's description."""
    create: str
    """The name of the hook that creates a plugin's product."""
    product: str
    """The public name of the product's class, with its module. The module may need torch, so it is imported late."""
    info: type[Info]
    """The class of a plugin's description."""
    version: int
    """The version of the plugin interface that this release has."""
    adapters: Mapping[int, Callable[[Any], Any]] = field(default_factory=lambda: MappingProxyType({}))
    """Functions that adapt a plugin's product from an older interface version, by that version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate(Generic[Info]):
    """One installed plugin name with its status on this machine."""

    name: str
    distribution: str
    entry_point: str
    status: Status
    reason: str = ""
    advice: str = ""
    info: Info | None = None
    changes: tuple[str, ...] = ()
    """Descriptions of the global process state that loading the plugin changes."""


def distribution_of(entry_point: EntryPoint) -> str:
    """Return name and version of the distribution that declares a plugin, if known."""
    if entry_point.dist is None:
        return "(unknown distribution)"
    metadata = entry_point.dist.metadata  # a local variable, because each access parses the file
    return f"{metadata['Name']} {metadata['Version']}"


def label_of(entry_point: EntryPoint) -> str:
    """Return a plugin's name, distribution and module, for messages."""
    return f"plugin {entry_point.name!r} of {distribution_of(entry_point)} ({entry_point.value})"


class Plugins(Generic[Info]):
    """The installed plugins of one group."""

    def __init__(
        self,
        group: PluginGroup[Info],
        entry_points: Iterable[EntryPoint] | None = None,
        *,
        probe: PluginProbe | None = None,
        once: bool = False,
    ) -> None:
        """Create the plugins of a group; this object reads the installed entry points at each use.

        ``entry_points`` replaces them in tests. ``once`` reads them at the first use only. ``probe`` is the check in a child
        process of plugins that aren't selected by name.
        """
        self.group = group
        self._probe = probe or PluginProbe()
        self._known = None if entry_points is None else InstalledEntryPoints(tuple(entry_points))
        self._once = once
        self._manager = pluggy.PluginManager("outrider")
        self._manager.add_hookspecs(group.hooks)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all installed plugins, sorted. Loads no plugin."""
        return tuple(sorted({each.name for each in self._offers()}))

    def candidates(self, *, load: bool = True) -> tuple[Candidate[Info], ...]:
        """Return every installed plugin with its status. Errors of plugins become part of their status.

        A child process loads each plugin first. A plugin that hangs or ends the child isn't loaded in this process.
        ``load=False`` loads no plugin; every plugin without a duplicate then has the status ``broken`` without a reason.
        """
        offers_by_name: dict[str, list[EntryPoint]] = {}
        for offer in self._offers():
            offers_by_name.setdefault(offer.name, []).append(offer)
        unique = [offers[0] for offers in offers_by_name.values() if len(offers) == 1]
        verdicts = self._probe.verdicts(unique, self.group.describe) if load else {}
        return tuple(self._examine(name, offers_by_name[name], verdicts, load=load) for name in sorted(offers_by_name))

    def try_in_child(self, name: str) -> ProbeVerdict:
        """Load the named plugin in a child process, and return what that changed in the process or why it is not safe."""
        entry_point = self.offer(name)
        return in_child([entry_point], self.group.describe, limit_s=self._probe.limit_s)[entry_point]

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each distribution whose entry points can't be read."""
        return self._installed().notes

    def offer(self, name: str) -> EntryPoint:
        """Return the entry point called ``name`` without loading it.

        Raises :class:`BackendNotFound` if there is none, and :class:`AmbiguousBackend` if there are several.
        """
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
        """Return the description of the named plugin. Loads only this plugin."""
        return self.describe(self.offer(name))

    def usable_info(self, name: str) -> Info:
        """Return the description of the named plugin. Raises :class:`BackendLoadError` if it can't run on this machine."""
        info = self.info(name)
        if not info.usable:
            failure = f"{self.group.noun} {name!r} is installed but can't run here"
            raise BackendLoadError(sentence(failure, info.reason, info.advice))
        return info

    def call(self, hook: str, name: str, **arguments: Any) -> Any:
        """Call a hook of the loaded plugin ``name`` and return its result."""
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name and plugin is not None]
        results = self._manager.subset_hook_caller(hook, others)(**arguments)
        return results[0] if results else None  # pluggy omits results that are None

    def create(self, info: Info, *, failure: str = "", advice: str = "", **arguments: Any) -> Any:
        """Create the product of a described plugin, and adapt it to this interface version.

        Raises the plugin's own :class:`OutriderError`, or :class:`BackendLoadError` with the texts ``failure`` and
        ``advice`` for every other error, and :class:`PluginContractError` for a product of another class.
        """
        group = self.group
        try:
            product = self.call(group.create, info.name, **arguments)
            if info.interface_max < group.version:
                product = group.adapters[info.interface_max](product)
        except (OutriderError, KeyboardInterrupt):
            raise
        except BaseException as error:
            failure = failure or f"{label_of(self.offer(info.name))}: hook {group.create} failed"
            raise BackendLoadError(sentence(failure, describe_error(error), advice)) from error
        module, _, expected = group.product.rpartition(".")
        if not isinstance(product, getattr(import_module(module), expected)):
            raise PluginContractError(
                f"{label_of(self.offer(info.name))}: hook {group.create} returned {type_name(product)}, expected a "
                f"{expected}; the class must subclass {group.product}"
            )
        return product

    def describe(self, offer: EntryPoint) -> Info:
        """Load and audit one plugin, and return its description.

        Raises :class:`BackendLoadError` if the plugin or its hook fails, and :class:`PluginContractError` for missing hooks,
        an invalid description or an unsupported interface version.
        """
        group, name = self.group, offer.name
        self._load(offer)
        try:
            info = self.call(group.describe, name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise BackendLoadError(
                f"{label_of(offer)}: hook {group.describe} failed: {describe_error(error)}; the hook must be cheap and "
                "must not need the vendor's package"
            ) from error
        if not isinstance(info, group.info):
            raise PluginContractError(
                f"{label_of(offer)}: hook {group.describe} returned {type_name(info)}, expected a {group.info.__name__}"
            )
        wrong = wrong_field(info, group.info)
        if wrong:
            raise PluginContractError(f"{label_of(offer)}: hook {group.describe} says {wrong}")
        if info.name != name:
            raise PluginContractError(
                f"{label_of(offer)}: {group.describe} says name={info.name!r}, expected {name!r}, the name of its entry point"
            )
        if not info.interface_min <= group.version <= info.interface_max and info.interface_max not in group.adapters:
            side = "a newer plugin" if info.interface_max < group.version else "a newer outrider"
            raise PluginContractError(
                f"{label_of(offer)} supports interface versions {info.interface_min} to {info.interface_max}, "
                f"this outrider has "
                f"version {group.version}; install {side}"
            )
        return info

    def _installed(self) -> InstalledEntryPoints:
        if self._known is not None:
            return self._known
        current = installed_entry_points(self.group.entry_points)
        if self._once:
            self._known = current
        return current

    def _offers(self, name: str | None = None) -> list[EntryPoint]:
        group = self.group.entry_points
        selected = [ep for ep in self._installed().entry_points if ep.group == group and name in (None, ep.name)]
        # The import path can show one distribution twice: as a source tree and as an installation.
        unique = {(distribution_of(each), each.name, each.value): each for each in selected}
        return list(unique.values())

    def _examine(
        self, name: str, offers: Sequence[EntryPoint], verdicts: Mapping[EntryPoint, ProbeVerdict], *, load: bool
    ) -> Candidate[Info]:
        candidate: Candidate[Info] = Candidate(
            name=name,
            distribution=" and ".join(distribution_of(offer) for offer in offers),
            entry_point=" and ".join(offer.value for offer in offers),
            status="duplicate",
            reason=self._duplicate_reason(name, offers),
            advice="uninstall one of them",
        )
        if len(offers) > 1:
            return candidate
        if not load:
            return replace(candidate, status="broken", reason="", advice="")
        verdict = verdicts[offers[0]]
        candidate = replace(candidate, changes=verdict.changes)
        advice = f"repair or uninstall {candidate.distribution}"
        if verdict.harm:
            return replace(candidate, status="broken", reason=f"{label_of(offers[0])}: {verdict.harm}", advice=advice)
        try:
            info = self.describe(offers[0])
        except BackendError as error:
            return replace(candidate, status="broken", reason=str(error), advice=advice)
        status: Status = "usable" if info.usable else "unusable"
        reason = info.reason if info.usable else info.reason or "the plugin says that it can't run here, and not why"
        return replace(candidate, status=status, reason=reason, advice=info.advice, info=info)

    def _load(self, offer: EntryPoint) -> None:
        """Import the module of one plugin, check its hooks, and register it with pluggy. Raises :class:`BackendLoadError` or
        :class:`PluginContractError`.
        """
        name = offer.name
        if self._manager.has_plugin(name):
            return
        try:
            plugin = offer.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an import can also raise SystemExit or a plugin's own BaseException
            raise BackendLoadError(f"{label_of(offer)} can't be loaded: {describe_error(error)}") from error
        try:
            _audit(self._manager, plugin, label_of(offer), self.group.hooks)
            self._manager.register(plugin, name=name)
        except BackendError:
            raise
        except Exception as error:  # attribute access on the plugin can raise
            raise PluginContractError(
                f"{label_of(offer)} can't be registered: {error}; expected one module for one name"
            ) from error

    def _duplicate_reason(self, name: str, offers: Sequence[EntryPoint]) -> str:
        return f"{' and '.join(distribution_of(offer) for offer in offers)} both offer a {self.group.noun} named {name!r}"


def _audit(manager: pluggy.PluginManager, plugin: object, label: str, hooks: type) -> None:
    """Raise :class:`PluginContractError` unless ``plugin`` has every hook with every argument. pluggy checks neither."""
    expected = _hook_signatures(hooks)
    if inspect.isclass(plugin):
        raise PluginContractError(
            f"{label} is a class, expected a module (or an object) with the hooks {', '.join(expected)}"
        )
    implementations = _marked_hooks(manager, plugin, label, expected)
    for hook, signature in expected.items():
        if hook not in implementations:
            undecorated = callable(getattr(plugin, hook, None))
            cause = "is there but isn't marked with @hookimpl" if undecorated else "is missing"
            raise PluginContractError(f"{label}: hook {hook!r} {cause}; expected @hookimpl def {signature}")
        required = list(inspect.signature(getattr(hooks, hook)).parameters)[1:]
        actual = inspect.signature(implementations[hook])
        # pluggy passes arguments by name, and skips parameters with a default.
        accepted = [p.name for p in actual.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        if sorted(accepted) != sorted(required) or len(accepted) != len(actual.parameters):
            raise PluginContractError(
                f"{label}: hook {hook!r} has the signature {hook}{actual}, expected "
                f"{signature}: the same argument names, without defaults"
            )


def _marked_hooks(manager: pluggy.PluginManager, plugin: object, label: str, expected: Collection[str]) -> dict[str, Any]:
    """Return the functions of ``plugin`` that are marked as hooks, by hook name. Raises :class:`PluginContractError` for a
    hook that isn't ``expected``, and for wrappers.
    """
    implementations: dict[str, Any] = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            continue
        hook = options.get("specname") or attribute
        if hook not in expected:
            close = get_close_matches(hook, expected, n=1)
            raise PluginContractError(
                f"{label}: {hook!r} is marked as a hook but there is none of that name; "
                f"{f'did you mean {close[0]!r}? ' if close else ''}hooks: {', '.join(expected)}"
            )
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginContractError(f"{label}: hook {hook!r} is a wrapper, expected a plain implementation")
        implementations[hook] = getattr(plugin, attribute)
    return implementations


def _hook_signatures(hooks: type) -> dict[str, str]:
    """Return the signature of each specified hook as source text, by hook name."""
    signatures = {}
    for name, function in inspect.getmembers(hooks, inspect.isfunction):
        if not name.startswith("_"):
            signature = inspect.signature(function)
            text = f"{name}{signature.replace(parameters=list(signature.parameters.values())[1:])}"
            signatures[name] = text.replace("'", "")  # postponed annotations have quotation marks
    return signatures


def sentence(*parts: str) -> str:
    """Join the non-empty parts of an error message as ``failure: reason; advice``."""
    first, *others = [part for part in parts if part]
    return f"{first}: {'; '.join(others)}" if others else first


def describe_error(error: BaseException) -> str:
    """Return type and text of an error and of its causes: often only the cause names a missing library."""
    texts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(texts) < 4:
        texts.append(str(current) if isinstance(current, OutriderError) else f"{type(current).__name__}: {current}")
        current = current.__cause__
    return " (caused by ".join(texts) + ")" * (len(texts) - 1)


def type_name(value: object) -> str:
    """Return the type of ``value`` as a phrase for error messages."""
    return "None" if value is None else f"a {type(value).__name__}"


def wrong_field(record: Any, declared: type, prefix: str = "") -> str:
    """Return ``field=value, expected type`` for the first field of another type than declared; empty if all are right.

    ``prefix``: the path of a nested record, for its field names.
    """
    hints = typing.get_type_hints(declared)
    for each in dataclasses.fields(declared):
        value, hint = getattr(record, each.name), hints[each.name]
        name = f"{prefix}{each.name}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, hint):
            nested = wrong_field(value, hint, f"{name}.")
            if nested:
                return nested
        elif not _has_type(value, hint):
            return f"{name}={shown(value)}, expected {_type_name(hint)}"
    return ""


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, one) for one in arguments)
    if origin is tuple:  # descriptions have no other tuples than tuple[X, ...]
        return isinstance(value, tuple) and all(_has_type(item, arguments[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False
        return all(_has_type(key, arguments[0]) and _has_type(item, arguments[1]) for key, item in value.items())
    if hint is int and isinstance(value, bool):
        return False
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return name.replace("collections.abc.", "").replace("typing.", "")
