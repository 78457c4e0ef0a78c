"""Vision towers of Qwen2-VL to Qwen3.5: transformers' modules, loaded with Outrider's strict checks.

The tower runs once per image, before the prefill of its prompt. Its features replace the embeddings of the placeholder tokens
(:class:`ForwardInput`). Letters: F features, W their width (:attr:`ModelConfig.feature_size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.device import Backend, ConfigError
from outrider.errors import CheckpointError
from outrider.model.checkpoint.files import Piece, Target
from outrider.model.checkpoint.loading import Progress, check_tensors, load_tensors, loading_stream
from outrider.model.checkpoint.mapping import vision_name
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.checkpoint.reading import read_json, wrap_read_errors
from outrider.model.config.checkpoint_config import hf_config, read_model_config
from outrider.model.config.model_config import ModelConfig
from outrider.model.media.mrope import MediaGrid
from outrider.model.media.preprocessing import Media
from outrider.model.quantization import read_quantization


class VisionTower:
    """The vision tower of a model: it computes features in the decoder's hidden space from the pixels of images
    and videos.
    """

    def __init__(self, module: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self._module = module
        self._device = device
        self._dtype = dtype

    def encode(self, media: Sequence[Media]) -> list[Tensor]:
        """Return the features [F, W] of each of ``media``, in order, on the device and in the model's dtype.

        Enqueues on the stream whose scope the caller opened. The host blocks, because pixels are copied from pageable memory
        and transformers reads the grids back. Call it during prefill, never in the decode loop.
        """
        if not media:
            return []
        pixels = torch.cat([each.pixels for each in media]).to(self._device, self._dtype)
        extents = [[each.grid.frames, each.grid.rows, each.grid.columns] for each in media]
        with torch.no_grad():
            out = self._module(pixels, grid_thw=torch.tensor(extents, device=self._device))
        features = torch.cat((out.pooler_output, *getattr(out, "deepstack_features", ())), dim=-1)
        merged = self._module.spatial_merge_size**2
        return list(features.split([each.grid.patches // merged for each in media]))


def has_vision_tower(directory: str | Path) -> bool:
    """Return True if the checkpoint in ``directory`` has a tensor of a vision tower."""
    return any(vision_name(key) is not None for key in open_checkpoint(Path(directory)).tensors)


def load_vision(
    directory: str | Path, *, backend: Backend, dtype: torch.dtype, progress: Progress | None = None
) -> VisionTower:
    """Load the vision tower of a vision-language checkpoint, with the checks of :func:`load_decoder`.

    Quantized weights are dequantized. Raises :class:`CheckpointError` also for a checkpoint without a vision tower.
    """
    directory = Path(directory)
    config = read_model_config(directory)
    if config.vision is None:
        raise CheckpointError(f"{directory}: a {config.family} checkpoint has no vision tower")
    files = open_checkpoint(directory)
    path = directory / "config.json"
    with wrap_read_errors(path, "the config of a vision tower"):
        vision = hf_config(config.family, read_json(path)).vision_config
        if vision.depth > len(files.tensors):
            raise ConfigError(f"vision_config.depth is {vision.depth}, but there are {len(files.tensors)} tensors in all")
        with torch.device("meta"):  # only the shapes, without memory
            shapes = {name: tuple(tensor.shape) for name, tensor in _build(config.family, vision).state_dict().items()}
    names = {inner: key for key in files.tensors if (inner := vision_name(key)) is not None}
    targets = [Target(name, (Piece(names.get(name, f"visual.{name}"), shape),)) for name, shape in shapes.items()]
    quantization = read_quantization(directory, mode="dequantize")
    optional = {key for key in files.tensors if vision_name(key) is None}
    check_tensors(files, targets, optional=optional, quantization=quantization)
    with loading_stream(backend, dtype) as stream:
        weights = load_tensors(
            files, targets, dtype=dtype, backend=backend, stream=stream, progress=progress, quantization=quantization
        )
        module = _build(config.family, vision)
        module.load_state_dict(weights, assign=True)
        module.to(backend.device)  # moves computed buffers: rotary frequencies, in their own dtype
        tower = VisionTower(module.eval().requires_grad_(False), device=backend.device, dtype=dtype)
        with wrap_read_errors(path, "the config of a vision tower"):
            _check_smallest_image(tower, vision, config)
    return tower


def _check_smallest_image(tower: VisionTower, vision: Any, config: ModelConfig) -> None:
    """Run the smallest image through the tower, so that inconsistent sizes fail at load time and not at a request."""
    assert config.vision is not None
    side = config.vision.merge
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = MediaGrid(kind="image", frames=1, rows=side, columns=side)
    (features,) = tower.encode([Media(grid, torch.zeros(side * side, values), b"")])
    if tuple(features.shape) != (1, config.feature_size):
        raise ConfigError(
            f"the vision tower gives features {list(features.shape)}, the decoder takes [1, {config.feature_size}]"
        )


def _build(family: str, vision: Any) -> Any:
    if family == "qwen2_vl":  # the only tower that AutoModel doesn't know
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        return Qwen2VisionTransformerPretrainedModel(vision)
    from transformers import AutoModel

    return AutoModel.from_config(vision)
