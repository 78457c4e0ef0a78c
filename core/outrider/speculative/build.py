"""From a name and a checkpoint to a proposer."""

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
    DraftVocabulary,
    LanguageModel,
    Progress,
    QuantizedMode,
    load_decoder,
    load_dflash,
    load_eagle,
    load_eagle3,
    load_mtp,
    load_peagle,
    of_vocabulary,
    with_output_head,
)
from outrider.speculative.block import BlockProposer
from outrider.speculative.combined import CombinedProposer
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer
from outrider.speculative.eagle import DraftHead, EagleProposer, EagleTreeProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.names import BY_TARGETS_HEAD, DRAFTLESS, FIRST, OWN_PROPOSERS
from outrider.speculative.ngram import NgramProposer
from outrider.speculative.peagle import PEagleProposer
from outrider.speculative.proposer import PlainProposer, Proposer
from outrider.speculative.suffix import SuffixProposer
from outrider.speculative.tree import DynamicTree


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """What a proposer is built for. ``directory``: the draft's checkpoint, if there is one.

    ``draft_tokens``: D, the longest path. ``topk``: 1 for a chain, else T, how many children of a node are looked at.
    The tree has D * T nodes in all. ``quantized``: how quantised weights of the draft are loaded.
    ``output_head``: the format of the copy of the target's output head that drafts are drawn with; None: that head itself.
    ``vocabulary``: the tokens that they're drawn from; None: all.
    """

    target: LanguageModel
    backend: Backend
    dtype: torch.dtype
    directory: Path | None
    draft_tokens: int
    topk: int = 1
    progress: Progress | None = None
    quantized: QuantizedMode = QuantizedMode.KERNELS
    output_head: str | None = None
    vocabulary: DraftVocabulary | None = None


Builder = Callable[[DraftOptions], Proposer]
_Head = TypeVar("_Head")


def build(name: str, options: DraftOptions, *, builders: Mapping[str, Builder] | None = None) -> Proposer:
    """The proposer called ``name``, one of :data:`BUILDERS` or of ``builders``, or ``suffix+`` and such a name.

    Raises :class:`ConfigError` for an unknown name and for options that don't go together, :class:`CheckpointError` for a
    checkpoint that isn't right.
    """
    known = {**BUILDERS, **(builders or {})}
    check_output_head(name, options.output_head, options.vocabulary)
    if name not in known and name.startswith(FIRST):
        return _combined(name, options, known)
    if name not in known:
        raise ConfigError(f"speculate is {name!r}; expected one of {', '.join(sorted(known))}")
    return known[name](options)


def check_output_head(name: str, format: str | None, vocabulary: object | None = None) -> None:
    """Raise :class:`ConfigError` where ``format`` is none, or where the proposer called ``name`` draws with another head and
    so has no use for it, nor for a ``vocabulary``.
    """
    if format not in (None, *OUTPUT_FORMATS):
        raise ConfigError(
            f"draft_output_head is {shown(format)}; expected one of {', '.join(OUTPUT_FORMATS)}, or None for the target's own"
        )
    given = None if vocabulary is None else "draft_vocabulary is given"
    if format is not None:
        given = f"draft_output_head is {format}"
    if given is not None and name.removeprefix(FIRST) not in BY_TARGETS_HEAD:
        raise ConfigError(
            f"{given}, but speculate={name!r} doesn't draw drafts with the target's output head; "
            f"{', '.join(sorted(BY_TARGETS_HEAD))} do. A draft with a head of its own is quantised as a checkpoint "
            "(outrider quantize)"
        )


def _directory(options: DraftOptions, name: str, what: str) -> Path:
    if options.directory is None:
        raise ConfigError(f"speculate={name!r} needs the directory of {what}; give draft_dir (--draft)")
    return options.directory


def _read(load: Callable[..., _Head], options: DraftOptions, name: str, what: str) -> _Head:
    """What drafts on top of the target, from its directory."""
    directory, target = _directory(options, name, what), options.target
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


def _shape(options: DraftOptions) -> DynamicTree:
    return DynamicTree(topk=options.topk, depth=options.draft_tokens)


def _none(options: DraftOptions) -> Proposer:
    del options
    return PlainProposer()


def _with_head(head: DraftHead, options: DraftOptions) -> Proposer:
    if options.topk == 1:
        return EagleProposer(head, draft_tokens=options.draft_tokens)
    return EagleTreeProposer(head, _shape(options))


def _eagle(options: DraftOptions) -> Proposer:
    return _with_head(_read(load_eagle, options, "eagle", "an EAGLE head"), options)


def _eagle3(options: DraftOptions) -> Proposer:
    return _with_head(_read(load_eagle3, options, "eagle3", "an EAGLE-3 head"), options)


def _mtp(options: DraftOptions) -> Proposer:
    heads = _read(load_mtp, options, "mtp", "heads of multi-token prediction")
    return MtpProposer(heads, draft_tokens=options.draft_tokens, branches=options.topk)


def _draft_model(options: DraftOptions) -> Proposer:
    directory = _directory(options, "draft-model", "a draft model")
    model = load_decoder(
        directory,
        backend=options.backend,
        dtype=options.dtype,
        progress=options.progress,
        ranks=options.target.ranks,
        quantized=options.quantized,
        drafts=True,
    )
    model = of_vocabulary(model, options.target.config.vocab_size, directory=directory, backend=options.backend)
    if options.topk == 1:
        return DraftModelProposer(model, target=options.target, draft_tokens=options.draft_tokens)
    return DraftModelTreeProposer(model, target=options.target, shape=_shape(options))


def _ngram(options: DraftOptions) -> Proposer:
    vocabulary = options.target.config.vocab_size
    return NgramProposer(vocab_size=vocabulary, draft_tokens=options.draft_tokens, branches=options.topk)


def _chain_only(options: DraftOptions, name: str) -> None:
    if options.topk > 1:
        raise ConfigError(f"draft_topk is {options.topk}, but speculate={name!r} drafts chains alone; leave draft_topk out")


def _dflash(options: DraftOptions) -> Proposer:
    _chain_only(options, "dflash")
    head = _read(load_dflash, options, "dflash", "a DFlash head")
    return BlockProposer(head, draft_tokens=options.draft_tokens)


def _peagle(options: DraftOptions) -> Proposer:
    _chain_only(options, "peagle")
    head = _read(load_peagle, options, "peagle", "a P-EAGLE head")
    return PEagleProposer(head, draft_tokens=options.draft_tokens)


def _combined(name: str, options: DraftOptions, known: Mapping[str, Builder]) -> Proposer:
    """Suffix decoding first, then the proposer whose name stands behind the plus sign."""
    other = name.removeprefix(FIRST)
    if other not in known or other in DRAFTLESS:
        behind = ", ".join(sorted(set(known) - DRAFTLESS))
        raise ConfigError(f"speculate is {name!r}; expected one of {behind} behind {FIRST!r}")
    _chain_only(options, name)
    made = known[other](options)
    # It may draft fewer tokens than were asked for, as heads of multi-token prediction do; both draft as many.
    return CombinedProposer(SuffixProposer.of(options.target, made.depth or options.draft_tokens), made)


def _suffix(options: DraftOptions) -> Proposer:
    _chain_only(options, "suffix")
    return SuffixProposer.of(options.target, options.draft_tokens)


_OWN: Mapping[str, Builder] = {
    "none": _none,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "peagle": _peagle,
    "dflash": _dflash,
    "mtp": _mtp,
    "draft-model": _draft_model,
    "ngram": _ngram,
    "suffix": _suffix,
}

BUILDERS: Mapping[str, Builder] = MappingProxyType({name: _OWN[name] for name in OWN_PROPOSERS})
"""Every proposer that comes with Outrider, by the name that ``speculate`` takes."""
