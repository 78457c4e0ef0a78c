"""What a package offers that brings a proposer of its own: two hooks, and a record that describes it.

A plugin is a module named by an entry point of the group ``outrider.proposers``; its name there is what ``--speculate``
takes. It needs no torch to be described, so a plugin's module imports the proposer itself inside ``create_proposer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.device.plugin import PluginInfo, hookimpl, hookspec

if TYPE_CHECKING:
    from outrider.speculative.build import DraftOptions
    from outrider.speculative.proposer import Proposer

PROPOSERS_GROUP = "outrider.proposers"
PROPOSER_VERSION = 1
"""Version of the interface of proposers. It rises when a proposer that was right could become wrong."""

__all__ = ["PROPOSERS_GROUP", "PROPOSER_VERSION", "ProposerHooks", "ProposerInfo", "hookimpl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerInfo(PluginInfo):
    """What a plugin says about its proposer. ``needs``: the checkpoint that ``--draft`` must name, in words; or nothing.

    ``interface_min`` and ``interface_max`` are versions of this interface (:data:`PROPOSER_VERSION`).
    """

    needs: str = "nothing"


class ProposerHooks:
    """The hooks. They're called before an engine exists; the proposer itself is called directly."""

    @hookspec
    def proposer_info(self) -> ProposerInfo:  # type: ignore[empty-body]
        """Describe the plugin. Cheap, repeatable, without side effects."""

    @hookspec
    def create_proposer(self, options: DraftOptions) -> Proposer:  # type: ignore[empty-body]
        """Make the proposer for a target and a backend.

        Raise :class:`~outrider.device.errors.ConfigError` for options that it can't do (a tree, say), and
        :class:`~outrider.device.errors.CheckpointError` for a checkpoint that isn't right.
        """
