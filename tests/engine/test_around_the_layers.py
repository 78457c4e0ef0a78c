"""What an iteration does besides its layers: on a device with queues each operation more is microseconds of every token."""

from collections import Counter

import pytest
import torch
from tests.engine.conftest import Tiny
from torch.utils._python_dispatch import TorchDispatchMode

from outrider import SamplingParams
from outrider.device import KernelSet, WrappedKernels
from outrider.engine.state.staging import Staging
from outrider.model import Decoder
from outrider.registry import get_backend

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


class Counted(TorchDispatchMode):
    """Counts operators, those within an operator not among them."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        self.calls[name] += 1
        self.calls["states"] += name == "aten::copy_" and args[0].dim() == 2 and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def decoded(bundle, prompt, **config):
    """The operators of a request's iterations behind its prompt."""
    engine = bundle.engine(max_requests=2, max_context=64, **config)
    engine.add_request(prompt, PARAMS)
    engine.step()
    counted = Counted()
    with counted:
        while engine.has_unfinished:
            engine.step()
    assert counted.calls["outrider::publish_accepted"] > 0
    return counted.calls


@pytest.mark.parametrize("mode", ["staged", "fused"])
def test_without_drafts_the_last_tokens_are_verified_where_they_are(tiny64, tiny_tokens, mode):
    calls = decoded(tiny64, tiny_tokens[0][:8], speculate="none", mode=mode)
    assert calls["aten::cat"] == 0


def test_states_that_are_read_in_the_same_graph_are_not_copied(tiny64, tiny_tokens):
    """A draft's head reads them behind verify: from static buffers where that is a graph of its own."""
    copies = {mode: decoded(tiny64, tiny_tokens[0][:8], mode=mode)["states"] for mode in ("staged", "fused")}
    assert copies["staged"] > 0
    assert copies["fused"] == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["staged", "fused"])
def test_what_the_host_decided_is_moved_only_where_it_is_new(tiny_tokens, mode, monkeypatch):
    """In fused mode the copy lies between two graphs, and but for an iteration in 16, with a new page, nothing is new."""
    bundle = Tiny(get_backend("sim"))
    engine = bundle.engine(max_requests=2, max_context=64, speculate="none", mode=mode, page_size=16)
    moved, unpack = [], Staging.unpack
    monkeypatch.setattr(Staging, "unpack", lambda self, *rest: (moved.append(rest), unpack(self, *rest))[1])
    before = engine.stats.iterations
    prompts = [tiny_tokens[0][:8], tiny_tokens[1][:5]]
    made = engine.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))
    iterations, copies = engine.stats.iterations - before, len(moved)
    assert [each.token_ids for each in made] == [bundle.plain(prompt, 30).token_ids for prompt in prompts]
    assert copies == iterations if mode == "staged" else copies < iterations / 2


class Together(KernelSet):
    """Looks at logits only where it decides by them, or where nobody decides without a draw or a grammar between."""

    def __init__(self):
        self.calls = Counter()

    def verify_checked(self, *operands):
        self.calls["together"] += 1
        before = self.calls["apart"]
        made = super().verify_checked(*operands)
        self.calls["apart"] = before
        return made

    def find_nan(self, x, found):
        self.calls["apart"] += 1
        super().find_nan(x, found)


@pytest.mark.parametrize("speculate", ["none", "eagle", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_are_looked_at_by_whoever_decides(tiny64, tiny_tokens, speculate, temperature):
    bundle = Tiny()
    bundle.target = Decoder(tiny64.target.config, tiny64.target.weights, Together())
    engine = bundle.engine(max_requests=2, max_context=64, speculate=speculate)
    engine.add_request(tiny_tokens[0][:8], SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=3))
    engine.step()
    calls = bundle.target.kernels.calls
    calls.clear()
    while engine.has_unfinished:
        engine.step()
    together = speculate != "tree" and not temperature
    assert (calls["together"] > 0, calls["apart"] > 0) == (together, not together)


def test_a_wrapper_that_decides_is_asked_for_both():
    class Inner(KernelSet):
        def verify_checked(self, *operands):  # noqa: ARG002
            raise AssertionError("not what decides")

    class Decides(WrappedKernels):
        def verify_chain(self, logits, drafts, *rest):
            tokens, accepted = super().verify_chain(logits, drafts, *rest)
            return tokens + 1, accepted

    logits, zeros = torch.zeros(1, 2, 5), torch.zeros(1, dtype=torch.int64)
    operands = (logits, torch.ones(1, 1, dtype=torch.int64), torch.zeros(1), zeros, zeros, torch.zeros(1, 2).long())
    tokens, accepted = Decides(Inner()).verify_checked(*operands)
    assert (tokens.tolist(), accepted.tolist()) == ([[1, 0]], [0])
    with pytest.raises(AssertionError, match="not what decides"):
        WrappedKernels(Inner()).verify_checked(*operands)
