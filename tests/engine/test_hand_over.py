"""A request goes on in another engine: the same tokens and acceptance as without, whatever else runs in both."""

import pytest
import torch

from outrider import SamplingParams
from outrider.device import ConfigError
from outrider.engine.engine import Engine
from outrider.engine.requests.request import FinishReason
from outrider.errors import RequestError
from outrider.registry import get_backend
from outrider.speculative.eagle import EagleProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS, decoder
from outrider_proof.tiny import plain_config
from speculative.test_proposers import PROPOSERS

CHOSEN = {"none": lambda: None} | PROPOSERS
PROMPT, LONGEST = (3, 1, 4, 1, 5, 9, 2, 6), 24
GREEDY = SamplingParams(max_tokens=LONGEST, ignore_eos=True)


def engine(name, *, backend=None, **fields):
    config = plain_config(**{"dtype": "float64", "max_context": 64, "page_size": 4} | fields)
    return Engine(tiny.target(), backend or tiny.BACKEND, proposer=CHOSEN[name](), config=config)


def finish(engine, request):
    """Run one request to its end; its completion."""
    record = engine._requests[request]
    while not record.finished:
        engine.step()
    engine.drain()
    return record.completion()


def until_output(engine, request, tokens=1):
    while len(engine._requests[request].output) < tokens:
        engine.step()


NAMES = ["none", "eagle", "eagle-tree", "eagle3", "mtp", "draft-model", "draft-model-tree", "ngram", "dflash", "peagle"]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "other_backend", "overlap"),
    [(name, other, other is (i % 2 == 0)) for i, name in enumerate(NAMES) for other in (False, True)],
)
def test_tokens_and_acceptance_are_those_of_one_engine(name, other_backend, overlap):
    alone = engine(name)
    whole = finish(alone, alone.add_request(PROMPT, GREEDY))
    first = engine(name, overlap=overlap)
    second = engine(name, overlap=overlap, page_size=3, backend=CpuBackend() if other_backend else None)
    free = [(each.free_pages, each.free_rows) for each in (first, second)]
    for each in (first, second):  # others in flight, on either side
        each.add_request((7, 8, 9), SamplingParams(max_tokens=LONGEST))
        each.step()
    request = first.add_request(PROMPT, GREEDY)
    until_output(first, request, 6)
    handed = first.hand_over(request)
    assert handed.length == len(PROMPT) + len(handed.output) - 1
    (last,) = [output for output in first.step() if output.request_id == request and output.finish_reason]
    assert last.finish_reason is FinishReason.HAND_OVER
    taken = finish(second, second.take_over(handed))
    assert taken.token_ids == whole.token_ids
    assert (taken.iterations, taken.acceptance_length) == (whole.iterations, whole.acceptance_length)
    for each in (first, second):
        while each.has_unfinished:
            each.step()
        each.drain()
    assert free == [(each.free_pages, each.free_rows) for each in (first, second)]


def test_from_one_backend_to_another_and_back():
    """Nothing but fences orders the streams of a simulated device, which run in a random order."""
    made = []
    for backend in (get_backend("sim:strategy=random,seed=3"), CpuBackend()):
        loading = backend.create_stream("load")
        with backend.on(loading):
            target = decoder(tiny.target(), backend)
            proposer = MAKERS["eagle"](target, backend)
        loading.synchronize()
        config = plain_config(dtype="float64", max_context=64, max_requests=2, page_size=4, overlap=True)
        made.append(Engine(target, backend, proposer=proposer, config=config))
    for giver, taker in (made, made[::-1]):
        request = giver.add_request(PROMPT, GREEDY)
        until_output(giver, request, 4)
        assert finish(taker, taker.take_over(giver.hand_over(request))).token_ids == plain(PROMPT)


def plain(prompt):
    alone = tiny.engine(None, max_requests=1)
    return alone.generate([prompt], GREEDY)[0].token_ids


def test_sampling_penalties_and_logprobs_go_along():
    params = SamplingParams(
        max_tokens=LONGEST,
        ignore_eos=True,
        temperature=1.0,
        seed=5,
        frequency_penalty=0.7,
        repetition_penalty=1.2,
        logprobs=2,
    )
    alone = engine("none")
    whole = finish(alone, alone.add_request(PROMPT, params))
    first, second = engine("none", overlap=True), engine("none")
    request = first.add_request(PROMPT, params)
    until_output(first, request, 9)
    taken = finish(second, second.take_over(first.hand_over(request)))
    assert taken.token_ids == whole.token_ids
    assert [each.token for each in taken.logprobs] == [each.token for each in whole.logprobs]


def test_stop_strings_go_along(bundle64, prompt_tokens):
    def make():
        config = plain_config(dtype=bundle64.dtype)
        return Engine(bundle64.target, bundle64.backend, config=config, tokenizer=tokenizer)

    from engine.conftest import BUNDLED
    from outrider.model import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(BUNDLED / "target")
    prompt = prompt_tokens[0][:12]
    text = tokenizer.decode(bundle64.plain(prompt, LONGEST).token_ids)
    params = SamplingParams(max_tokens=LONGEST, stop=(text[-6:-2],))
    alone = make()
    whole = finish(alone, alone.add_request(prompt, params))
    first, second = make(), make()
    request = first.add_request(prompt, params)
    until_output(first, request, 4)
    taken = finish(second, second.take_over(first.hand_over(request)))
    assert (taken.token_ids, taken.text, taken.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)


def test_what_can_not_be_handed_over():
    first = engine("eagle", prefill_chunk=3)
    request = first.add_request(PROMPT, GREEDY)
    for _ in range(2):
        with pytest.raises(RequestError, match="is waiting or prefilling"):
            first.hand_over(request)
        first.step()
    finish(first, request)
    with pytest.raises(RequestError, match="isn't running"):
        first.hand_over(request)


def test_engines_that_do_not_fit():
    first = engine("eagle")
    request = first.add_request(PROMPT, GREEDY)
    until_output(first, request)
    handed = first.hand_over(request)
    with pytest.raises(ConfigError, match="proposer: eagle there, none here"):
        engine("none").take_over(handed)
    with pytest.raises(ConfigError, match="proposer.relay: .* there, .* here"):
        engine("eagle-tree").take_over(handed)
    other = Engine(tiny.decoder(rms_eps=1e-3), tiny.BACKEND, config=plain_config(dtype="float64"))
    with pytest.raises(ConfigError, match="one's: model.rms_eps: 1e-06 there, 0.001 here"):
        other.take_over(handed)
    with pytest.raises(RequestError, match="don't fit in the context of 16"):
        engine("eagle", max_context=16).take_over(handed)
    # Another length of the chain changes neither the cache nor the relay.
    longer = Engine(
        tiny.target(),
        tiny.BACKEND,
        proposer=EagleProposer(tiny.eagle_head(), draft_tokens=5),
        config=plain_config(dtype="float64", max_context=64),
    )
    assert finish(longer, longer.take_over(handed)).token_ids == plain(PROMPT)


def test_the_state_is_contiguous_and_its_own():
    """Later work of the engine that it left, in the same pages, doesn't reach it."""
    first = engine("eagle", max_requests=1, prefix_cache=False)
    request = first.add_request(PROMPT, GREEDY)
    until_output(first, request, 5)
    handed = first.hand_over(request)
    tensors = (*handed.keys_values, *handed.draft_caches, *handed.relay.values())
    assert all(tensor.is_contiguous() for tensor in tensors)
    before = [tensor.clone() for tensor in tensors]
    finish(first, first.add_request((9, 8, 7, 6, 5, 4, 3, 2, 1), GREEDY))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
