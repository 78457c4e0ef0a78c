"""A draft length for each request: the same tokens, fewer verified tokens, and the policy that chooses the lengths."""

import random
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.device import AttentionMetadata, ConfigError
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.requests.draft_length import (
    DraftCosts,
    LengthSchedule,
    RequestAcceptance,
    RequestDraftLength,
    default_widths,
)
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.state.plans import PackedTokens
from outrider.model import ForwardInput
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.proposers import EXTREMES, MAKERS
from tiny_programs import PROMPTS

CPU = CpuBackend()
MODES = {"staged": {}, "alone": {"overlap": False}, "graphs": {"graphs": True}, "fused": {"mode": "fused"}}
GREEDY = SamplingParams(max_tokens=16)
THREE = [*PROMPTS[:2], PROMPTS[1][::-1]]


def engine(name, policy=None, **config):
    target = tiny.target()
    sizes = {"max_context": 48, "max_requests": 3, "page_size": 4, "prefill_chunk": 4, "overlap": True, "dtype": "float64"}
    proposer = (MAKERS | EXTREMES)[name](target, CPU)
    return Engine(target, CPU, proposer=proposer, config=EngineConfig(**sizes | config), draft_length=policy)


def serve(made):
    for prompt, result in zip(THREE, made.generate(THREE, GREEDY), strict=True):
        assert result.token_ids == tiny.plain(prompt, 16)


@contextmanager
def verified_tokens(made):
    """The number of tokens of each pass of the target that decodes."""
    found, inner = [], made.model.forward_with_aux_hidden_states

    def forward(inputs, *rest):
        if inputs.prompt_lens is None and inputs.attention.host_query_start is None:
            found.append(inputs.tokens.shape[0])
        return inner(inputs, *rest)

    with patch.object(made.model, "forward_with_aux_hidden_states", forward):
        yield found


def test_the_target_computes_the_verified_tokens_alone():
    """Called stages compute no other token. A graph has those of its width, which also hold the padding requests."""
    policy, expected = LengthSchedule((3, 0, 1, 2, 0, 0, 1), (2, 4)), []
    choose = policy.choose_each

    def noted(requests, cached):
        drafted, verified = choose(requests, cached)
        expected.append(sum(verified or [drafted] * len(requests)) + len(requests))
        return drafted, verified

    policy.choose_each = noted
    made = engine("eagle", policy)
    with verified_tokens(made) as found:
        made.generate(THREE, GREEDY)
    assert found == expected
    replayed = engine("eagle", LengthSchedule((3, 0, 1), (2, 4)), graphs=True, buckets=(5,), max_requests=None)
    with verified_tokens(replayed) as found:
        replayed.generate(THREE, GREEDY)
    assert set(found) == {5, 10}  # nothing drafted, and two tokens for each of five requests


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 3), min_size=1, max_size=6), padding=st.integers(0, 5), cached=st.integers(0, 30))
def test_each_token_is_packed_once(lengths, padding, cached):
    count = sum(lengths) + len(lengths)
    packed = PackedTokens.of_lengths(
        torch.tensor(lengths), torch.full((len(lengths),), cached), lane=torch.arange(4), count=count + padding, capacity=32
    )
    used = [4 * request + number for request, length in enumerate(lengths) for number in range(length + 1)]
    assert packed.index[:count].tolist() == used
    tokens = torch.arange(4 * len(lengths))
    starts, tables = 4 * torch.arange(len(lengths) + 1, dtype=torch.int32), torch.zeros(len(lengths), 8, dtype=torch.int32)
    whole = AttentionMetadata(starts, starts[1:], tables, max_query=4, max_kv=32, uniform=True)
    selected = packed.select(ForwardInput(tokens + 1, torch.stack((tokens,) * 3), tokens + 100, whole))
    assert selected.tokens[:count].tolist() == [place + 1 for place in used]
    assert selected.positions[2, :count].tolist() == used
    assert selected.slots.tolist() == [*(place + 100 for place in used), *[0] * padding]
    assert not selected.attention.uniform
    assert packed.query_start.diff().tolist() == [length + 1 for length in lengths]
    assert packed.seq_lens.tolist() == [min(cached + length + 1, 32) for length in lengths]
    for row, place in enumerate(packed.rows.tolist()):
        assert used[place] == row - max(0, row % 4 - lengths[row // 4])


# -- the policy ----------------------------------------------------------------------------------------------------------

# Milliseconds of an 8B model on an H200 by length and by width: large batches are bound by arithmetic.
COSTS = DraftCosts({(length, 128): ms for length, ms in enumerate((6.1, 9.6, 13.3, 17.1))})
PACKED = DraftCosts({(2, 128): 10.2, (3, 128): 13.6})


def run(policy, shares, iterations=300, seed=0):
    """The lengths of each iteration, and the accepted tokens, of requests with these acceptance probabilities."""
    rng, requests = random.Random(seed), [RequestAcceptance() for _ in shares]
    chosen, accepted = [], 0
    for _ in range(iterations):
        drafted, verified = policy.choose_each(requests, 0)
        lengths = verified or (drafted,) * len(shares)
        for request, length, share in zip(requests, lengths, shares, strict=True):
            count = next((number for number in range(length) if rng.random() >= share), length)
            request.observe(length, count)
            accepted += count
        chosen.append(lengths)
    return chosen, accepted


def test_requests_of_poor_acceptance_verify_fewer_drafts():
    shares = [0.9, 0.3] * 64
    chosen, accepted = run(RequestDraftLength(COSTS, PACKED), shares)
    late = chosen[100:]
    good, poor = (sum(sum(lengths[first::2]) for lengths in late) / (64 * len(late)) for first in (0, 1))
    assert good > 1.8
    assert poor < 0.2
    of_width = [lengths for lengths in late if sum(lengths) + len(lengths) == 2 * 128]
    assert len(of_width) > 0.95 * len(late)
    _, of_one_length = run(RequestDraftLength(DraftCosts({(1, 128): 1.0}), DraftCosts({(2, 128): 9.0})), shares)
    assert accepted > 1.3 * of_one_length  # from as many verified tokens


def test_one_length_is_chosen_where_it_is_faster():
    small = RequestDraftLength(DraftCosts({(0, 8): 4.0, (3, 8): 4.1}), DraftCosts({(2, 8): 4.1, (3, 8): 4.1}))
    assert small.choose_each([RequestAcceptance() for _ in range(8)], 0) == (3, ())
    dull = run(RequestDraftLength(COSTS, PACKED), [0.02] * 128)[0]
    assert dull[60:].count((0,) * 128) > 0.8 * len(dull[60:])


def test_a_request_whose_acceptance_rises_gets_drafts_again():
    request = RequestAcceptance()
    for _ in range(60):
        request.observe(3, 0)
    assert request.share < 0.1
    for _ in range(400):
        request.observe(0, 0)
    assert request.share > 0.7


def test_usual_widths():
    assert [default_widths(most) for most in (1, 2, 3, 4, 7)] == [(), (2,), (2, 3), (3, 4), (4, 6)]


# -- the option ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "fused"])
def test_costs_are_measured_for_each_width(mode):
    made = engine("eagle", draft_length="request", **MODES[mode])
    report = made.draft_length
    assert (report.policy, report.lengths) == ("request", (0, 1, 2, 3))
    assert {width for width, _, _ in report.packed} == {2, 3}
    assert "by request and load" in str(report)
    serve(made)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("eagle-tree", {"draft_length": "request"}, "trees"),
        ("none", {"draft_length": "request"}, "drafts nothing"),
        ("eagle-tree", {"policy": LengthSchedule((3,), (2,))}, "one shape"),
    ],
)
def test_what_cannot_be_is_refused(name, config, said):
    with pytest.raises(ConfigError, match=said):
        engine(name, **config)


def test_more_tokens_than_a_graph_has_are_refused():
    made = engine("eagle", LengthSchedule((3, 3), (2,)), graphs=True)
    with pytest.raises(ConfigError, match="at most a mean of 2"):
        made.generate(THREE, GREEDY)
