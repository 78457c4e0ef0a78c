"""Every proposer on the simulated accelerator: clean under the sanitizer, plain tokens under adversarial schedules, and a
tree's waits are needed, each of them.
"""

import dataclasses
import inspect
import textwrap

import pytest
import torch

from outrider import Engine, EngineConfig, SamplingParams
from outrider.engine import step
from outrider.model import Decoder, Eagle3Head, EagleHead, MtpHead
from outrider.sanitizer import watch
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.ngram import NgramProposer
from outrider.speculative.tree import DynamicTree, FixedTree
from outrider_sim.backend import SimBackend
from outrider_sim.explore import run_once
from outrider_sim.options import parse_options
from outrider_sim.strategies import Strategy, make_strategy
from speculative import tiny

PROMPTS, NEW_TOKENS = [(3,), (1, 2, 3, 4, 5)], 10


def moved(value, device):
    """Weights, copied to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def decoder(model, backend):
    return Decoder(model.config, moved(model.weights, backend.device), backend.kernels)


def eagle(target):
    head = tiny.eagle_head()
    return EagleHead(head.config, moved(head.weights, target.device), target)


def eagle3(target):
    head = tiny.eagle3_head()
    return Eagle3Head(head.config, moved(head.weights, target.device), target, capture_layers=head.capture_layers)


def mtp(target):
    return [MtpHead(h.config, moved(h.weights, target.device), target, ahead=h.ahead) for h in tiny.mtp_heads()]


def shape():
    return DynamicTree(topk=3, depth=3)


MAKERS = {
    "eagle": lambda t, _: EagleProposer(eagle(t), draft_tokens=3),
    "eagle-tree": lambda t, _: EagleTreeProposer(eagle(t), shape()),
    "eagle-fixed-tree": lambda t, _: EagleTreeProposer(eagle(t), FixedTree.regular((3, 2, 1))),
    "eagle3": lambda t, _: EagleProposer(eagle3(t), draft_tokens=3),
    "eagle3-tree": lambda t, _: EagleTreeProposer(eagle3(t), shape()),
    "mtp": lambda t, _: MtpProposer(mtp(t)),
    "mtp-tree": lambda t, _: MtpProposer(mtp(t), branches=3),
    "draft-model": lambda t, b: DraftModelProposer(decoder(tiny.draft_model(), b), target=t, draft_tokens=3),
    "draft-model-tree": lambda t, b: DraftModelTreeProposer(decoder(tiny.draft_model(), b), target=t, shape=shape()),
    "ngram": lambda t, _: NgramProposer(vocab_size=t.config.vocab_size, draft_tokens=3),
    "ngram-tree": lambda t, _: NgramProposer(vocab_size=t.config.vocab_size, draft_tokens=3, branches=3),
}


def program(name):
    """Generate with one proposer, greedy and sampling, and compare the greedy tokens with plain decoding."""

    def run(backend):
        loading = backend.create_stream("load")
        with backend.on(loading):
            target = decoder(tiny.target(), backend)
            proposer = MAKERS[name](target, backend)
        loading.synchronize()
        made = EngineConfig(dtype="float64", max_context=32, max_requests=2, page_size=4, prefill_chunk=4, overlap=True)
        engine = Engine(target, backend, proposer=proposer, config=made)
        results = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.token_ids == tiny.plain(prompt, NEW_TOKENS)
        engine.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=1.0))

    return run


@pytest.fixture(scope="module", autouse=True)
def _plain_first():
    """Plain decoding runs outside the simulator's schedules."""
    for prompt in PROMPTS:
        tiny.plain(prompt, NEW_TOKENS)


@pytest.mark.parametrize("name", MAKERS)
def test_the_sanitizer_finds_nothing(name):
    backend = SimBackend(parse_options({}))
    with watch(backend) as report:
        error = run_once(backend, program(name), Strategy())
    assert error is None
    assert report.clean, str(report)


@pytest.mark.parametrize("name", MAKERS)
def test_any_schedule_gives_plain_greedy_tokens(name):
    for seed in range(8):
        backend = SimBackend(parse_options({}))
        error = run_once(backend, program(name), make_strategy("mixed", seed, {}))
        if error is not None:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize(
    "wait",
    [
        "fences.shared_reads_done.wait(streams.plan)",
        "fences.draft_outputs_ready.wait(streams.plan)",
        "fences.plan_ready.wait(streams.forward)",
        "fences.accept_ready.wait(streams.plan)",
        "fences.extend_plan_ready.wait(streams.forward)",
    ],
)
def test_a_missing_wait_of_a_tree_is_found_in_one_run(wait, monkeypatch):
    (name,) = [each for each in ("_decode", "_extend") if wait in inspect.getsource(getattr(step.Step, each))]
    source = textwrap.dedent(inspect.getsource(getattr(step.Step, name)))
    namespace = dict(vars(step))
    exec(source.replace(wait, "pass"), namespace)
    monkeypatch.setattr(step.Step, name, namespace[name])
    backend = SimBackend(parse_options({}))
    with watch(backend) as report:
        run_once(backend, program("eagle-tree"), Strategy())
    assert not report.clean
