"""Construction of a proposer from its name and checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from outrider.device import Backend, ConfigError
from outrider.errors import CheckpointError
from outrider.model import (
    BaseDraftHead,
    Decoder,
    DraftVocabulary,
    HeadCheckpoint,
    LanguageModel,
    Progress,
    QuantizedMode,
    check_draft_format,
    find_mtp_format,
    load_chained_mtp,
    load_decoder,
    load_dflash,
    load_eagle,
    load_eagle3,
    load_mtp,
    load_peagle,
    open_head,
    with_output_head,
    with_vocabulary_size,
)
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.config.checkpoint_config import read_model_config
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer, HybridDraftModelProposer
from outrider.speculative.eagle import DraftHead, EagleProposer, EagleTreeProposer
from outrider.speculative.lookup import CombinedProposer, NgramProposer, SuffixProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.parallel import BlockProposer, PEagleProposer
from outrider.speculative.plugin import BUILTIN_PROPOSERS, DRAFT_HEADS, DRAFTLESS, STORED, SUFFIX_PREFIX, USES_TARGET_HEAD
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
    quantized: QuantizedMode = "kernels"
    """How quantized weights of the draft are loaded and multiplied."""
    weights: str | None = None
    """Format of the draft head's products, and of the copy of the target's output head with which the proposer samples. None
    leaves the weights as they are stored.
    """
    vocabulary: DraftVocabulary | None = None
    """Tokens that drafts are sampled from. None means all."""


Builder = Callable[[DraftOptions], Proposer]


def build_proposer(name: str, options: DraftOptions, *, builders: Mapping[str, Builder] | None = None) -> Proposer:
    """Build the proposer called ``name``: one of :data:`BUILDERS` or ``builders``, or ``suffix+`` and such a name.

    Raises :class:`ConfigError` for an unknown name and for contradictory options, and :class:`CheckpointError` for an invalid
    checkpoint.
    """
    known = {**BUILDERS, **(builders or {})}
    check_draft_settings(name, options.backend, options.weights, options.vocabulary)
    if name not in known and name.startswith(SUFFIX_PREFIX):
        return _build_combined(name, options, known)
    if name not in known:
        raise ConfigError(f"speculate is {name!r}; expected one of {', '.join(sorted(known))}")
    return known[name](options)


def check_draft_settings(name: str, backend: Backend, weights: str | None, vocabulary: object | None = None) -> None:
    """Raise :class:`ConfigError` for a format ``weights`` or a ``vocabulary`` that the proposer called ``name`` can't use.

    Raises :class:`CapabilityError` if the backend has no kernels for the format.
    """
    head = name.removeprefix(SUFFIX_PREFIX)
    if weights is not None:
        if weights != STORED:
            check_draft_format(weights, backend)
        if head not in DRAFT_HEADS:
            raise ConfigError(
                f"draft_weights is {weights}, but speculate={name!r} has no draft head; {', '.join(sorted(DRAFT_HEADS))} "
                "have one. A draft model is quantised as a checkpoint (outrider quantize)"
            )
    if vocabulary is not None and head not in USES_TARGET_HEAD:
        raise ConfigError(
            f"draft_vocabulary is given, but speculate={name!r} doesn't draw drafts with the target's output head; "
            f"{', '.join(sorted(USES_TARGET_HEAD))} do"
        )


def _draft_directory(options: DraftOptions, name: str, what: str) -> Path:
    if options.directory is None:
        raise ConfigError(f"speculate={name!r} needs the directory of {what}; give draft_dir (--draft)")
    return options.directory


def _open_head(options: DraftOptions, name: str, what: str) -> HeadCheckpoint:
    return open_head(
        _draft_directory(options, name, what),
        target=options.target,
        backend=options.backend,
        dtype=options.dtype,
        progress=options.progress,
        quantized=options.quantized,
        rounding=options.weights,
    )


def _use_output_copy(heads: Sequence[BaseDraftHead], options: DraftOptions) -> None:
    """Let ``heads`` sample with one copy of the target's output head, with the format and vocabulary of the options.

    Raises :class:`ConfigError` for a vocabulary if a head has another output head of its own.
    """
    if any(head.has_own_output_head for head in heads):
        if options.vocabulary is not None:
            raise ConfigError(
                "draft_vocabulary draws drafts with a copy of the target's output head, and "
                f"{options.directory} has another one of its own (lm_head.weight); leave it out"
            )
        return
    rounds = options.weights is not None and isinstance(options.target, Decoder)
    if rounds or options.vocabulary is not None:
        output = with_output_head(
            options.target, backend=options.backend, format=options.weights, vocabulary=options.vocabulary
        )
        for head in heads:
            head.output = output


def _tree_shape(options: DraftOptions) -> DynamicTree:
    return DynamicTree(topk=options.topk, depth=options.draft_tokens)


def _build_none(options: DraftOptions) -> Proposer:
    del options
    return NonSpeculativeProposer()


def _eagle_proposer(head: DraftHead, options: DraftOptions) -> Proposer:
    _use_output_copy((head,), options)
    if options.topk == 1:
        return EagleProposer(head, draft_tokens=options.draft_tokens)
    return EagleTreeProposer(head, _tree_shape(options))


def _build_eagle(options: DraftOptions) -> Proposer:
    return _eagle_proposer(load_eagle(_open_head(options, "eagle", "an EAGLE head")), options)


def _build_eagle3(options: DraftOptions) -> Proposer:
    return _eagle_proposer(load_eagle3(_open_head(options, "eagle3", "an EAGLE-3 head")), options)


def _build_mtp(options: DraftOptions) -> Proposer:
    directory = _draft_directory(options, "mtp", "heads of multi-token prediction")
    build = _MTP_BUILDERS[find_mtp_format(open_checkpoint(directory))]
    try:
        return build(options)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; to decode without these heads, take speculate none (--speculate none)") from error


def _build_mimo_mtp(options: DraftOptions) -> Proposer:
    heads = load_mtp(_open_head(options, "mtp", "heads of multi-token prediction"))
    _use_output_copy(heads, options)
    return MtpProposer(heads, draft_tokens=options.draft_tokens, branches=options.topk)


def _build_chained_mtp(options: DraftOptions) -> Proposer:
    return _eagle_proposer(load_chained_mtp(_open_head(options, "mtp", "a head of multi-token prediction")), options)


def _build_draft_model(options: DraftOptions) -> Proposer:
    directory = _draft_directory(options, "draft-model", "a draft model")
    context, own = options.target.config.max_context, read_model_config(directory, drafts=True)
    if own.recurrent is not None and options.topk > 1:
        raise ConfigError(
            f"draft_topk is {options.topk}, and {directory} has recurrent layers: each branch of a tree would need a state "
            "of its own; leave draft_topk out, to draft a chain"
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
        build = DraftModelProposer if own.recurrent is None else HybridDraftModelProposer
        return build(model, target=options.target, draft_tokens=options.draft_tokens, context=own.max_context)
    return DraftModelTreeProposer(model, target=options.target, shape=_tree_shape(options))


def _build_ngram(options: DraftOptions) -> Proposer:
    vocabulary = options.target.config.vocab_size
    return NgramProposer(vocab_size=vocabulary, draft_tokens=options.draft_tokens, branches=options.topk)


def _require_chain(options: DraftOptions, name: str) -> None:
    if options.topk > 1:
        raise ConfigError(f"draft_topk is {options.topk}, but speculate={name!r} drafts chains alone; leave draft_topk out")


def _build_dflash(options: DraftOptions) -> Proposer:
    _require_chain(options, "dflash")
    head = load_dflash(_open_head(options, "dflash", "a DFlash head"))
    _use_output_copy((head,), options)
    return BlockProposer(head, draft_tokens=options.draft_tokens)


def _build_peagle(options: DraftOptions) -> Proposer:
    _require_chain(options, "peagle")
    head = load_peagle(_open_head(options, "peagle", "a P-EAGLE head"))
    _use_output_copy((head,), options)
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


_MTP_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {"mimo": _build_mimo_mtp, **dict.fromkeys(("chained", "layer"), _build_chained_mtp)}
)
"""Builders of proposers with multi-token prediction heads, by the result of :func:`find_mtp_format`."""

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
