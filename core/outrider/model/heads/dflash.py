"""DFlash: a head that drafts a whole block in one pass. Every position of the block attends to the block and the text before
it.

Letters: T tokens of text, N new tokens, H hidden size, A number of captured target layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.device import HeadNorms, ResidualStream, RotaryArgs
from outrider.device.kernels.weights import linear
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import Piece, Target
from outrider.model.checkpoint.mapping import SINGLE_RANK, layer_targets, table_target
from outrider.model.config.config_fields import is_whole
from outrider.model.config.model_config import ModelConfig
from outrider.model.heads.draft_head import ENVELOPE, BaseDraftHead, HeadCheckpoint, HeadWeights, head_weights
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel, side_by_side
from outrider.model.layers.layer_weights import LayerWeights
from outrider.model.layers.ranks import Shards


class DFlashHead(BaseDraftHead):
    """Draft head that predicts a block of tokens from the target's intermediate hidden states.

    Placement and capture follow the rules of :class:`LanguageModel`. :meth:`write_text_cache` computes the keys and values of
    the text from the target's states alone, without running the layers. Keys and values of a block are valid for that block
    only.

    ``block_size`` counts the positions of a block, the last known token's included. The other positions hold ``mask_token``.
    In ``causal`` layers, one value for all or one for each, a position attends only to earlier positions of the block.
    ``aux_hidden_state_layers`` are the target's layers whose inputs the head reads. The head's layers norm q and k.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: HeadWeights,
        target: LanguageModel,
        *,
        block_size: int,
        mask_token: int,
        aux_hidden_state_layers: tuple[int, ...],
        causal: bool | tuple[bool, ...] = False,
    ) -> None:
        super().__init__(config, weights, target)
        self.block_size = block_size
        self.mask_token = mask_token
        self._causal = (causal,) * config.num_layers if isinstance(causal, bool) else causal
        self.aux_hidden_state_layers = aux_hidden_state_layers

    def write_text_cache(
        self,
        aux_hidden_states: tuple[Tensor, ...],
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        prompt_lens: Tensor | None = None,
    ) -> None:
        """Write keys and values of T tokens of text to ``slots`` int64 [T] of each layer's cache.

        ``aux_hidden_states`` are the target's states [T, H]. ``positions`` are int64 [T] or [3, T].
        """
        config, kernels, fusion, hidden_norm = self.config, self.kernels, self.weights.fusion, self.weights.hidden_norm
        assert fusion is not None
        assert hidden_norm is not None
        text = kernels.rms_norm(linear(kernels, side_by_side(aux_hidden_states), fusion), hidden_norm, config.rms_eps)
        cos_sin = self._rotary(positions, prompt_lens)
        for weights, pages in zip(self.weights.layers, cache.layers, strict=True):
            assert weights.k_norm is not None  # every DFlash layer has one
            norms = HeadNorms(weights.k_norm, weights.k_norm, config.rms_eps)
            keys_values = self._keys_values(text, weights)
            kernels.head_norm_rope_write_cache(keys_values, norms, RotaryArgs(*cos_sin, *pages, slots))

    def forward(self, inputs: ForwardInput, cache: KVCache) -> Tensor:
        """Return the block's hidden states [N, H] after the final norm.

        ``inputs.slots`` follow the slots of the text, whose keys and values :meth:`write_text_cache` has written.
        ``inputs.attention`` holds a mask by which a block sees itself (:class:`~outrider.device.AttentionMetadata`).
        """
        cos_sin = self._rotary(inputs.positions, inputs.prompt_lens)
        table = self.weights.embedding
        embedded = self.target.embed(inputs.tokens) if table is None else self.target.embed_from_table(inputs.tokens, table)
        causal_inputs = replace(inputs, attention=replace(inputs.attention, tree_mask=None))
        x = ResidualStream(self.kernels, embedded)
        self.target.begin_pass(inputs)
        for index, (layer, pages) in enumerate(zip(self._layers, cache.layers, strict=True)):
            seen = causal_inputs if self._causal[index] else inputs
            x = layer.forward(x, seen, cos_sin, pages)
            if index == 0:  # write_text_cache wrote the text's keys and values before the first layer
                inputs, causal_inputs = inputs.after_first_layer(), causal_inputs.after_first_layer()
        assert self.weights.final_norm is not None  # every DFlash head has one
        return x.norm(self.weights.final_norm, self.config.rms_eps)

    def _keys_values(self, text: Tensor, weights: LayerWeights) -> Tensor:
        """Return keys and values side by side, [T, 2 Hkv D].

        An unquantized weight is sliced. A quantized weight multiplies the query rows too, and their result is dropped.
        """
        queries = self.config.num_heads * self.config.head_size
        bias = weights.qkv_bias
        if isinstance(weights.qkv, Tensor):
            key_value_bias = None if bias is None else bias[queries:]
            return linear(self.kernels, text, weights.qkv[queries:], key_value_bias)
        return linear(self.kernels, text, weights.qkv, bias)[:, queries:].contiguous()


_MAX_BLOCK_SIZE = 64
_AUX_LAYERS, _TARGET_LAYERS = ("aux_hidden_state_layer_ids", 0), ("target_layer_ids", 1)
"""For each published key of the captured layers: the key, and the number to add to its values to get the layers whose inputs
the head reads.
"""


def load_dflash(checkpoint: HeadCheckpoint) -> DFlashHead:
    """Load a DFlash head.

    The config is a Qwen3 config with ``block_size`` and ``dflash_config``, or the envelope of the library speculators. The
    tensors are ``fc``, ``hidden_norm``, ``layers.i`` and ``norm``; embedding and output head are the target's unless the head
    has ``embed_tokens`` or ``lm_head``, the latter over a draft vocabulary with ``d2t``. Errors follow
    :func:`load_eagle`. A :class:`CheckpointError` names each unsupported feature: positions that predict the next token
    (``sample_from_anchor``), target layers that don't exist, and tensors of other drafters. Raises :class:`CheckpointError`
    for a config of another kind of head.
    """
    config = checkpoint.layer_config("layers.0")
    checkpoint.check_hidden_size(config)
    options = _read_options(checkpoint, config)
    num_captured = len(options["aux_hidden_state_layers"])
    draft_vocab, present = checkpoint.draft_vocab_size(config), checkpoint.files.tensors
    targets_of = partial(dflash_targets, config, num_captured, draft_vocab=draft_vocab, present=present)

    checkpoint.check(targets_of, optional=("d2t", "t2d"))  # t2d is the inverse mapping of d2t
    ids = checkpoint.target_ids(draft_vocab, config.vocab_size)
    with checkpoint.load(config, targets_of) as (local, weights):
        ids = None if ids is None else ids.to(checkpoint.backend.device)
        return DFlashHead(local, head_weights(weights, local.num_layers, target_ids=ids), checkpoint.target, **options)


def _read_options(checkpoint: HeadCheckpoint, config: ModelConfig) -> dict[str, Any]:
    """Return the options of a head with ``config``: keyword arguments of :class:`DFlashHead`. Raises
    :class:`CheckpointError`.
    """
    file, raw, is_envelope = checkpoint.file, checkpoint.raw, checkpoint.is_envelope
    options = raw if is_envelope else raw.get("dflash_config")
    if not isinstance(options, dict):
        raise CheckpointError(
            f"{file}: dflash_config is {shown(options)}, expected mask_token_id and target_layer_ids; a head of another kind "
            "has another name for speculate"
        )
    if not config.qk_norm:
        raise CheckpointError(f"{file}: model_type is {config.family!r}, expected 'qwen3', whose layers norm q and k")
    anchored = raw.get("sample_from_anchor", options.get("sample_from_anchor"))
    if is_envelope and anchored is None:
        raise CheckpointError(
            f"{file}: sample_from_anchor is missing, and readers of {ENVELOPE} take its absence both ways; add what the head "
            "was trained with, true or false"
        )
    if anchored:
        raise CheckpointError(
            f"{file}: sample_from_anchor is true: each position predicts the token after its own, which isn't supported; "
            "expected positions that predict their own token"
        )
    block_size = raw.get("block_size", options.get("block_size"))
    if not is_whole(block_size, 2, _MAX_BLOCK_SIZE):
        raise CheckpointError(
            f"{file}: block_size is {shown(block_size)}, expected a whole number from 2 to {_MAX_BLOCK_SIZE}"
        )
    mask = options.get("mask_token_id")
    if not is_whole(mask, 0, config.vocab_size - 1):
        raise CheckpointError(f"{file}: mask_token_id is {shown(mask)}, expected a token from 0 to {config.vocab_size - 1}")
    named = _AUX_LAYERS if is_envelope else _TARGET_LAYERS
    return {
        "block_size": block_size,
        "mask_token": mask,
        "aux_hidden_state_layers": _layers(file, options, named, checkpoint.target.config.num_layers),
        "causal": _causal(raw, options, config),
    }


def _causal(raw: Mapping[str, Any], options: Mapping[str, Any], config: ModelConfig) -> tuple[bool, ...]:
    """Return for each layer whether a position attends only to earlier positions of its block. Without a setting, sliding
    layers do.
    """
    said = raw.get("is_causal", options.get("causal"))
    if said is None and raw.get("sliding_window_non_causal"):
        said = False
    return tuple(window > 0 if said is None else bool(said) for window in config.windows)


def _layers(file: Path, options: Mapping[str, Any], named: tuple[str, int], depth: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs the head reads. Raises :class:`CheckpointError` unless ``options`` lists layers
    of a target with ``depth`` layers.
    """
    key, offset = named
    found = options.get(key)
    if not isinstance(found, list) or not found or not all(is_whole(each, -offset, depth - 1 - offset) for each in found):
        raise CheckpointError(
            f"{file}: {key} is {shown(found)}, expected layers of the target with another one after it: from "
            f"{-offset} to {depth - 1 - offset}"
        )
    return tuple(each + offset for each in found)


def dflash_targets(
    config: ModelConfig,
    num_captured: int,
    shards: Shards = SINGLE_RANK,
    *,
    draft_vocab: int | None = None,
    present: Container[str] = (),
) -> list[Target]:
    """Return the weights of a head that reads the outputs of ``num_captured`` target layers.

    ``draft_vocab`` is the number of tokens that it drafts, by default the vocabulary. ``present`` holds the checkpoint's
    tensor names, for optional tensors.
    """
    hidden = config.hidden_size
    targets = [
        Target("fusion", (Piece("fc.weight", (hidden, num_captured * hidden)),)),
        Target("hidden_norm", (Piece("hidden_norm.weight", (hidden,)),)),
        Target("final_norm", (Piece("norm.weight", (hidden,)),)),
    ]
    if "embed_tokens.weight" in present:
        targets.append(table_target("embedding", "embed_tokens.weight", config.vocab_size, hidden, shards))
    if "lm_head.weight" in present or draft_vocab not in (None, config.vocab_size):
        targets.append(table_target("head", "lm_head.weight", draft_vocab or config.vocab_size, hidden, shards))
    for index in range(config.num_layers):
        targets += layer_targets(config, f"layers.{index}", f"layers.{index}", shards=shards)
    return targets
