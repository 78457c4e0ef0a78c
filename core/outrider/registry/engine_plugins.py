"""Proposers and transports of installed plugins, by name. The built-in transports are plugins too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.device.errors import ConfigError
from outrider.registry.backends import parse_spec
from outrider.registry.plugins import Candidate, PluginGroup, Plugins, checked_product
from outrider.speculative.plugin import (
    BUILTIN_PROPOSERS,
    PROPOSER_VERSION,
    PROPOSERS_GROUP,
    SUFFIX_PREFIX,
    ProposerHooks,
    ProposerInfo,
)

if TYPE_CHECKING:
    from outrider.speculative.build import Builder, DraftOptions
    from outrider.speculative.proposer import Proposer
    from outrider.transports.link import Transport


PROPOSERS = PluginGroup(
    entry_points=PROPOSERS_GROUP,
    noun="proposer",
    hooks=ProposerHooks,
    describe="proposer_info",
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
    plugins.usable_info(plugins.offer(name))
    return {name: lambda options: _build(plugins, name, options)}


def _build(plugins: Plugins[ProposerInfo], name: str, options: DraftOptions) -> Proposer:
    from outrider.speculative.proposer import Proposer

    offer, hook = plugins.offer(name), "create_proposer"
    failure = f"plugin {offer.label}: hook {hook} failed"
    product = plugins.create(hook, plugins.info(name), failure=failure, options=options)
    proposer: Proposer = checked_product(offer, hook, product, Proposer, "outrider.speculative.proposer.Proposer")
    return proposer


def get_transport(name: str) -> Transport:
    """Create the transport of a name such as ``nixl`` or ``nixl:devices=eth0``.

    Raises :class:`ConfigError` for an unknown name or option, and the errors of :meth:`Plugins.usable_info`.
    """
    from outrider.transports.link import Transport
    from outrider.transports.plugin import TRANSPORT_VERSION, TRANSPORTS_GROUP, TransportHooks, TransportInfo

    group = PluginGroup(
        entry_points=TRANSPORTS_GROUP,
        noun="transport",
        hooks=TransportHooks,
        describe="transport_info",
        info=TransportInfo,
        version=TRANSPORT_VERSION,
    )
    plugins, spec = Plugins(group), parse_spec(name)
    if spec.name not in plugins.names:
        raise ConfigError(f"there is no transport {spec.name!r}; expected one of {', '.join(plugins.names)}")
    offer = plugins.offer(spec.name)
    info = plugins.usable_info(offer)
    unknown = sorted(set(spec.options) - set(info.options))
    if unknown:
        raise ConfigError(
            f"the transport {spec.name!r} has no option {unknown[0]!r}; it has {', '.join(info.options) or 'none'}"
        )
    hook = "create_transport"
    product = plugins.create(hook, info, failure=f"plugin {offer.label}: hook {hook} failed", options=spec.options)
    transport: Transport = checked_product(offer, hook, product, Transport, "outrider.transports.Transport")
    return transport
