"""Copies of weights in faster layouts: for FBGEMM and oneDNN (PackedWeights), and for compiled functions (BlockWeight)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

_Product = Callable[[Tensor, Tensor | None], Tensor]
"""A product ``x @ weight.T + bias`` with a packed weight; x has the weight's dtype."""

_MIN_ELEMENTS = MappingProxyType({torch.float32: 1 << 18, torch.bfloat16: 1 << 16})
"""Minimum number of elements of a weight that is packed, by dtype: for smaller products the call costs more than the layout
saves.
"""
_MAX_BYTES = 2 << 30
"""Maximum bytes of all packed copies together. Further weights are not packed."""
_PLANNED_TOKENS = 4
"""Number of tokens for which oneDNN chooses the layout of a packed weight."""
_MAX_TOKENS = 64
"""Maximum number of tokens for which a packed weight is faster (docs/evidence/README.md#2026-11-28-packed-weights)."""
_PACKING_PRODUCTS = 64
"""Number of products with a weight whose faster copy saves about half the time of packing it."""
_CHECKED_ELEMENTS = 1 << 18
"""Number of elements of a weight that are checked at a time; they fit into the cache of a core."""
_FLOAT16_EXPONENT = 15
"""Values below 2 to this power are finite in float16."""
_FBGEMM_ENGINES = frozenset({"fbgemm", "x86"})
"""Names of torch's quantized engines that pack weights for FBGEMM."""


def is_observed() -> bool:
    """Return True if a torch dispatch mode or function mode is active. Such a mode sees the operators of the backend
    interface, so no other operators may replace them.
    """
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


class _PackedCopy(NamedTuple):
    weight: weakref.ref[Tensor]
    version: int
    """Version of the weight's values that were packed."""
    max_elements: float
    """Elements of the largest x."""
    product: _Product | None = None
    num_bytes: int = 0
    exponent: int | None = None
    """Of the power of two of a float16 copy that is due, or None."""


class PackedWeights:
    """Packed copies of the weights of one kernel set. A copy is made for a weight's second product, and is freed with it.

    A weight whose values are exact in float16, up to one power of two, has its copy in float16: FBGEMM multiplies it with
    float32 activations and sums in float32, so only the order of the sums differs from the product with the weight itself.
    Values from a float16 or bfloat16 checkpoint are exact. Other weights have a copy of their own dtype for oneDNN.

    FBGEMM packs ten times slower than oneDNN. A weight therefore has oneDNN's copy first, and the float16 copies follow one
    after another, so that an iteration packs on average one part in ``packing_products`` of the weights that it multiplies.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, packing_products: int = _PACKING_PRODUCTS) -> None:
        self._copies: dict[int, _PackedCopy] = {}
        self._free_bytes = max_bytes
        self._packing_products = packing_products
        self._credit = 0.0
        """Elements of float16 copies that past products have paid for."""
        self._onednn_dtypes = {torch.float32, torch.bfloat16} if torch.backends.mkldnn.is_available() else set()
        if self._onednn_dtypes and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._onednn_dtypes.discard(torch.bfloat16)
        self._float16_dtypes = {torch.float32, torch.bfloat16} - (self._onednn_dtypes - {torch.float32})
        if torch.backends.quantized.engine not in _FBGEMM_ENGINES:
            self._float16_dtypes = set()
        self._dtypes = self._onednn_dtypes | self._float16_dtypes

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return ``x @ weight.T + bias``, or None if the weight isn't packed.

        An observer of torch's operators sees the weight itself: products under a dispatch mode use no copy.
        """
        if x.dtype is not weight.dtype or is_observed() or not (elements := x.numel()):
            return None
        # A weight that inference mode made has no version: torch refuses to change it outside of that mode.
        version = 0 if weight.is_inference() else weight._version
        copy = self._copies.get(id(weight))
        if copy is None or copy.version != version:
            self._register(weight, version, elements)  # most weights of tests have one product
            return None
        if elements > copy.max_elements:
            return None
        if copy.product is None or copy.exponent is not None:
            copy = self._pack(weight, copy)
        return None if copy.product is None else copy.product(x, bias)

    def _register(self, weight: Tensor, version: int, elements: int) -> None:
        """Record that a weight was multiplied once, by an x of ``elements`` elements, so that its second product makes a
        copy. Do nothing for a weight or an x that no copy serves.
        """
        key, dtype = id(weight), weight.dtype
        self._drop(key)
        if dtype not in self._dtypes or weight.numel() < _MIN_ELEMENTS[dtype] or not weight.is_contiguous():
            return
        limit = _MAX_TOKENS * weight.shape[1] if dtype in self._onednn_dtypes else math.inf
        if elements <= limit:
            self._copies[key] = _PackedCopy(weakref.ref(weight, lambda _: self._drop(key)), version, limit)

    def _pack(self, weight: Tensor, copy: _PackedCopy) -> _PackedCopy:
        """Make the first copy of the weight if there is room, or the float16 copy that replaces it if its turn has come."""
        has_onednn, elements = weight.dtype in self._onednn_dtypes, weight.numel()
        if copy.product is None:
            if weight.nbytes > self._free_bytes:
                return copy
            exponent = _float16_exponent(weight.detach()) if weight.dtype in self._float16_dtypes else None
            copy = copy._replace(exponent=exponent)
            if has_onednn:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PLANNED_TOKENS)
                copy = self._keep(weight, copy._replace(product=partial(_multiply_onednn, packed), num_bytes=weight.nbytes))
            elif exponent is None:
                return self._keep(weight, copy._replace(max_elements=-1))
        if copy.exponent is None:
            return copy
        self._credit += elements / self._packing_products if has_onednn else elements
        if self._credit < elements:
            return copy
        self._credit -= elements
        product = partial(_multiply_float16, _pack_float16(weight.detach(), copy.exponent), 2.0**-copy.exponent)
        num_bytes = elements * torch.float16.itemsize
        return self._keep(weight, copy._replace(product=product, num_bytes=num_bytes, exponent=None))

    def _keep(self, weight: Tensor, copy: _PackedCopy) -> _PackedCopy:
        """Replace the weight's copy and return the new one."""
        self._free_bytes += self._copies[id(weight)].num_bytes - copy.num_bytes
        self._copies[id(weight)] = copy
        return copy

    def _drop(self, key: int) -> None:
        copy = self._copies.pop(key, None)
        self._free_bytes += 0 if copy is None else copy.num_bytes


def _float16_exponent(weight: Tensor) -> int | None:
    """Return the exponent of a power of two that makes all values of the weight exact in float16, or None. 0 is preferred."""
    largest = max(abs(bound.item()) for bound in weight.aminmax())
    if not math.isfinite(largest):
        return None
    for exponent in (0, _FLOAT16_EXPONENT - math.frexp(largest)[1]):
        parts = (part.float() * 2.0**exponent for part in weight.view(-1).split(_CHECKED_ELEMENTS))
        if all(torch.equal(part.half().float(), part) for part in parts):
            return exponent
    return None


def _pack_float16(weight: Tensor, exponent: int) -> torch.ScriptObject:
    """Return the weight times a power of two in FBGEMM's layout."""
    scaled = weight.float() if exponent == 0 else weight.float() * 2.0**exponent
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16.default(scaled, None)
    return packed


def _multiply_float16(packed: torch.ScriptObject, scale: float, x: Tensor, bias: Tensor | None) -> Tensor:
    narrow = x.dtype is not torch.float32
    made: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x.float() if narrow else x, packed)
    if scale != 1.0:
        made.mul_(scale)
    if bias is not None:
        made.add_(bias)
    return made.to(x.dtype) if narrow else made


def _multiply_onednn(packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    return made


# -- weights of 4- or 8-bit integers, recovered from their float32 values ----------------------------------------------


GROUP = 32
"""Columns of a weight that share a scale."""
TILE = 32
"""Rows of a weight in a tile."""
_PROBED_ROWS = 4
"""Rows that are checked before the whole weight is."""
_ROWS_AT_A_TIME = 4 * TILE
"""Rows that are converted at a time; they fit into the cache of a core."""


class BlockWeight(NamedTuple):
    """A weight in the layout of :mod:`outrider_cpu.block_functions`."""

    data: Tensor
    """uint8 [tiles, groups, bytes of a record]."""
    bits: int
    tiles: int
    groups: int


class _Blocks(NamedTuple):
    layout: int
    """Index of the GGUF type in the order in which :func:`_recover` tries them."""
    bits: int
    values: Tensor
    """uint8 or int8 [N, G, 32]."""
    scales: tuple[Tensor, ...]
    """float16 [N, G] each: the scales, then the minima if there are some."""


def pack_blocks(weight: Tensor) -> BlockWeight | None:
    """Return the float32 ``weight`` [N, K] in blocks, or None if some value isn't exactly one of 4- or 8-bit blocks.

    ``Q4_0``, ``Q4_1`` and ``Q8_0`` of GGUF have such values.
    """
    if weight.dtype is not torch.float32 or weight.dim() != 2 or weight.shape[0] % TILE or weight.shape[1] % GROUP:
        return None
    weight = weight.detach()
    blocks = _recover(weight[:_PROBED_ROWS])
    parts: list[Tensor] = []
    for rows in weight.split(_ROWS_AT_A_TIME):
        bits = 0 if blocks is None else blocks.bits
        blocks = None if blocks is None else _recover(rows, blocks.layout)
        if blocks is None or bits != blocks.bits:
            return None
        parts.append(_to_records(blocks))
    return BlockWeight(torch.cat(parts), bits, weight.shape[0] // TILE, weight.shape[1] // GROUP)


def _recover(rows: Tensor, likely: int = 0) -> _Blocks | None:
    """Return the integers, scales and minima that give exactly the values of ``rows`` [N, K], or None. The layout
    ``likely`` is tried first.
    """
    grouped = rows.unflatten(1, (-1, GROUP))
    lowest, highest = grouped.amin(dim=2), grouped.amax(dim=2)  # faster than aminmax
    magnitude = torch.maximum(highest, -lowest)
    signed = torch.where(-lowest < magnitude, -magnitude, magnitude)
    layouts = (
        ((highest - lowest) / 15, lowest),  # Q4_1
        (signed / 8, -signed),  # Q4_0
        (magnitude / 127, None),  # Q8_0
        ((magnitude / 127).log2().ceil().exp2(), None),  # 8 bits with a power of two, which bfloat16 holds
    )
    for layout in sorted(range(len(layouts)), key=likely.__ne__):
        step, minimum = layouts[layout]
        scale = step.half()
        wide = scale.float().unsqueeze(2)
        offsets = grouped if minimum is None else grouped - minimum.unsqueeze(2)
        values = (offsets * torch.where(wide == 0, 0, wide.reciprocal())).round_()
        made = values * wide if minimum is None else values * wide + minimum.unsqueeze(2)
        if not torch.equal(made, grouped):
            continue
        if minimum is None:
            return _Blocks(layout, 8, values.to(torch.int8), (scale,))
        if torch.equal(minimum.half().float(), minimum) and int(values.max()) < 1 << 4:
            return _Blocks(layout, 4, values.to(torch.uint8), (scale, minimum.half()))
    return None


def _to_records(blocks: _Blocks) -> Tensor:
    """Return the records uint8 [tiles, G, bytes] of whole tiles."""
    fours = blocks.values.view(torch.int32)  # of columns; a word has even columns in its lower half, odd ones in its upper
    if blocks.bits == 8:
        words = fours & ~0x00FFFF00 | fours >> 8 & 0xFF00 | (fours & 0xFF00) << 8
    else:
        pairs = fours & 0x0F0F | fours >> 12 & 0xF0F0
        pairs = pairs & 0x00FF | (pairs & 0xFF00) << 8
        words = pairs[..., 0::2] | pairs[..., 1::2] << 8
    tiles, groups = words.shape[0] // TILE, words.shape[1]
    ordered = words.view(tiles, TILE, -1).mT.contiguous().view(tiles, groups, -1).view(torch.uint8)
    scales = [each.view(tiles, TILE, groups).transpose(1, 2).contiguous().view(torch.uint8) for each in blocks.scales]
    return torch.cat((ordered, *scales), dim=2)
