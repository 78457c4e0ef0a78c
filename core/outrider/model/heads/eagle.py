"""The EAGLE head: one decoder layer that predicts the target's next hidden state (Li et al. 2024, EAGLE-1 and -2).

The EAGLE-3 head reads three of the target's hidden states and has its own, smaller output head (Li et al. 2025). The P-EAGLE
head is an EAGLE-3 head trained to draft several tokens in one pass (Hui et al. 2026, arXiv 2602.01469).

Published configs have three formats: flat keys (the paper's authors, vLLM), keys in ``eagle_config`` (SpecForge, SGLang), and
the envelope of the library speculators, whose ``transformer_layer_config`` is the layer's own config.

Letters: T new tokens, N rows of logits, H hidden size of the head, Ht of the target, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Container, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.device import KernelSet, ResidualStream, SeparateInput
from outrider.device.kernels.weights import Weight, linear
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import CheckpointFiles, Piece, Target
from outrider.model.checkpoint.mapping import SINGLE_RANK, layer_targets, table_target
from outrider.model.config.config_fields import MAX_LAYERS, is_whole
from outrider.model.config.model_config import ModelConfig
from outrider.model.heads.draft_head import ENVELOPE, BaseDraftHead, HeadCheckpoint, HeadWeights, head_weights
from outrider.model.heads.draft_output import DraftVocabulary, with_output_head
from outrider.model.layers.cache import KVCache
from outrider.model.layers.decoder import Decoder
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel, side_by_side
from outrider.model.layers.ranks import Shards


class EagleHead(BaseDraftHead):
    """Drafts one token at a time from the target's hidden states. Placement and capture follow :class:`LanguageModel`.

    At position i the head reads the hidden state of position i and the token of position i + 1. Its result predicts the
    hidden state of position i + 1, so its keys and values at position i depend on the following token. ``config`` is the
    head's own, with the target's vocabulary and context.
    """

    reads_hidden = True

    def forward(self, inputs: ForwardInput, hidden: Tensor, cache: KVCache) -> Tensor:
        """Return predicted hidden states [T, H], or [S, H] of the kept rows, without a final norm.

        ``inputs.tokens`` are one position ahead of ``hidden`` [T, H]; ``inputs.positions`` are the positions of ``hidden``.
        ``cache`` is the head's own KV cache.
        """
        cos_sin = self._rotary(inputs.positions, inputs.prompt_lens)
        x = ResidualStream(self.kernels, self._fuse(inputs.tokens, hidden))
        return self._forward_layers(x, inputs, cos_sin, cache).add()

    def _fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the fusion [T, H] of the tokens' embeddings with ``hidden`` [T, H]."""
        fusion, bias, embedding = self.weights.fusion, self.weights.fusion_bias, self.weights.embedding
        assert fusion is not None
        assert embedding is not None
        if self.target.ranks.is_single:
            return self.kernels.fuse_embedding(tokens, embedding, hidden, fusion, bias)
        embedded = self.target.embed_from_table(tokens, embedding)
        return linear(self.kernels, torch.cat((embedded, hidden), dim=-1), fusion, bias)


def fuse(weights: HeadWeights, states: tuple[Tensor, ...], eps: float, kernels: KernelSet) -> Tensor:
    """Fuse three of the target's states, each [T, Ht], into the state [T, H] that the head reads."""
    if weights.state_norms:
        states = tuple(kernels.rms_norm(x, w, eps) for x, w in zip(states, weights.state_norms, strict=True))
    assert weights.fusion is not None  # a head that reads intermediate states fuses them
    joined = side_by_side(states)
    if weights.input_norm is not None:
        joined = kernels.rms_norm(joined, weights.input_norm, eps)
    return linear(kernels, joined, weights.fusion)


class Eagle3Head(BaseDraftHead):
    """Drafts from three intermediate states of the target. Placement and capture follow :class:`LanguageModel`.

    The interface is that of :class:`EagleHead`, but :meth:`condition` fuses the target's states first, and draft logits cover
    the head's own vocabulary. ``aux_hidden_state_layers`` are the target's layers whose inputs the head reads; a head without
    any reads the target's final state. With ``norm_before_residual`` the layer's residual is the normed state. With
    ``norm_output`` the states include the final norm, also as input of the next draft step.

    A P-EAGLE head drafts several tokens in one pass: positions without target states read ``mask_token`` and the
    ``mask_state`` of its weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: HeadWeights,
        target: LanguageModel,
        *,
        aux_hidden_state_layers: tuple[int, ...],
        norm_before_residual: bool = False,
        norm_output: bool = False,
        mask_token: int | None = None,
    ) -> None:
        super().__init__(config, weights, target)
        self.mask_token = mask_token
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self.reads_hidden = not aux_hidden_state_layers
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output

    def condition(self, final: Tensor | None, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Fuse ``aux_hidden_states`` of the target into the state [T, H] that the head reads, or return ``final``."""
        if self.reads_hidden:
            return super().condition(final, aux_hidden_states)
        return fuse(self.weights, aux_hidden_states, self.config.rms_eps, self.kernels)

    def forward(self, inputs: ForwardInput, hidden: Tensor, cache: KVCache) -> Tensor:
        """Return the head's states [T, H], or [S, H] of the kept rows.

        ``hidden`` [T, H] is the result of :meth:`condition`, or of an earlier forward. Tokens, positions and cache follow
        :meth:`EagleHead.forward`.
        """
        weights, kernels, eps = self.weights, self.kernels, self.config.rms_eps
        embedding_norm, hidden_norm = weights.layers[0].attention_norm, weights.hidden_norm
        assert embedding_norm is not None
        assert hidden_norm is not None
        assert weights.embedding is not None
        assert weights.final_norm is not None
        cos_sin = self._rotary(inputs.positions, inputs.prompt_lens)
        embedded = kernels.rms_norm(self.target.embed_from_table(inputs.tokens, weights.embedding), embedding_norm, eps)
        normed = kernels.rms_norm(hidden, hidden_norm, eps)
        rows = normed if self._norm_before_residual else hidden.clone()
        x = ResidualStream(kernels, rows, SeparateInput(torch.cat((embedded, normed), dim=-1)))
        x = self._forward_layers(x, inputs, cos_sin, cache)
        return x.norm(weights.final_norm, eps) if self._norm_output else x.add()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, Vd] of the draft vocabulary for the head's states ``hidden`` [N, H]."""
        norm = self.weights.final_norm
        assert norm is not None
        return super().logits(hidden if self._norm_output else self.kernels.rms_norm(hidden, norm, self.config.rms_eps))


# -- options in the config of an EAGLE-3 head --------------------------------------------------------------------------


_FOUND_KIND = {
    False: "has the tensor 'mask_hidden': it drafts in parallel (P-EAGLE)",
    True: "has no tensor 'mask_hidden': it drafts one token after the other",
}
_MAX_LISTED_LAYERS = 16
_NESTED = "eagle_config"
# Containing object, key, and the offset from each number to the layer whose input is meant: hidden state k is the output of
# k layers. None: the first number decides (_nested_offset).
_LAYER_KEYS = (
    (None, "eagle_aux_hidden_state_layer_ids", 0),
    (None, "aux_hidden_state_layer_ids", 0),
    (None, "target_layer_ids", 1),
    (_NESTED, "eagle_aux_hidden_state_layer_ids", None),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Options:
    """Options of an EAGLE-3 head."""

    layers: tuple[int, ...]
    """The target's layers whose inputs the head reads; the number of layers stands for the output of the last one. Empty if
    the head reads the target's final state instead.
    """
    prefix: str
    """Prefix of the names of the first layer's tensors."""
    norm_before_fc: bool = False
    """True if the three joined states are normed (``input_norm``)."""
    fc_norm: bool = False
    """True if each of the three states is normed."""
    norm_before_residual: bool = False
    """True if the layer's residual is the normed state."""
    norm_output: bool = False
    """True if the input of the next draft step is the state after the final norm."""


def read_eagle3_options(
    file: Path, raw: dict[str, object], depth: int, present: Container[str], *, parallel: bool = False
) -> Eagle3Options:
    """Return the options of ``config.json`` (``raw``) for a target of ``depth`` layers.

    ``present`` holds the names of the head's tensors. ``parallel`` is true if a P-EAGLE head is expected, which drafts
    several tokens in one pass.

    Raises :class:`CheckpointError` for a head of the other kind, a parallel head that reads no intermediate states, values of
    a wrong type, and contradicting keys.
    """
    envelope = ENVELOPE in raw
    kind, wanted = raw.get("speculators_model_type"), "peagle" if parallel else "eagle3"
    if kind not in (None, wanted):
        raise CheckpointError(f"{file}: speculators_model_type is {shown(kind)}, expected {wanted!r}")
    nested = raw.get(_NESTED)
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(f"{file}: {_NESTED} is {shown(nested)}, expected an object")
    if ("mask_hidden" in present) is not parallel:
        raise CheckpointError(
            f"{file}: the head {_FOUND_KIND[parallel]}; expected an EAGLE-3 head that drafts "
            f"{'in parallel' if parallel else 'one token after the other'}; for this one it's speculate "
            f"{'eagle3' if parallel else 'peagle'}"
        )
    reads_final = _flag(file, raw, "use_aux_hidden_state") is False
    if reads_final and parallel:
        raise CheckpointError(
            f"{file}: use_aux_hidden_state is false: the head reads the target's final state alone, which isn't supported "
            "for a head that drafts in parallel; expected a head that reads three inner states"
        )
    before_residual = _flag(file, raw, "norm_before_residual")
    if envelope and before_residual is None and not parallel:  # all readers default to false for parallel heads
        raise CheckpointError(
            f"{file}: norm_before_residual is missing, and readers of {ENVELOPE} take its absence both ways; add what the "
            "head was trained with, true or false"
        )
    before_fc, each = _flag(file, raw, "norm_before_fc"), _flag(file, raw, "fc_norm")
    return Eagle3Options(
        layers=() if reads_final else _layers(file, raw, depth),
        prefix="layers.0" if "layers.0.hidden_norm.weight" in present else "midlayer",
        # Configs older than these keys belong to heads without the tensors; a head with the tensors uses them.
        norm_before_fc="input_norm.weight" in present if before_fc is None else before_fc,
        fc_norm="fc_norm.0.weight" in present if each is None else each,
        norm_before_residual=bool(before_residual),
        norm_output=bool(_flag(file, raw, "norm_output")),
    )


def _flag(file: Path, raw: dict[str, object], key: str) -> bool | None:
    """Return the boolean ``key`` from the top level or from ``eagle_config``, or None if neither has the key. Raises
    :class:`CheckpointError` for another type.
    """
    nested = raw.get(_NESTED)
    values = [part[key] for part in (raw, nested) if isinstance(part, dict) and part.get(key) is not None]
    if not all(isinstance(each, bool) for each in values):
        raise CheckpointError(f"{file}: {key} is {shown(values[0])}, expected true or false")
    if len(set(map(bool, values))) > 1:
        raise CheckpointError(
            f"{file}: {key} is {shown(values[0])}, and {shown(values[1])} in {_NESTED}; expected one of them"
        )
    return bool(values[0]) if values else None


def _layers(file: Path, raw: dict[str, object], depth: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs the head reads, by default the published choice. Raises
    :class:`CheckpointError` for layers that a target of ``depth`` layers lacks.
    """
    found: dict[str, tuple[int, ...]] = {}
    for container, key, offset in _LAYER_KEYS:
        part = raw if container is None else raw.get(container)
        named = part.get(key) if isinstance(part, dict) else None
        if named is None:
            continue
        name = key if container is None else f"{container}.{key}"
        is_short_list = isinstance(named, list) and len(named) <= _MAX_LISTED_LAYERS
        if not is_short_list or not all(is_whole(layer, -_MAX_LISTED_LAYERS, MAX_LAYERS) for layer in named):
            raise CheckpointError(f"{file}: {name} is {shown(named)}, expected three layers of a target of {depth} layers")
        shift = _nested_offset(named) if offset is None else offset
        found[name] = tuple(layer + shift for layer in named)
    if len(set(found.values())) > 1:
        listing = "; ".join(f"{name}: the inputs of layers {list(layers)}" for name, layers in found.items())
        raise CheckpointError(f"{file}: the head's layers are named in more than one way, and differently ({listing})")
    layers = next(iter(found.values()), tuple(sorted({2, depth // 2, depth - 3})))
    if len(layers) != 3 or not all(0 <= layer <= depth for layer in layers):
        name = next(iter(found), "eagle_config.eagle_aux_hidden_state_layer_ids")
        raise CheckpointError(
            f"{file}: the head would read the inputs of layers {list(layers)} of a target of {depth} layers, expected three "
            f"layers; name them in {name}"
        )
    return layers


def _nested_offset(named: list[int]) -> int:
    """Return the offset of layer numbers in ``eagle_config``, which two kinds of producers write.

    Numbers of layers whose output is meant begin with 1 (or -1, the embedding), numbers of layers whose input is meant with
    the published default of 2, or more: sgl-project/sglang#25454.
    """
    return 1 if named[:1] in ([1], [-1]) else 0


# -- weights and heads -------------------------------------------------------------------------------------------------


def eagle_targets(config: ModelConfig, present: Container[str], shards: Shards = SINGLE_RANK) -> list[Target]:
    """Return the targets of an EAGLE head's weights. ``present`` holds the checkpoint's tensor names, for optional tensors.

    Published heads have no ``layers.0.input_layernorm`` and no final norm. They may have ``fc.bias`` and their own copies of
    the embedding and of the output head.
    """
    hidden = config.hidden_size
    targets = [Target("fusion", (Piece("fc.weight", (hidden, 2 * hidden)),))]
    if "fc.bias" in present:
        targets.append(Target("fusion_bias", (Piece("fc.bias", (hidden,)),)))
    if "embed_tokens.weight" in present:
        targets.append(table_target("embedding", "embed_tokens.weight", config.vocab_size, hidden, shards))
    if "lm_head.weight" in present:
        targets.append(table_target("head", "lm_head.weight", config.vocab_size, hidden, shards))
    for index in range(config.num_layers):
        norm = index > 0 or "layers.0.input_layernorm.weight" in present
        targets += layer_targets(config, f"layers.{index}", f"layers.{index}", attention_norm=norm, shards=shards)
    return targets


def eagle3_targets(
    config: ModelConfig,
    target: ModelConfig,
    options: Eagle3Options,
    draft_vocab: int,
    present: Container[str],
    shards: Shards = SINGLE_RANK,
) -> list[Target]:
    """Return the targets of an EAGLE-3 head's weights: the tensors to load and their shapes. ``present`` holds the
    checkpoint's tensor names, for optional tensors.
    """
    hidden, states = config.hidden_size, len(options.layers)
    targets = [
        Target("final_norm", (Piece("norm.weight", (hidden,)),)),
        Target("hidden_norm", (Piece(f"{options.prefix}.hidden_norm.weight", (hidden,)),)),
    ]
    if states:
        targets.append(Target("fusion", (Piece("fc.weight", (hidden, states * target.hidden_size)),)))
    if "lm_head.weight" in present or hidden != target.hidden_size:
        targets.append(table_target("head", "lm_head.weight", draft_vocab, hidden, shards))
    if "embed_tokens.weight" in present or hidden != target.hidden_size:
        targets.append(table_target("embedding", "embed_tokens.weight", config.vocab_size, hidden, shards))
    if options.norm_before_fc:
        targets.append(Target("input_norm", (Piece("input_norm.weight", (states * target.hidden_size,)),)))
    if options.fc_norm:
        targets += [
            Target(f"state_norms.{index}", (Piece(f"fc_norm.{index}.weight", (target.hidden_size,)),))
            for index in range(states)
        ]
    targets += layer_targets(config, options.prefix, "layers.0", attention_width=2 * hidden, shards=shards)
    for index in range(1, config.num_layers):
        targets += layer_targets(config, f"layers.{index}", f"layers.{index}", shards=shards)
    return targets


def load_eagle(checkpoint: HeadCheckpoint) -> EagleHead:
    """Load an EAGLE head in its published format.

    Errors follow :func:`load_decoder`. A head with another hidden size, vocabulary or dtype than the target's
    raises :class:`CheckpointError`.
    """
    config = checkpoint.layer_config("layers.0")
    checkpoint.check_hidden_size(config)
    targets_of = partial(eagle_targets, config, checkpoint.files.tensors)
    checkpoint.check(targets_of)
    with checkpoint.load(config, targets_of) as (local, weights):
        record = head_weights(weights, local.num_layers, embedding=checkpoint.target.embedding)
        return EagleHead(local, record, checkpoint.target)


def load_eagle3(checkpoint: HeadCheckpoint) -> Eagle3Head:
    """Load an EAGLE-3 or EAGLE-3.1 head in its published formats.

    The head reads the target layers that its config lists; the default is the published choice, the inputs of layers 2, n / 2
    and n - 3. :func:`read_eagle3_options` documents the other options. Errors follow :func:`load_eagle`; a
    draft vocabulary with tokens outside the target's also raises :class:`CheckpointError`.
    """
    config, options = _read_eagle3_config(checkpoint, parallel=False)
    with _load_eagle3_weights(checkpoint, config, options) as (local, record, _):
        return Eagle3Head(
            local,
            record,
            checkpoint.target,
            aux_hidden_state_layers=options.layers,
            norm_before_residual=options.norm_before_residual,
            norm_output=options.norm_output,
        )


def load_peagle(checkpoint: HeadCheckpoint) -> Eagle3Head:
    """Load a P-EAGLE head.

    The checkpoint is an EAGLE-3 head with the tensor ``mask_hidden`` ([1, 1, 3 Ht], [1, 3 Ht] or [3 Ht]). The config names
    the mask token as ``mask_token_id``, ``pard_token`` or ``ptd_token_id``. Errors follow :func:`load_eagle3`.
    A mask token that is missing, contradictory or outside the vocabulary raises :class:`CheckpointError`, and so does
    ``parallel_drafting`` false.
    """
    target = checkpoint.target
    config, options = _read_eagle3_config(checkpoint, parallel=True)
    mask = _mask_token(checkpoint, config.vocab_size)
    joined = _mask_target(checkpoint.files, len(options.layers) * target.config.hidden_size)
    with _load_eagle3_weights(checkpoint, config, options, joined) as (local, record, weights):
        states = weights[_MASK_STATE].view(1, -1).chunk(len(options.layers), dim=-1)
        state = fuse(record, tuple(each.contiguous() for each in states), local.rms_eps, target.kernels)
        return Eagle3Head(
            local,
            replace(record, mask_state=state[0]),
            target,
            mask_token=mask,
            aux_hidden_state_layers=options.layers,
            norm_before_residual=options.norm_before_residual,
            norm_output=options.norm_output,
        )


def _read_eagle3_config(checkpoint: HeadCheckpoint, *, parallel: bool) -> tuple[ModelConfig, Eagle3Options]:
    """Return the config of an EAGLE-3 or (``parallel``) P-EAGLE head and its options. Raises :class:`CheckpointError`."""
    file, raw, target = checkpoint.file, checkpoint.raw, checkpoint.target
    options = read_eagle3_options(file, raw, target.config.num_layers, checkpoint.files.tensors, parallel=parallel)
    config = checkpoint.layer_config(options.prefix)
    if target.config.num_layers in options.layers and not target.native:
        raise CheckpointError(
            f"{file}: the head reads the output of the target's last layer, which a target that runs by transformers' own "
            "code doesn't pass on; run the target natively"
        )
    if not options.layers:
        checkpoint.check_hidden_size(config)
    if raw.get("target_hidden_size") is not None:
        checkpoint.check_size("target_hidden_size", raw["target_hidden_size"], target.config.hidden_size)
    return config, options


@contextmanager
def _load_eagle3_weights(
    checkpoint: HeadCheckpoint, config: ModelConfig, options: Eagle3Options, *more: Target
) -> Generator[tuple[ModelConfig, HeadWeights, dict[str, Any]]]:
    """Check and load an EAGLE-3 head, in the scope of the loading stream.

    Yields the rank's config, its weights, and all loaded weights by name, among them those of the targets ``more``.
    """
    target, files = checkpoint.target, checkpoint.files
    draft_vocab = checkpoint.draft_vocab_size(config)

    def targets_of(shards: Shards) -> list[Target]:
        return [*eagle3_targets(config, target.config, options, draft_vocab, files.tensors, shards), *more]

    checkpoint.check(targets_of, optional=("d2t", "t2d"))  # t2d is the inverse mapping of d2t
    ids = checkpoint.target_ids(draft_vocab, config.vocab_size)
    with checkpoint.load(config, targets_of) as (local, weights):
        if ids is not None and "head" not in weights:
            weights["head"], ids = _rows_of_target(checkpoint, ids)
        elif ids is not None:
            ids = ids.to(checkpoint.backend.device)
        record = head_weights(weights, local.num_layers, embedding=target.embedding, target_ids=ids)
        yield local, record, weights


def _rows_of_target(checkpoint: HeadCheckpoint, ids: Tensor) -> tuple[Weight, Tensor | None]:
    """Return the rows of the target's output head from which a head without its own drafts, and the tokens int64 of these
    rows (None: all). ``ids`` are the tokens that the head drafts.
    """
    origin = checkpoint.files.origin
    if not isinstance(checkpoint.target, Decoder):
        raise CheckpointError(
            f"{origin}: has 'd2t' and no 'lm_head.weight', so it drafts with rows of the target's output head, which a "
            "target that runs by transformers' own code doesn't give; run the target natively"
        )
    vocabulary = DraftVocabulary(ids=ids.sort().values, origin=f"'d2t' of {origin}")
    drafting = with_output_head(
        checkpoint.target, backend=checkpoint.backend, format=checkpoint.rounding, vocabulary=vocabulary
    )
    return drafting.weights.head, drafting.output_ids


_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_MASK_STATE = "mask_hidden"


def _mask_target(files: CheckpointFiles, width: int) -> Target:
    """Return the target of the mask state's weight, whichever published shape the file has."""
    shape = files.shape(_MASK_STATE)
    is_published_shape = shape[-1:] == (width,) and math.prod(shape) == width
    return Target(_MASK_STATE, (Piece(_MASK_STATE, shape if is_published_shape else (1, 1, width)),))


def _mask_token(checkpoint: HeadCheckpoint, vocab: int) -> int:
    file, raw = checkpoint.file, checkpoint.raw
    parallel = raw.get("parallel_drafting")
    if parallel not in (None, True):
        raise CheckpointError(f"{file}: parallel_drafting is {shown(parallel)}, expected true: the head has {_MASK_STATE!r}")
    found = {key: raw[key] for key in _MASK_TOKEN_KEYS if raw.get(key) is not None}
    if not found:
        raise CheckpointError(f"{file}: mask_token_id is missing; add the token that stands for unknown ones in training")
    for key, token in found.items():
        if not is_whole(token, 0, vocab - 1):
            raise CheckpointError(f"{file}: {key} is {shown(token)}, expected a token from 0 to {vocab - 1}")
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{key} {token}" for key, token in found.items())
        raise CheckpointError(f"{file}: the mask token is named in more than one way, and differently ({listing})")
    return int(next(iter(found.values())))
