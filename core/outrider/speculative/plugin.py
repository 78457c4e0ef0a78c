"""Names of the proposers of Outrider, and the plugin interface of others: two hooks and a record that describes the proposer.

A plugin is a module named by an entry point of the group ``outrider.proposers``. The entry point's name is the value of
``--speculate``. Descriptions must not need torch, so the module imports the proposer inside ``create_proposer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from outrider.device.plugin import PluginInfo, hookimpl, hookspec

if TYPE_CHECKING:
    from outrider.speculative.build import DraftOptions
    from outrider.speculative.proposer import Proposer


BUILTIN_PROPOSERS: Mapping[str, str] = MappingProxyType(
    {
        "eagle": "an EAGLE head (fc, layers.0.*): chain, or tree with --draft-topk",
        "eagle3": "an EAGLE-3 head (midlayer.*, its own lm_head, d2t): chain or tree",
        "peagle": "a P-EAGLE head (EAGLE-3 with mask_hidden, one or more layers): a draft in one pass, a chain",
        "dflash": "a DFlash head (fc, hidden_norm, layers.*, dflash_config): a block in one pass, a chain",
        "mtp": "heads of multi-token prediction (model.mtp_layers.*), of --draft or of the model: chain or tree",
        "draft-model": "any supported decoder with the same tokenizer: chain or tree",
        "ngram": "nothing: it drafts what followed the last tokens earlier in the text: chain or tree",
        "suffix": "nothing: it drafts what followed the last tokens in the text or in past outputs: chain",
        "none": "nothing: non-speculative decoding",
    }
)
"""Proposer names with the checkpoint that each needs. Other lists of names derive from this one."""

DRAFTLESS = frozenset(name for name, needs in BUILTIN_PROPOSERS.items() if needs.startswith("nothing:"))
"""Names of proposers that need no checkpoint."""

INSIDE_MODEL = frozenset({"mtp"})
"""Names of proposers whose heads are read from the target's checkpoint if no draft is given."""

USES_TARGET_HEAD = frozenset({"eagle", "dflash", "mtp"})
"""Names of proposers that sample drafts with the target's output head."""

DRAFT_HEADS = USES_TARGET_HEAD | {"eagle3", "peagle"}
"""Names of proposers with a draft head, whose weights may be rounded when they are loaded."""

STORED = "stored"
"""Value of the setting ``draft_weights`` that keeps a draft's weights as its checkpoint has them."""

SUFFIX_PREFIX = "suffix+"
"""Prefix of a proposer's name: suffix decoding drafts first, and the named proposer drafts where it matches too little."""


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
