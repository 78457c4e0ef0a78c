"""Operators of products with quantised weights, and the plan of each product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider.device.kernels.operators import expect
from outrider_triton.launch import define, launch, power_of_two, warps_for
from outrider_triton.products.streamed import multiply
from outrider_triton.quantized.formats import TRITON_FORMATS
from outrider_triton.quantized.jit import activations as jit_activations
from outrider_triton.quantized.jit import products as quantized
from outrider_triton.quantized.jit.nibble_planes import UNIT_COLUMNS
from outrider_triton.quantized.scaled_blocks import multiply_blocks
from outrider_triton.tiles.configs import SCALED_BLOCKS, STREAMED, MatmulConfig
from outrider_triton.tiles.derive.quantized import OperandStorage
from outrider_triton.tiles.facts import DeviceFacts

_COLUMNS_PER_SCALE = 128
"""Number of columns per multiplication if group scales multiply the sums."""
_GROUPED_ELEMENTS_PER_PROGRAM = 1024
"""Number of elements that one program quantises if the groups of a row have scales of their own."""
MAX_ROW_ELEMENTS = 1 << 15
"""Maximum number of elements of a row that one program holds."""


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """The plan by which a kernel computes the product of a weight; see
    :func:`outrider_triton.quantized.jit.products.linear_quantized`.
    """

    mode: str
    """Granularity of the scales: one per ``row``, one per ``block`` of at least the columns of one multiplication, or
    ``fine``, per fewer columns.
    """
    native: bool
    """True if the matrix unit takes both operands as stored."""
    columns: int
    """Number of columns per scale, a power of two."""
    at_once: int
    """Maximum number of columns per multiplication; 0: a whole tile."""
    planes: bool = False
    """True if the product uses nibble planes (:func:`outrider_triton.quantized.jit.nibble_planes.linear_planes`)."""
    library_blocks: bool = False
    """True if torch's library multiplies the operands as stored, with scales of blocks and of groups of 128 columns."""
    can_stream: bool = False
    """True if a streamed kernel exists: with ``planes``
    :func:`outrider_triton.quantized.jit.nibble_planes_streamed.streamed_planes`, else
    :func:`outrider_triton.products.jit.streamed.streamed_linear`.
    """
    shares_units: bool = False
    """True if :func:`outrider_triton.quantized.jit.scaled_blocks.multiply_scaled_blocks` multiplies the operands."""

    def stored(self, format: str) -> OperandStorage:
        """Return the operand storage of a weight in ``format``, from which the time of this plan is estimated."""
        registered = TRITON_FORMATS[format]
        instructions = 0.0 if self.native else registered.convert_instructions * (1.0 if self.mode != "fine" else 1.3)
        instructions = 1.4 if self.planes else instructions
        least = 8 if self.planes or self.native else 16
        return OperandStorage(
            registered.elements.bits,
            1 if self.native else 2,
            self.at_once,
            instructions,
            not self.planes,
            least,
            self.can_stream,
            self.shares_units,
        )


def plan(facts: DeviceFacts, weight: QuantizedWeight, *, planes: bool = True) -> ProductPlan | None:
    """Return the plan for a weight, or None if the kernel can't multiply it. ``planes``: nibble planes may be used.

    The kernel can't multiply four kinds: a format that isn't registered; groups of columns (of the weight or its activations)
    that are neither a power of two nor a multiple of 64 times one; an odd number of four-bit columns; scales in float64.
    """
    k, columns = weight.shape[1], weight.block[1]
    zeros, at_once = weight.zero_points is not None, 0
    registered = TRITON_FORMATS.get(weight.format)
    if registered is None or weight.scales.dtype is torch.float64 or (registered.is_packed and k % 2):
        return None
    if columns >= k:
        mode, columns = ("block" if zeros else "row"), power_of_two(k)
    elif _power_of_two_factor(columns) >= 64:
        mode, at_once = "block", min(_power_of_two_factor(columns), _COLUMNS_PER_SCALE)
    elif _power_of_two_factor(columns) == columns and columns > 1:
        mode, at_once = "fine", 2 * _COLUMNS_PER_SCALE
    else:
        return None
    group = weight.activation_group if weight.activation_group < k else 0
    if group:
        at_once = min(at_once or _COLUMNS_PER_SCALE, _power_of_two_factor(group))
        if at_once < 32 or (mode == "fine" and at_once < columns):
            return None
    native = registered.is_native(facts) and weight.activations == weight.format and not zeros and mode != "fine"
    in_planes = (
        planes
        and registered.has_planes
        and mode != "fine"
        and k % UNIT_COLUMNS.value == 0
        and weight.data.data_ptr() % 4 == 0
    )
    in_planes = in_planes and weight.activations is None
    ring = in_planes and not zeros and mode == "block" and weight.block == (1, UNIT_COLUMNS.value)
    by_piece = mode == "block" and columns == group == UNIT_COLUMNS.value and weight.scales.shape[1] == k // columns
    by_row = mode == "row" and not group
    ring = ring or (native and registered.streams_rows and (by_row or by_piece) and k % UNIT_COLUMNS.value == 0)
    ring = ring and facts.streams_products and weight.data.data_ptr() % 16 == 0 and weight.scales.is_contiguous()
    ring = ring and weight.data.is_contiguous()
    by_block = native and by_piece and weight.block[0] == UNIT_COLUMNS.value
    shares = by_block and ring and weight.shape[0] % UNIT_COLUMNS.value == 0
    by_block = by_block and _library_scales_blocks(facts, weight)
    return ProductPlan(mode, native, columns, at_once, in_planes, by_block, ring, shares)


def _library_scales_blocks(facts: DeviceFacts, weight: QuantizedWeight) -> bool:
    """Return True if cuBLAS multiplies the weight with scales of blocks: from CUDA 12.9 on, on Hopper, if the rows of its
    scales are multiples of 16 bytes.
    """
    version = torch.version.cuda
    known = version is not None and tuple(map(int, version.split(".")[:2])) >= (12, 9)
    return known and facts.capability == 90 and weight.shape[0] % 128 == 0 and weight.scales.shape[1] % 4 == 0


def _power_of_two_factor(value: int) -> int:
    """Return the largest power of two that divides ``value``."""
    return value & -value


def quantized_rows(
    x: Tensor,
    format: str,
    group: int,
    input_scale: Tensor | None,
    dtype: torch.dtype,
    pdl: bool,
    *,
    plain: bool = False,
    by_group: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantise rows ``x`` [m, k]; return them in ``dtype`` and their scales, float32 [m, groups].

    ``plain``: multiply the rounded rows by their scales again. ``by_group``: see :func:`allocate_quantized`.
    """
    m, k = x.shape
    group = group if 0 < group < k else k
    expect(group <= MAX_ROW_ELEMENTS, lambda: f"activations in groups of {group}, expected at most {MAX_ROW_ELEMENTS}")
    out, scales = allocate_quantized(x, k, group, dtype, by_group)
    block = power_of_two(group)
    launch(
        jit_activations.quantize_rows,
        (m, scales.shape[1]),
        *(x, input_scale, out, scales, k, x.stride(0), group, *scales.stride()),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        PLAIN=plain,
        BLOCK=block,
        pdl=pdl,
        warps=warps_for(block // 2),
    )
    return out, scales


define("quantize_rows.triton", quantized_rows)


def weight_of_operands(
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    input_scale: Tensor | None,
    format: str,
    block: Sequence[int],
    shape: Sequence[int],
    activations: str,
    activation_group: int,
) -> QuantizedWeight:
    """Return the :class:`QuantizedWeight` that the operands of an operator describe."""
    return QuantizedWeight(
        format=format,
        data=data,
        scales=scales,
        block=(block[0], block[1]),
        shape=(shape[0], shape[1]),
        zero_points=zero_points,
        activations=activations or None,
        activation_group=activation_group,
        input_scale=input_scale,
    )


def flat_rows(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return ``x`` [..., K] as rows [m, K] with contiguous columns, for a product with the weight."""
    expect(
        x.shape[-1] == weight.shape[1],
        lambda: f"product of {tuple(x.shape)} with a quantised weight of {tuple(weight.shape)}",
    )
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _linear_quantized(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    block: Sequence[int],
    shape: Sequence[int],
    activations: str,
    activation_group: int,
    x_scales: Tensor | None,
    dtype: torch.dtype,
    parts: bool,
    mode: str,
    columns: int,
    at_once: int,
    native: bool,
    fp8: bool,
    asm: bool,
    config: list[int],
    pdl: bool,
) -> Tensor:
    """Return the product of ``x`` and a quantised weight. With ``x_scales``, ``x`` is quantised already.

    ``parts``: return a split product in parts, float32 [split, T, N], without the bias.
    """
    weight = weight_of_operands(data, scales, zero_points, input_scale, format, block, shape, activations, activation_group)
    tiling, registered = MatmulConfig(*config), TRITON_FORMATS[format]
    is_streamed = tiling.descriptor == STREAMED and native and registered.streams_rows and mode in ("row", "block")
    has_blocks = tiling.descriptor == SCALED_BLOCKS and native and mode == "block"
    supported = is_streamed or has_blocks or not tiling.descriptor
    expect(supported, lambda: f"a product with a quantised weight can't be tiled as {config}")
    flat = flat_rows(x, weight)
    (m, k), n = flat.shape, shape[0]
    # Without a split this is the whole product: programs always store to one tensor.
    product = torch.empty((tiling.split, m, n), dtype=torch.float32 if tiling.split > 1 else dtype, device=x.device)
    group, groups = 0, 1
    if activations:
        group = activation_group if activation_group < k else 0
        if x_scales is None:
            flat, x_scales = quantized_rows(flat, activations, group, input_scale, activation_dtype(data, native), pdl)
        groups = x_scales.shape[1]
    if is_streamed and x_scales is not None:
        out, whole_bias = (product, None) if tiling.split > 1 else (product[0], bias)
        multiply(flat, data, whole_bias, out, tiling, pdl, quantized=(x_scales, scales, block[0]))
        return _whole_or_parts(product, bias, x, dtype, parts, pdl)
    if has_blocks and x_scales is not None:
        multiply_blocks(flat, x_scales, data, scales, product[0], tiling, pdl)
        return _whole_or_parts(product if bias is None else product + bias, bias, x, dtype, parts, pdl)
    packed = registered.is_packed
    if packed and (flat.data_ptr() % 4 or flat.stride(0) % 2):
        flat = flat.clone(memory_format=torch.contiguous_format)
    row_bytes = k // 2 if packed else k
    rows_per_program = tiling.rows_per_program or tiling.block_n
    launch(
        quantized.linear_quantized,
        (triton.cdiv(n, rows_per_program), triton.cdiv(m, tiling.block_m), tiling.split),
        *(flat, x_scales, registered.kernel_data(data, native=native)),
        *(scales, zero_points, bias if tiling.split == 1 else None, product, m, n, k, flat.stride(0), groups),
        *(scales.shape[1], rows_per_program, tiling.prefetch_columns if row_bytes % 16 == 0 else 0),
        **registered.launch_constants,
        NATIVE=native,
        MODE=mode,
        ROWS=block[0],
        COLUMNS=columns,
        GROUP=group,
        FP8=fp8,
        ASM=asm,
        SUB=min(at_once, tiling.block_k) if at_once else tiling.block_k,
        SPLIT=tiling.split,
        **tiling.launch_constants(k),
        pdl=pdl,
    )
    return _whole_or_parts(product, bias, x, dtype, parts, pdl)


def _whole_or_parts(product: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype, parts: bool, pdl: bool) -> Tensor:
    """Return the only part of ``product``, or all ``parts``, or their sum and the bias."""
    if product.shape[0] == 1:
        return product.view(*x.shape[:-1], product.shape[2])
    return product if parts else sum_parts(product, bias, x, dtype, pdl)


def activation_dtype(data: Tensor, native: bool) -> torch.dtype:
    """Return the dtype of quantised activations: the weight's if ``native``, else float16, which holds the values of either
    format.
    """
    return data.dtype if native else torch.float16


def sum_parts(parts: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype, pdl: bool) -> Tensor:
    """Return the sum of ``parts`` [split, T, N] and ``bias`` in ``dtype``, shaped like a product of ``x``."""
    split, _, n = parts.shape
    out = torch.empty((*x.shape[:-1], n), dtype=dtype, device=x.device)
    block = 512
    launch(
        quantized.add_parts,
        (triton.cdiv(out.numel(), block),),
        *(parts, bias, out, out.numel(), n),
        PARTS=split,
        BLOCK=block,
        pdl=pdl,
        warps=2,
    )
    return out


# An overload of the operator that has the same operands.
define("linear_quantized.triton", _linear_quantized)


def _linear_quantized_add(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    rows: int,
    activations: str,
    group: int,
    x_scales: Tensor | None,
    residual: Tensor,
    config: list[int],
    pdl: bool,
) -> None:
    """Add a streamed product to ``residual`` [T, N] in place. ``x_scales``: the scales of a quantised ``x``, else it is
    quantised in groups of ``group`` columns (0: all); ``rows`` weight rows share a scale.
    """
    n = data.shape[0]
    expect(
        residual.is_contiguous() and residual.shape == (*x.shape[:-1], n),
        lambda: (
            f"adding a product of {tuple(x.shape)} to a residual of {tuple(residual.shape)}; expected contiguous rows of {n}"
        ),
    )
    if x_scales is None:
        x, x_scales = quantized_rows(x, activations, group, input_scale, data.dtype, pdl)
    multiply(x, data, bias, residual, MatmulConfig(*config), pdl, quantized=(x_scales, scales, rows), add=True)


define("linear_quantized.triton_add", _linear_quantized_add, writes=("residual",))


def allocate_quantized(like: Tensor, k: int, group: int, dtype: torch.dtype, by_group: int = 0) -> tuple[Tensor, Tensor]:
    """Return uninitialised quantised rows of ``k`` elements in ``dtype``, as many as ``like`` has, and their float32 scales,
    one per ``group`` columns (0: all).

    ``by_group``: the scales of a group are adjacent, and there are rows and scales for a multiple of ``by_group`` rows. The
    scales are returned for the rows of ``like``.
    """
    m, groups = like.numel() // like.shape[-1], -(-k // group) if group else 1
    padded = -(-m // by_group) * by_group if by_group else m
    shape = (groups, padded) if by_group else (padded, groups)
    scales = torch.empty(shape, dtype=torch.float32, device=like.device)
    return torch.empty((padded, k), dtype=dtype, device=like.device), scales.t()[:m] if by_group else scales


def _add_rms_norm_quantize(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    format: str,
    group: int,
    dtype: torch.dtype,
    by_group: int,
    unquantized: Tensor | None,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Add ``x`` and the bias to the residual; return the quantised norm and its scales. Store the norm to ``unquantized``,
    too, if it is given.

    ``x`` is [T, H], or [parts, T, H] of a split product.
    """
    expect(
        x.shape[-2:] == residual.shape and residual.is_contiguous() and x.is_contiguous(),
        lambda: f"adding {tuple(x.shape)} to a residual of {tuple(residual.shape)}; expected equal, contiguous rows",
    )
    (m, size), block = residual.shape, power_of_two(residual.shape[1])
    out, scales = allocate_quantized(residual, size, group, dtype, by_group)
    launch(
        jit_activations.add_rms_norm_quantize,
        (m,),
        *(x, bias, residual, weight, out, scales, unquantized, eps, size, residual.numel(), *scales.stride()),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        GROUP=min(group, block),
        PARTS=1 if x.dim() == 2 else x.shape[0],
        BLOCK=block,
        pdl=pdl,
    )
    return out, scales


define("add_rms_norm.triton_quantize", _add_rms_norm_quantize, writes=("residual", "unquantized"))


def _silu_mul_quantize(
    gate_up: Tensor, format: str, group: int, dtype: torch.dtype, by_group: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    size = gate_up.shape[-1] // 2
    block = min(power_of_two(size), max(group, _GROUPED_ELEMENTS_PER_PROGRAM)) if group else power_of_two(size)
    out, scales = allocate_quantized(gate_up, size, group, dtype, by_group)
    launch(
        jit_activations.silu_mul_quantize,
        (scales.shape[0], triton.cdiv(size, block)),
        *(gate_up.contiguous(), out, scales, size, *scales.stride()),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        GROUP=min(group, block),
        BLOCK=block,
        pdl=pdl,
    )
    return out, scales


define("silu_mul.triton_quantize", _silu_mul_quantize)
