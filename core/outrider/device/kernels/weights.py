"""Weights of products in any format: unquantized tensors, quantised weights, and weights that are split by rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.device.errors import ConfigError
from outrider.device.kernels.quantized import QuantizedWeight

if TYPE_CHECKING:
    from outrider.device.kernels.model_kernels import ModelKernels


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A weight whose row blocks are stored in different formats, for example q quantised and k unquantized."""

    parts: tuple[Tensor | QuantizedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all parts together, and their columns."""
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)


Weight = Tensor | QuantizedWeight | SplitWeight
"""A weight [out, in] of a product."""


def linear(kernels: ModelKernels, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, with the kernel of the weight's format."""
    if isinstance(weight, Tensor):
        return kernels.linear(x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return kernels.linear_quantized(x, weight, bias)
    product = torch.cat([linear(kernels, x, part) for part in weight.parts], dim=-1)
    return product if bias is None else product + bias


def plain(weight: Weight) -> Tensor:
    """Return an unquantized weight as a tensor. Raises :class:`ConfigError` for a quantised weight."""
    if not isinstance(weight, Tensor):
        raise ConfigError(f"expected a plain weight, found {label(weight)}")
    return weight


def label(weight: Weight) -> str:
    """Return the storage format of a weight in words."""
    if isinstance(weight, SplitWeight):
        return " and ".join(dict.fromkeys(label(part) for part in weight.parts))
    return "plain" if isinstance(weight, Tensor) else weight.label


def quantized_products(record: object) -> Counter[str]:
    """Count the quantised products in a record of weights, by the words of their format."""
    if isinstance(record, QuantizedWeight):
        return Counter((record.label,))
    if isinstance(record, SplitWeight):
        return sum((quantized_products(part) for part in record.parts), Counter())
    if isinstance(record, tuple):
        return sum((quantized_products(each) for each in record), Counter())
    if is_dataclass(record) and not isinstance(record, type):
        return sum((quantized_products(getattr(record, each.name)) for each in fields(record)), Counter())
    return Counter()
