"""Multi-token prediction heads: one head for each position ahead (Gloeckle et al. 2024; DeepSeek-V3, section 2.2).

:func:`load_mtp` reads the format of MiMo (Xiaomi 2025). ``model.mtp_layers.<k>`` holds a norm of the embedding, a norm of the
hidden state, a projection of both side by side, one decoder layer and a final norm.

Letters: T new tokens, N rows of logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.device import ResidualStream
from outrider.device.kernels.weights import linear
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import Piece, Target
from outrider.model.checkpoint.mapping import (
    SINGLE_RANK,
    expert_targets,
    has_router,
    is_model,
    layer_targets,
    mtp_depth,
    mtp_layer,
    mtp_tensors,
    offset_norms,
)
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.config_fields import MAX_LAYERS, is_whole
from outrider.model.config.layer_configs import HYBRID_FAMILIES
from outrider.model.config.model_config import ExpertsConfig, ModelConfig
from outrider.model.heads.draft_head import BaseDraftHead, HeadCheckpoint, HeadWeights, head_weights
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel
from outrider.model.layers.ranks import Shards
from outrider.model.quantization.cache import scale_keys


class MtpHead(BaseDraftHead):
    """Head number ``ahead``, from 1. Placement and capture follow :class:`LanguageModel`.

    At position i it reads the token at i + ``ahead`` and a hidden state of position i: the target's for the first head, else
    the preceding head's result. Its own result at i predicts the token at i + ``ahead`` + 1. ``embedding_first``: the
    projection reads the embedding before the hidden state.
    """

    reads_hidden = True

    def __init__(
        self,
        config: ModelConfig,
        weights: HeadWeights,
        target: LanguageModel,
        *,
        ahead: int,
        embedding_first: bool = False,
    ) -> None:
        super().__init__(config, weights, target)
        self.ahead = ahead
        self._embedding_first = embedding_first

    def forward(self, inputs: ForwardInput, hidden: Tensor, cache: KVCache) -> Tensor:
        """Return hidden states [T, H] after the head's final norm, or [S, H] of the kept rows. ``cache`` has one layer."""
        weights, kernels, eps = self.weights, self.kernels, self.config.rms_eps
        assert weights.token_norm is not None
        assert weights.hidden_norm is not None
        assert weights.fusion is not None
        assert weights.final_norm is not None
        cos_sin = self._rotary(inputs.positions, inputs.prompt_lens)
        embedded = kernels.rms_norm(self.target.embed_inputs(inputs), weights.token_norm, eps)
        states = kernels.rms_norm(hidden, weights.hidden_norm, eps)
        joined = (embedded, states) if self._embedding_first else (states, embedded)
        x = ResidualStream(kernels, linear(kernels, torch.cat(joined, dim=-1), weights.fusion))
        return self._forward_layers(x, inputs, cos_sin, cache).norm(weights.final_norm, eps)


def mtp_targets(config: ModelConfig, heads: int, shards: Shards = SINGLE_RANK) -> list[Target]:
    """Return the targets of all ``heads`` multi-token prediction heads, in the format of MiMo."""
    hidden = config.hidden_size
    targets: list[Target] = []
    for index in range(heads):
        prefix, name = f"model.mtp_layers.{index}", f"heads.{index}"
        targets += [
            Target(f"{name}.token_norm", (Piece(f"{prefix}.token_layernorm.weight", (hidden,)),)),
            Target(f"{name}.hidden_norm", (Piece(f"{prefix}.hidden_layernorm.weight", (hidden,)),)),
            Target(f"{name}.fusion", (Piece(f"{prefix}.input_proj.weight", (hidden, 2 * hidden)),)),
            Target(f"{name}.final_norm", (Piece(f"{prefix}.final_layernorm.weight", (hidden,)),)),
        ]
        targets += layer_targets(config, prefix, f"{name}.layers.0", shards=shards)
    return targets


def mtp_weights(loaded: Mapping[str, Any], name: str, experts: ExpertsConfig | None = None) -> HeadWeights:
    """Return the weights of the head ``name`` from the loaded tensors. ``experts`` is the config of a mixture."""
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in loaded.items() if key.startswith(prefix)}
    return head_weights(own, 1, experts=experts)


def load_mtp(checkpoint: HeadCheckpoint) -> tuple[MtpHead, ...]:
    """Load the ``num_nextn_predict_layers`` multi-token prediction heads of a checkpoint.

    The checkpoint holds the heads alone, or the model and the heads; the model's tensors are then ignored. Errors follow
    :func:`load_eagle`. Raises :class:`CheckpointError` if the config names no valid number of heads.
    """
    checkpoint, ignored = _open(checkpoint)
    heads = checkpoint.raw.get("num_nextn_predict_layers")
    if not is_whole(heads, 1, MAX_LAYERS):
        raise CheckpointError(
            f"{checkpoint.file}: num_nextn_predict_layers is {shown(heads)}, expected the number of heads, at least 1 and at "
            f"most {MAX_LAYERS}"
        )
    config = checkpoint.layer_config("model.mtp_layers.0")
    checkpoint.check_hidden_size(config)
    config = replace(config, num_layers=1, windows=config.windows[:1])
    targets_of = partial(mtp_targets, config, heads)
    checkpoint.check(targets_of, optional=ignored)
    with checkpoint.load(config, targets_of) as (local, weights):
        return tuple(
            MtpHead(local, mtp_weights(weights, f"heads.{index}"), checkpoint.target, ahead=index + 1)
            for index in range(heads)
        )


def _open(checkpoint: HeadCheckpoint) -> tuple[HeadCheckpoint, set[str]]:
    """Return ``checkpoint`` for the loading of its heads, and the names of the model's tensors, which are ignored."""
    present, quantization = checkpoint.files.tensors, checkpoint.quantization
    if not is_model(present):
        return checkpoint, set()
    if quantization is not None:  # heads of a quantized model may be unquantized
        checkpoint = replace(checkpoint, quantization=replace(quantization, weights=False))
    return checkpoint, present.keys() - mtp_tensors(present)


HEAD_NAME = "heads.0"
"""Prefix of the head's weights."""


class ChainedNames(NamedTuple):
    """The names of a chained head's tensors: the prefix of its layer, two norms of inputs, a projection, the last norm."""

    layer: str = "mtp.layers.0"
    token_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    fusion: str = "mtp.fc"
    final_norm: str = "mtp.norm"

    @classmethod
    def of_layer(cls, layer: str, present: Container[str]) -> ChainedNames:
        """Return the names in a head that is stored as one more ``layer`` of the model. ``present`` holds the checkpoint's
        tensor names, since the last norm has either of two.
        """
        last = "final_layernorm" if f"{layer}.final_layernorm.weight" in present else "shared_head.norm"
        return cls(layer, *(f"{layer}.{part}" for part in ("enorm", "hnorm", "eh_proj", last)))


_OF_MTP = ChainedNames()


def load_chained_mtp(checkpoint: HeadCheckpoint) -> MtpHead:
    """Load the one head, in a format that chains it (tensors ``mtp.*``, or one more layer). Its result is its own next input,
    so it drafts any number of tokens.

    Embedding and output head are the target's. What the checkpoint holds, and errors, follow :func:`load_mtp`.
    """
    checkpoint, ignored = _open(checkpoint)
    layer = mtp_layer(checkpoint.files.tensors)
    names = _OF_MTP if layer is None else ChainedNames.of_layer(layer, checkpoint.files.tensors)
    config = _chained_config(checkpoint, names)
    targets_of = partial(chained_mtp_targets, config, checkpoint.files.tensors, names=names)
    ignored |= scale_keys(checkpoint.files, [names.layer])  # the head's cache has the model's dtype
    copies = "embed_tokens", "shared_head.head", "shared_head"  # of the model's
    ignored |= {f"{names.layer}.{part}.weight" for part in copies}
    checkpoint.check(targets_of, optional=ignored)
    with checkpoint.load(config, targets_of) as (local, weights):
        record = mtp_weights(weights, HEAD_NAME, local.experts)
        return MtpHead(local, record, checkpoint.target, ahead=1, embedding_first=True)


def _chained_config(checkpoint: HeadCheckpoint, names: ChainedNames) -> ModelConfig:
    """Return the config of the head's one layer, which is a mixture of experts if the checkpoint has a router.

    Raises :class:`CheckpointError` for a head that isn't supported.
    """
    config = read_model_config(checkpoint.directory, drafts=True)
    text = checkpoint.raw.get("text_config")
    fields: dict[str, Any] = checkpoint.raw | (text if isinstance(text, dict) else {})
    depth = mtp_depth(checkpoint.raw)
    problem = None
    if names == _OF_MTP and config.family not in HYBRID_FAMILIES:
        problem = f"model_type is {shown(config.family)}, and a head with tensors mtp.* belongs to a hybrid model"
    elif names.layer not in (_OF_MTP.layer, f"model.layers.{config.num_layers}"):
        problem = f"the head is {names.layer}, expected model.layers.{config.num_layers}, after the model's own layers"
    elif depth != 1:
        problem = f"the head has {shown(depth)} layers, expected 1, which drafts every token of a chain"
    elif fields.get("mtp_use_dedicated_embeddings", False) is not False:
        problem = "mtp_use_dedicated_embeddings is true, expected false: the head reads the model's embedding"
    if problem is not None:
        raise CheckpointError(f"{checkpoint.file}: {problem}")
    checkpoint.check_vocabulary_and_dtype(config)
    checkpoint.check_hidden_size(config)
    experts = config.experts if has_router(config, names.layer, checkpoint.files.tensors) else None
    if experts is not None:
        experts = replace(experts, dense_layers=())
    return chained_head_config(replace(config, experts=experts))


def chained_head_config(config: ModelConfig) -> ModelConfig:
    """Return the config of a chained head's one layer, for a model with ``config``."""
    return replace(config, num_layers=1, windows=(0,), recurrent=None)


def chained_mtp_targets(
    config: ModelConfig, present: Container[str], shards: Shards, *, names: ChainedNames = _OF_MTP
) -> list[Target]:
    """Return the targets of a chained head's weights. ``present`` holds the checkpoint's tensor names, for optional
    tensors.
    """
    hidden, mixture = config.hidden_size, config.experts is not None
    targets = [
        Target(f"{HEAD_NAME}.token_norm", (Piece(f"{names.token_norm}.weight", (hidden,)),)),
        Target(f"{HEAD_NAME}.hidden_norm", (Piece(f"{names.hidden_norm}.weight", (hidden,)),)),
        Target(f"{HEAD_NAME}.fusion", (Piece(f"{names.fusion}.weight", (hidden, 2 * hidden)),)),
        Target(f"{HEAD_NAME}.final_norm", (Piece(f"{names.final_norm}.weight", (hidden,)),)),
        *layer_targets(config, names.layer, f"{HEAD_NAME}.layers.0", mlp=not mixture, shards=shards),
    ]
    if mixture:
        targets += expert_targets(config, names.layer, f"{HEAD_NAME}.layers.0", present, shards)
    return list(offset_norms(config, targets))
