"""L4: the backend's own attention, with its preferred page size and dtypes, equals the reference."""

from __future__ import annotations

import pytest

from outrider_conformance.lab import Lab
from outrider_conformance.own_attention import SHAPES, check_called, check_in_graph, check_joined
from outrider_conformance.promises import promise


@promise("Capabilities.page_size", "Tokens of a KV page with which the backend's own kernels run:")
@pytest.mark.parametrize("shape", SHAPES)
def test_preferred_pages_and_dtypes_are_attended_to(lab: Lab, shape: str) -> None:
    """Lengths on both sides of a page's end, with NaN after each sequence, are right, and no call is left to the
    reference.
    """
    check_called(lab, SHAPES[shape])


@promise("KernelSet", "*Capture.* Every method may be captured; none reads a device value on the host.")
@pytest.mark.parametrize("shape", ["decoding", "a chain", "a tree"])
def test_attention_in_a_graph_follows_the_lengths(lab: Lab, shape: str) -> None:
    """A captured attention call follows longer sequences, whose host lengths are rebound if the policy needs them."""
    check_in_graph(lab, SHAPES[shape])


@promise(
    "KernelSet",
    "*Delegation.* An override computes a call, or delegates the call by ``super()``, for example for an unsupported shape.",
)
@pytest.mark.parametrize("shape", ["decoding", "a chain"])
def test_layers_with_quantised_weights_get_it_too(lab: Lab, shape: str) -> None:
    """Fused calls of layers with quantised weights use the backend's own attention."""
    check_joined(lab, SHAPES[shape])
