"""Names of the proposers of Outrider. This module needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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

SUFFIX_PREFIX = "suffix+"
"""Prefix of a proposer's name: suffix decoding drafts first, and the named proposer drafts where it matches too little."""
