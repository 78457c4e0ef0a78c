"""Routing and experts: the references against plain loops, and that nothing of the device is read on the host."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.device import KernelSet
from outrider.device.kernels.reference import experts as references

KERNELS = KernelSet()


def drawn(tokens, count, k, *, hidden=6, inner=4, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    logits = normal(tokens, count)
    weights, chosen = KERNELS.route(logits, k, renormalize=False)
    return normal(tokens, hidden), weights, chosen, normal(count, 2 * inner, hidden), normal(count, hidden, inner)


def plainly(x, weights, chosen, gate_up, down):
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for share, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += share * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@given(tokens=st.integers(1, 40), count=st.integers(1, 9), k=st.integers(1, 9), seed=st.integers(0, 99), same=st.booleans())
@settings(max_examples=40, deadline=None)
def test_experts_are_those_of_a_loop(tokens, count, k, seed, same):
    x, weights, chosen, gate_up, down = drawn(tokens, count, min(k, count), seed=seed)
    if same:  # one expert gets every token
        chosen = chosen[:1].expand_as(chosen).contiguous()
    made = KERNELS.experts(x, weights, chosen, gate_up, down)
    assert torch.allclose(made, plainly(x, weights, chosen, gate_up, down), rtol=1e-12, atol=1e-12)


def test_weights_are_copied_in_parts(monkeypatch):
    operands = drawn(30, 8, 2)
    whole = KERNELS.experts(*operands)
    monkeypatch.setattr(references, "_MAX_GATHERED_BYTES", 1)
    assert torch.equal(KERNELS.experts(*operands), whole)


@pytest.mark.parametrize("tokens", [1, 4, 200])
def test_shapes_are_known_without_the_values(tokens):
    """Tensors without values: whatever read one would raise."""
    logits = torch.empty(tokens, 16, device="meta")
    weights, chosen = references.route(logits, 4, True, 0, 16)
    gate_up, down = torch.empty(16, 24, 8, device="meta"), torch.empty(16, 8, 12, device="meta")
    assert references.experts(torch.empty(tokens, 8, device="meta"), weights, chosen, gate_up, down).shape == (tokens, 8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"chosen": torch.zeros(3, 3, dtype=torch.int64)}, "experts of"),
        ({"down": torch.zeros(5, 6, 3, dtype=torch.float64)}, "experts of"),
    ],
)
def test_shapes_that_do_not_fit_are_known_before_anything_runs(change, told):
    operands = dict(zip(("x", "weights", "chosen", "gate_up", "down"), drawn(3, 5, 2, device="cpu"), strict=True))
    with torch.device("meta"):
        fake = {name: torch.empty_like(each, device="meta") for name, each in (operands | change).items()}
    with pytest.raises(RuntimeError, match=told):
        torch.ops.outrider.experts(**fake)
    with pytest.raises(RuntimeError, match="6 experts of a token"):
        torch.ops.outrider.route(torch.empty(3, 5, device="meta"), 6, False, 0, 5)
    with pytest.raises(RuntimeError, match="experts 3 to 6 of 5 are held"):
        torch.ops.outrider.route(torch.empty(3, 5, device="meta"), 2, False, 3, 6)


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_ranks_that_divide_the_experts_add_up_to_one(tokens):
    x, _, _, gate_up, down = drawn(tokens, 6, 3)
    logits = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = KERNELS.experts(x, *KERNELS.route(logits, 3, renormalize=True), gate_up, down)
    parts = []
    for first, last in ((0, 2), (2, 3), (3, 6)):
        weights, chosen = KERNELS.route(logits, 3, renormalize=True, held=(first, last))
        assert bool(((chosen >= -1) & (chosen < last - first)).all())
        assert torch.equal(chosen < 0, weights == 0)
        parts.append(KERNELS.experts(x, weights, chosen, gate_up[first:last], down[first:last]))
    assert torch.allclose(sum(parts), whole, rtol=1e-12, atol=1e-12)
