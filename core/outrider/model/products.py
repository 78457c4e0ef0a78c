"""Products of a model with its weights, plain or quantised: which kernel each of them takes.

Letters: T new tokens, H hidden size, Hq query heads, Hkv key heads, D head size, I intermediate size.
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
    """A weight whose rows lie in several parts, since these are stored in different ways: q quantised and k plain, say."""

    parts: tuple[Tensor | QuantizedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all parts, and their columns."""
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


Weight = Tensor | QuantizedWeight | SplitWeight
"""A weight [out, in] of a product. Only a tensor takes part in the kernels that join a product with what follows it."""


class OtherProduct(NamedTuple):
    """As :class:`~outrider.device.Product`, for a weight that is no tensor.

    ``gated``, ``maxima``: see :class:`~outrider.device.QuantizedProduct`.
    """

    x: Tensor
    weight: QuantizedWeight | SplitWeight
    bias: Tensor | None
    gated: bool = False
    maxima: Tensor | None = None


class Attending(NamedTuple):
    """As :class:`OtherProduct` of what attention gives, before attention: ``operands`` of
    :meth:`~outrider.device.KernelSet.paged_attention`, q [T, Hq, D], both caches, metadata.
    """

    operands: tuple[Tensor, Tensor, Tensor, AttentionMetadata]
    output: QuantizedWeight
    bias: Tensor | None


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Product | OtherProduct:
    """A product that is still to be made."""
    return Product(x, weight, bias) if isinstance(weight, Tensor) else OtherProduct(x, weight, bias)


def plain(weight: Weight) -> Tensor:
    """The weight as the tensor that it is; :class:`ConfigError` for another."""
    if not isinstance(weight, Tensor):
        raise ConfigError(f"expected a plain weight, found {label(weight)}")
    return weight


def label(weight: Weight) -> str:
    """How the weight is stored, in words."""
    if isinstance(weight, SplitWeight):
        return " beside ".join(dict.fromkeys(label(part) for part in weight.parts))
    return "plain" if isinstance(weight, Tensor) else weight.label


def linear(kernels: KernelSet, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``."""
    if isinstance(weight, Tensor):
        return kernels.linear(x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return kernels.linear_quantized(x, weight, bias)
    made = torch.cat([linear(kernels, x, part) for part in weight.parts], dim=-1)
    return made if bias is None else made + bias


def multiply(kernels: KernelSet, made: Product | OtherProduct) -> Tensor:
    """A product that was still to be made."""
    gated = isinstance(made, OtherProduct) and made.gated
    return linear(kernels, kernels.silu_mul(made.x) if gated else made.x, made.weight, made.bias)


def quantized_product(made: object) -> QuantizedProduct | None:
    """The product as one with a quantised weight; None for any other, and for what is no product."""
    if isinstance(made, OtherProduct) and isinstance(made.weight, QuantizedWeight):
        return QuantizedProduct(made.x, made.weight, made.bias, made.gated, made.maxima)
    return None


def linear_silu_mul(kernels: KernelSet, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """See :meth:`KernelSet.linear_silu_mul`."""
    if isinstance(weight, Tensor):
        return kernels.linear_silu_mul(x, weight, bias)
    return kernels.silu_mul(linear(kernels, x, weight, bias))


def linear_rope_write_cache(kernels: KernelSet, made: Product | OtherProduct, rotary: RotaryArgs) -> Tensor:
    """See :meth:`KernelSet.linear_rope_write_cache`."""
    if isinstance(made, Product):
        return kernels.linear_rope_write_cache(made, rotary)
    if isinstance(made.weight, QuantizedWeight) and not made.gated:
        return kernels.linear_quantized_rope_write_cache(made.x, made.weight, made.bias, rotary)
    return rope_write_cache(kernels, multiply(kernels, made), rotary)


def rope_write_cache(kernels: KernelSet, made: Tensor, rotary: RotaryArgs) -> Tensor:
    """Rotate and cache what a product made of queries, keys and values, [T, (Hq + 2 Hkv) D] → queries [T, Hq, D]."""
    q, k, v = rotary.split(made)
    kernels.rope_write_cache(q, k, v, *rotary)
    return q


def quantized_products(record: object) -> Counter[str]:
    """How many products of a record of weights are stored in which quantised way, by the words for it."""
    if isinstance(record, QuantizedWeight):
        return Counter((record.label,))
    if isinstance(record, SplitWeight):
        return sum((quantized_products(part) for part in record.parts), Counter())
    if isinstance(record, tuple):
        return sum((quantized_products(each) for each in record), Counter())
    if is_dataclass(record) and not isinstance(record, type):
        return sum((quantized_products(getattr(record, each.name)) for each in fields(record)), Counter())
    return Counter()
