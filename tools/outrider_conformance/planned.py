"""Attention that was planned against the reference, also when its plan is renewed, called and in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, AttentionShape, CaptureContext, HostParam, KernelSet, Stream
from outrider_conformance.lab import Lab

_HEADS, _KV_HEADS, _SIZE, _PAGE, _PAGES = 4, 2, 64, 16, 5
_SCALE = 0.125
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
_LENGTHS = ((17, 40, 3), (61, 5, 16))
"""Cached tokens before the new ones, of one batch and of the next."""


class PlannedBatch:
    """Three sequences on the device: what a batch has of its own is written anew for each."""

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
        with lab.backend.on(stream):
            self.made = {name: tensor.to(lab.backend.device, copy=True) for name, tensor in self.host.items()}
        stream.synchronize()
        self.plan: object | None = None

    def metadata(self, context: Sequence[int], tensors: dict[str, Tensor]) -> AttentionMetadata:
        """The batch with these lengths."""
        return AttentionMetadata(
            query_start=tensors["query_start"],
            seq_lens=tensors["seq_lens"],
            block_table=tensors["block_table"],
            max_query=max(self.new),
            max_kv=_PAGES * _PAGE,
            uniform=len(set(self.new)) == 1,
            seq_lens_host=HostParam("lengths", [n + c for n, c in zip(self.new, context, strict=True)]),
            host_query_start=self.starts,
        )

    def planned(self, context: Sequence[int]) -> AttentionMetadata:
        """Write these lengths and plan for them, or renew the plan."""
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
        """Attention of the batch."""
        return kernels.paged_attention(
            tensors["q"], tensors["k_cache"], tensors["v_cache"], metadata, scale=_SCALE, window=self.window
        )

    def check(self, found: Tensor, context: Sequence[int], how: str) -> None:
        """Against the reference on the host, in float64."""
        host = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in self.host.items()}
        host["seq_lens"] = torch.tensor([n + c for n, c in zip(self.new, context, strict=True)], dtype=torch.int32)
        wanted = self.attend(KernelSet(), host, self.metadata(context, host))
        off = float((found.cpu().double() - wanted).abs().nan_to_num(nan=float("inf")).max())
        assert off <= _TOLERANCE[self.dtype], f"planned attention in {self.dtype}, {how}: off by {off:.3g}"


def check_renewed(lab: Lab, new: Sequence[int], window: int) -> None:
    """One plan, for one batch and then for one with other lengths."""
    (stream,) = lab.streams("s")
    batch = PlannedBatch(lab, stream, new, window=window)
    for number, context in enumerate((*_LENGTHS, _LENGTHS[0])):
        planned = batch.planned(context)
        with lab.backend.on(stream):
            out = batch.attend(lab.backend.kernels_in_use, batch.made, planned)
        stream.synchronize()
        batch.check(out, context, f"batch {number}")


def check_in_graph(lab: Lab) -> None:
    """Captured once, replayed for two batches whose plans were made in the place of the first."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    batch = PlannedBatch(lab, stream, (4, 4, 4))
    planned = batch.planned((0, 0, 0))
    stream.synchronize()
    with backend.on(stream):
        outputs = {"out": torch.zeros_like(batch.made["q"])}
    stream.synchronize()

    def fn(context: CaptureContext) -> None:
        context.outputs["out"].copy_(batch.attend(backend.kernels_in_use, batch.made, planned))

    graph = backend.capture("planned attention", fn, stream=stream, inputs=batch.made, outputs=outputs)
    for context in _LENGTHS:
        batch.planned(context)
        graph.replay(stream)
        stream.synchronize()
        batch.check(outputs["out"], context, "in a graph")


def check_unplanned(lab: Lab) -> None:
    """Without shapes the metadata comes back without a plan that anything would need."""
    (stream,) = lab.streams("s")
    batch = PlannedBatch(lab, stream, (1, 1, 1))
    with lab.backend.on(stream):
        metadata = replace(batch.metadata(_LENGTHS[0], batch.made), seq_lens_host=None, host_query_start=None)
        batch.made["seq_lens"].copy_(torch.tensor([1 + n for n in _LENGTHS[0]], dtype=torch.int32))
        planned = lab.backend.kernels_in_use.plan_attention(metadata, stream=stream)
        out = batch.attend(lab.backend.kernels_in_use, batch.made, planned)
    stream.synchronize()
    batch.check(out, _LENGTHS[0], "without a plan")
