"""L4: the backend's own attention, with its preferred page size and dtypes, equals the reference."""

from __future__ import annotations

import pytest

from outrider_conformance.lab import Lab
from outrider_conformance.own_attention import SHAPES, check_block, check_own_answers, preferred_dtypes
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import refusals_left_out


@promise("Capabilities.page_size", "Tokens of a KV page with which the backend's own kernels run:")
@pytest.mark.parametrize("shape", SHAPES)
def test_preferred_pages_and_dtypes_are_attended_to(lab: Lab, shape: str) -> None:
    """Attention equals the reference for lengths on both sides of a page's end, with NaN after each sequence, in each
    preferred dtype, and no call is left to the reference.
    """
    context = SHAPES[shape].context(lab.backend)
    for dtype in preferred_dtypes(lab.backend):
        batch = SHAPES[shape].batch(lab, dtype)
        lab.slow(batch.stream)
        batch.check_call(batch.grown(context), context, "called")
    check_own_answers(lab.backend)


@promise("KernelSet", "*Capture.* Every method may be captured; none reads a device value on the host.")
@pytest.mark.parametrize("shape", ["decoding", "a chain", "a tree"])
def test_attention_in_a_graph_follows_the_lengths(lab: Lab, shape: str) -> None:
    """One captured call of attention is replayed for lengths that have grown since its capture."""
    context = SHAPES[shape].context(lab.backend)
    batch = SHAPES[shape].batch(lab, preferred_dtypes(lab.backend)[0], room=40)
    with refusals_left_out(lab.backend.capabilities):
        batch.check_graph(context, [[tokens + more for tokens in context] for more in (0, 17, 40)])
    check_own_answers(lab.backend)


@promise(
    "KernelSet",
    "*Delegation.* An override computes a call, or delegates the call by ``super()``, for example for an unsupported shape.",
)
@pytest.mark.parametrize("shape", ["decoding", "a chain"])
@pytest.mark.parametrize("quantized", [False, True], ids=["unquantized", "quantised"])
def test_layers_use_it(lab: Lab, shape: str, quantized: bool) -> None:
    """The attention block of a layer uses the backend's own attention, with quantised weights, too. Other tests check the
    results.
    """
    check_block(lab, SHAPES[shape], quantized=quantized)
