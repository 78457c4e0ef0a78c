"""Penalties, biases, minimum lengths, log-probabilities and samples through the whole engine, plain and speculative."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from drawing import some_and_many
from model.harness import Driver
from outrider import SamplingParams
from outrider.device import KernelSet
from outrider.engine.requests.sampling import derived_seed
from outrider.engine.requests.scheduler import Scheduler
from outrider.errors import RequestError
from outrider_proof import tiny

NEW = 24


@pytest.fixture(scope="module")
def reference(bundled_dir):
    return AutoModelForCausalLM.from_pretrained(bundled_dir / "target", dtype=torch.float64).eval()


def logits_of(reference, tokens):
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]


@functools.cache
def tiny_logits(tokens):
    """Logits of the tiny model behind these tokens, from one prefill into a fresh cache."""
    driver = Driver(tiny.target())
    return driver.logits([(driver.sequence(), tokens)])[-1]


def by_hand(reference, prompt, params, stops):
    """Greedy decoding with options, one whole forward a token."""
    output = []
    while len(output) < params.max_tokens:
        tokens = (*prompt, *output)
        logits = (tiny_logits(tokens) if reference is tiny_logits else logits_of(reference, tokens)[-1]).clone()
        for token, value in params.biases:
            logits[token] += value
        if len(output) < params.min_tokens:
            logits[list(stops)] = -torch.inf
        for token in set(prompt) | set(output):
            score, penalty = logits[token], params.repetition_penalty
            logits[token] = score / penalty if score > 0 else score * penalty
        for token in set(output):
            logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
        output.append(int(logits.argmax()))
        if output[-1] in stops:
            break
    return tuple(output)


by_hand_once = functools.cache(by_hand)


@functools.cache
def generated(reference, prompt, penalty):
    """What transformers gives."""
    with torch.no_grad():
        made = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, repetition_penalty=penalty)
    return tuple(made[0, len(prompt) :].tolist())


@pytest.mark.sample(1)
@pytest.mark.parametrize("speculate", ["eagle", "none"])
@pytest.mark.parametrize("penalty", [1.3, 0.8])
@pytest.mark.slow
def test_repetition_penalty_equals_generate(bundle64, reference, prompt_tokens, speculate, penalty):
    prompts = [tuple(tokens[:40]) for tokens in prompt_tokens[:6]]
    engine = bundle64.engine(speculate=speculate, max_requests=4, max_context=80, prefill_chunk=24, overlap=True)
    params = SamplingParams(max_tokens=NEW, repetition_penalty=penalty)
    for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
        assert result.token_ids == generated(reference, prompt, penalty)


options = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.2, 2.0]),
        "presence_penalty": st.sampled_from([-0.5, 1.0, 2.0]),
        "frequency_penalty": st.sampled_from([-0.4, 0.6, 2.0]),
        "logit_bias": st.dictionaries(
            st.integers(0, tiny.VOCABULARY - 1), st.sampled_from([-math.inf, 3.0, 12.0]), max_size=3
        ),
        "min_tokens": st.integers(1, 8),
    },
)


DRAWN = given(
    drawn=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40), options), min_size=1, max_size=4),
    draft_tokens=st.integers(0, 4),
    tree=st.booleans(),
    max_requests=st.integers(1, 3),
    overlap=st.booleans(),
)


def any_options(tiny64, tiny_tokens, drawn, draft_tokens, tree, max_requests, overlap):
    """Rows are reused by requests with other options; chains and trees of any length give the same tokens."""
    engine = tiny64.engine(
        speculate="none" if draft_tokens == 0 else "tree" if tree else "eagle",
        draft_tokens=max(draft_tokens, 1),
        max_context=96,
        max_requests=max_requests,
        prefill_chunk=16,
        overlap=overlap,
    )
    prompts = [tiny_tokens[index % len(tiny_tokens)][:length] for index, length, _ in drawn]
    stops = (13, 16)
    params = [SamplingParams(max_tokens=12, stop_token_ids=stops, ignore_eos=True, **given) for _, _, given in drawn]
    for prompt, chosen, result in zip(prompts, params, engine.generate(prompts, params), strict=True):
        assert result.token_ids == by_hand(tiny_logits, prompt, chosen, stops)


test_options_equal_a_loop_by_hand, test_many_options_equal_a_loop_by_hand = some_and_many(any_options, DRAWN, some=4, many=25)


@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.slow
def test_a_preempted_request_keeps_its_history(bundle64, reference, prompt_tokens, overlap, monkeypatch):
    preempted = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self: preempted.append(preempt(self)))
    engine = bundle64.engine(max_requests=3, page_size=4, num_pages=22, max_context=48, overlap=overlap)
    prompts = [tuple(tokens[:12]) for tokens in prompt_tokens[:4]]
    params = SamplingParams(
        max_tokens=NEW, repetition_penalty=1.2, frequency_penalty=0.8, min_tokens=20, stop_token_ids=(13,)
    )
    stops = frozenset({13, *bundle64.target.config.eos_token_ids})
    for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
        assert result.token_ids == by_hand_once(reference, prompt, params, stops)
    assert preempted


def test_the_drafted_prefix_matters(bundle64, reference, prompt_tokens, monkeypatch):
    """The net catches: penalties that forget the drafted tokens give other tokens."""
    prompts = [tokens[:30] for tokens in prompt_tokens[:1]]
    params = SamplingParams(max_tokens=NEW, frequency_penalty=1.5, presence_penalty=0.5)
    expected = [by_hand(reference, prompt, params, ()) for prompt in prompts]
    right = bundle64.engine(max_context=80).generate(prompts, params)
    assert [result.token_ids for result in right] == expected
    penalize = KernelSet.penalize_logits

    def forgetful(self, logits, tokens, _, *rest):
        nothing = torch.eye(logits.shape[1], dtype=torch.bool).repeat(logits.shape[0], 1) & False
        return penalize(self, logits, tokens, nothing, *rest)

    monkeypatch.setattr(KernelSet, "penalize_logits", forgetful)
    wrong = bundle64.engine(max_context=80).generate(prompts, params)
    assert [result.token_ids for result in wrong] != expected


def test_nothing_is_processed_without_options(bundle64, prompt_tokens, monkeypatch):
    def never(*_):
        raise AssertionError("called for a batch without options")

    for name in ("bias_logits", "penalize_logits", "truncate_logits", "count_tokens", "logprobs"):
        monkeypatch.setattr(KernelSet, name, never)
    params = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, top_k=3, top_p=0.5), SamplingParams(temperature=1.0)]
    engine = bundle64.engine(max_context=96)
    engine.generate([tokens[:9] for tokens in prompt_tokens[:3]], params)
    with pytest.raises(AssertionError, match="called for a batch"):
        engine.generate([prompt_tokens[0][:9]], SamplingParams(top_k=3, temperature=1.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("speculate", ["eagle", "none", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_model(bundle64, reference, prompt_tokens, speculate, temperature):
    engine = bundle64.engine(speculate=speculate, max_context=80, max_requests=3, overlap=True)
    prompts = [tokens[:20] for tokens in prompt_tokens[:5]]
    wanted = [3, None, 0, 20, 1]
    params = [
        SamplingParams(max_tokens=12, temperature=temperature, logprobs=n, repetition_penalty=1.2, top_p=0.9, seed=3)
        for n in wanted
    ]
    for prompt, count, result in zip(prompts, wanted, engine.generate(prompts, params), strict=True):
        if count is None:
            assert result.logprobs == ()
            continue
        assert [entry.token for entry in result.logprobs] == list(result.token_ids)
        expected = torch.log_softmax(logits_of(reference, [*prompt, *result.token_ids])[len(prompt) - 1 : -1], -1)
        for row, entry in zip(expected, result.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            best = torch.sort(row, descending=True)
            assert [token for token, _ in entry.top] == best.indices[:count].tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values[:count].tolist(), abs=1e-4)


def test_logprobs_come_with_their_tokens(bundle64, prompt_tokens):
    engine = bundle64.engine(max_context=80)
    pieces = list(engine.stream(prompt_tokens[0][:20], SamplingParams(max_tokens=12, logprobs=1)))
    assert all([entry.token for entry in piece.logprobs] == list(piece.tokens) for piece in pieces)


def test_samples_are_requests_with_seeds_of_their_own(bundle64, prompt_tokens):
    prompt, other = prompt_tokens[0][:20], prompt_tokens[1][:9]
    engine = bundle64.engine(max_context=80, max_requests=4)
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=7, n=3)
    results = engine.generate([prompt, other], [params, SamplingParams(max_tokens=4)])
    assert len(results) == 4
    assert [result.request_id for result in results] == [0, 1, 2, 3]
    for index, result in enumerate(results[:3]):
        alone = SamplingParams(max_tokens=10, temperature=1.0, seed=derived_seed(7, index))
        assert result.token_ids == engine.generate([prompt], alone)[0].token_ids
    assert len({result.token_ids for result in results[:3]}) == 3
    assert results[3].token_ids == bundle64.plain(other, 20).token_ids[:4]


@pytest.mark.parametrize(("prefix_cache", "abort_first"), [(True, False), (True, True), (False, False)])
def test_samples_share_the_pages_of_the_prompt(bundle64, prompt_tokens, prefix_cache, abort_first):
    prompt = prompt_tokens[0][:40]
    engine = bundle64.engine(max_context=96, page_size=8, num_pages=20, max_requests=4, prefix_cache=prefix_cache)
    pages = engine.free_pages
    first = engine.add_request(prompt, SamplingParams(max_tokens=6, temperature=1.0, n=4))
    if abort_first:
        engine.abort(first)
    least, tokens = pages, {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        least = min(least, engine.free_pages)
    assert [len(drawn) for drawn in tokens.values()] == [0 if abort_first else 6, 6, 6, 6]
    if prefix_cache and not abort_first:
        assert pages - least <= 4 + 4 * 3, "four pages are shared, each sample has a few of its own"
    if not prefix_cache:
        assert pages - least > 4 + 4 * 3, "the net catches"


def test_derived_seeds():
    assert derived_seed(5, 0) == 5
    seeds = {derived_seed(seed, index) for seed in range(-50, 50) for index in range(50)}
    assert len(seeds) == 5000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"logprobs": 21}, "reports 20 at most"),
        ({"logit_bias": {2048: 1.0}}, "token 2048 of the sampling options"),
        ({"stop_token_ids": (-1,)}, "token -1 of the sampling options"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "make 301 entries"),
        ({"logit_bias": dict.fromkeys(range(300), 1.0), "min_tokens": 1}, "make 301 entries"),
        ({"logit_bias": dict.fromkeys(range(2048), -math.inf)}, "ban every token"),
    ],
)
def test_what_an_engine_refuses(bundle64, params, match):
    engine = bundle64.engine(max_context=96)
    with pytest.raises(RequestError, match=match):
        engine.add_request((1, 2), SamplingParams(**params))
    assert not engine.has_unfinished


def test_a_stream_is_one_sample(bundle64):
    with pytest.raises(RequestError, match="one sample"):
        next(bundle64.engine(max_context=96).stream((1, 2), SamplingParams(n=2, temperature=1.0)))
