"""Registry of transports by name. The built-in transports are plugins too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.device.errors import ConfigError
from outrider.registry.backends import parse_spec
from outrider.registry.plugins import PluginGroup, Plugins, checked_product
from outrider.transports.plugin import TRANSPORT_VERSION, TRANSPORTS_GROUP, TransportHooks, TransportInfo

if TYPE_CHECKING:
    from outrider.transports.link import Transport

TRANSPORTS = PluginGroup(
    entry_points=TRANSPORTS_GROUP,
    noun="transport",
    hooks=TransportHooks,
    describe="transport_info",
    info=TransportInfo,
    version=TRANSPORT_VERSION,
)


def get_transport(name: str) -> Transport:
    """Create the transport of a name such as ``nixl`` or ``nixl:devices=eth0``.

    Raises :class:`ConfigError` for an unknown name or option, and the errors of :meth:`Plugins.usable_info`.
    """
    from outrider.transports.link import Transport

    plugins, spec = Plugins(TRANSPORTS), parse_spec(name)
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
