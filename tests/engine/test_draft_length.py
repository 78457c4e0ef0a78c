"""Draft lengths that change from iteration to iteration: the policy, and that the tokens stay those of plain decoding."""

from itertools import pairwise

import pytest

from outrider.device import ConfigError
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.requests.draft_length import (
    DraftCosts,
    FixedLength,
    LengthSchedule,
    LoadDraftLength,
    default_draft_lengths,
)
from outrider.engine.requests.sampling import SamplingParams
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.proposers import EXTREMES, MAKERS, PROMPTS

# Milliseconds as an H200 has them for an 8B model at 640 cached tokens, by requests and length: large batches are bound by
# arithmetic.
COSTS = DraftCosts(
    {
        (length, size): ms / 1e3
        for size, row in {8: (4.0, 4.4, 4.8, 5.1), 32: (4.2, 4.7, 5.1, 5.4), 128: (6.1, 9.6, 13.3, 17.1)}.items()
        for length, ms in enumerate(row)
    }
)


def run(policy, *, requests, shares, iterations=200):
    """The lengths of iterations in which that share of the drafted tokens passes at each place."""
    chosen = []
    for _ in range(iterations):
        length = policy.choose(requests, 0)
        accepted, left = [], requests
        for place in range(length):
            passing = round(left * shares[place])
            accepted += [place] * (left - passing)
            left = passing
        policy.observe(length, [*accepted, *[length] * left])
        chosen.append(length)
    return chosen


@pytest.mark.parametrize(
    ("requests", "shares", "length"),
    [(8, (0.8, 0.8, 0.8), 3), (128, (0.8, 0.8, 0.8), 1), (128, (0.1, 0.1, 0.1), 0), (8, (0.05, 0.05, 0.05), 0)],
)
def test_the_fastest_length_is_found(requests, shares, length):
    chosen = run(LoadDraftLength(COSTS), requests=requests, shares=shares)
    assert chosen[-1] == length
    assert sum(a != b for a, b in pairwise(chosen)) <= 3


def test_a_length_stays_where_no_other_is_much_faster():
    close = DraftCosts({(0, 8): 5.0, (1, 8): 8.5, (2, 8): 11.1})  # with the prior 0.2, 0.2 and 0.197 tokens a second
    assert set(run(LoadDraftLength(close), requests=8, shares=(0.7, 0.7))) == {2}


def test_acceptance_that_comes_back_is_found_out():
    policy = LoadDraftLength(COSTS)
    run(policy, requests=8, shares=(0.0, 0.0, 0.0))
    assert policy.choose(8, 0) == 0
    chosen = run(policy, requests=8, shares=(0.9, 0.9, 0.9), iterations=8000)
    assert chosen[-1] == 3


def test_cached_tokens_make_longer_drafts_worth_it():
    """Reading the cache costs the same for each length: the more of it, the less the others' difference weighs."""
    costs = DraftCosts(COSTS.base, dict.fromkeys(range(4), 2e-05 / 640))
    policy = LoadDraftLength(costs)
    assert policy.preferred(128, 0) < policy.preferred(128, 128 * 32768)


def test_a_batch_beyond_what_was_measured_costs_as_the_largest():
    assert COSTS.seconds(3, 500, 0) == COSTS.seconds(3, 128, 0)
    assert COSTS.seconds(1, 9, 0) == COSTS.base[1, 32]


def test_usual_lengths():
    assert [default_draft_lengths(most) for most in (1, 3, 8)] == [(0, 1), (0, 1, 2, 3), (0, 1, 6, 8)]


CHAINS = ["eagle", "eagle3", "mtp", "peagle", "draft-model", "ngram", "suffix", "dflash", "suffix+eagle"]


# -- in an engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu():
    return CpuBackend()


def engine(cpu, name, *, policy=None, **config):
    target = tiny.target()
    config = {"max_context": 48, "max_requests": 3, "page_size": 4, "prefill_chunk": 4, "overlap": True} | config
    proposer = (MAKERS | EXTREMES)[name](target, cpu)
    return Engine(target, cpu, proposer=proposer, config=EngineConfig(dtype="float64", **config), draft_length=policy)


@pytest.mark.sample(2, per="mode")
@pytest.mark.parametrize("mode", [{}, {"graphs": True}, {"mode": "fused"}], ids=["staged", "graphs", "fused"])
@pytest.mark.parametrize("name", CHAINS)
def test_same_tokens_whatever_the_lengths(cpu, name, mode):
    made = engine(cpu, name, policy=LengthSchedule((3, 0, 0, 1, 2, 0, 3, 1)), **mode)
    prompts = [*PROMPTS, PROMPTS[1][::-1]]
    for prompt, result in zip(prompts, made.generate(prompts, SamplingParams(max_tokens=16)), strict=True):
        assert result.token_ids == tiny.plain(prompt, 16)


def drafts(made, prompt):
    """What is drafted for a request, by the number of its cached tokens."""
    found, inner = {}, made.proposer.draft

    def draft(inputs):
        drafted = inner(inputs)
        found[int(inputs.seq_lens[0])] = drafted.tokens[0].tolist()
        return drafted

    made.proposer.draft = draft
    made.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "peagle", "draft-model", "ngram"])
def test_drafts_are_as_good_after_plain_iterations(cpu, name):
    """The draft takes in what plain iterations decide: behind them it drafts what it drafts behind a prompt of the same
    tokens.
    """
    prompt = PROMPTS[1]
    found = drafts(engine(cpu, name, policy=LengthSchedule((0, 0, 0, 3)), overlap=False), prompt)
    place = min(found)
    assert place == len(prompt) + 3
    text = (*prompt, *tiny.plain(prompt, 12))
    assert found[place] == drafts(engine(cpu, name, overlap=False), text[:place])[place]


@pytest.mark.sample(2, per="mode")
@pytest.mark.parametrize("name", ["eagle", "eagle, untrained", "eagle-tree", "eagle3", "eagle3-tree", "mtp", "peagle"])
@pytest.mark.parametrize("mode", [{}, {"mode": "fused"}], ids=["staged", "fused"])
def test_drafts_are_as_good_behind_drafts(cpu, name, mode):
    """Of accepted tokens the last one alone goes on behind the last layer's keys and values; of a prompt's, too."""
    compared = 0
    for prompt in PROMPTS:
        found = drafts(engine(cpu, name, overlap=False, **mode), prompt)
        text = (*prompt, *tiny.plain(prompt, 12))
        for place in sorted(found)[1:]:
            if place <= len(text):
                assert found[place] == drafts(engine(cpu, name, overlap=False, **mode), text[:place])[place]
                compared += 1
    assert compared > 2


def test_what_is_drawn_does_not_depend_on_the_lengths(cpu):
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    policies = (None, LengthSchedule((0, 1, 3)))
    both = [engine(cpu, "eagle", policy=policy, mode="fused").generate(PROMPTS, drawn) for policy in policies]
    assert [result.token_ids for result in both[0]] == [result.token_ids for result in both[1]]


def test_the_policy_is_told_what_was_accepted(cpu):
    class Noting(FixedLength):
        needs_acceptance = True

        def observe(self, drafted, accepted):
            assert drafted == 3
            told.extend(accepted)

    told = []
    made = engine(cpu, "eagle", policy=Noting(3))
    made.generate(PROMPTS, SamplingParams(max_tokens=12))
    assert len(told) == made.stats.request_iterations
    assert sum(told) == made.stats.verified_tokens - made.stats.request_iterations > 0
    assert made.stats.drafted_tokens == 3 * made.stats.request_iterations


def test_what_was_drafted_is_counted_by_the_lengths_that_were_chosen(cpu):
    made = engine(cpu, "eagle", policy=LengthSchedule((0, 2)), max_requests=1, overlap=False)
    made.generate([PROMPTS[0]], SamplingParams(max_tokens=12, ignore_eos=True))
    iterations = made.stats.request_iterations
    assert made.stats.drafted_tokens == 2 * (iterations // 2) > 0


@pytest.mark.parametrize(
    "mode", [{}, {"overlap": False}, {"graphs": True}, {"mode": "fused"}], ids=["staged", "alone", "graphs", "fused"]
)
def test_costs_are_measured_for_each_length_and_size(cpu, mode):
    made = engine(cpu, "eagle", draft_length="load", **mode)
    report = made.draft_length
    assert (report.policy, report.lengths) == ("load", (0, 1, 2, 3))
    assert [(length, size) for length, size, _ in report.costs] == [(0, 3), (1, 3), (2, 3), (3, 1), (3, 2), (3, 3)]
    assert all(ms > 0 for _, _, ms in report.costs)
    assert "0, 1, 2, 3 tokens drafted by load" in str(report)
    for prompt, result in zip(PROMPTS, made.generate(PROMPTS, SamplingParams(max_tokens=10)), strict=True):
        assert result.token_ids == tiny.plain(prompt, 10)


def test_the_length_is_fixed_where_costs_would_be_the_hosts(cpu):
    made = engine(cpu, "eagle", mode="fused")
    assert (made.draft_length.policy, made.draft_length.lengths) == ("fixed", (3,))
    assert str(made.draft_length) == "3 tokens drafted in every iteration"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("eagle-tree", {"draft_length": "load"}, "trees"),
        ("none", {"draft_length": "load"}, "drafts nothing"),
        ("eagle", {"policy": FixedLength(4)}, "drafts 0 to 3 tokens"),
        ("eagle-tree", {"policy": LengthSchedule((0, 1))}, "one shape"),
    ],
)
def test_what_cannot_be_is_refused(cpu, name, options, said):
    with pytest.raises(ConfigError, match=said):
        engine(cpu, name, **options)


def test_the_option_is_checked():
    with pytest.raises(ConfigError, match="draft_length is 'long'"):
        EngineConfig(draft_length="long")
