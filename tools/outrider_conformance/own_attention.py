"""Batches for attention as the engine calls it, and checks that the backend's own attention answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from outrider.device import (
    QUANTIZED_FORMATS,
    AttentionBlock,
    AttentionTokens,
    Backend,
    LayerRows,
    QuantizedWeight,
    ResidualStream,
    RotaryArgs,
    Weight,
)
from outrider_conformance.kernel_calls import counts_of, layers_of
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.paged_batch import HEAD_SIZE, HEADS, SCALE, PagedBatch
from outrider_conformance.reporting.verdict import not_applicable

_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of a batch of sequences, and the kind of its attention."""

    new: tuple[int, ...]
    """Number of new tokens of each sequence."""
    pages: tuple[float, ...]
    """Cached tokens of each sequence before the new ones, in pages: lengths lie around a page's end for any page size."""
    tree: bool = False
    window: int = 0
    padding: int = 0

    def context(self, backend: Backend) -> list[int]:
        """Return the cached tokens of each sequence before the new ones."""
        return [int(count * backend.capabilities.page_size) for count in self.pages]

    def batch(self, lab: Lab, dtype: torch.dtype, room: int = 0) -> PagedBatch:
        """Return operands of this shape on a new stream, with the preferred page size."""
        (stream,) = lab.streams("s")
        return PagedBatch(
            lab,
            stream,
            self.new,
            self.context(lab.backend),
            dtype=dtype,
            page_size=lab.backend.capabilities.page_size,
            room=room,
            tree=self.tree,
            window=self.window,
            padding=self.padding,
        )


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "decoding": Shape((1, 1, 1), (0.1, 1.0, 1.5)),
        "a chain": Shape((4, 4, 4), (0.0, 0.99, 1.9)),
        "a tree": Shape((5, 5), (0.5, 1.0), tree=True),
        "a window": Shape((3, 3), (0.3, 1.2), window=9),
        "a ragged prompt": Shape((7, 1, 20), (0.0, 0.25, 1.0)),
        "padding": Shape((3, 2), (0.1, 1.0), padding=3),
    }
)


def preferred_dtypes(backend: Backend) -> tuple[torch.dtype, ...]:
    """Return the preferred dtypes of the backend, or all declared dtypes if it prefers none."""
    has = backend.capabilities
    return has.preferred_dtypes or tuple(sorted(has.dtypes, key=str))


def check_block(lab: Lab, shape: Shape, *, quantized: bool) -> None:
    """Fail if the attention block of a layer doesn't call the kernel set that has attention of its own. ``quantized``: the
    weights of the block are quantised.
    """
    backend, kernels = lab.backend, lab.backend.kernels_in_use
    formats = sorted(backend.capabilities.quantized_formats)
    if quantized and not formats:
        not_applicable("no format of quantised weights is declared")
    calls = counts_of(kernels)
    own = next((layer.name for layer in layers_of(kernels) if "paged_attention" in calls.overridden[layer.name]), None)
    if own is None:
        not_applicable("attention is the reference's")
    dtype = preferred_dtypes(backend)[0]
    batch = shape.batch(lab, dtype)
    hidden, tokens = HEADS * HEAD_SIZE, batch.made["q"].shape[0]
    metadata = batch.grown(shape.context(backend))

    def weight(rows: int) -> Weight:
        if quantized:
            return _ones(formats[0], rows, hidden, backend.device)
        return torch.full((rows, hidden), 1 / hidden, dtype=dtype, device=backend.device)

    def attention_calls() -> int:
        """Return how often the kernel set computed attention, alone and in attention blocks of its own."""
        alone = calls.count("paged_attention", kernels=own)
        return alone + calls.count("attention_block", kernels=own, own=True)

    with backend.on(batch.stream):
        norm = torch.ones(hidden, dtype=dtype, device=backend.device)
        block = AttentionBlock(
            norm=norm, eps=_EPS, qkv=weight(2 * hidden), output=weight(hidden), scale=SCALE, window=shape.window
        )
        ones = torch.ones(tokens, HEAD_SIZE, dtype=dtype, device=backend.device)
        slots = torch.arange(tokens, device=backend.device)
        rotary = RotaryArgs(ones, ones, batch.made["k_cache"], batch.made["v_cache"], slots)
        before = attention_calls()
        x = ResidualStream(kernels, torch.zeros(tokens, hidden, dtype=dtype, device=backend.device))
        rows = AttentionTokens(metadata, rotary, LayerRows())
        kernels.resolve_block("attention_block", block)(x, block, rows).norm(norm, _EPS)
        assert attention_calls() > before, (
            f"{own!r} has attention of its own, and the attention block of a layer didn't call it: attention_block of an "
            "outer or inner kernel set computed attention instead. Pass your attention on as the block's attend"
        )
    batch.stream.synchronize()


def _ones(format: str, rows: int, columns: int, device: torch.device) -> QuantizedWeight:
    """Return a quantised weight [rows, columns] in ``format`` whose elements are one small number, with one scale per row."""
    data = QUANTIZED_FORMATS[format].encode(torch.ones(rows, columns, device=device))
    scales = torch.full((rows, 1), 1 / columns, device=device)
    return QuantizedWeight(format=format, data=data, scales=scales, block=(1, columns), shape=(rows, columns))


def check_own_answers(backend: Backend) -> None:
    """Fail if the kernel set that overrides attention left calls to the overridden method."""
    calls = counts_of(backend.kernels_in_use)
    for layer in layers_of(backend.kernels_in_use):
        if "paged_attention" in calls.overridden[layer.name]:
            left = calls.shapes("paged_attention", kernels=layer.name, own=False)
            unused = "paged_attention" in layer.unused_overrides()
            assert unused or not left, f"{layer.name!r} left its own attention to what it overrides, with {'; '.join(left)}"
            return
