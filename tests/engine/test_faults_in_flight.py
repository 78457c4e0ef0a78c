"""Whatever fails while iterations are in flight: the tokens of the requests stay right, and nothing is lost.

A drawn fault meets a drawn operation or allocation of a small engine under a drawn schedule; meanwhile requests are
aborted. (That pages and rows came back is checked after every test here, see conftest.)
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.engine.conftest import Tiny

from outrider import Engine, SamplingParams
from outrider.device import DeviceError, DeviceFault, EngineStopped, OutOfDeviceMemory
from outrider.engine import Regex
from outrider.engine.requests.request import FinishReason
from outrider.errors import RequestError
from outrider.registry import get_backend
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider.speculative.tree import DynamicTree
from outrider_proof.decode_program import ResidueGrammars, Residues
from outrider_proof.tiny import plain_config

PROMPTS = ((5, 9, 20, 13, 21, 7, 2), (5, 9, 20, 13, 8), (17,), (8, 8, 3))
LONGEST = 9
GUIDED = SamplingParams(max_tokens=LONGEST, guide=Regex("residues"))
OPERATIONS = 1600
"""About what a run enqueues: prefill chunks, and some six iterations of 170 operations; with trees, more."""
LIVES = {"error": DeviceFault, "oom": OutOfDeviceMemory}


@pytest.fixture(scope="module")
def device():
    made = Tiny(get_backend("sim"))
    return made.backend, made.target, made.head


MODES = {"staged": {}, "graphs": {"graphs": True}, "fused": {"mode": "fused"}}


def engine_on(device, speculate, *, overlap=True, mode="staged"):
    backend, target, head = device
    proposers = {
        "none": NonSpeculativeProposer,
        "eagle": lambda: EagleProposer(head, draft_tokens=3),
        "tree": lambda: EagleTreeProposer(head, DynamicTree(topk=2, depth=2)),
    }
    # Too few pages for all requests at their longest: some wait or are preempted.
    config = plain_config(
        dtype="float64",
        max_context=24,
        max_requests=3,
        page_size=4,
        num_pages=14,
        prefill_chunk=5,
        overlap=overlap,
        **MODES[mode],
    )
    engine = Engine(target, backend, proposer=proposers[speculate](), config=config)
    ResidueGrammars.into(engine)
    return engine


@pytest.fixture(scope="module")
def expected(tiny64):
    return [tiny64.plain(prompt, LONGEST).token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def guided_tokens(tiny64):
    engine = engine_on((tiny64.backend, tiny64.target, tiny64.head), "none", overlap=False)
    found = [completion.token_ids for completion in engine.generate(PROMPTS, GUIDED)]
    for tokens in found:
        guide = Residues(tiny64.target.config.vocab_size)
        assert [guide.accept(token) for token in tokens] == [True] * LONGEST
    return found


def start(device, strategy):
    from outrider_sim.strategies import make_strategy

    backend = device[0]
    backend.control.reset(make_strategy(strategy, 0, {}))
    return backend


class Run:
    """Serves the prompts, some of them guided; aborts some at their moments; keeps what came out and what was raised."""

    def __init__(self, engine, aborts=None, guided=()):
        self.engine, self.aborts = engine, dict(aborts or {})
        plain = SamplingParams(max_tokens=LONGEST)
        self.ids = [engine.add_request(prompt, GUIDED if i in guided else plain) for i, prompt in enumerate(PROMPTS)]
        self.tokens = {request: [] for request in self.ids}
        self.ended, self.raised, self.steps = {}, [], 0

    def step(self):
        self.steps += 1
        for index, when in list(self.aborts.items()):
            if when <= self.steps:
                del self.aborts[index]
                if self.ids[index] not in self.ended:
                    try:
                        self.engine.abort(self.ids[index])
                    except RequestError:
                        assert self.raised  # it ended in the step that raised, whose outputs come with the next one
        for output in self.engine.step():
            self.tokens[output.request_id].extend(output.tokens)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    def to_the_end(self):
        while self.engine.has_unfinished:
            try:
                self.step()
            except DeviceError as error:
                self.raised.append(error)
                if error.device_lost:
                    return self
        return self

    def check(self, expected):
        for request, tokens in zip(self.ids, expected, strict=True):
            got = tuple(self.tokens[request])
            if self.ended.get(request) in (FinishReason.LENGTH, FinishReason.STOP):
                assert got == tokens
            else:
                assert got == tokens[: len(got)]


faults = st.tuples(st.sampled_from(sorted(LIVES)), st.integers(1, OPERATIONS))
aborts = st.dictionaries(st.integers(0, len(PROMPTS) - 1), st.integers(1, 8), max_size=2)
strategies = st.sampled_from(["program", "lazy", "random", "pct"])
proposers = st.sampled_from(["eagle", "tree", "none"])
modes = st.sampled_from(sorted(MODES))
guides = st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=3))


def recovers(device, expected, speculate, faults, aborts, strategy, overlap, mode, guided=frozenset(), along=()):
    """``guided``: which requests are, and ``along``: what such ones write."""
    backend = start(device, strategy)
    expected = [along[index] if index in guided else tokens for index, tokens in enumerate(expected)]
    run = Run(engine_on(device, speculate, overlap=overlap, mode=mode), aborts, guided)
    for kind, number in faults:
        backend.control.inject(kind, number)
    run.to_the_end()
    run.check(expected)
    assert len(run.raised) <= len(faults)
    if any(error.device_lost for error in run.raised):
        # What an operation that failed left behind is undefined, and may send a later one out of its bounds.
        assert any(kind == "error" for kind, _ in faults)
        assert "out of" in str(run.raised[-1])
        with pytest.raises(EngineStopped):
            run.engine.step()
        return run
    assert all(isinstance(error, tuple(LIVES.values())) for error in run.raised)
    assert len(run.ended) == len(PROMPTS)
    engine = run.engine
    assert (engine.free_rows, engine.free_pages) == (3, 13)
    return run


COMMON = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.explicit, Phase.generate],  # a run is short enough to be read as it is
    "suppress_health_check": [HealthCheck.too_slow],
}


@given(st.data())
@settings(max_examples=8, **COMMON)
@pytest.mark.slow
def test_a_fault_costs_time_and_nothing_else(device, expected, guided_tokens, data):
    recovers(
        device,
        expected,
        data.draw(proposers),
        data.draw(st.lists(faults, min_size=1, max_size=2)),
        data.draw(aborts),
        data.draw(strategies),
        data.draw(st.booleans()),
        data.draw(modes),
        data.draw(guides),
        guided_tokens,
    )


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=200, **COMMON)
def test_many_faults_cost_time_and_nothing_else(device, expected, guided_tokens, data):
    many = st.tuples(proposers, st.lists(faults, min_size=1, max_size=4), aborts, strategies, st.booleans(), modes, guides)
    recovers(device, expected, *data.draw(many), guided_tokens)


@pytest.mark.sample(2, per="overlap")
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize(("overlap", "tokens"), [(False, 5), (True, 1)])
def test_what_a_failed_copy_was_to_bring_is_brought_again(device, expected, number, overlap, tokens):
    """The operations that an iteration begins with, after another request's: repeated, it packs the same values, and the
    device hasn't got them.
    """
    backend = start(device, "lazy")
    engine = engine_on(device, "none", overlap=overlap, mode="fused")
    params = SamplingParams(max_tokens=tokens)
    engine.generate([(17, 3)], SamplingParams(max_tokens=3))
    backend.control.inject("error", number)
    request, got, raised = engine.add_request(PROMPTS[0], params), [], []
    while engine.has_unfinished:
        try:
            got += [token for output in engine.step() for token in output.tokens]
        except DeviceFault as error:
            raised.append(error)
    assert len(raised) == (0 if number in (2, 3) else 1)  # a fence's signal and its wait don't fail
    assert request not in engine.open_requests
    assert tuple(got) == expected[0][:tokens]


@pytest.mark.sample(1, per="kind")
@pytest.mark.parametrize("kind", sorted(LIVES))
@pytest.mark.parametrize("number", [1, 6, 17])
@pytest.mark.parametrize("forward", [1, 3, 5])
def test_a_fault_in_the_model_is_raised_once_and_the_engine_goes_on(device, expected, monkeypatch, kind, number, forward):
    """What a matrix product that failed leaves is undefined, but no index."""
    backend, target, _ = device
    start(device, "lazy")
    engine = engine_on(device, "eagle")
    honest, calls = target.forward_with_aux_hidden_states, 0

    def forward_with_aux_hidden_states(*arguments):
        nonlocal calls
        calls += 1
        if calls == forward:
            backend.control.inject(kind, number)
        return honest(*arguments)

    monkeypatch.setattr(target, "forward_with_aux_hidden_states", forward_with_aux_hidden_states)
    run = Run(engine).to_the_end()
    run.check(expected)
    assert [type(error) for error in run.raised] == [LIVES[kind]]
    assert len(run.ended) == len(PROMPTS)


@given(st.sampled_from(["lost", "stuck"]), st.integers(1, OPERATIONS), aborts, strategies, modes)
@settings(max_examples=12, **COMMON)
@pytest.mark.slow
def test_a_device_that_is_gone_ends_it_with_what_is_known(device, expected, kind, number, aborts, strategy, mode):
    backend = start(device, strategy)
    run = Run(engine_on(device, "eagle", mode=mode), aborts)
    backend.control.inject(kind, number)
    run.to_the_end()
    run.check(expected)
    if run.raised:
        (error,) = run.raised
        assert error.device_lost
        left = run.engine.open_requests
        for request, tokens in zip(run.ids, expected, strict=True):
            assert left.get(request, ()) == tokens[: len(left.get(request, ()))]
        with pytest.raises(EngineStopped):
            run.engine.step()
    else:
        assert len(run.ended) == len(PROMPTS)
    backend.control.reset()


@pytest.mark.sample(1, per="index")
@pytest.mark.parametrize("when", range(1, 9))
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_an_abort_at_any_step_leaves_the_others_alone(device, expected, when, index):
    start(device, "random")
    run = Run(engine_on(device, "eagle"), {index: when}).to_the_end()
    run.check(expected)
    assert run.raised == []
    with pytest.raises(RequestError, match="may have finished already"):
        run.engine.abort(run.ids[index])


@pytest.mark.sample(1, per="speculate")
@pytest.mark.parametrize("speculate", ["eagle", "tree", "none"])
@pytest.mark.parametrize("most", range(1, LONGEST + 1))
def test_a_request_that_ends_in_each_possible_step(device, expected, speculate, most):
    """Its neighbours, and whoever takes its row over, write what they do alone."""
    start(device, "random")
    engine = engine_on(device, speculate)
    lengths = [most, LONGEST, LONGEST, max(1, LONGEST - most)]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    done = engine.generate(PROMPTS, params)
    assert [each.token_ids for each in done] == [tokens[:length] for tokens, length in zip(expected, lengths, strict=True)]
    assert (engine.free_rows, engine.free_pages) == (3, 13)
