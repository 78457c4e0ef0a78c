"""Construction of a proposer from its name and checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from outrider.device import Backend, ConfigError
from outrider.errors import shown
from outrider.model import (
    OUTPUT_FORMATS,
    BaseDraftHead,
    DraftVocabulary,
    LanguageModel,
    Progress,
    QuantizedMode,
    find_mtp_format,
    load_chained_mtp,
    load_decoder,
    load_dflash,
    load_eagle,
    load_eagle3,
    load_mtp,
    load_peagle,
    with_output_head,
    with_vocabulary_size,
)
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.config.checkpoint_config import read_model_config
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer
from outrider.speculative.eagle import DraftHead, EagleProposer, EagleTreeProposer
from outrider.speculative.lookup import CombinedProposer, NgramProposer, SuffixProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.parallel import BlockProposer, PEagleProposer
from outrider.speculative.plugin import BUILTIN_PROPOSERS, DRAFTLESS, SUFFIX_PREFIX, USES_TARGET_HEAD
from outrider.speculative.proposer import NonSpeculativeProposer, Proposer
from outrider.speculative.tree import DynamicTree


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """The checkpoint, target and options from which :func:`build_proposer` builds a proposer."""

    target: LanguageModel
    """The model that verifies the drafts."""
    backend: Backend
    dtype: torch.dtype
    directory: Path | None
    """Directory of the draft's checkpoint, or None for a proposer without one."""
    draft_tokens: int
    """D, the length of the longest path of a draft in tokens."""
    topk: int = 1
    """Number of candidate children per node, T: 1 drafts a chain, more draft a tree of D * T nodes."""
    progress: Progress | None = None
    quantized: QuantizedMode = QuantizedMode.KERNELS
    """How quantized weights of the draft are loaded and multiplied."""
    output_head: str | None = None
    """Format of a quantized copy of the target's output head, from which the proposer samples. None uses the target's own
    head.
    """
    vocabulary: DraftVocabulary | None = None
    """Tokens that drafts are sampled from. None means all."""


Builder = Callable[[DraftOptions], Proposer]
_Head = TypeVar("_Head")
_OwnHead = TypeVar("_OwnHead", bound=BaseDraftHead)


def build_proposer(name: str, options: DraftOptions, *, builders: Mapping[str, Builder] | None = None) -> Proposer:
    """Build the proposer called ``name``: one of :data:`BUILDERS` or ``builders``, or ``suffix+`` and such a name.

    Raises :class:`ConfigError` for an unknown name and for contradictory options, and :class:`CheckpointError` for an invalid
    checkpoint.
    """
    known = {**BUILDERS, **(builders or {})}
    check_output_head(name, options.output_head, options.vocabulary)
    if name not in known and name.startswith(SUFFIX_PREFIX):
        return _build_combined(name, options, known)
    if name not in known:
        raise ConfigError(f"speculate is {name!r}; expected one of {', '.join(sorted(known))}")
    return known[name](options)


def check_output_head(name: str, format: str | None, vocabulary: object | None = None) -> None:
    """Raise :class:`ConfigError` for an unknown ``format``, or if the proposer called ``name`` doesn't sample with the
    target's head.

    Such a proposer has no use for ``format`` or ``vocabulary``.
    """
    if format not in (None, *OUTPUT_FORMATS):
        raise ConfigError(
            f"draft_output_head is {shown(format)}; expected one of {', '.join(OUTPUT_FORMATS)}, or None for the target's own"
        )
    setting = None if vocabulary is None else "draft_vocabulary is given"
    if format is not None:
        setting = f"draft_output_head is {format}"
    if setting is not None and name.removeprefix(SUFFIX_PREFIX) not in USES_TARGET_HEAD:
        raise ConfigError(
            f"{setting}, but speculate={name!r} doesn't draw drafts with the target's output head; "
            f"{', '.join(sorted(USES_TARGET_HEAD))} do. A draft with a head of its own is quantised as a checkpoint "
            "(outrider quantize)"
        )


def _draft_directory(options: DraftOptions, name: str, what: str) -> Path:
    if options.directory is None:
        raise ConfigError(f"speculate={name!r} needs the directory of {what}; give draft_dir (--draft)")
    return options.directory


def _load_head(load: Callable[..., _Head], options: DraftOptions, name: str, what: str) -> _Head:
    """Load a draft head with ``load`` for the target, or for a copy of the target with the output head that the
    options name.
    """
    directory, target = _draft_directory(options, name, what), options.target
    if options.output_head is not None or options.vocabulary is not None:
        target = with_output_head(target, backend=options.backend, format=options.output_head, vocabulary=options.vocabulary)
    return load(
        directory,
        target=target,
        backend=options.backend,
        dtype=options.dtype,
        progress=options.progress,
        quantized=options.quantized,
    )


def _tree_shape(options: DraftOptions) -> DynamicTree:
    return DynamicTree(topk=options.topk, depth=options.draft_tokens)


def _build_none(options: DraftOptions) -> Proposer:
    del options
    return NonSpeculativeProposer()


def _eagle_proposer(head: DraftHead, options: DraftOptions) -> Proposer:
    if options.topk == 1:
        return EagleProposer(head, draft_tokens=options.draft_tokens)
    return EagleTreeProposer(head, _tree_shape(options))


def _build_eagle(options: DraftOptions) -> Proposer:
    return _eagle_proposer(_share_output_head(_load_head(load_eagle, options, "eagle", "an EAGLE head"), options), options)


def _share_output_head(head: _OwnHead, options: DraftOptions) -> _OwnHead:
    """Return ``head``, with the target's output head instead of its own copy of that. Raises :class:`ConfigError` for options
    that replace the target's output head, if ``head`` has another one.
    """
    if not head.share_output_head(options.target) and (options.output_head is not None or options.vocabulary is not None):
        raise ConfigError(
            "draft_output_head and draft_vocabulary draw drafts with a copy of the target's output head, and "
            f"{options.directory} has another one of its own (lm_head.weight); leave them out"
        )
    return head


def _build_eagle3(options: DraftOptions) -> Proposer:
    return _eagle_proposer(_load_head(load_eagle3, options, "eagle3", "an EAGLE-3 head"), options)


def _build_mtp(options: DraftOptions) -> Proposer:
    directory = _draft_directory(options, "mtp", "heads of multi-token prediction")
    return _MTP_BUILDERS[find_mtp_format(open_checkpoint(directory))](options)


def _build_mimo_mtp(options: DraftOptions) -> Proposer:
    heads = _load_head(load_mtp, options, "mtp", "heads of multi-token prediction")
    return MtpProposer(heads, draft_tokens=options.draft_tokens, branches=options.topk)


def _build_chained_mtp(options: DraftOptions) -> Proposer:
    return _eagle_proposer(_load_head(load_chained_mtp, options, "mtp", "a head of multi-token prediction"), options)


def _build_draft_model(options: DraftOptions) -> Proposer:
    directory = _draft_directory(options, "draft-model", "a draft model")
    context, own = options.target.config.max_context, read_model_config(directory, drafts=True)
    if own.recurrent is not None:
        raise ConfigError(
            f"{directory} has recurrent layers, whose states can't be cut back to the accepted tokens: a draft model has "
            "attention in every layer; take another draft, or the head in the model's checkpoint (speculate mtp)"
        )
    model = load_decoder(
        directory,
        backend=options.backend,
        dtype=options.dtype,
        progress=options.progress,
        ranks=options.target.ranks,
        quantized=options.quantized,
        drafts=True,
        positions=context,
    )
    model = with_vocabulary_size(model, options.target.config.vocab_size, directory=directory, backend=options.backend)
    if options.topk == 1:
        return DraftModelProposer(model, target=options.target, draft_tokens=options.draft_tokens, context=own.max_context)
    return DraftModelTreeProposer(model, target=options.target, shape=_tree_shape(options))


def _build_ngram(options: DraftOptions) -> Proposer:
    vocabulary = options.target.config.vocab_size
    return NgramProposer(vocab_size=vocabulary, draft_tokens=options.draft_tokens, branches=options.topk)


def _require_chain(options: DraftOptions, name: str) -> None:
    if options.topk > 1:
        raise ConfigError(f"draft_topk is {options.topk}, but speculate={name!r} drafts chains alone; leave draft_topk out")


def _build_dflash(options: DraftOptions) -> Proposer:
    _require_chain(options, "dflash")
    head = _share_output_head(_load_head(load_dflash, options, "dflash", "a DFlash head"), options)
    return BlockProposer(head, draft_tokens=options.draft_tokens)


def _build_peagle(options: DraftOptions) -> Proposer:
    _require_chain(options, "peagle")
    head = _load_head(load_peagle, options, "peagle", "a P-EAGLE head")
    return PEagleProposer(head, draft_tokens=options.draft_tokens)


def _build_combined(name: str, options: DraftOptions, known: Mapping[str, Builder]) -> Proposer:
    """Return a proposer that combines suffix decoding with the proposer whose name follows the plus sign in ``name``."""
    fallback_name = name.removeprefix(SUFFIX_PREFIX)
    if fallback_name not in known or fallback_name in DRAFTLESS:
        allowed = ", ".join(sorted(set(known) - DRAFTLESS))
        raise ConfigError(f"speculate is {name!r}; expected one of {allowed} after {SUFFIX_PREFIX!r}")
    _require_chain(options, name)
    fallback = known[fallback_name](options)
    # The fallback may draft fewer tokens than requested, as MTP heads do. Both proposers must draft the same number.
    return CombinedProposer(SuffixProposer.for_target(options.target, fallback.depth or options.draft_tokens), fallback)


def _build_suffix(options: DraftOptions) -> Proposer:
    _require_chain(options, "suffix")
    return SuffixProposer.for_target(options.target, options.draft_tokens)


_MTP_BUILDERS: Mapping[str, Builder] = MappingProxyType({"mimo": _build_mimo_mtp, "chained": _build_chained_mtp})
"""Builders of proposers with multi-token prediction heads, by the checkpoint's format, a value of ``MTP_PREFIXES``."""

_BUILDER_OF: Mapping[str, Builder] = {
    "none": _build_none,
    "eagle": _build_eagle,
    "eagle3": _build_eagle3,
    "peagle": _build_peagle,
    "dflash": _build_dflash,
    "mtp": _build_mtp,
    "draft-model": _build_draft_model,
    "ngram": _build_ngram,
    "suffix": _build_suffix,
}

BUILDERS: Mapping[str, Builder] = MappingProxyType({name: _BUILDER_OF[name] for name in BUILTIN_PROPOSERS})
"""Builders of the proposers of Outrider, by the name that ``speculate`` takes."""
