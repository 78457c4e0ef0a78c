"""Draft lengths that change from iteration to iteration: the policy, and that the tokens stay those of plain decoding."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.device import ConfigError
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.requests.draft_length import (
    MAX_REPEATS,
    DraftCosts,
    LengthSchedule,
    LoadDraftLength,
    LookupDraftLength,
    RepeatedSuffix,
    default_draft_lengths,
)
from outrider.engine.requests.sampling import SamplingParams
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.proposers import EXTREMES, MAKERS
from tiny_programs import PROMPTS

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


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40), prompt=st.integers(0, 40), step=st.integers(1, 5))
def test_repeats_are_counted_from_the_last_place_of_the_last_two_tokens(text, prompt, step):
    suffix, prompt = RepeatedSuffix(), min(prompt, len(text))
    for end in (*range(prompt, len(text), step), len(text)):
        found = suffix.update(text[:prompt], text[prompt:end])
        places = [i for i in range(1, end - 1) if text[i - 1 : i + 1] == text[end - 2 : end]] if end else []
        last = places[-1] if places else -1
        same = [text[last - back] == text[end - 1 - back] for back in range(min(MAX_REPEATS, last + 1))]
        assert found == (same.index(False) if False in same else len(same))


def test_a_lookup_is_drafted_for_where_the_text_repeats():
    """The costs of a CPU: each verified token takes a third of an iteration of one token."""
    costs = DraftCosts({(length, size): 1.0 + length / 3 for length in (0, 1, 5, 7) for size in (1, 2)})
    policy = LookupDraftLength(costs)
    chosen = {0: [], 8: []}
    for index in range(400):
        repeats = 8 if index % 2 else 0
        length = policy.choose(1, 0, (repeats,))
        policy.observe(length, (length if repeats else 0,), (repeats,))
        chosen[repeats].append(length)
    assert set(chosen[8]) == {7}
    late = chosen[0][20:]
    assert late.count(0) >= 0.97 * len(late)  # new text is drafted for once in 65 iterations, to see whether that changed
    assert 7 in late
    assert policy.choose(2, 0, (0, 8)) in (5, 7)


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


# -- in an engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu():
    return CpuBackend()


def engine(cpu, name, *, policy=None, **config):
    target = tiny.target()
    config = {"max_context": 48, "max_requests": 3, "page_size": 4, "prefill_chunk": 4, "overlap": True} | config
    proposer = (MAKERS | EXTREMES)[name](target, cpu)
    return Engine(target, cpu, proposer=proposer, config=EngineConfig(dtype="float64", **config), draft_length=policy)


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
@pytest.mark.slow
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
    class Noting(LengthSchedule):
        needs_acceptance = True

        def observe(self, drafted, accepted, repeats=()):
            assert (drafted, *repeats) == (3,)
            told.extend(accepted)

    told = []
    made = engine(cpu, "eagle", policy=Noting((3,)))
    made.generate(PROMPTS, SamplingParams(max_tokens=12))
    assert len(told) == made.stats.request_iterations
    assert sum(told) == made.stats.verified_tokens - made.stats.request_iterations > 0
    assert made.stats.drafted_tokens == 3 * made.stats.request_iterations


def test_what_was_drafted_is_counted_by_the_lengths_that_were_chosen(cpu):
    made = engine(cpu, "eagle", policy=LengthSchedule((0, 2)), max_requests=1, overlap=False)
    made.generate([PROMPTS[0]], SamplingParams(max_tokens=12, ignore_eos=True))
    iterations = made.stats.request_iterations
    assert made.stats.drafted_tokens == 2 * (iterations // 2) > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "mode", [{}, {"overlap": False}, {"graphs": True}, {"mode": "fused"}], ids=["staged", "alone", "graphs", "fused"]
)
def test_costs_are_measured_for_each_length_and_size(cpu, mode):
    made = engine(cpu, "eagle", draft_length="load", **mode)
    report = made.draft_length
    assert (report.policy, report.lengths) == ("load", (0, 1, 2, 3))
    of_longest = [(3, 1), (3, 2), (3, 3)]
    called = [(length, size) for length in (0, 1, 2) for size in (1, 2, 3)]
    shorter = (
        [(0, 3), (1, 3), (2, 3)] if mode.get("graphs") or mode.get("mode") else called
    )  # few graphs are captured of them
    assert [(length, size) for length, size, _ in report.costs] == shorter + of_longest
    assert all(ms > 0 for _, _, ms in report.costs)
    assert "0, 1, 2, 3 tokens drafted by load" in str(report)
    for prompt, result in zip(PROMPTS, made.generate(PROMPTS, SamplingParams(max_tokens=10)), strict=True):
        assert result.token_ids == tiny.plain(prompt, 10)


@pytest.mark.sample(1, per="mode")
@pytest.mark.parametrize("name", ["ngram", "suffix"])
@pytest.mark.parametrize("mode", [{}, {"overlap": False}, {"mode": "fused"}], ids=["staged", "alone", "fused"])
def test_a_lookup_by_load_gives_the_tokens_of_plain_decoding(cpu, name, mode):
    made = engine(cpu, name, draft_length="load", max_context=80, **mode)
    prompts = [(*PROMPTS[0], *PROMPTS[0], *PROMPTS[0]), *PROMPTS]
    for prompt, result in zip(prompts, made.generate(prompts, SamplingParams(max_tokens=20)), strict=True):
        assert result.token_ids == tiny.plain(prompt, 20)
    assert made.draft_length.policy == "lookup"


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_lookup_by_load_learns_from_sampled_requests_too(cpu, name):
    made = engine(cpu, name, draft_length="load")
    sampled = SamplingParams(max_tokens=10, temperature=0.9, seed=4, ignore_eos=True)
    both = [sampled, SamplingParams(max_tokens=16)]
    results = made.generate(PROMPTS[:2], both)
    assert results[1].token_ids == tiny.plain(PROMPTS[1], 16)
    alone = engine(cpu, name, draft_length="fixed").generate(PROMPTS[:1], sampled)
    assert results[0].token_ids == alone[0].token_ids


def test_the_length_is_fixed_where_costs_would_be_the_hosts(cpu):
    made = engine(cpu, "eagle", mode="fused")
    assert (made.draft_length.policy, made.draft_length.lengths) == ("fixed", (3,))
    assert str(made.draft_length) == "3 tokens drafted in every iteration"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("eagle-tree", {"draft_length": "load"}, "trees"),
        ("none", {"draft_length": "load"}, "drafts nothing"),
        ("eagle", {"policy": LengthSchedule((4,))}, "drafts 0 to 3 tokens"),
        ("eagle-tree", {"policy": LengthSchedule((0, 1))}, "one shape"),
    ],
)
def test_what_cannot_be_is_refused(cpu, name, options, said):
    with pytest.raises(ConfigError, match=said):
        engine(cpu, name, **options)


def test_the_option_is_checked():
    with pytest.raises(ConfigError, match="draft_length is 'long'"):
        EngineConfig(draft_length="long")
