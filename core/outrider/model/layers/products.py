"""Products with unquantized and quantized weights, and the kernel that computes each.

Letters: T new tokens, H hidden size, Hq query heads, Hkv KV heads, D head size, I intermediate size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import (
    AttentionMetadata,
    ConfigError,
    KernelSet,
    Product,
    QuantizedProduct,
    QuantizedWeight,
    RotaryArgs,
)


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A weight whose row blocks are stored in different formats, for example q quantized and k unquantized."""

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
"""A weight [out, in] of a product. Kernels that fuse a product with the following operation take a tensor only."""


class OtherProduct(NamedTuple):
    """A :class:`~outrider.device.Product` whose weight is not a tensor.

    ``gated`` and ``maxima`` are those of :class:`~outrider.device.QuantizedProduct`.
    """

    x: Tensor
    weight: QuantizedWeight | SplitWeight
    bias: Tensor | None
    gated: bool = False
    maxima: Tensor | None = None


class Attending(NamedTuple):
    """Attention whose output product is quantized, deferred until the next norm.

    ``operands`` are those of :meth:`~outrider.device.KernelSet.paged_attention`: q [T, Hq, D], both caches, metadata.
    """

    operands: tuple[Tensor, Tensor, Tensor, AttentionMetadata]
    output: QuantizedWeight
    bias: Tensor | None


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Product | OtherProduct:
    """Return a record of the product of ``x`` and a weight, which the caller computes later."""
    return Product(x, weight, bias) if isinstance(weight, Tensor) else OtherProduct(x, weight, bias)


def plain(weight: Weight) -> Tensor:
    """Return an unquantized weight as a tensor. Raises :class:`ConfigError` for a quantized weight."""
    if not isinstance(weight, Tensor):
        raise ConfigError(f"expected a plain weight, found {label(weight)}")
    return weight


def label(weight: Weight) -> str:
    """Return the storage format of a weight in words."""
    if isinstance(weight, SplitWeight):
        return " and ".join(dict.fromkeys(label(part) for part in weight.parts))
    return "plain" if isinstance(weight, Tensor) else weight.label


def linear(kernels: KernelSet, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` for an unquantized, quantized or split weight."""
    if isinstance(weight, Tensor):
        return kernels.linear(x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return kernels.linear_quantized(x, weight, bias)
    made = torch.cat([linear(kernels, x, part) for part in weight.parts], dim=-1)
    return made if bias is None else made + bias


def multiply(kernels: KernelSet, made: Product | OtherProduct) -> Tensor:
    """Compute a recorded product of activations and a weight."""
    gated = isinstance(made, OtherProduct) and made.gated
    return linear(kernels, kernels.silu_mul(made.x) if gated else made.x, made.weight, made.bias)


def quantized_product(made: object) -> QuantizedProduct | None:
    """Return the recorded product ``made`` if its weight is quantized, else None."""
    if isinstance(made, OtherProduct) and isinstance(made.weight, QuantizedWeight):
        return QuantizedProduct(made.x, made.weight, made.bias, made.gated, made.maxima)
    return None


def linear_silu_mul(kernels: KernelSet, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Compute :meth:`KernelSet.linear_silu_mul` with a weight of any format."""
    if isinstance(weight, Tensor):
        return kernels.linear_silu_mul(x, weight, bias)
    return kernels.silu_mul(linear(kernels, x, weight, bias))


def linear_rope_write_cache(kernels: KernelSet, made: Product | OtherProduct, rotary: RotaryArgs) -> Tensor:
    """Compute :meth:`KernelSet.linear_rope_write_cache` with a weight of any format."""
    if isinstance(made, Product):
        return kernels.linear_rope_write_cache(made, rotary)
    if isinstance(made.weight, QuantizedWeight) and not made.gated:
        return kernels.linear_quantized_rope_write_cache(made.x, made.weight, made.bias, rotary)
    return rope_write_cache(kernels, multiply(kernels, made), rotary)


def rope_write_cache(kernels: KernelSet, made: Tensor, rotary: RotaryArgs) -> Tensor:
    """Rotate q and k of a product's result [T, (Hq + 2 Hkv) D], write k and v to the cache, and return q [T, Hq, D]."""
    q, k, v = rotary.split(made)
    kernels.rope_write_cache(q, k, v, *rotary)
    return q


def quantized_products(record: object) -> Counter[str]:
    """Count the quantized products in a record of weights, by the words of their format."""
    if isinstance(record, QuantizedWeight):
        return Counter((record.label,))
    if isinstance(record, SplitWeight):
        return sum((quantized_products(part) for part in record.parts), Counter())
    if isinstance(record, tuple):
        return sum((quantized_products(each) for each in record), Counter())
    if is_dataclass(record) and not isinstance(record, type):
        return sum((quantized_products(getattr(record, each.name)) for each in fields(record)), Counter())
    return Counter()
