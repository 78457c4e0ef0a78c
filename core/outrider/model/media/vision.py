"""Images and videos: their preprocessing, their placeholder tokens in a prompt, and the vision towers of Qwen2-VL to Qwen3.5.

Transformers' image processor resizes, normalizes and splits pixels into patches. The Pillow variant is used, whose results
don't depend on other installed packages. Frames of a video are processed as images, and ``temporal_patch_size`` of them are
combined into one temporal patch.

The towers are transformers' modules, loaded with Outrider's strict checks. A tower runs once per image, before the prefill of
its prompt. Its features replace the embeddings of the placeholder tokens (:class:`ForwardInput`). Letters: F features, W
their width (:attr:`ModelConfig.feature_size`).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from outrider.device import Backend, ConfigError
from outrider.errors import CheckpointError, RequestError, one_line, shown
from outrider.model.checkpoint.files import Piece, Target, present, read_json, wrap_read_errors
from outrider.model.checkpoint.loading import Progress, check_tensors, load_tensors, loading_stream
from outrider.model.checkpoint.mapping import vision_name
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.config.checkpoint_config import has_alternating_axes, hf_config, read_model_config
from outrider.model.config.config_fields import FLAG, Field, check_fields, list_of, number, record, whole_number
from outrider.model.config.model_config import ModelConfig, VisionConfig
from outrider.model.media.mrope import MediaGrid
from outrider.model.media.tokenizer import Tokenizer, has_tokenizer
from outrider.model.quantization import read_quantization

_MIN_PIXELS, _MAX_PIXELS = whole_number(1, 1 << 22), whole_number(1, 1 << 26)
_UP_TO_64 = whole_number(1, 64)
_COLOURS = list_of(number(-100, 100), 3)
_SIZE: Mapping[str, Field] = MappingProxyType(
    # The first two keys are transformers', the others those of published files. A smaller image is enlarged.
    {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS, "min_pixels": _MIN_PIXELS, "max_pixels": _MAX_PIXELS}
)
_VIDEO: Mapping[str, Field] = MappingProxyType({"size": record(_SIZE)})
_IMAGE: Mapping[str, Field] = MappingProxyType(
    {
        "do_resize": FLAG,
        "resample": whole_number(0, 5),
        "size": record(_SIZE),
        "min_pixels": _MIN_PIXELS,
        "max_pixels": _MAX_PIXELS,
        "do_rescale": FLAG,
        "rescale_factor": number(0, 1e6),
        "do_normalize": FLAG,
        "image_mean": _COLOURS,
        "image_std": list_of(number(1e-6, 1e6), 3),
        "do_convert_rgb": FLAG,
        "patch_size": whole_number(1, 1024),
        "temporal_patch_size": _UP_TO_64,
        "merge_size": _UP_TO_64,
    }
)
"""The keys of preprocessor_config.json that are read, with the constraints of their values."""

Picture = Any
"""An image that a caller passes: a ``PIL.Image.Image``, or an array or tensor [rows, columns, colours]."""


def decode_image(data: bytes) -> Any:
    """Return the image in the bytes of a file, in RGB and upright. Raises :class:`RequestError` for data that is none."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or 1 << 26):
                raise ConfigError(f"{image.width} x {image.height} pixels are too many")
            return ImageOps.exif_transpose(image).convert("RGB")  # cameras store turned images, and how to turn them back
    except Exception as error:  # Pillow's decoders raise many error classes
        raise RequestError(f"the data can't be read as an image: {one_line(str(error))}") from error


@dataclass(frozen=True, slots=True)
class Media:
    """A preprocessed image or video."""

    grid: MediaGrid
    pixels: Tensor
    """Patches of the medium, float32 [patches, values of a patch] on the host."""
    digest: bytes
    """Hash of grid and pixels. Prompts can share a cached prefix only if their media have equal digests."""
    times: tuple[tuple[int, ...], ...] = ()
    """Tokens of the text before each temporal patch, which states its time; empty for an image, without such texts, and
    without a tokenizer.
    """

    def runs(self, vision: VisionConfig) -> tuple[Media, ...]:
        """Return a medium for each of :meth:`MediaGrid.runs`."""
        grids = self.grid.runs(vision)
        if len(grids) == 1:
            return (self,)
        return tuple(_media(grid, pixels) for grid, pixels in zip(grids, self.pixels.chunk(len(grids)), strict=True))


class MediaProcessor:
    """The checkpoint's image processing. Threads may share it."""

    def __init__(self, processor: Any, video_size: dict[str, int], timed: Path | None = None) -> None:
        """Create the processor. ``timed`` is the checkpoint's directory if its prompts state the times of a video as text.
        ``video_size`` then limits the pixels of all frames together, else those of each frame.
        """
        self._processor = processor
        self._video_size = video_size
        self._timed = timed

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_checkpoint(self._timed) if self._timed is not None and has_tokenizer(self._timed) else None

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> MediaProcessor:
        """Read the processor's config. Raises :class:`CheckpointError` if it is missing or unreadable."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        directory = Path(directory)
        path = directory / "preprocessor_config.json"
        if not present(path):
            raise CheckpointError(f"{directory}: no image processor can be read from it: there's no {path.name}")
        with wrap_read_errors(path, "an image processor"):
            processor = Qwen2VLImageProcessorPil(**_checked(read_json(path), _IMAGE))
            size = _edges(dict(processor.size))
        family = _check_tower(directory, path, processor)
        video = directory / "video_preprocessor_config.json"
        if present(video):
            with wrap_read_errors(video, "a video processor"):
                video_size = _checked(read_json(video), _VIDEO).get("size")
                size = size if video_size is None else _edges(video_size)
        return cls(processor, size, directory if has_alternating_axes(family) else None)

    def image(self, picture: Picture) -> Media:
        """Preprocess one image. Raises :class:`RequestError` if that fails, for example for an extremely narrow image."""
        pixels, rows, columns = self._patches(picture, {})
        return _media(MediaGrid(kind="image", frames=1, rows=rows, columns=columns), pixels)

    def video(self, frames: Sequence[Picture], *, frames_per_second: float) -> Media:
        """Preprocess the sampled frames of a video, all of one size. The last frame is repeated to fill a temporal patch.

        Raises :class:`RequestError` for no frames, frames of several sizes, or a rate that is not positive.
        """
        if not frames or not frames_per_second > 0:
            raise RequestError(f"a video of {len(frames)} frames at {frames_per_second} frames a second can't be read")
        depth = self._processor.temporal_patch_size
        options: dict[str, Any] = {"size": self._video_size}
        if self._timed is not None and self._processor.do_resize:
            frames, options = self._resized(frames), {"do_resize": False}
        padded = [*frames, *[frames[-1]] * (-len(frames) % depth)]
        patched = [self._patches(frame, options) for frame in padded]
        sizes = {(rows, columns) for _, rows, columns in patched}
        if len(sizes) > 1:
            raise RequestError(f"the frames of a video have several sizes, in patches {sorted(sizes)}")
        rows, columns = sizes.pop()
        side = self._processor.patch_size**2
        # A patch has the dimensions colours, time and side². The processor repeats a single frame over the time.
        frames_patches = torch.stack([pixels.view(rows * columns, -1, depth, side)[:, :, 0] for pixels, _, _ in patched])
        temporal_patches = frames_patches.view(len(padded) // depth, depth, rows * columns, -1, side).permute(0, 2, 3, 1, 4)
        grid = MediaGrid(
            kind="video",
            frames=len(padded) // depth,
            rows=rows,
            columns=columns,
            seconds_per_frame=depth / frames_per_second,
        )
        media = _media(grid, temporal_patches.reshape(grid.patches, -1))
        if self._tokenizer is None:
            return media
        last, text = len(frames) - 1, self._tokenizer
        middles = ((first + min(first + depth - 1, last)) / 2 / frames_per_second for first in range(0, len(frames), depth))
        times = (text.encode(f"<{middle:.1f} seconds>", special_tokens=False) for middle in middles)
        return replace(media, times=tuple(map(tuple, times)))

    def _resized(self, frames: Sequence[Picture]) -> list[Picture]:
        """Return ``frames`` in the size of transformers' video processor, whose limits are for the pixels of all frames."""
        import numpy as np
        from transformers.image_transforms import resize
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        processor, limits = self._processor, self._video_size
        depth = processor.temporal_patch_size
        resized = []
        for frame in frames:
            with _processing():
                pixels = np.asarray(frame.convert("RGB") if hasattr(frame, "convert") else frame)
                shape = smart_resize(
                    max(len(frames), depth),
                    *pixels.shape[:2],
                    temporal_factor=depth,
                    factor=processor.patch_size * processor.merge_size,
                    min_pixels=limits["shortest_edge"],
                    max_pixels=limits["longest_edge"],
                )
                resized.append(resize(pixels, shape, resample=processor.resample, input_data_format="channels_last"))
        return resized

    def _patches(self, picture: Picture, options: dict[str, Any]) -> tuple[Tensor, int, int]:
        """Return the patches of one image [rows * columns, values], and rows and columns.

        Raises :class:`RequestError` for an image that the processor can't process.
        """
        if getattr(picture, "shape", ())[-1:] == (3,):  # three rows of pixels could be taken for three colours
            options = options | {"input_data_format": "channels_last"}
        with _processing():
            processed = self._processor.preprocess(picture, return_tensors="pt", **options)
        _, rows, columns = (int(value) for value in processed["image_grid_thw"][0])
        return processed["pixel_values"], rows, columns


@contextmanager
def _processing() -> Generator[None]:
    try:
        yield
    except Exception as error:  # the processor's libraries may raise anything
        raise RequestError(f"an image can't be processed: {error}") from error


def _checked(raw: dict[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    found = {key: value for key, value in check_fields(raw, fields).items() if value is not None}
    size = found.get("size")
    if size:
        min_pixels, max_pixels = (
            size.get("shortest_edge", size.get("min_pixels")),
            size.get("longest_edge", size.get("max_pixels")),
        )
        found["size"] = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    return found


def _edges(size: dict[str, int]) -> dict[str, int]:
    """Return ``size``, the limits of an image's number of pixels. Raises :class:`ConfigError` unless it has a minimum and a
    maximum.
    """
    min_pixels, max_pixels = size.get("shortest_edge"), size.get("longest_edge")
    if not isinstance(min_pixels, int) or not isinstance(max_pixels, int) or min_pixels > max_pixels:
        raise ConfigError(f"size is {shown(size)}, expected shortest_edge and longest_edge, in pixels, and the first smaller")
    return size


def _check_tower(directory: Path, path: Path, processor: Any) -> str:
    """Raise :class:`CheckpointError` unless the processor's patch sizes equal those of the checkpoint's vision tower. Return
    the model's family, empty without a config.
    """
    config = directory / "config.json"
    if not present(config):
        return ""
    raw = read_json(config)
    with wrap_read_errors(config, "a config"):
        vision = hf_config(raw["model_type"], raw).vision_config
    for processor_key, tower_key in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ):
        found, expected = getattr(processor, processor_key), getattr(vision, tower_key)
        if found != expected:
            raise CheckpointError(f"{path}: {processor_key} is {found}, expected {expected} as {tower_key} in config.json")
    return str(raw["model_type"])


def _media(grid: MediaGrid, pixels: Tensor) -> Media:
    pixels = pixels.to(torch.float32).contiguous()
    return Media(grid, pixels, digest_of(grid, pixels))


def digest_of(grid: MediaGrid, pixels: Tensor) -> bytes:
    """Return the hash of a grid and its pixels, which are float32, contiguous and on the host."""
    content = hashlib.sha256(repr(grid).encode())
    content.update(pixels.numpy().tobytes())
    return content.digest()


def expand_placeholders(tokens: Sequence[int], media: Sequence[Media], vision: VisionConfig) -> list[int]:
    """Return ``tokens`` with each image or video token repeated once per feature of its medium.

    In a prompt that states times, the text of its time precedes each temporal patch of a video, whose placeholders are
    between marks. They replace the token and the marks around it. Raises :class:`RequestError` if placeholders and media
    don't match in number or kind, and for a video without the times that the prompt needs.
    """
    kinds = {vision.image_token: "image", vision.video_token: "video"}
    prompt_kinds = [kinds[token] for token in tokens if token in kinds]
    media_kinds = [each.grid.kind for each in media]
    if prompt_kinds != media_kinds:
        raise RequestError(
            f"the prompt has places for {prompt_kinds or 'no media'}, but {media_kinds or 'no media'} were given"
        )
    remaining = iter(media)
    out: list[int] = []
    dropped = -1
    for index, token in enumerate(tokens):
        if token not in kinds:
            out += [token] * (index != dropped)
            continue
        medium = next(remaining)
        if medium.grid.kind == "image" or vision.frame_marks is None:
            out += [token] * medium.grid.features(vision)
            continue
        if not medium.times:
            raise RequestError(
                "the prompt of a video states the time of its frames as text, and this checkpoint has no tokenizer; expected "
                "a prompt with one placeholder for each feature"
            )
        before, after = vision.frame_marks
        if list(tokens[index - 1 : index + 2]) == [before, token, after]:
            out.pop()
            dropped = index + 1
        for time, run in zip(medium.times, medium.grid.runs(vision), strict=True):
            out += [*time, before, *[token] * run.features(vision), after]
    return out


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
