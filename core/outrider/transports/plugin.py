"""What a package offers that brings a transport of its own: two hooks, and a record that describes it.

A plugin is a module named by an entry point of the group ``outrider.transports``; its name there is what ``--transport``
takes. The module imports the library that moves the bytes inside ``create_transport``.
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
"""Version of the interface of transports. It rises when a transport that was right could become wrong."""

__all__ = ["TRANSPORTS_GROUP", "TRANSPORT_VERSION", "TransportHooks", "TransportInfo", "hookimpl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportInfo(PluginInfo):
    """What a plugin says about its transport. ``options``: those that it takes, each with what it means.

    ``interface_min`` and ``interface_max`` are versions of this interface (:data:`TRANSPORT_VERSION`).
    """

    options: Mapping[str, str] = field(default_factory=dict)


class TransportHooks:
    """The hooks. They're called before an engine exists; the transport itself is called directly."""

    @hookspec
    def transport_info(self) -> TransportInfo:  # type: ignore[empty-body]
        """Describe the plugin. Cheap, repeatable, without side effects."""

    @hookspec
    def create_transport(self, options: Mapping[str, str]) -> Transport:  # type: ignore[empty-body]
        """Make the transport. ``options``: those that its name came with (``nixl:devices=eth0``).

        Raise :class:`~outrider.device.errors.ConfigError` for options that it doesn't know.
        """
