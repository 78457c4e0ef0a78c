"""The proposers that come with Outrider, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OWN_PROPOSERS: Mapping[str, str] = MappingProxyType(
    {
        "eagle": "an EAGLE head (fc, layers.0.*): chain, or tree with --draft-topk",
        "eagle3": "an EAGLE-3 head (midlayer.*, its own lm_head, d2t): chain or tree",
        "peagle": "a P-EAGLE head (EAGLE-3 with mask_hidden, one or more layers): a draft in one pass, a chain",
        "dflash": "a DFlash head (fc, hidden_norm, layers.*, dflash_config): a block in one pass, a chain",
        "mtp": "heads of multi-token prediction (model.mtp_layers.*), one a step: chain or tree",
        "draft-model": "any supported decoder with the same tokenizer: chain or tree",
        "ngram": "nothing: it looks the last tokens up in what was there before",
        "suffix": "nothing: it looks the last tokens up in the request's text and in past outputs: chain",
        "none": "nothing: plain decoding",
    }
)
"""The proposers that come with Outrider: name, and the checkpoint that each needs. Other lists of names derive from this one,
which needs no torch."""

DRAFTLESS = frozenset(name for name, needs in OWN_PROPOSERS.items() if needs.startswith("nothing:"))
"""Those that need no checkpoint."""

BY_TARGETS_HEAD = frozenset({"eagle", "dflash", "mtp"})
"""Those that draw their drafts with the target's output head."""

FIRST = "suffix+"
"""Before the name of a proposer: suffix decoding goes first, and the other one drafts where it finds too little."""
