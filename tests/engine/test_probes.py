"""Bad values on the device: found before they are used, told with the results, and only their own request ends."""

from dataclasses import replace

import pytest
import torch
from tests.engine.conftest import Bundle, Tiny

from outrider import Engine, SamplingParams
from outrider.device import KernelSet
from outrider.engine.requests.request import FinishReason
from outrider.model import Decoder
from outrider.speculative.eagle import EagleProposer
from outrider.speculative.lookup import NgramProposer
from outrider_proof.tiny import plain_config

LENGTH = 16
MODES = {"called": {}, "graphs": {"graphs": True}, "fused": {"mode": "fused"}}


@pytest.fixture(scope="module", params=["cpu", "sim"])
def backend(request):
    from outrider.registry import get_backend

    return get_backend(request.param)


@pytest.fixture(scope="module")
def bundle(backend):
    """The bundled model, which doesn't come upon every token of its vocabulary."""
    return Bundle(backend, "float32")


@pytest.fixture(scope="module")
def small(backend):
    return Tiny(backend)


def with_plain_tokens(bundle, prompts):
    """Three prompts, and what plain decoding gives for them on this device."""
    prompts = [prompt[:12] for prompt in prompts[:3]]
    return prompts, served(bundle.engine(speculate="none", max_requests=3, max_context=64), prompts)[0]


@pytest.fixture(scope="module")
def prompts_and_tokens(bundle, prompt_tokens):
    return with_plain_tokens(bundle, prompt_tokens)


@pytest.fixture(scope="module")
def small_prompts_and_tokens(small, tiny_tokens):
    return with_plain_tokens(small, tiny_tokens)


def served(engine, prompts, meddle=lambda step: None):
    """Tokens and last outputs of requests for ``prompts``."""
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True)) for prompt in prompts]
    tokens, last, step = {i: [] for i in ids}, {}, 0
    while engine.has_unfinished:
        meddle(step)
        for output in engine.step():
            tokens[output.request_id] += output.tokens
            if output.finish_reason is not None:
                last[output.request_id] = output
        step += 1
    return [tuple(tokens[i]) for i in ids], [last[i] for i in ids]


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("hidden", float("nan"), "relay.hidden holds NaN at index 0"),
        ("token", 99999, "relay.token holds 99999 at index 0, expected 0 to 23"),
        ("token", -3, "relay.token holds -3 at index 0, expected 0 to 23"),
    ],
)
def test_a_bad_relay_ends_its_request_alone(small, small_prompts_and_tokens, mode, name, value, told):
    prompts, plain = small_prompts_and_tokens
    engine = small.engine(max_requests=3, max_context=64, overlap=True, **MODES[mode])

    def meddle(step):
        if step == 2:
            row = engine._requests[1].row
            with small.backend.on(engine._parts.streams.forward):
                engine._parts.future.relay[name][row] = value

    tokens, last = served(engine, prompts, meddle)
    assert tokens[0] == plain[0]
    assert tokens[2] == plain[2]
    assert tokens[1] == plain[1][: len(tokens[1])]
    assert 0 < len(tokens[1]) < LENGTH
    assert last[1].finish_reason is FinishReason.ERROR
    assert last[1].error == f"request 1: {told}"
    assert last[0].error is None
    # The engine goes on, also for the same prompt.
    assert served(engine, prompts)[0] == plain


class NanFor(KernelSet):
    """Logits that are NaN wherever token ``marked`` comes in."""

    def __init__(self, marked, table):
        self.marked, self.table = marked, table

    def gather_rows(self, state, rows):
        found = super().gather_rows(state, rows)
        return torch.where((rows == self.marked).unsqueeze(-1), float("nan"), found) if state is self.table else found


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_nan_from_the_model_ends_its_request_alone(bundle, prompts_and_tokens, mode):
    prompts, plain = prompts_and_tokens
    free = [prompt for prompt in prompts if 7 not in prompt]
    assert len(free) == 3
    model = Decoder(bundle.target.config, bundle.target.weights, NanFor(7, bundle.target.weights.embedding))
    config = plain_config(max_requests=3, max_context=64, page_size=4, overlap=True, **MODES[mode])
    engine = Engine(model, bundle.backend, proposer=EagleProposer(bundle.head, draft_tokens=4), config=config)
    tokens, last = served(engine, [prompts[0], [*prompts[1], 7, 5], prompts[2]])
    assert last[1].finish_reason is FinishReason.ERROR
    assert "target.logits holds NaN at index 0" in last[1].error
    assert tokens[1] == ()
    assert (tokens[0], tokens[2]) == (plain[0], plain[2])
    # Its pages go to others, who see nothing of it, and nobody shares them.
    assert served(engine, [prompts[1], prompts[0], prompts[2]])[0] == [plain[1], plain[0], plain[2]]


def test_completions_say_what_was_found(bundle, prompt_tokens):
    model = Decoder(bundle.target.config, bundle.target.weights, NanFor(7, bundle.target.weights.embedding))
    engine = Engine(model, bundle.backend, config=plain_config(max_requests=2, max_context=64))
    good, bad = engine.generate([prompt_tokens[0][:8], [7, 8]], SamplingParams(max_tokens=4))
    assert good.error is None
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error == "request 1: target.logits holds NaN at index 0"


class DraftsNonsense(NgramProposer):
    """A draft whose first token for ``row`` of the batch isn't one."""

    def __init__(self, row, token, **options):
        super().__init__(**options)
        self._row, self._token = row, token

    def draft(self, inputs):
        drafted = super().draft(inputs)
        count, length = drafted.tokens.shape
        row = torch.arange(count, device=inputs.seq_lens.device) == self._row
        first = torch.arange(length, device=inputs.seq_lens.device) == 0
        return replace(drafted, tokens=torch.where(row.unsqueeze(1) & first, self._token, drafted.tokens))


@pytest.mark.sample(1, per="mode")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("token", [99999, -3])
def test_a_drafted_token_that_is_none_ends_its_request_alone(small, small_prompts_and_tokens, mode, token):
    prompts, plain = small_prompts_and_tokens
    proposer = DraftsNonsense(2, token, vocab_size=small.target.config.vocab_size, draft_tokens=3)
    config = plain_config(dtype="float64", max_requests=3, max_context=64, page_size=4, overlap=True, **MODES[mode])
    tokens, last = served(Engine(small.target, small.backend, proposer=proposer, config=config), prompts)
    assert last[2].error == f"request 2: draft.tokens holds {token} at index 0, expected 0 to 23"
    assert tokens[2] == plain[2][: len(tokens[2])]
    assert tokens[:2] == plain[:2]
