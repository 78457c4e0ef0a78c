"""L4: planned attention equals the reference, also after its plan is renewed, called directly and in a graph."""

from __future__ import annotations

import pytest

from outrider_conformance.lab import Lab
from outrider_conformance.planned_attention import check_in_graph, check_renewed, check_unplanned
from outrider_conformance.promises import promise


@promise("KernelSet.plan_attention", "return the metadata with the plan.")
@pytest.mark.parametrize("new", [(1, 1, 1), (4, 4, 4), (5, 1, 30)], ids=["decoding", "verifying", "ragged"])
@pytest.mark.parametrize("window", [0, 8], ids=["all", "window"])
def test_a_plan_follows_its_batch(lab: Lab, new: tuple[int, ...], window: int) -> None:
    """One plan is renewed for a batch with other lengths, and its attention is right."""
    check_renewed(lab, new, window)


@promise(
    "KernelSet.plan_attention",
    "The method then updates the plan in place, so that a graph captured with the plan computes this batch.",
)
def test_a_graph_follows_the_plan_that_it_was_captured_with(lab: Lab) -> None:
    """A captured attention call computes two batches whose plans replaced the captured plan in place."""
    check_in_graph(lab)


@promise("KernelSet.plan_attention", "without shapes, nothing is planned.")
def test_without_shapes_nothing_is_planned(lab: Lab) -> None:
    """The metadata comes back without shapes, and attention works without a plan."""
    check_unplanned(lab)
