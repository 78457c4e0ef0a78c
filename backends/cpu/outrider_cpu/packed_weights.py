"""PackedWeights: copies of weights in the layout of oneDNN's products with few tokens."""

from __future__ import annotations

import weakref
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

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


class _PackedCopy(NamedTuple):
    weight: weakref.ref[Tensor]
    version: int
    """Version of the weight's values that were packed."""
    packed: Tensor | None
    num_bytes: int


class PackedWeights:
    """Packed copies of the weights of one kernel set. A copy is made for a weight's second product, and is freed with it."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._copies: dict[int, _PackedCopy] = {}
        self._free_bytes = max_bytes
        self._dtypes = {torch.float32, torch.bfloat16} if torch.backends.mkldnn.is_available() else set()
        if self._dtypes and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._dtypes.discard(torch.bfloat16)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return ``x @ weight.T + bias``, or None if the weight isn't packed.

        An observer of torch's operators sees the weight itself: products under a dispatch mode use no copy.
        """
        if x.dtype not in self._dtypes or x.dtype is not weight.dtype or weight.numel() < _MIN_ELEMENTS[x.dtype]:
            return None
        if not 0 < x.numel() <= _MAX_TOKENS * weight.shape[1] or not weight.is_contiguous():
            return None
        if torch._C._len_torch_dispatch_stack() or (packed := self._find(weight)) is None:
            return None
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
        return made

    def _find(self, weight: Tensor) -> Tensor | None:
        """Return the copy of the weight's present values, or None at the first call: most weights of tests have one product.

        A weight that inference mode made has no version: torch refuses to change it outside of that mode.
        """
        key, version = id(weight), 0 if weight.is_inference() else weight._version
        copy = self._copies.get(key)
        if copy is None or copy.version != version:
            self._drop(key)
            self._copies[key] = _PackedCopy(weakref.ref(weight, lambda _: self._drop(key)), version, None, 0)
            return None
        if copy.packed is None and weight.nbytes <= self._free_bytes:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PLANNED_TOKENS)
            self._free_bytes -= weight.nbytes
            self._copies[key] = copy = copy._replace(packed=packed, num_bytes=weight.nbytes)
        return copy.packed

    def _drop(self, key: int) -> None:
        copy = self._copies.pop(key, None)
        self._free_bytes += 0 if copy is None else copy.num_bytes
