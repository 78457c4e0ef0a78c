"""What reshapes logits, against transformers' processors and against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.device import ROW_ACCESS, KernelSet
from outrider.device.kernels.reference import ops

KERNELS = KernelSet()
V = 40


@st.composite
def truncations(draw):
    return (
        draw(st.sampled_from([0.3, 0.7, 1.0, 2.5])),
        draw(st.sampled_from([0, 1, 2, 7, V, 5 * V])),
        draw(st.sampled_from([1.0, 0.9, 0.5, 0.05])),
        draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
    )


def warped(logits, temperature, top_k, top_p, min_p):
    """What transformers makes of one row: temperature, top-k, top-p, min-p."""
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return MinPLogitsWarper(min_p)(None, scores) if min_p else scores


def truncate(logits, rows):
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return KERNELS.truncate_logits(
        logits, torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)
    )


@given(st.lists(truncations(), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_truncation_equals_the_warpers_of_transformers(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 2, V, generator=generator, dtype=torch.float64) * 3
    out = truncate(logits, rows)
    for row, (temperature, *rest) in enumerate(rows):
        expected = torch.softmax(warped(logits[row], temperature, *rest), -1)
        torch.testing.assert_close(torch.softmax(out[row] / temperature, -1), expected)
        assert torch.equal(out[row] == -torch.inf, expected == 0)


def test_a_bitmask_of_another_shape_is_an_error_before_anything_runs():
    for wrong in (torch.zeros(2, 3, 2, dtype=torch.int32), torch.zeros(2, 3, 1, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="expected int32, 1 words"):
            ops._masked(torch.zeros(2, 3, 32), wrong)


def test_declared_cells_are_the_cells_that_are_touched():
    counts = torch.zeros(4, 6, dtype=torch.int32)
    rows, tokens = torch.tensor([3, 1]), torch.tensor([[5, 2], [0, -1]])
    KERNELS.count_tokens(counts, rows, tokens)
    declared = ROW_ACCESS["outrider::count_tokens"]["counts"]({"counts": counts, "rows": rows, "tokens": tokens})
    assert set(counts.flatten().nonzero().flatten().tolist()) | {0} == set(declared.tolist())
    read = ROW_ACCESS["outrider::penalize_logits"]["counts"]({"counts": counts, "rows": rows})
    assert sorted(read.tolist()) == [*range(6, 12), *range(18, 24)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equally_likely_tokens_come_by_their_ids_however_many_are_asked_for(dtype):
    """What a neighbour asks for decides how many are computed: the others' lists mustn't change by it."""
    logits = (torch.randn(3, 2, 301, generator=torch.Generator().manual_seed(0)) * 2).to(torch.bfloat16).to(dtype)
    logits[0, 0] = 1.0  # all alike
    logits[1, 1, 7:] = -torch.inf  # fewer than are asked for
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    order = torch.sort(KERNELS.logprobs(logits, tokens, 301)[1], stable=True).values
    assert torch.equal(order, torch.arange(301).expand(3, 2, 301))  # each once
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    for count in (0, 1, 2, 5, 20, 300, 301):
        values, ids = KERNELS.logprobs(logits, tokens, count)
        assert torch.equal(ids, expected[..., :count])
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        assert torch.equal(values[..., 1:], torch.log_softmax(wide, -1).gather(2, ids).to(torch.float32))
