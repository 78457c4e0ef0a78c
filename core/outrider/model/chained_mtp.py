"""Loading of a head of multi-token prediction that drafts a chain by itself, as Qwen3-Next and Qwen3.5 publish it.

The head is one layer with gated attention, in the model's own checkpoint (``mtp.*``). It reads the state of a position and
the token after it. Each further draft token reads the head's own result, so the head drafts like an EAGLE head.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.device import Backend
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint_config import read_model_config
from outrider.model.config import ModelConfig
from outrider.model.expert_mapping import expert_targets
from outrider.model.files import open_checkpoint
from outrider.model.head_loading import check_hidden_size, check_vocabulary_and_dtype
from outrider.model.hybrid_configs import HYBRID_FAMILIES
from outrider.model.hybrid_mapping import offset_norms
from outrider.model.language_model import LanguageModel
from outrider.model.mapping import layer_targets
from outrider.model.mtp import MtpHead, load_mtp_tensors, mtp_weights
from outrider.model.pieces import Piece, Target
from outrider.model.quantization import QuantizedMode
from outrider.model.reading import read_json
from outrider.model.shards import Shards
from outrider.model.tensor_loading import Progress

_LAYER, HEAD_NAME = "mtp.layers.0", "heads.0"
"""Prefixes of the layer's tensors in the checkpoint, and of the head's weights."""
_DEPTH_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def load_chained_mtp(
    directory: str | Path,
    *,
    target: LanguageModel,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    quantized: QuantizedMode = QuantizedMode.KERNELS,
) -> MtpHead:
    """Load the head of a checkpoint for ``target``. Arguments and errors follow :func:`load_eagle`.

    :func:`load_mtp_tensors` says what the checkpoint holds. Embedding and output head are the target's.
    """
    directory = Path(directory)
    files = open_checkpoint(directory)
    config = _head_config(directory, target, dtype, files.tensors)
    local = target.shards.local(config, str(directory))
    with load_mtp_tensors(
        files,
        directory,
        partial(chained_mtp_targets, config, files.tensors),
        shards=target.shards,
        backend=backend,
        dtype=dtype,
        progress=progress,
        quantized=quantized,
    ) as weights:
        record = mtp_weights(weights, HEAD_NAME, config.experts)
        return MtpHead(local, record, target, ahead=1, embedding_first=True)


def _head_config(directory: Path, target: LanguageModel, dtype: torch.dtype, present: Container[str]) -> ModelConfig:
    """Return the config of the head's one layer, which is a mixture of experts if the checkpoint has a router.

    Raises :class:`CheckpointError` for a head that isn't supported.
    """
    raw = read_json(directory / "config.json")
    config = read_model_config(directory, drafts=True)
    text = raw.get("text_config")
    fields: dict[str, Any] = raw | (text if isinstance(text, dict) else {})
    depth = next((fields[key] for key in _DEPTH_KEYS if fields.get(key) is not None), 1)
    problem = None
    if config.family not in HYBRID_FAMILIES:
        problem = f"model_type is {shown(config.family)}, and a head with tensors mtp.* belongs to a hybrid model"
    elif depth != 1:
        problem = f"the head has {shown(depth)} layers, expected 1, which drafts every token of a chain"
    elif fields.get("mtp_use_dedicated_embeddings", False) is not False:
        problem = "mtp_use_dedicated_embeddings is true, expected false: the head reads the model's embedding"
    if problem is not None:
        raise CheckpointError(f"{directory / 'config.json'}: {problem}")
    check_vocabulary_and_dtype(directory, config, target, dtype)
    check_hidden_size(directory, config, target)
    experts = config.experts if f"{_LAYER}.mlp.gate.weight" in present else None
    if experts is not None:
        experts = replace(experts, dense_layers=())
    return chained_head_config(replace(config, experts=experts))


def chained_head_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the one layer of a head for a model with ``config``."""
    return replace(config, num_layers=1, windows=(0,), recurrent=None)


def chained_mtp_targets(config: ModelConfig, present: Container[str], shards: Shards) -> list[Target]:
    """Return the weights of the head."""
    hidden, mixture = config.hidden_size, config.experts is not None
    targets = [
        Target(f"{HEAD_NAME}.token_norm", (Piece("mtp.pre_fc_norm_embedding.weight", (hidden,)),)),
        Target(f"{HEAD_NAME}.hidden_norm", (Piece("mtp.pre_fc_norm_hidden.weight", (hidden,)),)),
        Target(f"{HEAD_NAME}.projection", (Piece("mtp.fc.weight", (hidden, 2 * hidden)),)),
        Target(f"{HEAD_NAME}.final_norm", (Piece("mtp.norm.weight", (hidden,)),)),
        *layer_targets(config, _LAYER, f"{HEAD_NAME}.layer", mlp=not mixture, shards=shards),
    ]
    if mixture:
        targets += expert_targets(config, _LAYER, f"{HEAD_NAME}.layer", present, shards)
    return list(offset_norms(config, targets))
