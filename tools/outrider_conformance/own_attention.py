"""Check attention as the engine calls it: with the preferred page size and dtypes, and with host lengths if needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import (
    QUANTIZED_FORMATS,
    AttentionMetadata,
    Backend,
    CaptureContext,
    HostParam,
    KernelSet,
    QuantizedWeight,
    Stream,
)
from outrider_conformance.kernel_calls import KernelCalls, counts_of, layers_of
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.attention_operands import attention_metadata, in_float64, largest_error
from outrider_conformance.reporting.verdict import not_applicable

_HEADS, _KV_HEADS, _SIZE = 4, 2, 64
_SCALE = 0.125
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_LENGTHS = "lengths"
_FUSED = ("attention_norm_linear_quantized", "attention_norm_linear_silu_mul_quantized")
"""Kernels that compute attention and the following product in one call."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of a batch of sequences, and the kind of its attention."""

    new: tuple[int, ...]
    """New tokens of each sequence."""
    context: tuple[float, ...]
    """Cached tokens of each sequence before the new ones, in pages: lengths lie around a page's end for any page size."""
    tree: bool = False
    window: int = 0
    padding: int = 0

    @property
    def uniform(self) -> bool:
        """True if all sequences have the same number of new tokens, without padding."""
        return len(set(self.new)) == 1 and not self.padding

    def lengths(self, page_size: int) -> list[int]:
        """Return the cached tokens of each sequence, including the new ones."""
        return [n + int(c * page_size) for n, c in zip(self.new, self.context, strict=True)]


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


class OwnBatch:
    """Operands of a shape. Keys and values after the end of each sequence, and in page 0, are NaN."""

    def __init__(self, backend: Backend, shape: Shape, dtype: torch.dtype, *, room: int = 0) -> None:
        self.backend, self.shape, self.dtype = backend, shape, dtype
        page = self.page_size = backend.capabilities.page_size
        draw = torch.Generator().manual_seed(11)
        lengths = shape.lengths(page)
        columns = max(2, -(-(max(lengths) + room) // page))
        pages = 1 + len(lengths) * columns
        table = (torch.randperm(pages - 1, generator=draw) + 1).view(len(lengths), columns).to(torch.int32)
        caches = [torch.randn(pages, page, _KV_HEADS, _SIZE, generator=draw).to(dtype) for _ in "kv"]
        kept = torch.zeros(pages, page, dtype=torch.bool)
        filled = torch.tensor(lengths).unsqueeze(1) + room > torch.arange(columns * page)
        kept[table.long()] = filled.view(len(lengths), columns, page)
        for cache in caches:
            cache[~kept] = torch.nan
        tokens = sum(shape.new) + shape.padding
        starts = [sum(shape.new[:index]) for index in range(len(lengths) + 1)]
        self.host: dict[str, Tensor] = {
            "q": torch.randn(tokens, _HEADS, _SIZE, generator=draw).to(dtype),
            "k_cache": caches[0],
            "v_cache": caches[1],
            "query_start": torch.tensor(starts, dtype=torch.int32),
            "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "block_table": table,
        }
        if shape.tree:
            lane = torch.arange(max(shape.new))
            branches = ((lane[:, None] - lane) % 2 == 0) & (lane[:, None] >= lane) | (lane == 0)
            self.host["tree_mask"] = branches.repeat(len(lengths), 1)

    def upload(self, stream: Stream) -> dict[str, Tensor]:
        """Copy all operands to the device on ``stream``, and wait for the copies."""
        return Lab(self.backend).upload(stream, self.host)

    def metadata(self, o: Mapping[str, Tensor], exact: HostParam | None) -> AttentionMetadata:
        """Return the metadata of this batch, with the host lengths ``exact`` if given."""
        max_kv = o["block_table"].shape[1] * self.page_size
        host = {"tree_mask": o.get("tree_mask"), "uniform": self.shape.uniform, "seq_lens_host": exact}
        return attention_metadata(o, max_query=max(self.shape.new), max_kv=max_kv, **host)

    def attend(self, kernels: KernelSet, o: Mapping[str, Tensor], exact: HostParam | None) -> Tensor:
        """Call attention as the engine does, and return the rows without padding."""
        operands = o["q"], o["k_cache"], o["v_cache"], self.metadata(o, exact)
        out = kernels.paged_attention(*operands, scale=_SCALE, window=self.shape.window)
        return out[: sum(self.shape.new)]

    def check(self, found: Tensor, lengths: list[int], how: str) -> None:
        """Compare ``found`` with the reference on the host, which computes in float64."""
        wide = {**in_float64(self.host), "seq_lens": torch.tensor(lengths, dtype=torch.int32)}
        off = largest_error(found, self.attend(KernelSet(), wide, None))
        assert off <= _TOLERANCE[self.dtype], f"attention in {self.dtype}, pages of {self.page_size}, {how}: off by {off:.3g}"


def dtypes_of(backend: Backend) -> tuple[torch.dtype, ...]:
    """Return the preferred dtypes of the backend, or all declared dtypes if it prefers none."""
    has = backend.capabilities
    return has.preferred_dtypes or tuple(sorted(has.dtypes, key=str))


def check_called(lab: Lab, shape: Shape) -> None:
    """Check attention that is enqueued after slow work, in each dtype of :func:`dtypes_of`."""
    (stream,) = lab.streams("s")
    backend = lab.backend
    for dtype in dtypes_of(backend):
        batch = OwnBatch(backend, shape, dtype)
        lengths = shape.lengths(batch.page_size)
        made = batch.upload(stream)
        exact = HostParam(_LENGTHS, lengths) if backend.speculative_sync.exact_host_lengths else None
        lab.slow(stream)
        with backend.on(stream):
            out = batch.attend(backend.kernels_in_use, made, exact)
        stream.synchronize()
        batch.check(out, lengths, "called")
    _check_own(backend)


def check_in_graph(lab: Lab, shape: Shape) -> None:
    """Capture attention once, replay it for other lengths, and rebind the host lengths before each replay."""
    (stream,) = lab.streams("s")
    backend = lab.backend
    dtype = dtypes_of(backend)[0]
    batch = OwnBatch(backend, shape, dtype, room=40)
    made = batch.upload(stream)
    exact = backend.speculative_sync.exact_host_lengths
    lengths = shape.lengths(batch.page_size)
    with backend.on(stream):
        outputs = {"out": torch.zeros_like(made["q"][: sum(shape.new)])}
    stream.synchronize()

    def fn(context: CaptureContext) -> None:
        param = context.params[_LENGTHS] if exact else None
        context.outputs["out"].copy_(batch.attend(backend.kernels_in_use, context.inputs, param))

    params = {_LENGTHS: lengths} if exact else {}
    graph = backend.capture("attention", fn, stream=stream, inputs=made, outputs=outputs, params=params)
    for more in (0, 17, 40):
        now = [length + more for length in lengths]
        with backend.on(stream):
            made["seq_lens"].copy_(torch.tensor(now, dtype=torch.int32))
        if exact:
            graph.update_params({_LENGTHS: now}, stream=stream)
        graph.replay(stream)
        stream.synchronize()
        batch.check(outputs["out"], now, f"in a graph, with {more} tokens more than at its capture")
    _check_own(backend)


def check_joined(lab: Lab, shape: Shape) -> None:
    """Check that a layer with quantised weights uses the backend's own attention in its fused calls.

    The fused calls compute attention, the output projection, and the gate and up projections, with and without the
    activation. Other tests check the numbers.
    """
    (stream,) = lab.streams("s")
    backend = lab.backend
    formats = sorted(backend.capabilities.quantized_formats)
    if not formats:
        not_applicable("no format of quantised weights is declared")
    kernels = backend.kernels_in_use
    calls = counts_of(kernels)
    own = next((layer.name for layer in layers_of(kernels) if "paged_attention" in calls.overridden[layer.name]), None)
    if own is None:
        not_applicable("attention is the reference's")
    dtype = dtypes_of(backend)[0]
    batch = OwnBatch(backend, shape, dtype)
    made = batch.upload(stream)
    lengths = shape.lengths(batch.page_size)
    exact = HostParam(_LENGTHS, lengths) if backend.speculative_sync.exact_host_lengths else None
    hidden = _HEADS * _SIZE
    with backend.on(stream):
        weight = _ones(formats[0], hidden, backend.device)
        residual = torch.zeros(made["q"].shape[0], hidden, dtype=dtype, device=backend.device)
        norm = torch.ones(hidden, dtype=dtype, device=backend.device)
        both = _ones(formats[0], hidden, backend.device, rows=2 * hidden)
        attended = made["q"], made["k_cache"], made["v_cache"], batch.metadata(made, exact), weight, None
        following = residual, norm, 1e-5, both, None
        for name, more in zip(_FUSED, ((), (weight, None)), strict=True):
            before = _attention_calls(calls, own)
            getattr(kernels, name)(*attended, *following, *more, scale=_SCALE, window=shape.window)
            assert _attention_calls(calls, own) > before, (
                f"{own!r} has attention of its own, and a layer with quantised weights didn't call it: "
                f"{name} of an outer or inner kernel set computed attention instead"
            )
    stream.synchronize()


def _attention_calls(calls: KernelCalls, kernels: str) -> int:
    """Return how often these kernels computed attention, in plain calls and in fused calls that they computed themselves."""
    return sum(
        count
        for call, count in calls.counts.items()
        if call.kernels == kernels and (call.kernel == "paged_attention" or (call.own and call.kernel in _FUSED))
    )


def _ones(format: str, size: int, device: torch.device, *, rows: int = 0) -> QuantizedWeight:
    """Return a quantised weight whose elements are one small number, with one scale per row; square unless
    ``rows`` is given.
    """
    rows = rows or size
    data = QUANTIZED_FORMATS[format].encode(torch.ones(rows, size, device=device))
    scales = torch.full((rows, 1), 1 / size, device=device)
    return QuantizedWeight(format=format, data=data, scales=scales, block=(1, size), shape=(rows, size))


def _check_own(backend: Backend) -> None:
    """Fail if the kernel set that overrides attention left calls to the overridden method."""
    calls = counts_of(backend.kernels_in_use)
    for layer in layers_of(backend.kernels_in_use):
        if "paged_attention" not in calls.overridden[layer.name]:
            continue
        if "paged_attention" in layer.unused_overrides():
            return
        counts = calls.counts
        left = {c.shape for c in counts if (c.kernels, c.kernel, c.own) == (layer.name, "paged_attention", False)}
        assert not left, f"{layer.name!r} left its own attention to what it overrides, with {'; '.join(sorted(left))}"
        return
