"""The plugin interface of transports: two hooks, and a record that describes the plugin.

A plugin is a module that an entry point of the group ``outrider.transports`` names. The name of the entry point is the value
of ``--transport``. The module imports its transfer library inside ``create_transport``, not at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.device.plugin import PluginInfo, hookimpl, hookspec

if TYPE_CHECKING:
    from outrider.transports.link import Transport

TRANSPORTS_GROUP = "outrider.transports"
TRANSPORT_VERSION = 1
"""Version of the transport interface. It rises when a change could make an existing transport incorrect."""

__all__ = ["TRANSPORTS_GROUP", "TRANSPORT_VERSION", "TransportHooks", "TransportInfo", "hookimpl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportInfo(PluginInfo):
    """The description of a transport plugin.

    ``interface_min`` and ``interface_max`` are versions of this interface (:data:`TRANSPORT_VERSION`).
    """

    options: Mapping[str, str] = field(default_factory=dict)
    """Help text of each option that the transport accepts, by name."""


class TransportHooks:
    """The hooks of a transport plugin. Outrider calls them before it creates an engine; the transport itself isn't a hook."""

    @hookspec
    def transport_info(self) -> TransportInfo:  # type: ignore[empty-body]
        """Return the description of the plugin. Calls must be cheap, repeatable and without side effects."""

    @hookspec
    def create_transport(self, options: Mapping[str, str]) -> Transport:  # type: ignore[empty-body]
        """Create the transport with the ``options`` of ``--transport`` (``nixl:devices=eth0``).

        Raise :class:`~outrider.device.errors.ConfigError` for an invalid value of an option.
        """
