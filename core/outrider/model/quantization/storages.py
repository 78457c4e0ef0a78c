"""Storages: how checkpoints spell a quantised weight, as names, shapes and dtypes of stored tensors, one class per spelling.

Every conversion is exact: values are repacked and scales are repeated, without arithmetic on them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import ConfigError, QuantizedWeight
from outrider.device.kernels.formats import pack_nibbles, unpack_nibbles
from outrider.device.kernels.weight_formats import WeightFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)
_INTEGERS = (torch.int32, torch.int64)
PACKED = "weight_packed"
"""Suffix of the name of a tensor of packed values."""
E8M0_NAN = 255
"""The exponent in e8m0 that stands for NaN."""
SUFFIXES = frozenset(
    {
        "activation_scale",
        "g_idx",
        "input_scale",
        "qweight",
        "qzeros",
        "scales",
        "weight_g_idx",
        PACKED,
        "weight_scale",
        "weight_scale_inv",
        "weight_shape",
        "weight_zero_point",
    }
)
"""Suffixes of the names of tensors that only quantized weights have, such as ``qweight``."""
# vLLM's writers and transformers use different suffixes for the same scale.
_ALTERNATIVE_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"weight_scale": "weight_scale_inv", "weight_scale_inv": "weight_scale", "input_scale": "activation_scale"}
)
_AWQ_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each column among the nibbles of an AWQ word."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor that stores part of a module's weight."""

    suffix: str
    """Suffix of the tensor's name after the module's name."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes that the tensor may have."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes that the tensor may have."""
    optional: bool = False
    """True if a module may lack the tensor."""

    def key(self, module: str, present: Container[str]) -> str:
        """Return the tensor's name among the names ``present``, or its default name if it is missing."""
        key, other = f"{module}.{self.suffix}", f"{module}.{_ALTERNATIVE_SUFFIXES.get(self.suffix, self.suffix)}"
        return other if key not in present and other in present else key


class Storage(ABC):
    """The tensors that store a module's weight [out, in]."""

    @abstractmethod
    def stored(self, format: WeightFormat, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """Return the tensors that store a weight of this ``format`` and ``shape`` [out, in]."""

    @abstractmethod
    def read(
        self, format: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor], *, grouped: bool
    ) -> QuantizedWeight:
        """Return the weight on the host that a module's ``tensors``, by the suffix of their names, store.

        ``grouped`` requires that the columns of each group are contiguous. Without it, a weight with other columns gets one
        scale per column, which is exact but needs more memory than the weight. Raises :class:`ConfigError` for such a weight
        with ``grouped``, and for contradictory contents.
        """


@dataclass(frozen=True, slots=True)
class ValuesStorage(Storage):
    """A tensor of the format's dtype, with its scales and zero points: compressed-tensors, Hugging Face's fp8, ModelOpt."""

    scale: str = "weight_scale"
    """Suffix of the name of the scales' tensor."""

    def stored(self, format: WeightFormat, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """Return the declarations of the values, the scales, the zero points and the scale of static activations."""
        scale_shapes = _scale_shapes(format.grid(shape))
        zeros = self._stored_zeros(format, shape)
        return (
            *self._stored_values(format, shape),
            StoredTensor(self.scale, scale_shapes, _SCALE_DTYPES),
            *([StoredTensor("weight_zero_point", *zeros)] if format.zeros else []),
            *([StoredTensor("input_scale", ((1,), (), (1, 1)), FLOATS)] if format.static else []),
        )

    def _stored_values(self, format: WeightFormat, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        return (StoredTensor("weight", (shape,), (format.elements.dtype,)),)

    def _stored_zeros(
        self, format: WeightFormat, shape: tuple[int, int]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
        return _scale_shapes(format.grid(shape)), (torch.int8,)

    def read(
        self, format: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor], *, grouped: bool
    ) -> QuantizedWeight:
        """Return the stored values; a single scale of all rows is repeated for each row, because weights are stacked.

        Raises :class:`ConfigError` if the scale of the activations isn't positive.
        """
        del grouped
        (grid, block), scales = (format.grid(shape), format.block_of(shape)), tensors[self.scale]
        if scales.dtype == torch.float8_e8m0fnu:  # powers of two
            scales = scales.to(torch.float32)
        scales, zeros = scales.reshape(grid), self._zeros(format, grid, tensors)
        if not format.rows:
            scales, block = repeat_rows(scales, shape[0], shape[0]), (1, block[1])
            zeros = None if zeros is None else repeat_rows(zeros, shape[0], shape[0])
        input_scale = tensors.get("input_scale")
        if input_scale is not None:
            input_scale = input_scale.reshape(1).to(torch.float32)
            if not (math.isfinite(float(input_scale)) and float(input_scale) > 0):
                raise ConfigError(f"input_scale is {float(input_scale)}, expected a number above 0")
        data = self._data(format, shape, tensors)
        return format.weight(shape, data, scales, zeros, block=block, input_scale=input_scale)

    def _data(self, format: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Tensor:
        del format, shape
        return tensors["weight"]

    def _zeros(self, format: WeightFormat, grid: tuple[int, int], tensors: Mapping[str, Tensor]) -> Tensor | None:
        del format
        zeros = tensors.get("weight_zero_point")
        return None if zeros is None else zeros.reshape(grid)

    def write(self, format: WeightFormat, weight: QuantizedWeight, scales_dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors, by the suffix of their names, that store ``weight`` with scales in ``scales_dtype``."""
        zeros = {} if weight.zero_points is None else {"weight_zero_point": self._written_zeros(weight.zero_points)}
        scales = weight.scales.to(scales_dtype)
        scales = scales if format.rows else scales.reshape(-1)
        return {**self._written_values(weight), self.scale: scales, **zeros}

    def _written_values(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        return {"weight": weight.data}

    def _written_zeros(self, zeros: Tensor) -> Tensor:
        return zeros


@dataclass(frozen=True, slots=True)
class PackedStorage(ValuesStorage):
    """Values of a weight packed in int32 words along its columns: ``pack-quantized`` of compressed-tensors."""

    packed_zeros: bool = True
    """True if the zero points are packed too, along the rows of their grid."""

    def _stored_values(self, format: WeightFormat, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        words = -(-shape[1] // _per_word(format))
        return (
            StoredTensor(PACKED, ((shape[0], words),), _INTEGERS[:1]),
            StoredTensor("weight_shape", ((2,),), _INTEGERS),
        )

    def _stored_zeros(
        self, format: WeightFormat, shape: tuple[int, int]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
        if not self.packed_zeros:
            return ValuesStorage._stored_zeros(self, format, shape)
        grid = format.grid(shape)
        return ((-(-grid[0] // _per_word(format)), grid[1]),), _INTEGERS[:1]

    def _data(self, format: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Tensor:
        if tuple(tensors["weight_shape"].tolist()) != shape:
            raise ConfigError(f"weight_shape is {tensors['weight_shape'].tolist()}, expected {list(shape)}")
        return _data_of_unsigned(format, _unpack(format, tensors[PACKED], dim=1, count=shape[1]))

    def _zeros(self, format: WeightFormat, grid: tuple[int, int], tensors: Mapping[str, Tensor]) -> Tensor | None:
        words = tensors.get("weight_zero_point")
        if words is None or not self.packed_zeros:
            return ValuesStorage._zeros(self, format, grid, tensors)
        zeros = _unpack(format, words, dim=0, count=grid[0]).to(torch.int16) - _zero_value(format)
        return zeros.to(torch.int8).reshape(grid)

    def _written_values(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        return {PACKED: weight.data.view(torch.int32), "weight_shape": torch.tensor(weight.shape)}

    def _written_zeros(self, zeros: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(zeros.T, (0, -zeros.shape[0] % 8))
        return pack_nibbles((padded + 8).to(torch.uint8).contiguous()).contiguous().view(torch.int32).T


@dataclass(frozen=True, slots=True)
class MicroscalingStorage(ValuesStorage):
    """Bytes of two 4-bit floats, and exponents of powers of two with a bias of 127: ``mxfp4-pack-quantized`` of
    compressed-tensors.
    """

    def stored(self, format: WeightFormat, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """Return the declarations of the bytes and the exponents."""
        return (
            StoredTensor(PACKED, (format.elements.data_shape(shape),), (torch.uint8,)),
            StoredTensor(self.scale, (format.grid(shape),), (torch.uint8,)),
        )

    def read(
        self, format: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor], *, grouped: bool
    ) -> QuantizedWeight:
        """Return the stored weight. Raises :class:`ConfigError` for a scale that is no number."""
        del grouped
        scales = tensors[self.scale]
        if bool((scales == E8M0_NAN).any()):
            raise ConfigError(f"{self.scale} has a scale that is no number ({E8M0_NAN})")
        return format.weight(shape, tensors[PACKED], scales.view(torch.float8_e8m0fnu), None)

    def write(self, format: WeightFormat, weight: QuantizedWeight, scales_dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the bytes and the exponents of ``weight``."""
        del format, scales_dtype
        return {PACKED: weight.data, self.scale: weight.scales.view(torch.uint8)}


class AwqStorage(Storage):
    """AWQ's ``gemm`` layout: words of eight columns of the transposed weight, in an order of their own."""

    def stored(self, format: WeightFormat, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """Return the declarations of the packed values, the packed zero points and the scales."""
        (rows, columns), groups, per_word = shape, format.grid(shape)[1], _per_word(format)
        return (
            StoredTensor("qweight", ((columns, -(-rows // per_word)),), _INTEGERS[:1]),
            StoredTensor("qzeros", ((groups, -(-rows // per_word)),), _INTEGERS[:1], optional=not format.zeros),
            StoredTensor("scales", ((groups, rows),), FLOATS),
        )

    def read(
        self, format: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor], *, grouped: bool
    ) -> QuantizedWeight:
        """Return the weight on the host, transposed to [out, in]. Zero points that the config denies must stand for zero,
        else raises :class:`ConfigError`.
        """
        del grouped

        def unpack_columns(words: Tensor) -> Tensor:
            values = _unpack(format, words, dim=1, count=words.shape[1] * 8).view(words.shape[0], -1, 8)
            return values[..., list(_AWQ_NIBBLE_ORDER)].flatten(-2)[:, : shape[0]]

        zeros = None
        if "qzeros" in tensors:
            zeros = unpack_columns(tensors["qzeros"]).T.to(torch.int8) - 8
            if not format.zeros:
                if bool(zeros.any()):
                    raise ConfigError("qzeros aren't 8 everywhere, but the config says that zero_point is false")
                zeros = None
        return format.weight(shape, pack_nibbles(unpack_columns(tensors["qweight"]).T), tensors["scales"].T, zeros)


@dataclass(frozen=True, slots=True)
class GptqStorage(Storage):
    """GPTQ's words of rows of the transposed weight, and a group for each column."""

    zero_offset: int
    """Number that is added to stored zero points."""

    def stored(self, format: WeightFormat, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """Return the declarations of the packed values, the packed zero points, the scales, and the group of each column."""
        (rows, columns), groups, per_word = shape, format.grid(shape)[1], _per_word(format)
        return (
            StoredTensor("qweight", ((-(-columns // per_word), rows),), _INTEGERS[:1]),
            StoredTensor("qzeros", ((groups, -(-rows // per_word)),), _INTEGERS[:1], optional=not format.zeros),
            StoredTensor("scales", ((groups, rows),), FLOATS),
            StoredTensor("g_idx", ((columns,),), _INTEGERS, optional=True),
        )

    def read(
        self, format: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor], *, grouped: bool
    ) -> QuantizedWeight:
        """Return the weight on the host, transposed to [out, in], with one scale per column if ``g_idx`` reorders the columns
        and ``grouped`` is False.

        Raises :class:`ConfigError` if ``g_idx`` names groups without a scale, or reorders columns that must stay grouped.
        """
        out_features, in_features = shape
        block = format.block_of(shape)
        values = _unpack(format, tensors["qweight"], dim=0, count=in_features).T
        scales, zeros = tensors["scales"].T, self._zero_points(format, out_features, tensors)
        groups = tensors.get("g_idx")
        if groups is not None:
            groups = groups.to(torch.int64)
            if in_features and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
                raise ConfigError(
                    f"g_idx names groups {int(groups.min())} to {int(groups.max())}, there are {scales.shape[1]}"
                )
            if not torch.equal(groups, torch.arange(in_features) // block[1]):
                if grouped:
                    raise ConfigError(
                        "g_idx assigns columns to groups in another order than they lie in (act-order, desc_act); products "
                        "with such a weight aren't supported; load it as a plain weight with --quantized dequantize"
                    )
                scales, block = scales.index_select(1, groups), (1, 1)
                zeros = None if zeros is None else zeros.index_select(1, groups)
        return format.weight(shape, _data_of_unsigned(format, values.contiguous()), scales, zeros, block=block)

    def _zero_points(self, format: WeightFormat, out_features: int, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if "qzeros" not in tensors:
            return None
        zero_value = _zero_value(format)
        stored = _unpack(format, tensors["qzeros"], dim=1, count=out_features).T.to(torch.int16)
        if not format.zeros:
            # The two versions of the format store different numbers, and configs often name the wrong version.
            if not (bool((stored == zero_value).all()) or bool((stored == zero_value - 1).all())):
                raise ConfigError(f"qzeros aren't {zero_value} or {zero_value - 1} everywhere, but the config says sym")
            return None
        zeros = stored + self.zero_offset - zero_value
        if int(zeros.max()) > 127:
            raise ConfigError(
                f"qzeros stand for a zero point of {int(zeros.max()) + zero_value}, expected at most {127 + zero_value}"
            )
        return zeros.to(torch.int8)


COMPRESSED_STORAGES: Mapping[str, ValuesStorage] = MappingProxyType(
    {
        "float-quantized": ValuesStorage(),
        "int-quantized": ValuesStorage(),
        "naive-quantized": ValuesStorage(),
        "pack-quantized": PackedStorage(),
        "mxfp4-pack-quantized": MicroscalingStorage(),
    }
)
"""Storages of compressed-tensors, by the name of the format in its configs."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of one module's weight, and the storage in which a checkpoint spells it."""

    format: WeightFormat
    storage: Storage
    source: str
    """Location of the scheme in the config, for error messages."""

    def stored(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """Return the tensors that store a weight of ``shape`` [out, in]."""
        return self.storage.stored(self.format, shape)


def _scale_shapes(grid: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    if grid == (1, 1):
        return ((1,), (), (1, 1))
    return (grid, (grid[0],)) if grid[1] == 1 else (grid,)


def _per_word(format: WeightFormat) -> int:
    return 32 // format.elements.bits


def _zero_value(format: WeightFormat) -> int:
    """Return the unsigned stored value that stands for the number zero."""
    return 1 << format.elements.bits - 1


def _unpack(format: WeightFormat, words: Tensor, *, dim: int, count: int) -> Tensor:
    """Unpack int32 ``words`` along ``dim``, lowest bits first, into ``count`` unsigned values in uint8."""
    values = words.movedim(dim, -1).contiguous().view(torch.uint8)  # little-endian bytes of each word
    if format.elements.bits < 8:
        values = unpack_nibbles(values, 2 * values.shape[-1])
    return values[..., :count].movedim(-1, dim).contiguous()


def _data_of_unsigned(format: WeightFormat, values: Tensor) -> Tensor:
    return pack_nibbles(values) if format.elements.bits < 8 else (values ^ 128).view(torch.int8)


def repeat_rows(grid: Tensor, rows: int, total: int) -> Tensor:
    """Repeat each row of a grid of scales ``rows`` times and cut the result to ``total`` rows."""
    return grid.repeat_interleave(rows, dim=0)[:total].contiguous()
