"""Kernels that are compiled when they're first used are compiled before the first request, and never after."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from tests.engine.conftest import Tiny

from outrider import Engine, SamplingParams
from outrider.device import KernelSet
from outrider.engine.assembly import Assembly
from outrider.engine.loop import Loop
from outrider.engine.state.staging import Packer
from outrider.model import Decoder, EagleHead
from outrider.registry import get_backend
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.tree import DynamicTree
from outrider_proof.tiny import plain_config

MODES = {"eager": {}, "graphs": {"graphs": True}, "fused": {"mode": "fused"}}


class Compiling(KernelSet):
    """Kernels that would be compiled anew for each power of two of tokens, requests or cached tokens. It notes them."""

    name = "compiling"

    def __init__(self, beforehand=True):
        self.variants = set()
        self.beforehand = beforehand
        self._open = False

    @contextmanager
    def _scope(self):
        self._open = self.beforehand
        yield
        self._open = False

    def every_variant(self):
        return self._scope()

    def compiled(self):
        return dict(Counter(kernel for kernel, *_ in self.variants))

    @contextmanager
    def _ahead(self):
        before = set(self.variants)
        yield
        self.ahead = {kernel for kernel, *_ in self.variants - before}

    def compile_ahead(self):
        return self._ahead()

    def _use(self, kernel, shape, *sizes):
        classes = [size.bit_length() for size in sizes]
        grid = [classes]
        if self._open:
            grid = [[]]
            for _ in sizes:
                grid = [[*before, more] for before in grid for more in range(14)]
        self.variants |= {(kernel, shape, *each) for each in grid}

    def linear(self, x, weight, bias=None):
        self._use("linear", tuple(weight.shape), x.numel() // x.shape[-1])
        return super().linear(x, weight, bias)

    def paged_attention(self, q, k_cache, v_cache, metadata, *, scale, window=0):
        tree = metadata.tree_mask is not None
        self._use("attention", (q.dtype, tree), metadata.seq_lens.shape[0], metadata.max_query, metadata.max_kv)
        return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)

    def sample(self, logits, temperature, seeds, positions, *, draft=False):
        self._use("sample", draft, logits.shape[0])
        return super().sample(logits, temperature, seeds, positions, draft=draft)

    def verify_chain(self, target_logits, draft_tokens, draft_probs, temperature, seeds, positions):
        self._use("verify_chain", draft_probs is None, target_logits.shape[0])
        return super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)

    def logprobs(self, logits, tokens, count):
        self._use("logprobs", logits.shape[1], logits.shape[0])
        return super().logprobs(logits, tokens, count)

    def truncate_logits(self, logits, temperature, top_k, top_p, min_p):
        self._use("truncate_logits", logits.dim(), logits.shape[0])
        return super().truncate_logits(logits, temperature, top_k, top_p, min_p)

    def penalize_logits(self, logits, *rest):
        self._use("penalize_logits", logits.dim(), logits.shape[0])
        return super().penalize_logits(logits, *rest)


@pytest.fixture(scope="module", params=["cpu", "sim"])
def bundle(request):
    return Tiny(get_backend(request.param))


def engine_with(bundle, kernels, *, tree=False, draft_tokens=2, **fields):
    loading = bundle.backend.create_stream("load")
    with bundle.backend.on(loading):  # another test's backend may have been created since
        target = Decoder(bundle.target.config, bundle.target.weights, kernels)
        head = EagleHead(bundle.head.config, bundle.head.weights, target)
    loading.synchronize()
    proposer = (
        EagleTreeProposer(head, DynamicTree(topk=2, depth=2)) if tree else EagleProposer(head, draft_tokens=draft_tokens)
    )
    sizes = {"max_requests": 3, "max_context": 96, "prefill_chunk": 24, "draft_tokens": draft_tokens}
    config = plain_config(dtype="float64", overlap=True, **sizes, **fields)
    return Engine(target, bundle.backend, proposer=proposer, config=config)


REQUESTS = (
    SamplingParams(max_tokens=9, ignore_eos=True),
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.8, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=12, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0),
    SamplingParams(max_tokens=9, ignore_eos=True),
)


def serve(engine, prompts):
    """Prompts of many lengths, in batches of one to three, chunks of all sizes."""
    lengths = (1, 2, 5, 23, 24, 25, 31, 50, 7, 60)
    each = [REQUESTS[i % len(REQUESTS)] for i in range(len(lengths))]
    return engine.generate([(prompts[i] * 9)[:length] for i, length in enumerate(lengths)], each)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_compiled_after_the_start(bundle, tiny_tokens, mode):
    kernels = Compiling()
    engine = engine_with(bundle, kernels, **MODES[mode])
    assert engine.warm_up.compiled["attention"] > 0
    assert sum(engine.warm_up.compiled.values()) == len(kernels.variants)  # and capturing found all of its own there
    serve(engine, tiny_tokens)
    assert kernels.compiled() == engine.warm_up.compiled


@pytest.mark.sample(1, per="mode")
@pytest.mark.parametrize("mode", MODES)
def test_fused_iterations_are_asked_for_ahead(bundle, mode):
    """An iteration of padding meets the kernels of all features; other modes need lengths that the host knows."""
    kernels = Compiling()
    kernels.ahead = set()
    engine = engine_with(bundle, kernels, **MODES[mode])
    of_guides = {"apply_token_bitmask"}
    assert kernels.ahead == (set(engine.warm_up.compiled) - of_guides if mode == "fused" else set())


@pytest.mark.sample(1)
def test_nothing_is_compiled_after_the_start_for_trees(bundle, tiny_tokens):
    kernels = Compiling()
    engine = engine_with(bundle, kernels, tree=True)
    serve(engine, tiny_tokens)
    assert kernels.compiled() == engine.warm_up.compiled


def test_the_warm_up_is_no_longer_than_it_must_be(monkeypatch):
    """Each request is cut short once every length of a draft was used, whatever was accepted: here there is one length."""
    iterations, requests = [], []
    iterate, add = Loop.iterate, Loop.add
    monkeypatch.setattr(Loop, "iterate", lambda self: iterations.append(len(requests)) or iterate(self))
    monkeypatch.setattr(Loop, "add", lambda self, request: requests.append(request) or add(self, request))
    engine_with(Tiny(get_backend("cpu")), Compiling(), draft_tokens=5, draft_length="fixed")
    assert max(Counter(iterations).values()) == 5, "two chunks, and three iterations behind them"


def test_the_scope_is_left_on_the_engines_own_device(monkeypatch):
    """Kernels are loaded onto the current device when the scope is left; an engine's needn't be the thread's first."""
    first, second = (Tiny(get_backend(name)) for name in ("sim:0", "sim:1"))
    left = []
    monkeypatch.setattr(
        "outrider.engine.assembly.serve_internal_requests", lambda *given: None
    )  # it takes long, and isn't the point

    class Loading(KernelSet):
        @contextmanager
        def every_variant(self):
            yield
            left.append(torch.empty(0, device="sim").device.index)

    with first.backend.on(first.backend.create_stream("somebody's")):
        engine_with(second, Loading())
    assert left == [1]


@pytest.mark.sample(1)
def test_without_every_variant_something_is(bundle, tiny_tokens):
    """That the tests above can fail: a scope that does nothing leaves most variants out."""
    kernels = Compiling(beforehand=False)
    engine = engine_with(bundle, kernels)
    serve(engine, tiny_tokens)
    assert sum(kernels.compiled().values()) > sum(engine.warm_up.compiled.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["graphs", "fused"])
def test_capturing_goes_on_with_none_of_the_warm_ups_requests(bundle, monkeypatch, mode):
    """Their rows and lengths would still be there: each graph's own warm-up would make them longer, beyond their tables."""
    found, capture = {}, Assembly.capture

    def watched(assembly, progress):
        parts = assembly._parts
        before = parts.future.seq_lens.tolist()
        launchers = capture(assembly, progress)
        parts.backend.synchronize()
        found.update(before=before, after=parts.future.seq_lens.tolist(), rows=parts.staging.decode_rows(3).tolist())
        found["captured"] = [parts.buffers.views(count, parts.proposer.nodes).inputs.seq_lens.tolist() for count in (1, 2, 3)]
        return launchers

    monkeypatch.setattr(Assembly, "capture", watched)
    engine_with(bundle, Compiling(), **MODES[mode])
    assert max(found["before"]) > 0, "the warm-up's requests have left their lengths"
    assert found["after"] == found["before"]
    assert found["rows"] == [0, 0, 0]
    assert found["captured"] == [[0], [0, 0], [0, 0, 0]]


@pytest.mark.sample(1)
def test_the_engine_forgets_its_own_requests(bundle, tiny_tokens):
    plain = engine_with(bundle, KernelSet())
    assert plain.warm_up is None
    engine = engine_with(bundle, Compiling())
    assert (engine.stats.iterations, engine.stats.emitted_tokens) == (0, 0)
    assert (engine.free_pages, engine.free_rows) == (plain.free_pages, plain.free_rows)
    assert engine.step() == []
    assert engine.add_request([0] * 30) == 0
    engine.step()
    (request,) = engine._scheduler.running
    assert request.prefill_start == 0  # its pages weren't taken for a prefix, though the prompt is the warm-up's own
    engine.abort(0)
    while engine.has_unfinished:
        engine.step()
    assert [done.token_ids for done in serve(engine, tiny_tokens)] == [done.token_ids for done in serve(plain, tiny_tokens)]


def test_a_small_engine_warms_up_too(bundle):
    target = Decoder(bundle.target.config, bundle.target.weights, Compiling())
    sizes = {"max_requests": 1, "max_context": 2, "page_size": 1}
    config = plain_config(dtype="float64", prefix_cache=False, **sizes)
    engine = Engine(target, bundle.backend, config=config)
    assert engine.warm_up.compiled
    assert len(engine.generate([[5]], SamplingParams(max_tokens=1))[0].token_ids) == 1


def test_it_says_what_it_compiled(bundle):
    engine = engine_with(bundle, Compiling())
    assert str(engine.warm_up).startswith(f"{sum(engine.warm_up.compiled.values())} kernels compiled or loaded in ")
    assert "attention" in str(engine.warm_up)


@pytest.mark.sample(1)
def test_what_is_packed_begins_at_multiples_of_16_bytes(bundle, tiny_tokens, monkeypatch):
    """Kernels are compiled apart for such addresses: an offset that changes with the batch would compile them again."""
    starts = []
    add = Packer.add

    def noted(packer, name, values):
        add(packer, name, values)
        starts.append(packer.segments[name][0])

    monkeypatch.setattr(Packer, "add", noted)
    engine = engine_with(bundle, KernelSet())
    serve(engine, tiny_tokens)
    assert len(set(starts)) > 20
    assert all(start * 8 % 16 == 0 for start in starts)
