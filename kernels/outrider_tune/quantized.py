"""GEMMs with random quantized weights, for measurements that depend on the bytes of weights and not on their values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.device import KernelSet, QuantizedWeight
from outrider.device.kernels.tuning import DecoderShape
from outrider.device.kernels.weight_formats import weight_format
from outrider_tune.measure import TimedKernelCase


def quantized_cases(
    name: str, shape: DecoderShape, *, tokens: int, rotate_bytes: int, dtype: torch.dtype, device: torch.device
) -> Iterator[TimedKernelCase]:
    """Yield GEMMs of a decoder layer and the output head, with rotating weights of the quantization ``name``."""
    attention = shape.heads * shape.head_size
    products = {
        "qkv": (attention + 2 * shape.kv_heads * shape.head_size, shape.hidden),
        "output": (shape.hidden, attention),
        "gate and up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "head": (shape.vocabulary, shape.hidden),
    }
    way = weight_format(name)
    for label, (rows, columns) in products.items():
        first = way.random_weight(rows, columns, device=device, scales_dtype=dtype)
        copies = max(2, -(-rotate_bytes // first.nbytes))
        weights = [
            first,
            *(way.random_weight(rows, columns, device=device, scales_dtype=dtype) for _ in range(copies - 1)),
        ]
        x = torch.randn(tokens, columns, dtype=dtype, device=device)

        def call(kernels: KernelSet, number: int, x: Tensor = x, weights: list[QuantizedWeight] = weights) -> Tensor:
            return kernels.linear_quantized(x, weights[number % len(weights)])

        moved = first.nbytes + x.nbytes + tokens * rows * dtype.itemsize
        yield TimedKernelCase("linear_quantized", f"{name} {label}, {tokens} tokens", moved, call)
