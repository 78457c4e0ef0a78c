"""Random quantized weights and their GEMMs, for measurements that depend on the bytes of weights and not on their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import QUANTIZED_FORMATS, ConfigError, KernelSet, QuantizedWeight
from outrider.device.kernels.tuning import DecoderShape
from outrider_tune.measure import TimedKernelCase

_SPREAD = {"fp8": 60.0, "int8": 40.0, "int4": 4.6}
"""Standard deviation of the values; of four bits, those of all words alike."""
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomFormat:
    """A quantization format of random weights.

    ``rows`` and ``columns`` are the size of a scale's block; 0 means all. ``activations`` is the format of dynamically
    quantized activations, or None.
    """

    format: str
    rows: int = 1
    columns: int = 0
    zeros: bool = False
    activations: str | None = None
    activation_group: int = 0


RANDOM_FORMATS: Mapping[str, RandomFormat] = MappingProxyType(
    {
        "fp8": RandomFormat(format="fp8", activations="fp8"),
        "fp8-tensor": RandomFormat(format="fp8", rows=0, activations="fp8"),
        "fp8-block": RandomFormat(format="fp8", rows=128, columns=128, activations="fp8", activation_group=128),
        "int8": RandomFormat(format="int8", activations="int8"),
        "int4": RandomFormat(format="int4", columns=128),
        "int4-zeros": RandomFormat(format="int4", columns=128, zeros=True),
        "int4-32": RandomFormat(format="int4", columns=32),
    }
)
"""By name: per channel or tensor, blocks of 128 by 128, groups of 128 and 32."""


def random_format(name: str) -> RandomFormat:
    """Return the random-weight format called ``name``. Raises :class:`ConfigError` for an unknown name."""
    if name not in RANDOM_FORMATS:
        raise ConfigError(f"there are no random weights in the format {name!r}; expected one of {', '.join(RANDOM_FORMATS)}")
    return RANDOM_FORMATS[name]


def random_quantized(
    way: RandomFormat,
    rows: int,
    columns: int,
    *,
    device: torch.device,
    generator: torch.Generator | None = None,
    scales_dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Return a random quantized weight [rows, columns] whose products have about the magnitude of their input.

    Scales have the model's dtype ``scales_dtype``, as in checkpoints; scales of whole rows are float32, as after loading.
    """
    block = (way.rows or rows, way.columns or columns)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    held = (rows, -(-columns // 2)) if way.format == "int4" else (rows, columns)
    data = torch.empty(held, dtype=QUANTIZED_FORMATS[way.format].dtype, device=device)
    for part in data.split(_ROWS_AT_ONCE):
        if way.format == "fp8":
            drawn = torch.empty(part.shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
            part.copy_(drawn.mul_(_SPREAD["fp8"]).clamp_(-448, 448))
        elif way.format == "int8":
            drawn = torch.empty(part.shape, dtype=torch.float32, device=device).normal_(generator=generator)
            part.copy_(drawn.mul_(_SPREAD["int8"]).clamp_(-128, 127))
        else:
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, device=device, generator=generator))
    scale = columns**-0.5 / _SPREAD[way.format]
    scales = torch.empty(grid, dtype=torch.float32, device=device).uniform_(0.9 * scale, 1.1 * scale, generator=generator)
    if block[1] < columns:
        scales = scales.to(scales_dtype)
    zeros = torch.randint(-2, 3, grid, dtype=torch.int8, device=device, generator=generator) if way.zeros else None
    return QuantizedWeight(
        format=way.format,
        data=data,
        scales=scales,
        block=block,
        shape=(rows, columns),
        zero_points=zeros,
        activations=way.activations,
        activation_group=way.activation_group,
    )


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
    way = random_format(name)
    for label, (rows, columns) in products.items():
        first = random_quantized(way, rows, columns, device=device, scales_dtype=dtype)
        copies = max(2, -(-rotate_bytes // first.nbytes))
        weights = [
            first,
            *(random_quantized(way, rows, columns, device=device, scales_dtype=dtype) for _ in range(copies - 1)),
        ]
        x = torch.randn(tokens, columns, dtype=dtype, device=device)

        def call(kernels: KernelSet, number: int, x: Tensor = x, weights: list[QuantizedWeight] = weights) -> Tensor:
            return kernels.linear_quantized(x, weights[number % len(weights)])

        moved = first.nbytes + x.nbytes + tokens * rows * dtype.itemsize
        yield TimedKernelCase("linear_quantized", f"{name} {label}, {tokens} tokens", moved, call)
