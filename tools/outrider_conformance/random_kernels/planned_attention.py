"""Check planned attention against the reference: with a new plan, with a renewed plan, and in a graph."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, AttentionShape, CaptureContext, HostParam, KernelSet, Stream
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.attention_operands import attention_metadata, in_float64, largest_error

_HEADS, _KV_HEADS, _SIZE, _PAGE, _PAGES = 4, 2, 64, 16, 5
_SCALE = 0.125
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
_LENGTHS = ((17, 40, 3), (61, 5, 16))
"""Cached tokens of each sequence before the new ones, for two batches in turn."""


class PlannedBatch:
    """Operands of three sequences on the device. Each batch writes its own lengths into them."""

    def __init__(self, lab: Lab, stream: Stream, new: Sequence[int], *, window: int = 0) -> None:
        self.lab, self.stream, self.new, self.window = lab, stream, tuple(new), window
        declared = lab.backend.capabilities.dtypes
        self.dtype = torch.bfloat16 if torch.bfloat16 in declared else torch.float32
        draw = torch.Generator().manual_seed(11)
        count, pages = len(new), 1 + len(new) * _PAGES

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(self.dtype)

        self.starts = tuple(sum(new[:index]) for index in range(count + 1))
        self.host = {
            "q": normal(sum(new), _HEADS, _SIZE),
            "k_cache": normal(pages, _PAGE, _KV_HEADS, _SIZE),
            "v_cache": normal(pages, _PAGE, _KV_HEADS, _SIZE),
            "query_start": torch.tensor(self.starts, dtype=torch.int32),
            "seq_lens": torch.ones(count, dtype=torch.int32),
            "block_table": (torch.randperm(pages - 1, generator=draw) + 1).view(count, _PAGES).to(torch.int32),
        }
        self.made = lab.upload(stream, self.host)
        self.plan: object | None = None

    def metadata(self, context: Sequence[int], tensors: dict[str, Tensor]) -> AttentionMetadata:
        """Return the metadata of the batch with these cached tokens per sequence."""
        host = {"seq_lens_host": HostParam("lengths", self.lengths(context)), "host_query_start": self.starts}
        uniform = len(set(self.new)) == 1
        return attention_metadata(tensors, max_query=max(self.new), max_kv=_PAGES * _PAGE, uniform=uniform, **host)

    def lengths(self, context: Sequence[int]) -> list[int]:
        """Return the length of each sequence, including its new tokens."""
        return [n + c for n, c in zip(self.new, context, strict=True)]

    def planned(self, context: Sequence[int]) -> AttentionMetadata:
        """Copy these lengths to the device, and make a plan for them or renew the existing plan."""
        backend, stream = self.lab.backend, self.stream
        shape = AttentionShape(
            heads=_HEADS,
            kv_heads=_KV_HEADS,
            head_size=_SIZE,
            page_size=_PAGE,
            dtype=self.dtype,
            scale=_SCALE,
            window=self.window,
        )
        batch = replace(self.metadata(context, self.made), shapes=(shape,), plan=self.plan)
        assert batch.seq_lens_host is not None
        lens = torch.tensor(batch.seq_lens_host.value, dtype=torch.int32)
        with backend.on(stream):
            self.made["seq_lens"].copy_(lens)
            planned = backend.kernels_in_use.plan_attention(batch, stream=stream)
        self.plan = planned.plan
        return planned

    def attend(self, kernels: KernelSet, tensors: dict[str, Tensor], metadata: AttentionMetadata) -> Tensor:
        """Compute attention of the batch with ``kernels``."""
        return kernels.paged_attention(
            tensors["q"], tensors["k_cache"], tensors["v_cache"], metadata, scale=_SCALE, window=self.window
        )

    def check(self, found: Tensor, context: Sequence[int], how: str) -> None:
        """Compare ``found`` with the reference on the host, which computes in float64."""
        host = {**in_float64(self.host), "seq_lens": torch.tensor(self.lengths(context), dtype=torch.int32)}
        off = largest_error(found, self.attend(KernelSet(), host, self.metadata(context, host)))
        assert off <= _TOLERANCE[self.dtype], f"planned attention in {self.dtype}, {how}: off by {off:.3g}"


def check_renewed(lab: Lab, new: Sequence[int], window: int) -> None:
    """Check attention with one plan: for a first batch, for a batch with other lengths, and for the first batch again."""
    (stream,) = lab.streams("s")
    batch = PlannedBatch(lab, stream, new, window=window)
    for number, context in enumerate((*_LENGTHS, _LENGTHS[0])):
        planned = batch.planned(context)
        with lab.backend.on(stream):
            out = batch.attend(lab.backend.kernels_in_use, batch.made, planned)
        stream.synchronize()
        batch.check(out, context, f"batch {number}")


def check_in_graph(lab: Lab) -> None:
    """Capture attention once, and replay it for two batches whose plans replaced the captured plan in place."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    batch = PlannedBatch(lab, stream, (4, 4, 4))
    planned = batch.planned((0, 0, 0))
    stream.synchronize()
    with backend.on(stream):
        outputs = {"out": torch.zeros_like(batch.made["q"])}
    stream.synchronize()

    rebinds = backend.speculative_sync.exact_host_lengths  # attention takes lengths as host integers

    def fn(context: CaptureContext) -> None:
        own = replace(planned, seq_lens_host=context.params["lengths"]) if rebinds else planned
        context.outputs["out"].copy_(batch.attend(backend.kernels_in_use, batch.made, own))

    params = {"lengths": batch.lengths((0, 0, 0))} if rebinds else None
    graph = backend.capture("planned attention", fn, stream=stream, inputs=batch.made, outputs=outputs, params=params)
    for context in _LENGTHS:
        batch.planned(context)
        if rebinds:
            graph.update_params({"lengths": batch.lengths(context)}, stream=stream)
        graph.replay(stream)
        stream.synchronize()
        batch.check(outputs["out"], context, "in a graph")


def check_refreshed_in_graph(lab: Lab) -> None:
    """Capture two attention calls with a longer sequence for the second, as in the passes of a draft. Replay them for two
    batches.
    """
    backend = lab.backend
    (stream,) = lab.streams("s")
    batch = PlannedBatch(lab, stream, (1, 1, 1))
    metadata = replace(batch.metadata(_LENGTHS[0], batch.made), seq_lens_host=None, host_query_start=None)
    first = metadata.seq_lens.clone()
    with backend.on(stream):
        outputs = {name: torch.zeros_like(batch.made["q"]) for name in ("first", "second")}
        inputs = {**batch.made, "lengths": first.to(backend.device)}
    stream.synchronize()

    def fn(context: CaptureContext) -> None:
        seq_lens = context.inputs["seq_lens"]
        for step, out in enumerate(context.outputs.values()):
            torch.add(context.inputs["lengths"], step, out=seq_lens)
            out.copy_(batch.attend(backend.kernels_in_use, batch.made, metadata))

    graph = backend.capture("draft passes", fn, stream=stream, inputs=inputs, outputs=outputs)
    for context in (*_LENGTHS, _LENGTHS[0]):
        lengths = torch.tensor(batch.lengths(context), dtype=torch.int32)
        with backend.on(stream):
            inputs["lengths"].copy_(lengths)
        graph.replay(stream)
        stream.synchronize()
        for step, (name, out) in enumerate(outputs.items()):
            batch.check(out, [n + step for n in context], f"in a graph, in the {name} pass with lengths of its own")


def held_bytes(lab: Lab, requests: int) -> int:
    """Return how much allocated device memory grows with planned attention of ``requests`` requests, of which only the plan
    is kept.
    """
    backend = lab.backend
    (stream,) = lab.streams("s")
    backend.synchronize()
    before = backend.memory_info().allocated
    batch = PlannedBatch(lab, stream, (1,) * requests)
    planned = batch.planned((17,) * requests)
    with backend.on(stream):
        batch.attend(backend.kernels_in_use, batch.made, planned)
    backend.synchronize()
    plan = planned.plan
    del batch, planned
    gc.collect()
    backend.synchronize()
    held = backend.memory_info().allocated - before
    del plan
    return held


def check_unplanned(lab: Lab) -> None:
    """Call ``plan_attention`` without shapes on a new stream; attention must work with the returned metadata."""
    plan, stream = lab.streams("plan", "s")
    batch = PlannedBatch(lab, stream, (1, 1, 1))
    with lab.backend.on(stream):
        metadata = replace(batch.metadata(_LENGTHS[0], batch.made), seq_lens_host=None, host_query_start=None)
        batch.made["seq_lens"].copy_(torch.tensor([1 + n for n in _LENGTHS[0]], dtype=torch.int32))
    plan.wait(lab.record(stream, "lengths"))
    with lab.backend.on(plan):
        planned = lab.backend.kernels_in_use.plan_attention(metadata, stream=plan)
    assert isinstance(planned, AttentionMetadata), f"plan_attention returned a {type(planned).__name__}"
    stream.wait(lab.record(plan, "planned"))
    with lab.backend.on(stream):
        out = batch.attend(lab.backend.kernels_in_use, batch.made, planned)
    stream.synchronize()
    batch.check(out, _LENGTHS[0], "without a plan")
