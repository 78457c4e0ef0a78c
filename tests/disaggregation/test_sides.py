"""Prefill and decode apart, in one thread: the same tokens as one engine, whatever happens on the way."""

import random
import threading

import pytest

from disaggregation.couple import LIMIT_S, Couple
from outrider import Engine, SamplingParams
from outrider.bundled import bundled
from outrider.device import DeviceError
from outrider.engine import ChoiceGuide, Ebnf, JsonObject, JsonSchema, Regex
from outrider.engine.requests.hand_over import RequestState
from outrider.errors import RequestError
from outrider.registry.engine_plugins import get_transport
from outrider.transports.link import LocalTransport
from outrider_proof import tiny
from outrider_proof.tiny import plain_config
from speculative.test_proposers import PROPOSERS

CHOSEN = {"none": lambda: None} | PROPOSERS
NEW = 12


def engine(name, **fields):
    config = plain_config(**{"dtype": "float64", "max_context": 64, "page_size": 4, "max_requests": 3} | fields)
    return Engine(tiny.target(), tiny.BACKEND, proposer=CHOSEN[name](), config=config)


def couple(name, transport=None, *, prefills_alone=True, **fields):
    sides = engine(name, **fields), engine(name, **fields)
    return Couple(*sides, transport or LocalTransport(), prefills_alone=prefills_alone)


def prompts(seed, count):
    rng = random.Random(seed)
    return [tuple(rng.randrange(tiny.VOCABULARY) for _ in range(rng.randint(1, 20))) for _ in range(count)]


def state(prompt, **fields):
    return RequestState(prompt=prompt, params=SamplingParams(**{"max_tokens": NEW} | fields))


def free(sides):
    return [(each.engine.free_pages, each.engine.free_rows) for each in (sides.prefill, sides.decode)]


def serve_all(sides, given):
    """Each prompt gets the tokens of one engine, and both sides are as before."""
    before = free(sides)
    for prompt in given:
        sides.submit(state(prompt))
    sides.run()
    check(sides, given, before)


def check(sides, given, before):
    sides.rest()
    for key, prompt in enumerate(given):
        assert sides.tokens(key) == tiny.plain(prompt, NEW), key
        assert sides.ended[key].finish_reason in ("length", "stop")
    assert free(sides) == before


@pytest.mark.parametrize(("faults", "ends"), [(7, False), (8, True)])
def test_a_device_that_keeps_failing_ends_the_decode_server(monkeypatch, faults, ends):
    sides = couple("none", prefills_alone=True)
    left, step, (prompt,) = [faults], Engine.step, prompts("faults", 1)

    def failing(self):
        if self is sides.decode.engine and left[0]:
            left[0] -= 1
            raise DeviceError("as it may")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)
    key, _ = sides.submit(state(prompt))
    if ends:
        with pytest.raises(DeviceError, match="as it may"):
            sides.rest()
    else:
        sides.rest()
        assert sides.tokens(key) == tiny.plain(prompt, NEW)


@pytest.mark.sample(3)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["none", "eagle", "eagle-tree", "mtp", "draft-model", "ngram"])
def test_tokens_are_those_of_one_engine(name, overlap):
    sides = couple(name, overlap=overlap, prefill_chunk=5, num_pages=40)
    serve_all(sides, prompts(name, 6))
    counts = sides.decode.counts
    assert counts["arrived"] == 6 - counts["finished_there"] > 0
    sides.close()


@pytest.mark.parametrize("transport", ["torch", pytest.param("nixl", marks=pytest.mark.needs_nixl)])
def test_over_transports_of_processes(transport):
    sides = couple("eagle", get_transport(transport), overlap=True)
    serve_all(sides, prompts(transport, 5))
    sides.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("moment", range(0, 12, 3))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_side_dies_at_any_moment(side, moment, alone):
    """The other one frees what it held; the decode side does again what didn't decode yet."""
    sides = couple("eagle", overlap=True, prefills_alone=alone, max_requests=2)
    before, given = free(sides), prompts(moment, 5)
    for prompt in given:
        sides.submit(state(prompt))
    for _ in range(moment):
        sides.turn()
    sides.lose(side)
    if side == "decode":  # another one comes, with an engine of its own; whoever asked asks again with what it has
        states = {key: state(prompt) for key, prompt in enumerate(given)}
        outputs = {key: sides.tokens(key) for key in states}
        open_ = [key for key in states if key not in sides.ended]
        sides.decode = type(sides.decode)(engine("eagle", overlap=True, max_requests=2), prefills_alone=alone)
        sides.prefill.engine.drain()
        sides.connect()
        ended, old = sides.ended, dict(sides.outputs)
        sides.outputs, sides.ended = {}, {}
        for key in open_:
            each = states[key]
            sides.submit(RequestState(prompt=each.prompt, params=each.params, output=outputs[key]))
        sides.run()
        for place, key in enumerate(open_):
            assert outputs[key] + sides.tokens(place) == tiny.plain(given[key], NEW)
        assert {*ended, *open_} == set(old)
        sides.rest()
        assert free(sides) == before
    else:
        done_again = sides.decode.counts["done_again"]
        sides.prefill = type(sides.prefill)(engine("eagle", overlap=True, max_requests=2))
        sides.connect()
        sides.run()
        check(sides, given, before)
        assert done_again or moment > 3
    sides.close()


def test_aborts_at_any_moment_free_everything():
    sides = couple("eagle", overlap=True)
    before = free(sides)
    for moment in range(8):
        _, number = sides.submit(state(prompts(moment, 1)[0]))
        for _ in range(moment):
            sides.turn()
        sides.decode.abort(number)
        sides.decode.abort(number)
    sides.rest()
    sides.run(lambda: not (sides.prefill.num_requests or sides.turn()))
    assert free(sides) == before
    sides.close()


def test_what_can_not_be_served_is_refused_by_either_side():
    sides = couple("none")
    key, _ = sides.submit(state(tuple(range(20)) * 4))
    sides.run()
    assert sides.ended[key].finish_reason == "error"
    assert "don't fit in the context of 64" in sides.ended[key].error
    with pytest.raises(RequestError, match="one sample"):
        sides.decode.engine.resume(state((1, 2), n=2, temperature=1.0))
    sides.close()


def test_a_request_that_ends_with_its_first_token_never_moves():
    sides = couple("eagle")
    before, (prompt,) = free(sides), prompts(3, 1)
    key, _ = sides.submit(state(prompt, max_tokens=1))
    sides.run()
    assert sides.tokens(key) == tiny.plain(prompt, NEW)[:1]
    assert sides.decode.counts["arrived"] == 0
    sides.rest()
    assert free(sides) == before
    sides.close()


def test_options_go_along():
    params = {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 2}
    params |= {"logit_bias": {3: float("-inf"), 4: 1.5}}
    alone = engine("none")
    whole = alone.generate([(3, 1, 4, 1, 5)], SamplingParams(max_tokens=NEW, **params))[0]
    sides = couple("none")
    key, _ = sides.submit(state((3, 1, 4, 1, 5), **params))
    sides.run()
    assert sides.tokens(key) == whole.token_ids
    reported = [each for output in sides.outputs[key] for each in output.logprobs]
    assert [each.token for each in reported] == [each.token for each in whole.logprobs]
    sides.close()


def test_a_decode_side_short_of_pages_takes_them_one_by_one():
    """Pages for two at a time: others wait in the prefill engine, and nothing is stuck."""
    sides = Couple(engine("eagle", num_pages=60), engine("eagle", num_pages=14), LocalTransport())
    serve_all(sides, prompts(8, 7))
    sides.close()


GUIDES = {
    "schema": JsonSchema({"type": "object", "properties": {"n": {"enum": ["a", "bb"]}}, "required": ["n"]}),
    "regex": Regex("(ab|cd){2,4}x"),
    "grammar": Ebnf('root ::= "(" root ")" | "x"'),
    "choice": ChoiceGuide(["yes", "no, never"]),
    "object": JsonObject(),
    "none": None,
}


@pytest.fixture(scope="module")
def guided():
    """Two engines with a tokenizer, and what one of them gives alone."""
    config = plain_config(dtype="float32", max_context=96, max_requests=3, overlap=True)
    made = [
        Engine.from_checkpoint(bundled("target"), tiny.BACKEND, draft_dir=bundled("eagle"), speculate="eagle", config=config)
        for _ in range(2)
    ]
    prompt = tuple(made[0].tokenizer.encode("def main("))
    params = {name: SamplingParams(max_tokens=24, guide=guide) for name, guide in GUIDES.items()}
    found = made[0].generate([prompt] * len(params), list(params.values()))
    wanted = {name: each.token_ids for name, each in zip(params, found, strict=True)}
    return made, prompt, params, wanted


def test_guides_go_along(guided):
    (giver, taker), prompt, params, wanted = guided
    sides = Couple(giver, taker, LocalTransport())
    keys = {name: sides.submit(RequestState(prompt=prompt, params=each))[0] for name, each in params.items()}
    sides.run()
    assert {name: sides.tokens(key) for name, key in keys.items()} == wanted
    assert sides.decode.counts["arrived"] == len(GUIDES)
    sides.close()


def test_a_guided_request_goes_on_with_the_output_that_it_has(guided):
    (giver, taker), prompt, params, wanted = guided
    sides = Couple(giver, taker, LocalTransport())
    key, _ = sides.submit(RequestState(prompt=prompt, params=params["schema"], output=wanted["schema"][:3]))
    sides.run()
    assert wanted["schema"][:3] + sides.tokens(key) == wanted["schema"]
    sides.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_guide_that_does_not_compile_ends_its_request_alone(guided, side):
    (giver, taker), prompt, params, wanted = guided
    sides = Couple(giver, taker, LocalTransport())
    if side == "prefill":  # as if this side's library took it
        sides.decode._compilers.delay = lambda *request: False
    before = free(sides)
    bad, _ = sides.submit(RequestState(prompt=prompt, params=SamplingParams(guide=Ebnf('start ::= "a"'))))
    good, _ = sides.submit(RequestState(prompt=prompt, params=params["regex"]))
    _, gone = sides.submit(RequestState(prompt=prompt, params=SamplingParams(guide=Regex("[a-z]{3,9}"))))
    sides.decode.abort(gone)
    sides.run(lambda: {bad, good} <= sides.ended.keys())
    assert sides.ended[bad].finish_reason == "error"
    assert "root" in sides.ended[bad].error
    assert sides.tokens(good) == wanted["regex"]
    sides.rest()
    assert free(sides) == before
    sides.close()


def test_requests_do_not_wait_for_a_guide(guided, monkeypatch):
    (giver, taker), prompt, params, wanted = guided
    gate = threading.Event()
    monkeypatch.setattr(taker, "compile_guide", lambda guide: gate.wait(LIMIT_S))
    sides = Couple(giver, taker, LocalTransport())
    slow, _ = sides.submit(RequestState(prompt=prompt, params=params["choice"]))
    other, _ = sides.submit(RequestState(prompt=prompt, params=params["none"]))
    sides.run(lambda: other in sides.ended)
    assert not sides.outputs[slow]
    gate.set()
    sides.run()
    assert sides.tokens(slow) == wanted["choice"]
    sides.close()
