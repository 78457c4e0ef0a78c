"""Prompts from graphs: the same tokens as from calls, in buckets that chunks don't fill, and what is never replayed."""

import itertools
from types import SimpleNamespace

import pytest
from tests.engine.conftest import Tiny, replayed_prefill

from outrider import Engine, SamplingParams
from outrider.device import MemoryInfo
from outrider.device.kernels.model_kernels import ModelKernels
from outrider.engine import prefill
from outrider.engine.config import EngineConfig
from outrider.engine.prefill import Prefill, PrefillGraphs, token_buckets
from outrider.engine.requests.batch import Batch, BatchFeatures, PrefillChunk
from outrider.engine.requests.draft_length import LengthSchedule
from outrider.engine.stages import Iteration
from outrider.registry import get_backend
from outrider.speculative.eagle import EagleProposer
from outrider_proof import tiny
from outrider_proof.engine_setups import HYBRID, host_models
from outrider_proof.explorations import implied_by
from outrider_proof.fence_log import FenceLog
from outrider_proof.proposers import MAKERS
from outrider_proof.tiny import plain_config
from outrider_sanitizer import watch

MODES = {"graphs": {"graphs": True}, "fused": {"mode": "fused"}}
SIZES = {"max_requests": 5, "max_context": 96, "draft_tokens": 3, "page_size": 4, "prefill_chunk": 40, "overlap": True}


@pytest.fixture(scope="module", params=["cpu", "sim"])
def bundle(request):
    return Tiny(get_backend(request.param))


def prompts_of(tiny_tokens):
    """Of 1 token to more than a chunk has; several fit into one chunk."""
    long = [token for prompt in tiny_tokens for token in prompt]
    lengths = (16, 1, 5, 39, 12, 3, 70, 40, 2, 17)
    return [long[3 * i : 3 * i + length] for i, length in enumerate(lengths)]


def noted_replays(monkeypatch):
    """Buckets of the chunks that are replayed, with the number of their sequences."""
    found = []
    launch = Prefill.launch

    def noted(prefill, batch, packer, bucket):
        if bucket is not None:
            found.append((bucket, len(batch.prefill)))
        return launch(prefill, batch, packer, bucket)

    monkeypatch.setattr(Prefill, "launch", noted)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("speculate", ["eagle", "tree", "none"])
def test_the_same_tokens_as_without(bundle, tiny_tokens, mode, speculate, monkeypatch):
    """Half the requests sample. Chunks of several requests, of a part of one, and of a request behind cached pages."""
    prompts = prompts_of(tiny_tokens)
    params = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
    with replayed_prefill(0):
        called = bundle.engine(speculate=speculate, **SIZES, **MODES[mode])
    wanted = [done.token_ids for done in called.generate([*prompts, prompts[3]], [*params, params[0]])]
    found = noted_replays(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST_WITHOUT_CONTEXT", 40)
    with watch(bundle.backend) as report:  # what is captured before isn't seen in replays
        with replayed_prefill(40):
            engine = bundle.engine(speculate=speculate, **SIZES, **MODES[mode])
        assert engine.captured_prefill.buckets == (16, 40)
        assert [done.token_ids for done in engine.generate([*prompts, prompts[3]], [*params, params[0]])] == wanted
    assert not report.findings
    assert {(bucket.tokens, bucket.has_context) for bucket, _ in found} == {(16, True), (40, True), (40, False)}
    assert max(count for _, count in found) > 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("speculate", "least", "buckets"),
    [("eagle", 40, {(40, False)}), ("eagle", 100, {(40, True)}), ("none", 40, {(40, False), (11, True)})],
)
def test_prompts_and_decoding_requests_share_a_pass(bundle, tiny_tokens, speculate, least, buckets, monkeypatch):
    """The same tokens in the same iterations as from calls. Buckets with 5 decoding requests: tokens of chunks, and whether
    these may continue prompts.
    """
    prompts = prompts_of(tiny_tokens)
    params = [SamplingParams(max_tokens=6 + i, ignore_eos=True) for i in range(len(prompts))]
    monkeypatch.setattr(prefill, "LEAST_WITHOUT_CONTEXT", least)
    made, mixed = [], []
    for size in (0, 40):
        with watch(bundle.backend) as report:  # what is captured before isn't seen in replays
            with replayed_prefill(size):
                engine = bundle.engine(speculate=speculate, **SIZES, mode="fused")
            found = noted_replays(monkeypatch)
            tokens = [done.token_ids for done in engine.generate(prompts, params)]
        assert not report.findings
        made.append((tokens, engine.stats.iterations, engine.stats.verified_tokens))
        mixed.append({(each.tokens, each.has_context, each.decoding) for each, _ in found if each.decoding})
    assert made[0] == made[1]
    assert mixed == [set(), {(*bucket, 5) for bucket in buckets}]


def test_a_mixed_pass_takes_no_longer_than_its_parts(tiny64):
    """A pass that has more tokens than its parts, because of padding, is never chosen."""
    engine = tiny64.engine(max_requests=1)
    engine.add_request([1], SamplingParams(max_tokens=1))
    (request,) = engine._requests.values()
    graphs = object.__new__(PrefillGraphs)
    graphs.buckets, graphs.sequences, graphs._drafted = token_buckets(6144), 16, 3
    graphs._mixed = graphs._mixed_buckets(SimpleNamespace(config=SimpleNamespace(max_requests=64)))

    def bucket(tokens, decoding):
        return graphs.bucket(Batch((PrefillChunk(request, 0, tokens),), (request,) * decoding, (), (), drafted=3))

    assert [bucket(tokens, 9).decoding for tokens in (10, 300, 512, 768, 769, 896, 897, 1024, 1025)] == [32] * 6 + [0] * 3
    assert [bucket(tokens, 8).decoding for tokens in (32, 33, 992, 993, 1024, 1500, 1505)] == [8, 8, 8, 0, 0, 8, 0]
    assert bucket(512, 33).decoding == 0
    for tokens in range(1, 2100, 7):
        for count in (1, 8, 9, 32):
            alone, mixed = bucket(tokens, 0), bucket(tokens, count)
            total, decoding = mixed.tokens + 4 * mixed.decoding, 4 * mixed.decoding
            assert max(total, 192) <= max(alone.tokens, 192) + max(decoding, 192) * bool(decoding)


def test_prompts_of_a_hybrid_are_replayed_by_kernels_of_its_own(monkeypatch):
    """Prompts continue states that earlier chunks and cached prefixes left. Padding sequences have the reserved row."""
    loaded, found = host_models("mtp-chain" + HYBRID), noted_replays(monkeypatch)
    prompts, params = (
        [(3, 1, 4, 1, 5, 9, 2), (3,), (3, 1, 4, 1, 5, 9, 2, 6, 5)],
        SamplingParams(max_tokens=8, ignore_eos=True),
    )
    made = []
    for size in (0, 16):
        config = plain_config(max_context=40, max_requests=3, page_size=4, prefill_chunk=6, dtype="float64", graphs=True)
        with replayed_prefill(size):
            engine = Engine(loaded.target, loaded.backend, proposer=loaded.make(), config=config)
        made.append([done.token_ids for _ in range(2) for done in engine.generate(prompts, params)])
        assert engine.stats.prefix_hits > 0
        assert bool(found) == bool(size)
    assert made[0] == made[1]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_proposer_takes_padding_in_or_says_that_it_doesnt(name):
    """A wrong draft costs acceptance and no token, so the number of iterations is compared, too."""
    prompts = [(3,), (1, 2, 3, 4, 5), (7, 8, 9)]
    counts = []
    for size in (0, 16):
        proposer = MAKERS[name](tiny.target(), tiny.BACKEND)
        with replayed_prefill(size):
            engine = tiny.engine(proposer, max_requests=4, mode="fused", overlap=True)
        replayed = size and (proposer is None or proposer.accepts_padding)
        assert (engine.captured_prefill is not None) == bool(replayed)
        found = engine.generate(prompts, SamplingParams(max_tokens=10))
        assert [done.token_ids for done in found] == [tiny.plain(prompt, 10) for prompt in prompts]
        counts.append(engine.stats.iterations)
    assert counts[0] == counts[1]


def test_what_only_calls_serve_is_called(bundle, tiny_tokens, monkeypatch):
    """Options and log-probabilities, alone or beside a request without; and a chunk that is too large."""
    prompts = prompts_of(tiny_tokens)[:3]
    found = noted_replays(monkeypatch)
    with replayed_prefill(16):
        engine = bundle.engine(mode="fused", **{**SIZES, "prefill_chunk": 60})
    for params in (SamplingParams(max_tokens=2, logprobs=2), SamplingParams(max_tokens=2, logit_bias={3: 1.0})):
        engine.generate(prompts, [SamplingParams(max_tokens=2), params, SamplingParams(max_tokens=2)])
    assert found == []
    engine.generate(prompts[:1], SamplingParams(max_tokens=2, temperature=0.5))
    assert [(bucket.tokens, count) for bucket, count in found] == [(16, 1)]


def test_nobody_is_padded_by_much():
    assert token_buckets(2048)[:4] == (16, 64, 128, 256)
    assert token_buckets(2048)[-2:] == (1792, 2048)
    assert token_buckets(3000)[-3:] == (2048, 2560, 3000)
    assert [token_buckets(most) for most in (9, 16, 64)] == [(9,), (16,), (16, 64)]
    assert {512, 1024} < set(token_buckets(2048))


def test_a_bucket_is_the_least_that_holds_the_chunks(tiny64):
    with replayed_prefill(40):
        engine = tiny64.engine(mode="fused", **SIZES)
    chunked, requests = engine._step.prefill, []
    for length in (15, 16, 17):
        engine.add_request([1] * length, SamplingParams(max_tokens=1))
        requests.append(list(engine._requests.values())[-1])
    chunks = [PrefillChunk(request, 0, len(request.context)) for request in requests]

    def bucket(*which):
        found = chunked.bucket(Batch(tuple(which), (), (), ()))
        return None if found is None else found.tokens

    assert bucket() is None
    assert [bucket(chunk) for chunk in chunks] == [16, 16, 40]
    assert bucket(*chunks[:2]) == 40
    assert bucket(*chunks) is None


@pytest.mark.parametrize("loads_in_capture", [False, True])
def test_a_shape_is_rehearsed_once(loads_in_capture, monkeypatch):
    """On a device that runs a callable before it captures it: each size, and chunks without context. Where a capture loads
    kernels, only the first size; of iterations each kind of requests.
    """
    backend, found = get_backend("sim"), {"rehearsed": [], "captured": []}
    iterations, mixed = ({"rehearsed": [], "captured": []} for _ in range(2))
    capture, enqueue, iterate = backend._capture, Prefill.enqueue_chunks, Iteration.run

    def rehearsed(name, fn, context, stream, pool):
        with backend.on(stream), backend.rehearsing(context, stream):
            fn(context)
        return capture(name, fn, context, stream, pool)

    def noted(self, inputs, features, *rest):
        if backend.active_capture is not None:
            which = "rehearsed" if backend.active_capture.rehearsal else "captured"
            found[which].append((inputs.tokens.shape[0], inputs.host_context is None))
        enqueue(self, inputs, features, *rest)

    def noted_iteration(self, batch, frame):
        which = "rehearsed" if backend.active_capture.rehearsal else "captured"
        (iterations if frame.prompts is None else mixed)[which].append((batch.bucket, batch.features))
        iterate(self, batch, frame)

    monkeypatch.setattr(backend, "_capture", rehearsed)
    monkeypatch.setattr(Prefill, "enqueue_chunks", noted)
    monkeypatch.setattr(Iteration, "run", noted_iteration)
    monkeypatch.setattr(prefill, "LEAST_WITHOUT_CONTEXT", 64)
    monkeypatch.setattr(ModelKernels, "loads_in_capture", loads_in_capture)
    with replayed_prefill(80):
        Tiny(backend).engine(mode="fused", **SIZES | {"prefill_chunk": 80})
    assert found["captured"] == [(80, True), (80, False), (64, True), (64, False), (16, True)]
    later = [] if loads_in_capture else [(64, True), (16, True)]
    assert found["rehearsed"] == [(80, True), (80, False), *later]
    of_largest = [(size, features) for size, features in iterations["captured"] if size == SIZES["max_requests"]]
    assert iterations["rehearsed"] == (of_largest if loads_in_capture else iterations["captured"])
    assert len(of_largest) == 3 < len(iterations["captured"])
    assert mixed["captured"] == [(5, BatchFeatures())] * 2
    assert mixed["rehearsed"] == [(5, BatchFeatures())] * (2 - loads_in_capture)


def test_what_shares_no_pass(tiny64):
    """A request that samples, shorter drafts, draft lengths of each request, and trees. The largest chunk can."""
    with replayed_prefill(40):
        engine = tiny64.engine(mode="fused", **SIZES)
        tree = tiny64.engine(mode="fused", speculate="tree", **SIZES)
    engine.add_request([1] * 40, SamplingParams(max_tokens=1))
    (request,) = engine._requests.values()

    def decoding(tokens, which=engine, drafted=3, **more):
        batch = Batch((PrefillChunk(request, 0, tokens),), (request,), (), (), drafted=drafted, **more)
        return which._step.prefill.bucket(batch).decoding

    assert [decoding(tokens) for tokens in (1, 40)] == [5, 5]
    assert decoding(5, drafted=2) == 0
    assert decoding(5, draft_lengths=(1,)) == 0
    assert decoding(5, decode_features=BatchFeatures(sampling=True)) == 0
    assert decoding(5, which=tree, drafted=tree._parts.proposer.nodes) == 0


@pytest.mark.parametrize(
    ("size", "temperature", "lengths", "waits"),
    [(0, 0.0, [3], True), (40, 0.0, [3], False), (40, 0.7, [3], True), (40, 0.0, [1] * 30 + [3], True)],
)
def test_new_prompts_wait_for_others_unless_they_share_a_pass(tiny64, size, temperature, lengths, waits):
    """Eight requests decode when a prompt arrives. It waits for others without graphs, next to sampled requests, and next to
    short drafts.
    """
    config = plain_config(dtype=tiny64.dtype, mode="fused", **{**SIZES, "max_requests": 9, "overlap": False})
    proposer = EagleProposer(tiny64.head, draft_tokens=3)
    with replayed_prefill(size):
        drafts = LengthSchedule(lengths)
        engine = Engine(tiny64.target, tiny64.backend, proposer=proposer, config=config, draft_length=drafts)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature)
    for number in range(8):
        engine.add_request([number], params)
    while any(request.needs_prefill for request in engine._requests.values()):
        engine.step()
    engine.add_request([9], params)
    engine.step()
    assert [request.needs_prefill for request in engine._requests.values()] == [False] * 8 + [waits]


@pytest.mark.parametrize("limited", [False, True])
def test_the_memory_that_capturing_takes_is_reported_where_the_device_tells(limited, monkeypatch):
    """On a device that has less free each time that it's asked."""
    backend = get_backend("sim" if limited else "cpu")
    looks = itertools.count(1)
    monkeypatch.setattr(backend, "memory_info", lambda: MemoryInfo(total=2**34, free=2**34 - 5 * next(looks), allocated=0))
    with replayed_prefill(16):
        engine = Tiny(backend).engine(mode="fused", **SIZES)
    assert [engine.captured.bytes, engine.captured_prefill.bytes] == ([5, 5] if limited else [None, None])


@pytest.mark.parametrize("mode", ["staged", "fused"])
def test_prompts_are_called_where_decoding_is_and_on_a_device_without_graphs(tiny64, mode):
    engine = tiny64.engine(mode=mode)
    assert engine.captured_prefill is None
    with replayed_prefill(16):
        engine = tiny64.engine(mode=mode)
    assert (engine.captured_prefill is not None) == (mode == "fused")


@pytest.mark.parametrize(
    ("mode", "fence"),
    [("fused", None), ("fused", "inputs_ready"), *(("staged", each) for each in (None, "inputs_ready", "shared_reads_done"))],
)
def test_the_fences_around_a_replay_are_needed(tiny_tokens, mode, fence):
    """Prompts alone, one behind the other: without the fence the graph reads what isn't staged yet, or not any more."""
    bundle = Tiny(get_backend("sim"))
    log = FenceLog(lambda stream: bundle.backend.control.steps(stream)[1], drop=fence, half="wait")
    sizes = SIZES | {"prefill_chunk": 9}
    config = EngineConfig(dtype="float64", mode=mode, graphs=True, **sizes)
    with watch(bundle.backend) as report:
        with replayed_prefill(16):
            engine = Engine(bundle.target, bundle.backend, config=config, wrap_fence=log.wrap)
        engine.generate([tokens[:9] for tokens in tiny_tokens[:4]], SamplingParams(max_tokens=1))
    assert bool(report.findings) is (fence is not None)
    if fence is not None:
        assert implied_by(report.findings, log) == (fence,)
