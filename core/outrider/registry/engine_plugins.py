"""Proposers and transports of installed plugins, by name. The built-in transports are plugins too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.device.errors import ConfigError
from outrider.registry.backends import parse_spec
from outrider.registry.plugins import Candidate, PluginGroup, Plugins
from outrider.speculative.plugin import (
    BUILTIN_PROPOSERS,
    PROPOSER_VERSION,
    PROPOSERS_GROUP,
    SUFFIX_PREFIX,
    ProposerHooks,
    ProposerInfo,
)

if TYPE_CHECKING:
    from outrider.speculative.build import Builder
    from outrider.transports.link import Transport


PROPOSERS = PluginGroup(
    entry_points=PROPOSERS_GROUP,
    noun="proposer",
    hooks=ProposerHooks,
    describe="proposer_info",
    create="create_proposer",
    product="outrider.speculative.proposer.Proposer",
    info=ProposerInfo,
    version=PROPOSER_VERSION,
)


def with_reserved_name_check(candidate: Candidate[ProposerInfo]) -> Candidate[ProposerInfo]:
    """Return the candidate, with the status ``broken`` if its name is that of a built-in proposer."""
    if candidate.name not in BUILTIN_PROPOSERS:
        return candidate
    reason = f"{candidate.name!r} is the name of a proposer that comes with Outrider; nothing takes its place"
    return replace(candidate, status="broken", reason=reason, advice="the plugin needs another name")


def plugin_builders(name: str, other_builders: Collection[str] = ()) -> Mapping[str, Builder]:
    """Return the builder of the plugin called ``name``; empty for a built-in proposer or one of ``other_builders``.

    Loads only the named plugin. Raises :class:`ConfigError` for an unknown name, and the errors of
    :meth:`Plugins.usable_info`.
    """
    speculate, name = name, name.removeprefix(SUFFIX_PREFIX)  # a combined proposer's second part can be a plugin's
    if name in BUILTIN_PROPOSERS or name in other_builders:
        return {}
    plugins = Plugins(PROPOSERS)
    if name not in plugins.names:
        installed = f"; plugins: {', '.join(plugins.names)}" if plugins.names else "; no plugin brings another one"
        names = ", ".join(sorted({*BUILTIN_PROPOSERS, *other_builders}))
        raise ConfigError(f"speculate is {speculate!r}; expected one of {names}{installed}")
    info = plugins.usable_info(name)
    return {name: lambda options: plugins.create(info, options=options)}


def get_transport(name: str) -> Transport:
    """Create the transport of a name such as ``nixl`` or ``nixl:devices=eth0``.

    Raises :class:`ConfigError` for an unknown name or option, and the errors of :meth:`Plugins.usable_info`.
    """
    from outrider.transports.plugin import TRANSPORT_VERSION, TRANSPORTS_GROUP, TransportHooks, TransportInfo

    group = PluginGroup(
        entry_points=TRANSPORTS_GROUP,
        noun="transport",
        hooks=TransportHooks,
        describe="transport_info",
        create="create_transport",
        product="outrider.transports.Transport",
        info=TransportInfo,
        version=TRANSPORT_VERSION,
    )
    plugins, spec = Plugins(group), parse_spec(name)
    if spec.name not in plugins.names:
        raise ConfigError(f"there is no transport {spec.name!r}; expected one of {', '.join(plugins.names)}")
    info = plugins.usable_info(spec.name)
    unknown = sorted(set(spec.options) - set(info.options))
    if unknown:
        raise ConfigError(
            f"the transport {spec.name!r} has no option {unknown[0]!r}; it has {', '.join(info.options) or 'none'}"
        )
    transport: Transport = plugins.create(info, options=spec.options)
    return transport
