"""L4: planned attention equals the reference, also after its plan is renewed, called directly and in a graph."""

from __future__ import annotations

import gc

import pytest
import torch

from outrider.device import CaptureContext
from outrider_conformance.lab import Lab
from outrider_conformance.promises import needs, promise
from outrider_conformance.random_kernels.paged_batch import (
    CONTEXTS,
    PagedBatch,
    check_planned_graph,
    check_renewed,
    check_unplanned,
    planned_batch,
)
from outrider_conformance.reporting.verdict import not_applicable, refusals_left_out

_FEW, _MANY = 2, 66
_SLACK_BYTES = 1 << 16
"""Bytes of memory that allocators may keep in pieces, independent of the number of requests."""


@promise("KernelSet.plan_attention", "return the metadata with the plan.")
@pytest.mark.parametrize("new", [(1, 1, 1), (4, 4, 4), (5, 1, 30)], ids=["decoding", "verifying", "ragged"])
@pytest.mark.parametrize("window", [0, 8], ids=["all", "window"])
def test_a_plan_follows_its_batch(lab: Lab, new: tuple[int, ...], window: int) -> None:
    """One plan is renewed for a batch with other lengths, and attention with the renewed plan equals the reference."""
    check_renewed(lab, new, window)


@promise(
    "KernelSet.plan_attention",
    "The method then updates the plan in place, so that a graph captured with the plan computes this batch.",
)
def test_a_graph_follows_the_plan_that_it_was_captured_with(lab: Lab) -> None:
    """A captured attention call computes two batches whose plans replaced the captured plan in place."""
    with refusals_left_out(lab.backend.capabilities):
        check_planned_graph(lab)


@promise("KernelSet.plan_attention", "without shapes, nothing is planned.")
def test_without_shapes_nothing_is_planned(lab: Lab) -> None:
    """The metadata comes back without shapes, and attention works without a plan."""
    check_unplanned(lab)


@promise("KernelSet", "*Capture.* Every method may be captured; none reads a device value on the host.")
def test_lengths_that_change_between_passes_of_a_graph_are_read_anew(lab: Lab) -> None:
    """Two captured attention calls, as of two draft passes, each read the lengths that the graph wrote before it."""
    if lab.backend.kernels_in_use.plans_on_host:
        not_applicable("these kernels plan on the host, and passes of a draft aren't planned")
    backend = lab.backend
    batch = planned_batch(lab, (1, 1, 1))
    metadata = batch.metadata(batch.made)
    with backend.on(batch.stream):
        outputs = {name: torch.zeros_like(batch.made["q"]) for name in ("first", "second")}
        inputs = {**batch.made, "lengths": batch.made["seq_lens"].clone()}
    batch.stream.synchronize()

    def fn(context: CaptureContext) -> None:
        for step, out in enumerate(context.outputs.values()):
            torch.add(context.inputs["lengths"], step, out=context.inputs["seq_lens"])
            out.copy_(batch.attend(metadata))

    with refusals_left_out(backend.capabilities):
        graph = backend.capture("draft passes", fn, stream=batch.stream, inputs=inputs, outputs=outputs)
    for context in (*CONTEXTS, CONTEXTS[0]):
        with backend.on(batch.stream):
            inputs["lengths"].copy_(torch.tensor(batch.lengths(context), dtype=torch.int32))
        graph.replay(batch.stream)
        batch.stream.synchronize()
        for step, (name, out) in enumerate(outputs.items()):
            batch.check(out, [n + step for n in context], f"in a graph, in the {name} pass with lengths of its own")


def _held_bytes(lab: Lab, requests: int) -> int:
    """Return how much allocated device memory grows with planned attention of ``requests`` requests, of which only the plan
    is kept.
    """
    backend, context = lab.backend, (17,) * requests
    (stream,) = lab.streams("s")
    backend.synchronize()
    before = backend.memory_info().allocated
    batch = PagedBatch(lab, stream, (1,) * requests, context)
    planned = batch.planned(context)
    with backend.on(stream):
        batch.attend(planned)
    backend.synchronize()
    plan = planned.plan
    del batch, planned
    gc.collect()
    backend.synchronize()
    held = backend.memory_info().allocated - before
    del plan
    return held


@needs("memory_limit")
@promise("SpeculativeSync.bytes_per_request", "Device memory in bytes that the plugin's kernels and runtime hold")
def test_memory_for_each_request_is_declared(lab: Lab) -> None:
    """Memory that attention keeps after its call grows no faster with the number of requests than declared."""
    declared = lab.backend.speculative_sync.bytes_per_request
    _held_bytes(lab, _MANY)  # what is allocated once
    few, many = _held_bytes(lab, _FEW), _held_bytes(lab, _MANY)
    grown, allowed = many - few, declared * (_MANY - _FEW) + _SLACK_BYTES
    assert grown <= allowed, (
        f"attention keeps {grown} bytes more for {_MANY} requests than for {_FEW}; {declared} bytes for each are declared: "
        "raise bytes_per_request, or free the memory"
    )
