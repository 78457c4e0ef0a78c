"""Quantization: which weights of a checkpoint are quantised, and how they come onto a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, ConfigError, QuantizedWeight
from outrider.device.kernels.quantized_reference import dequantize
from outrider.errors import CheckpointError, shown
from outrider.model.files import CheckpointFiles
from outrider.model.pieces import Piece, Target
from outrider.model.products import SplitWeight, Weight
from outrider.model.quantization.cache import CacheScheme
from outrider.model.quantization.layouts import ActOrderError, moved, narrowed, padded, stack, weight_of
from outrider.model.quantization.scheme import FLOATS, Scheme
from outrider.model.reading import reading

_WEIGHT = ".weight"
_EMBEDDING = "embed_tokens.weight"


class QuantizedMode(StrEnum):
    """How quantised weights are loaded.

    ``kernels``: quantised, in the formats that the backend declares; another format is an error. ``reference``: also in the
    others, with the torch reference of their products, which is slow. ``dequantize``: as plain weights in the model's
    dtype; activations then stay as they are.
    """

    KERNELS = "kernels"
    REFERENCE = "reference"
    DEQUANTIZE = "dequantize"

    @classmethod
    def of(cls, value: str) -> QuantizedMode:
        """The mode of that name; :class:`ConfigError` where there's none."""
        if value not in set(cls):
            raise ConfigError(f"quantized is {value!r}, expected one of {', '.join(cls)}")
        return cls(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """What a checkpoint's config says of quantised weights.

    ``path``: the file that says so. ``method``: its name for the way. ``scheme``: that of a module by its name, None where
    the module is plain. ``mode``: how they're loaded. ``cache``: what it says of keys and values, as it stands there.
    ``weights``: whether some are said to be quantised, and not the cache alone.
    """

    path: Path
    method: str
    scheme: Callable[[str], Scheme | None]
    mode: QuantizedMode
    cache: object = None
    weights: bool = True

    @property
    def cache_scheme(self) -> CacheScheme | None:
        """``cache`` as a record; :class:`CheckpointError` that names the key where it isn't supported."""
        if self.cache is None:
            return None
        with reading(self.path, "a config of a quantised KV cache"):
            return CacheScheme.of(self.cache)

    def scheme_of(self, files: CheckpointFiles, piece: Piece) -> Scheme | None:
        """The scheme of a piece; None where it's plain, or stored plain whatever the config says.

        Configs name kinds of modules, and their lists of exceptions are often incomplete: a weight that is there in a plain
        dtype, without any tensor of a quantised one, is a plain weight.
        """
        if not piece.key.endswith(_WEIGHT) or len(piece.shape) != 2 or piece.key.endswith(_EMBEDDING):
            return None
        module = piece.key.removesuffix(_WEIGHT)
        scheme = self.scheme(module)
        if scheme is None:
            return None
        stored = scheme.stored((piece.shape[0], piece.shape[1]))
        marks = [each.key(module, files.tensors) for each in stored if each.suffix != "weight"]
        if piece.key in files.tensors and files.dtype(piece.key) in FLOATS and not any(key in files.tensors for key in marks):
            return None
        return scheme

    def holds(self, files: CheckpointFiles, target: Target) -> bool:
        """Whether some of a target's pieces are quantised."""
        return any(self.scheme_of(files, piece) is not None for piece in target.pieces)

    def pieces(self, files: CheckpointFiles, target: Target) -> list[Piece]:
        """The tensors that a target is stored in, with the shapes that they must have. A wrong dtype is an error here."""
        found: list[Piece] = []
        for piece in target.pieces:
            scheme = self.scheme_of(files, piece)
            if scheme is None:
                found.append(piece)
                continue
            shape, module = (piece.shape[0], piece.shape[1]), piece.key.removesuffix(_WEIGHT)
            for each in scheme.stored(shape):
                key = each.key(module, files.tensors)
                there = key in files.tensors
                if each.optional and not there:
                    continue
                if there and files.dtype(key) not in each.dtypes:
                    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in each.dtypes)
                    raise CheckpointError(
                        f"{files.tensors[key].path}: tensor {shown(key)} is {files.dtype_name(key)}, expected {names}, since "
                        f"{scheme.source} says {scheme.format}"
                    )
                held = files.shape(key) if there else each.shapes[0]
                found.append(Piece(key, held if held in each.shapes else each.shapes[0]))
        return found

    def unused(self, files: CheckpointFiles, targets: Sequence[Target]) -> set[str]:
        """Tensors that quantised modules may have without need: biases of zeros, which a quantiser writes for each module."""
        spare = set()
        for target in targets:
            for piece in target.pieces:
                key = f"{piece.key.removesuffix(_WEIGHT)}.bias"
                if key in files.tensors and self.scheme_of(files, piece) is not None and not files.read(key).any():
                    spare.add(key)
        return spare

    def check(self, files: CheckpointFiles, targets: Sequence[Target], backend: Backend) -> None:
        """Raise :class:`CapabilityError` where the backend doesn't declare a format, unless another mode was asked for; and
        :class:`CheckpointError` where nothing is quantised.
        """
        schemes = [self.scheme_of(files, piece) for target in targets for piece in target.pieces]
        formats = {scheme.format for scheme in schemes if scheme is not None}
        if not formats and self.weights and not self._names_any(targets):
            raise CheckpointError(
                f"{self.path}: says how weights are quantised ({self.method}), but its targets and what it leaves out name "
                "no product of this model as quantised; expected class names such as Linear, or names of modules such as "
                "model.layers.0.mlp.up_proj; remove what it says, if all of them are meant to be plain"
            )
        if not formats and self.weights:
            raise CheckpointError(
                f"{self.path}: says that weights are quantised ({self.method}), but no weight is stored quantised in "
                f"{files.origin}; remove what it says, if they're meant to be plain"
            )
        if self.mode is not QuantizedMode.KERNELS:
            return
        missing = sorted(formats - backend.capabilities.quantized_formats)
        if missing:
            has = ", ".join(sorted(backend.capabilities.quantized_formats)) or "none"
            raise CapabilityError(
                f"{self.path}: weights are quantised as {', '.join(missing)} ({self.method}), and {backend.label} has no "
                f"kernels for that (it declares {has}); load them as plain weights with --quantized dequantize, or run the "
                "torch reference of the quantised product, which is slow, with --quantized reference"
            )

    def _names_any(self, targets: Sequence[Target]) -> bool:
        """Whether the config says of some product that it's quantised, however it's stored."""
        keys = (piece.key for target in targets for piece in target.pieces if len(piece.shape) == 2)
        modules = (key.removesuffix(_WEIGHT) for key in keys if key.endswith(_WEIGHT) and not key.endswith(_EMBEDDING))
        return any(self.scheme(module) is not None for module in modules)

    def load(
        self, files: CheckpointFiles, target: Target, *, dtype: torch.dtype, device: torch.device, done: Callable[[str], None]
    ) -> Weight:
        """A target's weight on ``device`` once the current stream has run. ``done(key)``: a piece was read."""
        made: list[Tensor | QuantizedWeight] = []
        for piece in target.pieces:
            scheme = self.scheme_of(files, piece)
            if scheme is None:
                part: Tensor | QuantizedWeight = files.read(piece.key, piece.cut).to(dtype)
            else:
                part = narrowed(self._read(files, piece, scheme), piece.cut)
                if self.mode is QuantizedMode.DEQUANTIZE:
                    part = _plain(part, dtype)
            made.append(part)
            done(piece.key)
        if target.padding:
            last = made[-1]
            if isinstance(last, Tensor):
                made[-1] = torch.nn.functional.pad(last, (0, 0, 0, target.padding))
            else:
                made[-1] = padded(last, target.padding)
        parts = [_moved(part, device) for part in _joined(made)]
        return parts[0] if len(parts) == 1 else SplitWeight(tuple(parts))

    def _read(self, files: CheckpointFiles, piece: Piece, scheme: Scheme) -> QuantizedWeight:
        module, shape = piece.key.removesuffix(_WEIGHT), (piece.shape[0], piece.shape[1])
        keys = {each.suffix: each.key(module, files.tensors) for each in scheme.stored(shape)}
        held = {suffix: files.read_stored(key) for suffix, key in keys.items() if key in files.tensors}
        try:
            return weight_of(scheme, shape, held, ordered=self.mode is not QuantizedMode.DEQUANTIZE)
        except ActOrderError as error:
            raise CheckpointError(
                f"{files.origin}: tensor {module}.{error}; products with such a weight aren't supported; load it as a plain "
                "weight with --quantized dequantize"
            ) from error
        except ConfigError as error:
            raise CheckpointError(f"{files.origin}: tensors of {module}: {error}") from error


def _plain(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return dequantize(weight.data, weight.scales, weight.zero_points, weight.format, weight.block, weight.shape, dtype)


def _joined(parts: Sequence[Tensor | QuantizedWeight]) -> list[Tensor | QuantizedWeight]:
    """Parts under one another, those that can be one record or tensor as one."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(parts) > 1 and len(quantized) == len(parts):
        whole = stack(quantized)  # in one go: a layer may have hundreds of experts
        if whole is not None:
            return [whole]
    joined: list[Tensor | QuantizedWeight] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Tensor) and isinstance(last, Tensor):
            joined[-1] = torch.cat((last, part))
        elif isinstance(part, QuantizedWeight) and isinstance(last, QuantizedWeight):
            both = stack((last, part))
            joined[-1:] = [last, part] if both is None else [both]
        else:
            joined.append(part)
    return joined


def _moved(part: Tensor | QuantizedWeight, device: torch.device) -> Tensor | QuantizedWeight:
    if isinstance(part, QuantizedWeight):
        return moved(part, device)
    made = torch.empty(part.shape, dtype=part.dtype, device=device)
    return made.copy_(part)
