"""What a request gives depends on the request alone: its draws always, every bit in the batch-invariant mode."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawing import some_and_many
from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.lookup import NgramProposer
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider.speculative.tree import DynamicTree
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config

CONTEXT = 96

others = st.lists(
    st.tuples(
        st.integers(0, 39),  # prompt
        st.integers(1, 50),  # its length
        st.integers(1, 12),  # most tokens
        st.sampled_from([0.0, 0.5, 1.3]),  # temperature
        st.booleans(),  # options
        st.integers(0, 4),  # step of arrival
        st.one_of(st.none(), st.integers(0, 4)),  # steps until it's aborted
    ),
    max_size=5,
)
company = st.fixed_dictionaries(
    {
        "others": others,
        "arrival": st.integers(0, 4),
        "max_requests": st.integers(1, 4),
        "prefill_chunk": st.sampled_from([1, 5, 64]),
        "page_size": st.sampled_from([3, 16]),
        "overlap": st.booleans(),
    }
)


def run_in_company(make, prompt_tokens, prompt, params, *, others, arrival, **config):
    """Tokens and log-probabilities of one request among others that come, run and are aborted."""
    engine = make(max_context=CONTEXT, **config)
    arrivals = [(step, index) for index, (*_, step, _) in enumerate(others)]
    ours, tokens, logprobs, finished = None, [], [], False
    live, step = {}, 0
    while not finished:
        for _, index in [pair for pair in arrivals if pair[0] == step]:
            number, length, most, temperature, optional, _, _ = others[index]
            options = {"top_p": 0.8, "presence_penalty": 0.6, "logit_bias": {5: 2.0}, "logprobs": 2} if optional else {}
            chosen = SamplingParams(max_tokens=most, temperature=temperature, seed=index, **options)
            live[engine.add_request(prompt_tokens[number % len(prompt_tokens)][:length], chosen)] = (index, step)
        if step == arrival:
            ours = engine.add_request(prompt, params)
        for request, (index, since) in list(live.items()):
            if others[index][-1] is not None and step - since >= others[index][-1]:
                engine.abort(request)
                del live[request]
        for output in engine.step():
            if output.finish_reason is not None:
                live.pop(output.request_id, None)
            if output.request_id == ours:
                tokens += output.tokens
                logprobs += output.logprobs
                finished = output.finish_reason is not None
        step += 1
    return tuple(tokens), tuple(logprobs)


def alone(make, prompt, params, **config):
    (result,) = make(max_context=CONTEXT, max_requests=1, **config).generate([prompt], params)
    return result.token_ids, result.logprobs


PROPOSERS = pytest.mark.parametrize("speculate", ["eagle", "none", "tree"])
DRAWN = given(
    company=company,
    number=st.integers(0, 39),
    seed=st.integers(-(2**63), 2**63 - 1),
    options=st.sampled_from([{}, {"top_k": 20, "min_p": 0.02}, {"frequency_penalty": 0.7, "logit_bias": {9: 3.0}}]),
)


def same_draws(tiny64, tiny_tokens, speculate, company, number, seed, options):
    def make(**config):
        return tiny64.engine(speculate=speculate, draft_tokens=3, **config)

    prompt = tiny_tokens[number % len(tiny_tokens)][:24]
    params = SamplingParams(max_tokens=14, temperature=1.0, seed=seed, **options)
    tokens, _ = run_in_company(make, tiny_tokens, prompt, params, **company)
    assert tokens == alone(make, prompt, params)[0]


test_draws_depend_on_seed_and_position_alone, test_many_draws_depend_on_seed_and_position_alone = some_and_many(
    same_draws, DRAWN, PROPOSERS, pytest.mark.sample(1), some=6, many=20
)


def test_draws_that_depend_on_the_row_would_show(tiny64, tiny_tokens, monkeypatch):
    """The net catches: a request that isn't the first of its batch takes other draws."""
    kernels = type(tiny64.target.kernels)
    sample = kernels.sample

    def by_row(self, logits, temperature, seeds, positions, **options):
        return sample(self, logits, temperature, seeds + torch.arange(len(seeds)), positions, **options)

    monkeypatch.setattr(kernels, "sample", by_row)
    prompt, params = tiny_tokens[0][:24], SamplingParams(max_tokens=14, temperature=1.0, seed=3)
    company = [(1, 10, 12, 0.5, False, 0, None)]

    def make(**config):
        return tiny64.engine(speculate="none", **config)

    tokens, _ = run_in_company(make, tiny_tokens, prompt, params, others=company, arrival=1)
    assert tokens != alone(make, prompt, params)[0]


def test_plain_decoding_really_draws(bundle64, prompt_tokens):
    """Behind the first token, which prefill draws, too."""
    engine = bundle64.engine(speculate="none", max_context=CONTEXT)
    each = [SamplingParams(max_tokens=6, temperature=1.5, seed=seed) for seed in range(40)]
    results = engine.generate([prompt_tokens[0][:10]] * 40, each)
    by_first = {}
    for result in results:
        by_first.setdefault(result.token_ids[0], set()).add(result.token_ids)
    assert any(len(rest) > 1 for rest in by_first.values())


def makers(bundle, *, invariant):
    from outrider.model import Decoder, EagleHead

    kernels = bundle.backend.kernels.batch_invariant() if invariant else bundle.backend.kernels
    target = Decoder(bundle.target.config, bundle.target.weights, kernels)
    head = EagleHead(bundle.head.config, bundle.head.weights, target)

    def make(speculate, **config):
        config = plain_config(dtype="float32", batch_invariant=invariant, draft_tokens=3, **config)
        if speculate == "tree":
            proposer = EagleTreeProposer(head, DynamicTree(topk=2, depth=3, nodes=5))
        elif speculate == "ngram":
            proposer = NgramProposer(vocab_size=target.config.vocab_size, draft_tokens=3)
        else:
            proposer = EagleProposer(head, draft_tokens=3) if speculate == "eagle" else NonSpeculativeProposer()
        return Engine(target, bundle.backend, proposer=proposer, config=config)

    return make


def same_bits(bundle32, prompt_tokens, speculate, company, number, temperature):
    make = makers(bundle32, invariant=True)
    prompt = prompt_tokens[number % len(prompt_tokens)][:24]
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=3, logprobs=3, min_p=0.01)

    def made(**config):
        return make(speculate, **config)

    assert run_in_company(made, prompt_tokens, prompt, params, **company) == alone(
        made, prompt, params, page_size=company["page_size"]
    )


BITS = given(company=company, number=st.integers(0, 39), temperature=st.sampled_from([0.0, 1.0]))
test_every_bit_is_the_same_in_the_invariant_mode, test_every_bit_is_the_same_in_many_companies = some_and_many(
    same_bits, BITS, PROPOSERS, pytest.mark.sample(1), some=2, many=8
)


@pytest.mark.parametrize("speculate", ["eagle", pytest.param("ngram", marks=pytest.mark.slow)])
def test_speculation_leaves_every_bit_of_the_logits(bundle32, prompt_tokens, speculate):
    """Verification of several rows, with the prefix cache and short chunks, against decoding of one row without them."""
    make = makers(bundle32, invariant=True)
    prompts = [prompt_tokens[0][:20], prompt_tokens[0][:20] + prompt_tokens[1][:9]]
    params = SamplingParams(max_tokens=9, logprobs=3)
    plain = make("none", max_context=64, max_requests=1, prefix_cache=False).generate(prompts, params)
    made = make(speculate, max_context=64, max_requests=2, prefill_chunk=7).generate(prompts, params)
    assert [(each.token_ids, each.logprobs) for each in made] == [(each.token_ids, each.logprobs) for each in plain]
    assert max(each.acceptance_length for each in made) > 1


def test_bits_differ_without_the_mode(bundle32, prompt_tokens):
    make = makers(bundle32, invariant=False)
    prompt, params = prompt_tokens[0][:24], SamplingParams(max_tokens=8, logprobs=3)
    company = [(n, 30, 12, 0.0, False, 0, None) for n in range(1, 4)]

    def made(**config):
        return make("none", **config)

    tokens, logprobs = run_in_company(
        made, prompt_tokens, prompt, params, others=company, arrival=1, max_requests=4, prefill_chunk=7
    )
    expected, expected_logprobs = alone(made, prompt, params)
    assert tokens == expected
    assert logprobs != expected_logprobs


def test_the_mode_needs_its_kernels(bundle32):
    with pytest.raises(ConfigError, match="batch_invariant is set"):
        bundle32.engine(batch_invariant=True)


def test_from_checkpoint_makes_them(bundled_dir):
    engine = Engine.from_checkpoint(
        bundled_dir / "target",
        CpuBackend(),
        draft_dir=bundled_dir / "eagle",
        speculate="eagle",
        config=plain_config(batch_invariant=True, max_context=CONTEXT),
    )
    assert engine.model.kernels.row_invariant
    assert engine.generate([(5, 6, 7)], SamplingParams(max_tokens=5))[0].acceptance_length > 0
    assert torch.is_tensor(engine.model.weights.head)
