"""Proposers by name: those that come with Outrider, and those of installed plugins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError, ConfigError, OutriderError, PluginContractError
from outrider.registry import Candidate, PluginGroup, Plugins
from outrider.registry.plugins import describe_error, type_name
from outrider.speculative.names import FIRST, OWN_PROPOSERS
from outrider.speculative.plugin import PROPOSER_VERSION, PROPOSERS_GROUP, ProposerHooks, ProposerInfo

if TYPE_CHECKING:
    from outrider.speculative.build import Builder, DraftOptions
    from outrider.speculative.proposer import Proposer

PROPOSERS = PluginGroup(
    entry_points=PROPOSERS_GROUP,
    noun="proposer",
    hooks=ProposerHooks,
    describe="proposer_info",
    info=ProposerInfo,
    version=PROPOSER_VERSION,
)


def shadowed(candidate: Candidate[ProposerInfo]) -> Candidate[ProposerInfo]:
    """The candidate; broken where its name is one of Outrider's own, which it can't take the place of."""
    if candidate.name not in OWN_PROPOSERS:
        return candidate
    reason = f"{candidate.name!r} is the name of a proposer that comes with Outrider; nothing takes its place"
    return replace(candidate, status="broken", reason=reason, advice="the plugin needs another name")


def plugin_builders(name: str, given: Collection[str] = ()) -> Mapping[str, Builder]:
    """The builder of the installed plugin called ``name``; empty for a proposer of Outrider's and for one of ``given``.

    Loads the named plugin alone. Raises :class:`ConfigError` for a name that no plugin offers, and what
    :meth:`Plugins.usable_info` raises.
    """
    asked, name = name, name.removeprefix(FIRST)  # whose second part may be a plugin's
    if name in OWN_PROPOSERS or name in given:
        return {}
    plugins = Plugins(PROPOSERS)
    if name not in plugins.names:
        installed = f"; plugins: {', '.join(plugins.names)}" if plugins.names else "; no plugin brings another one"
        raise ConfigError(f"speculate is {asked!r}; expected one of {', '.join(sorted({*OWN_PROPOSERS, *given}))}{installed}")
    plugins.usable_info(plugins.offer(name))
    return {name: lambda options: _build(plugins, name, options)}


def _build(plugins: Plugins[ProposerInfo], name: str, options: DraftOptions) -> Proposer:
    from outrider.speculative.proposer import Proposer

    offer, info = plugins.offer(name), plugins.info(name)
    try:
        made = plugins.adapt(plugins.call("create_proposer", name, options=options), info)
    except OutriderError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BackendLoadError(f"plugin {offer.label}: hook create_proposer failed: {describe_error(error)}") from error
    if not isinstance(made, Proposer):
        raise PluginContractError(
            f"plugin {offer.label}: hook create_proposer returned {type_name(made)}, expected a Proposer; the class must "
            "subclass outrider.speculative.proposer.Proposer"
        )
    return made
