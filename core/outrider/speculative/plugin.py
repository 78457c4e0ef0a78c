"""The plugin interface of proposers: two hooks and a record that describes the proposer.

A plugin is a module named by an entry point of the group ``outrider.proposers``. The entry point's name is the value of
``--speculate``. Descriptions must not need torch, so the module imports the proposer inside ``create_proposer``.
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
"""Version of the proposer interface. It rises when a correct proposer could become incorrect."""

__all__ = ["PROPOSERS_GROUP", "PROPOSER_VERSION", "ProposerHooks", "ProposerInfo", "hookimpl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerInfo(PluginInfo):
    """Description of a plugin's proposer.

    ``interface_min`` and ``interface_max`` are versions of this interface (:data:`PROPOSER_VERSION`).
    """

    needs: str = "nothing"
    """The checkpoint that ``--draft`` must name, in words, or ``nothing``."""


class ProposerHooks:
    """The hooks of a proposer plugin. The registry calls them before an engine exists; the engine then calls the proposer
    directly.
    """

    @hookspec
    def proposer_info(self) -> ProposerInfo:  # type: ignore[empty-body]
        """Return the description of the plugin. Calls must be cheap, repeatable and without side effects."""

    @hookspec
    def create_proposer(self, options: DraftOptions) -> Proposer:  # type: ignore[empty-body]
        """Create the proposer for a target and a backend.

        Raise :class:`~outrider.device.errors.ConfigError` for unsupported options (a tree, for example), and
        :class:`~outrider.device.errors.CheckpointError` for an invalid checkpoint.
        """
