"""Loading a DFlash head in its published format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.device import Backend
from outrider.errors import CheckpointError, shown
from outrider.model.config import ModelConfig
from outrider.model.config_fields import is_whole
from outrider.model.dflash import DFlashHead, DFlashWeights
from outrider.model.files import open_checkpoint
from outrider.model.head_loading import check_hidden_size, head_config
from outrider.model.language_model import LanguageModel
from outrider.model.mapping import SINGLE_RANK, layer_targets, layer_weights
from outrider.model.pieces import Piece, Target
from outrider.model.quantization import QuantizedMode, read_quantization
from outrider.model.reading import read_json
from outrider.model.shards import Shards
from outrider.model.tensor_loading import Progress, check_tensors, load_tensors, loading_stream

_MAX_BLOCK_SIZE = 64


def load_dflash(
    directory: str | Path,
    *,
    target: LanguageModel,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    quantized: QuantizedMode = QuantizedMode.KERNELS,
) -> DFlashHead:
    """Load a DFlash head for ``target``.

    The config is a Qwen3 config with ``block_size`` and ``dflash_config``. The tensors are ``fc``, ``hidden_norm``,
    ``layers.i`` and ``norm``; embedding and output head are the target's. Arguments and errors follow :func:`load_eagle`. A
    :class:`CheckpointError` names each unsupported feature: positions that predict the next token (``sample_from_anchor``),
    sliding-window layers, target layers that don't exist, and tensors of other drafters.
    """
    directory = Path(directory)
    file = directory / "config.json"
    files = open_checkpoint(directory)
    config = head_config(directory, target, dtype, files.tensors, "layers.0")
    raw = read_json(file)
    options = raw.get("dflash_config")
    if not isinstance(options, dict):
        raise CheckpointError(
            f"{file}: dflash_config is {shown(options)}, expected mask_token_id and target_layer_ids; a head of another kind "
            "has another name for speculate"
        )
    check_hidden_size(directory, config, target)
    if not config.qk_norm:
        raise CheckpointError(f"{file}: model_type is {config.family!r}, expected 'qwen3', whose layers norm q and k")
    if any(config.windows):
        raise CheckpointError(
            f"{file}: the head has sliding layers (layer_types), which aren't supported; expected full ones"
        )
    if raw.get("sample_from_anchor", options.get("sample_from_anchor")):
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
        raise CheckpointError(
            f"{file}: dflash_config.mask_token_id is {shown(mask)}, expected a token from 0 to {config.vocab_size - 1}"
        )
    layers = _layers(file, options.get("target_layer_ids"), target.config.num_layers)
    quantization = read_quantization(directory, mode=quantized)
    unsharded_targets = dflash_targets(config, len(layers))
    check_tensors(files, unsharded_targets, optional=set(), quantization=quantization, backend=backend)
    targets = dflash_targets(config, len(layers), target.shards)
    config = target.shards.local(config, str(directory))
    with loading_stream(backend, dtype) as stream:
        weights = load_tensors(
            files, targets, dtype=dtype, backend=backend, stream=stream, progress=progress, quantization=quantization
        )
        return DFlashHead(
            config,
            dflash_weights(config, weights),
            target,
            block_size=block_size,
            mask_token=mask,
            aux_hidden_state_layers=layers,
            causal=bool(raw.get("is_causal", options.get("causal"))),
        )


def _layers(file: Path, found: object, depth: int) -> tuple[int, ...]:
    """Return the target's layers whose input is the output of the layers that the config lists."""
    if not isinstance(found, list) or not found or not all(is_whole(each, -1, depth - 2) for each in found):
        raise CheckpointError(
            f"{file}: dflash_config.target_layer_ids is {shown(found)}, expected layers of the target whose output another "
            f"layer reads: from -1 (its embedding) to {depth - 2}, of {depth}"
        )
    return tuple(each + 1 for each in found)


def dflash_targets(config: ModelConfig, num_captured: int, shards: Shards = SINGLE_RANK) -> list[Target]:
    """Return the weights of a head that reads the outputs of ``num_captured`` target layers."""
    hidden = config.hidden_size
    targets = [
        Target("fusion", (Piece("fc.weight", (hidden, num_captured * hidden)),)),
        Target("hidden_norm", (Piece("hidden_norm.weight", (hidden,)),)),
        Target("norm", (Piece("norm.weight", (hidden,)),)),
    ]
    for index in range(config.num_layers):
        targets += layer_targets(config, f"layers.{index}", f"layers.{index}", shards=shards)
    return targets


def dflash_weights(config: ModelConfig, weights: Mapping[str, Any]) -> DFlashWeights:
    """Return the head's weights from the loaded tensors."""
    return DFlashWeights(
        fusion=weights["fusion"],
        hidden_norm=weights["hidden_norm"],
        norm=weights["norm"],
        layers=tuple(layer_weights(weights, f"layers.{index}") for index in range(config.num_layers)),
    )
