"""Quantization: the quantized weights of a checkpoint, and how they are loaded onto a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, ConfigError, QuantizedWeight
from outrider.device.kernels.reference.model import dequantize
from outrider.device.kernels.weight_formats import widen_scales
from outrider.device.kernels.weights import SplitWeight, Weight
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import CheckpointFiles, Piece, Target, TensorSlice, wrap_read_errors
from outrider.model.quantization.cache import read_scale_strategy
from outrider.model.quantization.storages import FLOATS, PACKED, Scheme, repeat_rows

# -- exact changes of the layout: values are repacked and scales are repeated ------------------------------------------


def map_scales(weight: QuantizedWeight, change: Callable[[Tensor], Tensor], **fields: Any) -> QuantizedWeight:
    """Return a copy of ``weight`` with ``change`` applied to its scales and its zero points, and with other ``fields``
    replaced.
    """
    zeros = weight.zero_points
    changed = None if zeros is None else change(zeros).contiguous()
    return replace(weight, scales=change(weight.scales).contiguous(), zero_points=changed, **fields)


def with_row_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Return an equal weight in which each row of the weight has its own row of scales."""
    rows, total_rows = weight.block[0], weight.shape[0]
    if rows == 1:
        return weight
    return map_scales(weight, lambda grid: repeat_rows(grid, rows, total_rows), block=(1, weight.block[1]))


def slice_weight(weight: QuantizedWeight, tensor_slice: TensorSlice | None) -> QuantizedWeight:
    """Return the rows or columns of ``weight`` that ``tensor_slice`` selects; the whole weight for None. A cut within a group
    of columns gives smaller groups.
    """
    if tensor_slice is None:
        return weight
    start, stop = tensor_slice.start, tensor_slice.stop
    if tensor_slice.dim == 0:
        weight = with_row_scales(weight) if start % weight.block[0] else weight
        rows = weight.block[0]
        data, shape = weight.data[start:stop].contiguous(), (stop - start, weight.shape[1])
        return map_scales(weight, lambda grid: grid[start // rows : -(-stop // rows)], data=data, shape=shape)
    data = weight.elements.slice_columns(weight.data, weight.shape[1], start, stop).contiguous()
    shape, columns = (weight.shape[0], stop - start), weight.block[1]
    if weight.scales.shape[1] == 1:
        return replace(weight, data=data, shape=shape, block=(weight.block[0], stop - start))
    shared = math.gcd(columns, start)  # columns of the largest groups that begin where the slice does
    return map_scales(
        weight,
        lambda grid: grid.repeat_interleave(columns // shared, dim=1)[:, start // shared : -(-stop // shared)],
        data=data,
        shape=shape,
        block=(weight.block[0], shared),
    )


def in_model_order(weight: QuantizedWeight, piece: Piece) -> QuantizedWeight:
    """Return ``weight``, the rows of ``piece``, in the order in which the model has them."""
    if piece.paired is None:
        return weight
    if not piece.paired.share_scales(weight.block[0]):
        weight = map_scales(with_row_scales(weight), piece.in_model_order)
    return replace(weight, data=piece.in_model_order(weight.data))


def pad_rows(weight: QuantizedWeight, rows: int) -> QuantizedWeight:
    """Return the weight with ``rows`` zero rows appended."""
    if not rows:
        return weight
    weight = with_row_scales(weight)
    padding = weight.elements.encode(torch.zeros(rows, weight.shape[1]))
    grid = (rows, weight.scales.shape[1])
    zeros = weight.zero_points
    return replace(
        weight,
        data=torch.cat((weight.data.view(torch.uint8), padding.view(torch.uint8))).view(weight.data.dtype),
        scales=torch.cat((weight.scales, weight.scales.new_ones(grid))),
        zero_points=None if zeros is None else torch.cat((zeros, zeros.new_zeros(grid))),
        shape=(weight.shape[0] + rows, weight.shape[1]),
    )


def stack_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate the rows of ``weights``. Return None if their formats differ in a way that one record can't express."""
    first = weights[0]
    if len(weights) == 1:
        return first
    compatible = all(
        weight.format == first.format
        and weight.shape[1] == first.shape[1]
        and weight.block[1] == first.block[1]
        and weight.activations == first.activations
        and weight.activation_group == first.activation_group
        and _same(weight.input_scale, first.input_scale)
        for weight in weights
    )
    if not compatible:
        return None
    rows = first.block[0]
    if any(weight.block[0] != rows for weight in weights) or any(weight.shape[0] % rows for weight in weights[:-1]):
        weights, rows = [with_row_scales(weight) for weight in weights], 1
    dtype = weights[0].scales.dtype
    for weight in weights:
        dtype = torch.promote_types(dtype, weight.scales.dtype)
    zeros = None
    if any(weight.zero_points is not None for weight in weights):
        zeros = torch.cat(
            [torch.zeros_like(w.scales, dtype=torch.int8) if w.zero_points is None else w.zero_points for w in weights]
        )
    return replace(
        first,
        data=torch.cat([weight.data.view(torch.uint8) for weight in weights]).view(first.data.dtype),
        scales=torch.cat([weight.scales.to(dtype) for weight in weights]),
        zero_points=zeros,
        block=(rows, first.block[1]),
        shape=(sum(weight.shape[0] for weight in weights), first.shape[1]),
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return a copy of ``weight`` with all tensors on ``device``, valid after the current stream's work."""

    def copied(tensor: Tensor) -> Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return result.copy_(tensor)

    return replace(
        weight,
        data=copied(weight.data),
        scales=copied(widen_scales(weight.scales, weight.block, weight.shape)),
        zero_points=None if weight.zero_points is None else copied(weight.zero_points),
        input_scale=None if weight.input_scale is None else copied(weight.input_scale),
    )


# -- loading -----------------------------------------------------------------------------------------------------------


_WEIGHT = ".weight"
_EMBEDDING = "embed_tokens.weight"


QuantizedMode = Literal["kernels", "reference", "dequantize"]
"""The way in which quantized weights are loaded and multiplied.

- ``kernels``: keep the weights quantized. A format that the backend doesn't declare is an error.
- ``reference``: keep the weights quantized, and use the slow torch reference for formats that the backend doesn't declare.
- ``dequantize``: convert the weights to the model's dtype at load time. Activations are then not quantized.
"""


def check_quantized_mode(value: str) -> QuantizedMode:
    """Return ``value``, which must be a mode. Raises :class:`ConfigError` for an unknown name."""
    if value not in get_args(QuantizedMode):
        raise ConfigError(f"quantized is {value!r}, expected one of {', '.join(get_args(QuantizedMode))}")
    return cast("QuantizedMode", value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """The parsed quantization config of a checkpoint."""

    path: Path
    """The file from which the config was read, for error messages."""
    method: str
    """Name of the quantization method, such as ``gptq``."""
    scheme: Callable[[str], Scheme | None]
    """Function from a module's name to its scheme, or to None for an unquantized module."""
    mode: QuantizedMode
    """How the quantized weights are loaded and multiplied."""
    cache: object = None
    """The unparsed KV cache scheme of the config, or None."""
    weights: bool = True
    """True if the config declares quantized weights, not just a quantized cache."""
    stacks: Scheme | None = None
    """Scheme of tensors that hold all experts of a layer; None if they are unquantized."""

    def packs_stacks(self, backend: Backend) -> bool:
        """Return True if tensors of all experts stay quantized on ``backend``; else they are dequantized while they are read.

        In mode ``kernels`` they are dequantized for a backend without kernels for their format.
        """
        if self.stacks is None or self.mode != "kernels":
            return self.stacks is not None and self.mode == "reference"
        return self.stacks.format.elements.name in backend.capabilities.quantized_formats

    @property
    def cache_strategy(self) -> str | None:
        """The granularity of the scales of a quantized KV cache, or None. Raises :class:`CheckpointError` with the key of an
        unsupported value.
        """
        if self.cache is None:
            return None
        with wrap_read_errors(self.path, "a config of a quantised KV cache"):
            return read_scale_strategy(self.cache)

    def scheme_of(self, files: CheckpointFiles, piece: Piece) -> Scheme | None:
        """Return the scheme of a piece, or None if the piece is unquantized.

        Lists of exceptions in configs are often incomplete. A weight that is stored in a floating-point dtype, without any
        tensor of a quantized weight, therefore counts as unquantized. A tensor of all experts is quantized if it is packed.
        """
        if piece.stack:
            return self.stacks if f"{piece.key}.{PACKED}" in files.tensors else None
        if not piece.key.endswith(_WEIGHT) or len(piece.shape) != 2 or piece.key.endswith(_EMBEDDING):
            return None
        module = piece.key.removesuffix(_WEIGHT)
        scheme = self.scheme(module)
        if scheme is None:
            return None
        stored = scheme.stored((piece.shape[0], piece.shape[1]))
        quantized_keys = [each.key(module, files.tensors) for each in stored if each.suffix != "weight"]
        stored_as_float = piece.key in files.tensors and files.dtype(piece.key) in FLOATS
        return scheme if not stored_as_float or any(key in files.tensors for key in quantized_keys) else None

    def has_quantized_piece(self, files: CheckpointFiles, target: Target) -> bool:
        """Return True if at least one of a target's pieces is quantized."""
        return any(self.scheme_of(files, piece) is not None for piece in target.pieces)

    def stored_pieces(self, files: CheckpointFiles, target: Target) -> list[Piece]:
        """Return the stored tensors of a target with their required shapes. Raises :class:`CheckpointError` for a wrong
        dtype.
        """
        found: list[Piece] = []
        for piece in target.pieces:
            scheme = self.scheme_of(files, piece)
            if scheme is None:
                found.append(piece)
                continue
            (rows, columns), stacked = piece.shape[-2:], piece.shape[:-2]
            module = piece.key.removesuffix(_WEIGHT)
            for each in scheme.stored((rows, columns)):
                shapes = [(*stacked, *shape) for shape in each.shapes]
                key = each.key(module, files.tensors)
                is_present = key in files.tensors
                if each.optional and not is_present:
                    continue
                if is_present and files.dtype(key) not in each.dtypes:
                    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in each.dtypes)
                    raise CheckpointError(
                        f"{files.tensors[key].path}: tensor {shown(key)} is {files.dtype_name(key)}, expected {names}, since "
                        f"{scheme.source} says {scheme.format.elements.name}"
                    )
                found_shape = files.shape(key) if is_present else shapes[0]
                found.append(Piece(key, found_shape if found_shape in shapes else shapes[0]))
        return found

    def unused_tensors(self, files: CheckpointFiles, targets: Sequence[Target]) -> set[str]:
        """Return tensors of quantized modules that have no effect: zero biases that some quantizers add to every module."""
        unused = set()
        for target in targets:
            for piece in target.pieces:
                key = f"{piece.key.removesuffix(_WEIGHT)}.bias"
                if key in files.tensors and self.scheme_of(files, piece) is not None and not files.read_tensor(key).any():
                    unused.add(key)
        return unused

    def check(self, files: CheckpointFiles, targets: Sequence[Target], backend: Backend) -> None:
        """Raise :class:`CapabilityError` if the backend lacks kernels for a format in mode ``kernels``.

        Raises :class:`CheckpointError` if the config declares quantized weights and no weight is quantized.
        """
        schemes = [self.scheme_of(files, piece) for target in targets for piece in target.pieces]
        formats = {scheme.format.elements.name for scheme in schemes if scheme is not None}
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
        if self.mode != "kernels":
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
        """Return True if the config declares at least one matrix of ``targets`` as quantized."""
        keys = (piece.key for target in targets for piece in target.pieces if len(piece.shape) == 2)
        modules = (key.removesuffix(_WEIGHT) for key in keys if key.endswith(_WEIGHT) and not key.endswith(_EMBEDDING))
        return any(self.scheme(module) is not None for module in modules)

    def load(
        self, files: CheckpointFiles, target: Target, *, dtype: torch.dtype, device: torch.device, done: Callable[[str], None]
    ) -> Weight:
        """Return a target's weight on ``device``, valid after the current stream's work. ``done(key)`` is called after each
        piece is read.
        """
        joined: list[Tensor | QuantizedWeight] = []
        read: dict[str, QuantizedWeight] = {}  # a target may have many slices of one weight
        for piece in target.pieces:
            scheme = self.scheme_of(files, piece)
            if scheme is None:
                stored = files.read_tensor(piece.key, piece.tensor_slice)
                part: Tensor | QuantizedWeight = piece.in_model_order(stored).to(dtype)
            else:
                if piece.stack:
                    part = self._read_stack(files, piece, scheme)
                else:
                    if piece.key not in read:
                        read[piece.key] = self._read(files, piece, scheme)
                    part = in_model_order(slice_weight(read[piece.key], piece.tensor_slice), piece)
                if self.mode == "dequantize":
                    part = _dequantized(part, dtype)
            joined.append(part)
            done(piece.key)
        if target.padding:
            last = joined[-1]
            if isinstance(last, Tensor):
                joined[-1] = torch.nn.functional.pad(last, (0, 0, 0, target.padding))
            else:
                joined[-1] = pad_rows(last, target.padding)
        weights = [_part_to_device(part, device) for part in _concatenate(joined)]
        return weights[0] if len(weights) == 1 else SplitWeight(tuple(weights))

    def _read(self, files: CheckpointFiles, piece: Piece, scheme: Scheme) -> QuantizedWeight:
        module, shape = piece.key.removesuffix(_WEIGHT), (piece.shape[0], piece.shape[1])
        keys = {each.suffix: each.key(module, files.tensors) for each in scheme.stored(shape)}
        tensors = {suffix: files.read_stored(key) for suffix, key in keys.items() if key in files.tensors}
        try:
            grouped = self.mode != "dequantize"
            return scheme.storage.read(scheme.format, shape, tensors, grouped=grouped)
        except ConfigError as error:
            raise CheckpointError(f"{files.origin}: tensors of {module}: {error}") from error

    def _read_stack(self, files: CheckpointFiles, piece: Piece, scheme: Scheme) -> QuantizedWeight:
        """Return the rows of one expert, or the same columns of all experts."""
        _, rows, columns = piece.shape
        part = piece.tensor_slice
        own_rows = part if part is not None and part.dim == 0 else None
        keys = {each.suffix: f"{piece.key}.{each.suffix}" for each in scheme.stored((rows, columns))}
        tensors = {suffix: files.tensors[key].read_tensor(key, own_rows).flatten(0, 1) for suffix, key in keys.items()}
        weight = scheme.storage.read(scheme.format, (len(tensors[PACKED]), columns), tensors, grouped=True)
        return weight if own_rows is not None else slice_weight(weight, part)


def _dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return dequantize(weight.data, weight.scales, weight.zero_points, weight.format, weight.block, weight.shape, dtype)


def _concatenate(parts: Sequence[Tensor | QuantizedWeight]) -> list[Tensor | QuantizedWeight]:
    """Return ``parts`` in order, with the rows of adjacent parts concatenated where their formats allow."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(parts) > 1 and len(quantized) == len(parts):
        stacked_all = stack_weights(quantized)  # one concatenation, because a layer may have hundreds of experts
        if stacked_all is not None:
            return [stacked_all]
    joined: list[Tensor | QuantizedWeight] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Tensor) and isinstance(last, Tensor):
            joined[-1] = torch.cat((last, part))
        elif isinstance(part, QuantizedWeight) and isinstance(last, QuantizedWeight):
            stacked = stack_weights((last, part))
            joined[-1:] = [last, part] if stacked is None else [stacked]
        else:
            joined.append(part)
    return joined


def _part_to_device(part: Tensor | QuantizedWeight, device: torch.device) -> Tensor | QuantizedWeight:
    if isinstance(part, QuantizedWeight):
        return to_device(part, device)
    result = torch.empty(part.shape, dtype=part.dtype, device=device)
    return result.copy_(part)
