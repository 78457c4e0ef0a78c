"""What reshapes logits, against transformers' processors and against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
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


def test_neutral_and_greedy_rows_stay_bit_for_bit():
    logits = torch.randn(3, 2, V)
    out = truncate(logits, [(1.0, 0, 1.0, 0.0), (0.0, 1, 0.1, 1.0), (1.0, 1, 1.0, 0.0)])
    assert torch.equal(out[:2], logits[:2])
    assert (out[2] > -torch.inf).sum(-1).tolist() == [1, 1]


def test_equals_at_the_edges():
    tied = torch.zeros(1, 1, 8)
    assert (truncate(tied, [(1.0, 3, 1.0, 0.0)]) == 0).all(), "equals of the k-th stay"
    kept = (truncate(tied, [(1.0, 0, 0.3, 0.0)]) == 0).flatten()
    assert kept.tolist() == [True] * 3 + [False] * 5, "the lowest index first among equals"


@st.composite
def histories(draw):
    nodes = draw(st.integers(1, 5))
    batch = draw(st.integers(1, 3))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))] if draw(st.booleans()) else None
    return nodes, batch, parents, draw(st.integers(0, 1000))


@given(histories())
@settings(max_examples=100, deadline=None)
def test_penalties_equal_a_loop_over_nodes_and_tokens(case):
    nodes, batch, parents, seed = case
    generator = torch.Generator().manual_seed(seed)
    size = 12

    def integers(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    prompts, outputs = integers(size, batch, 4), integers(size, batch, 5)
    tokens = torch.cat((outputs[:, -1:], integers(size, batch, nodes - 1)), 1)
    counts = torch.full((batch + 2, size), 99, dtype=torch.int32)
    rows = torch.randperm(batch + 1, generator=generator)[:batch] + 1
    for b in range(batch):
        counts[rows[b]] = 0
        counts[rows[b], prompts[b]] = 1
    KERNELS.count_tokens(counts, rows, outputs)
    penalties = torch.rand(batch, 3, generator=generator) * 2 + 0.1
    mask = None
    if parents is not None:
        mask = torch.zeros(nodes, nodes, dtype=torch.bool)
        for node in range(nodes):
            step = node
            while step >= 0:
                mask[node, step] = True
                step = parents[step]
    logits = torch.randn(batch, nodes, size, generator=generator, dtype=torch.float64)
    out = KERNELS.penalize_logits(logits, tokens, None if mask is None else mask.repeat(batch, 1), rows, counts, penalties)
    for b in range(batch):
        repetition, presence, frequency = penalties[b].double()
        for node in range(nodes):
            path = [j for j in range(1, nodes) if (mask[node, j] if mask is not None else j <= node)]
            written = outputs[b].tolist() + [int(tokens[b, j]) for j in path]
            everything = torch.tensor([prompts[b].tolist() + written])
            expected = RepetitionPenaltyLogitsProcessor(float(repetition))(everything, logits[b, node : node + 1].clone())[0]
            for token in set(written):
                expected[token] -= presence + frequency * written.count(token)
            torch.testing.assert_close(out[b, node], expected)


def test_neutral_penalties_change_no_bit_whatever_the_history():
    logits = torch.randn(2, 3, V)
    counts = torch.randint(0, 9, (3, V), dtype=torch.int32)
    tokens = torch.randint(0, V, (2, 3))
    neutral = torch.tensor([[1.0, 0.0, 0.0]] * 2)
    assert torch.equal(KERNELS.penalize_logits(logits, tokens, None, torch.tensor([2, 1]), counts, neutral), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 70])
def test_a_bitmask_keeps_the_tokens_whose_bits_are_set(dtype, vocabulary):
    logits = torch.randn(2, 3, vocabulary).to(dtype)
    allowed = torch.rand(2, 3, vocabulary) < 0.5
    words = -(-vocabulary // 32)
    bitmask = torch.zeros(2, 3, words, dtype=torch.int64)
    for b, n, token in allowed.nonzero().tolist():
        bitmask[b, n, token // 32] |= 1 << (token % 32)
    out = KERNELS.apply_token_bitmask(logits, bitmask.to(torch.int32))
    assert torch.equal(out, torch.where(allowed, logits, torch.tensor(-torch.inf, dtype=dtype)))
    full = torch.full((2, 3, words), -1, dtype=torch.int32)
    assert torch.equal(KERNELS.apply_token_bitmask(logits, full), logits)


def test_a_bitmask_of_another_shape_is_an_error_before_anything_runs():
    for wrong in (torch.zeros(2, 3, 2, dtype=torch.int32), torch.zeros(2, 3, 1, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="expected int32, 1 words"):
            ops._masked(torch.zeros(2, 3, 32), wrong)


def test_biases_end_where_they_should():
    logits = torch.zeros(2, 3, 6)
    positions = torch.tensor([[4, 5, 6], [9, 10, 11]])
    tokens = torch.tensor([[2, 2, 3], [5, 0, 0]])
    values = torch.tensor([[1.5, 2.0, 7.0], [-torch.inf, 3.0, 3.0]])
    until = torch.tensor([[100, 6, 100], [11, 100, 100]])
    out = KERNELS.bias_logits(logits, positions, torch.tensor([2, 1]), tokens, values, until)
    expected = torch.zeros(2, 3, 6)
    expected[0, :, 2] = torch.tensor([3.5, 3.5, 1.5])
    expected[1, :2, 5] = -torch.inf
    assert torch.equal(out, expected)


def test_logprobs():
    logits = torch.randn(2, 3, V)
    tokens = torch.tensor([[1, 2, 3], [4, -1, -1]])
    values, ids = KERNELS.logprobs(logits, tokens, 4)
    expected = torch.log_softmax(logits, -1)
    for b, n in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        torch.testing.assert_close(values[b, n, 0], expected[b, n, tokens[b, n]])
    best = torch.sort(expected, -1, descending=True)
    torch.testing.assert_close(values[..., 1:], best.values[..., :4])
    assert torch.equal(ids, best.indices[..., :4])


def test_declared_cells_are_the_cells_that_are_touched():
    counts = torch.zeros(4, 6, dtype=torch.int32)
    rows, tokens = torch.tensor([3, 1]), torch.tensor([[5, 2], [0, -1]])
    KERNELS.count_tokens(counts, rows, tokens)
    declared = ROW_ACCESS["outrider::count_tokens"]["counts"]({"counts": counts, "rows": rows, "tokens": tokens})
    assert set(counts.flatten().nonzero().flatten().tolist()) | {0} == set(declared.tolist())
    read = ROW_ACCESS["outrider::penalize_logits"]["counts"]({"counts": counts, "rows": rows})
    assert sorted(read.tolist()) == [*range(6, 12), *range(18, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_schemas_hold(dtype):
    utils = ("test_schema", "test_faketensor")
    operators, check = torch.ops.outrider, torch.library.opcheck
    logits = torch.randn(2, 3, 8).to(dtype)
    pair, tokens = torch.tensor([1, 2]), torch.tensor([[1, 2, 3], [3, 4, -1]])
    floats = torch.tensor([0.5, 1.0])
    check(operators.truncate_logits.default, (logits, floats, pair, floats.clone(), floats.clone()), test_utils=utils)
    counts = torch.zeros(3, 8, dtype=torch.int32)
    penalties = torch.rand(2, 3)
    check(operators.count_tokens.default, (counts, pair, tokens), test_utils=utils)
    for mask in (None, torch.ones(6, 3, dtype=torch.bool)):
        arguments = (logits, tokens.clamp(min=0), mask, pair, counts, penalties)
        check(operators.penalize_logits.default, arguments, test_utils=utils)
    entries = torch.tensor([[1, 2], [3, 4]])
    arguments = (logits, tokens.clone(), pair, entries, torch.rand(2, 2), entries.clone() + 9)
    check(operators.bias_logits.default, arguments, test_utils=utils)
    check(operators.apply_token_bitmask.default, (logits, torch.full((2, 3, 1), 5, dtype=torch.int32)), test_utils=utils)
    check(operators.logprobs.default, (logits, tokens, 3), test_utils=utils)


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
