"""Transports by name: those that come with Outrider, and those of installed plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError, ConfigError, OutriderError, PluginContractError
from outrider.registry.backends import parse_spec
from outrider.registry.plugins import PluginGroup, Plugins, describe_error, type_name
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
    """The transport that ``name`` says, as people type it: ``nixl``, ``nixl:devices=eth0``.

    Raises :class:`ConfigError` for a name or an option that nobody offers, and what loading the plugin raises.
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
    try:
        made = plugins.adapt(plugins.call("create_transport", spec.name, options=spec.options), info)
    except OutriderError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BackendLoadError(f"plugin {offer.label}: hook create_transport failed: {describe_error(error)}") from error
    if not isinstance(made, Transport):
        raise PluginContractError(
            f"plugin {offer.label}: hook create_transport returned {type_name(made)}, expected a Transport; the class must "
            "subclass outrider.transports.Transport"
        )
    return made
