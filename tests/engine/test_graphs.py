"""Stages from graphs, and the whole iteration from one: the same tokens, in buckets that a batch doesn't fill."""

from itertools import pairwise

import pytest
import torch
from tests.engine.conftest import Tiny, replayed_prefill

from outrider import Engine, EngineConfig, SamplingParams
from outrider.device import CaptureError, ConfigError, KernelSet
from outrider.engine.graphs import buckets_up_to, sizes_of_shorter
from outrider.model import Decoder
from outrider.registry import get_backend
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS
from outrider_proof.tiny import plain_config
from outrider_sanitizer import watch

MODES = {"graphs": {"graphs": True}, "fused": {"mode": "fused"}}


@pytest.fixture(scope="module", params=["cpu", "sim"])
def bundle(request):
    return Tiny(get_backend(request.param))


SOAK = {"max_requests": 5, "max_context": 64, "overlap": True, "draft_tokens": 3, "page_size": 4}
LENGTHS = (20, 3, 9, 14, 2, 6, 11, 4, 17, 5)


@pytest.fixture(scope="module")
def soak(tiny_tokens):
    """Prompts, their parameters, and the tokens of plain decoding, each request alone."""
    prompts = [prompt[: 5 + i] for i, prompt in enumerate(tiny_tokens[: len(LENGTHS)])]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in LENGTHS]
    plain = Tiny(get_backend("cpu")).engine(speculate="none", max_requests=5, max_context=64)
    wanted = [plain.generate([prompt], each)[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    return prompts, params, wanted


@pytest.fixture(scope="module", params=["eagle", "tree", "none"])
def called(request, bundle, soak):
    """How the requests are speculated on, the tokens without graphs on this device, and the acceptance length."""
    prompts, params, _ = soak
    engine = bundle.engine(speculate=request.param, **SOAK)
    tokens = [done.token_ids for done in engine.generate(prompts, params)]
    return request.param, tokens, engine.stats.acceptance_length


@pytest.mark.sample(1, per="mode")
@pytest.mark.parametrize("mode", MODES)
def test_a_soak_crosses_buckets_up_and_down(bundle, soak, called, mode):
    """Requests come and go, so that batches of 1 to 5 run in buckets of 1, 2, 4 and 5."""
    (prompts, params, wanted), (speculate, tokens, acceptance_length) = soak, called
    engine = bundle.engine(speculate=speculate, **SOAK, **MODES[mode])
    assert engine.captured.buckets == (1, 2, 4, 5)
    sizes = []
    launch = engine._step.launch
    engine._step.launch = lambda batch: (sizes.append(len(batch.decode)), launch(batch))[1]
    assert [done.token_ids for done in engine.generate(prompts, params)] == wanted
    assert tokens == wanted
    assert engine.stats.acceptance_length == acceptance_length
    assert {1, 3, 5} <= set(sizes)
    ups = sum(b > a for a, b in pairwise(sizes))
    downs = sum(b < a for a, b in pairwise(sizes))
    assert ups >= 2
    assert downs >= 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["graphs", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_proposer_runs_in_a_bucket_that_isnt_full(name, mode):
    prompts = [(3,), (1, 2, 3, 4, 5), (7, 8, 9)]
    proposer = MAKERS[name](tiny.target(), tiny.BACKEND)
    engine = tiny.engine(proposer, max_requests=4, buckets=(4,), overlap=True, **MODES[mode])
    found = engine.generate(prompts, SamplingParams(max_tokens=10))
    assert [done.token_ids for done in found] == [tiny.plain(prompt, 10) for prompt in prompts]


@pytest.mark.sample(2)
@pytest.mark.parametrize("more", [{"buckets": (8,)}, {"draft_length": "load"}], ids=["padded", "measured"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "draft-model"])
def test_there_may_be_room_for_more_requests_than_there_are_pages(name, more):
    """Few of them run then, and batches are padded to as many all the same; so are those that are captured or measured."""
    proposer = MAKERS[name](tiny.target(), tiny.BACKEND)
    sizes = {"max_requests": 8, "num_pages": 4, "max_context": 16}
    engine = tiny.engine(proposer, mode="fused", **sizes, **more)
    prompts = [(1, 2, 3), (4, 5)]
    found = engine.generate(prompts, SamplingParams(max_tokens=10))
    assert [done.token_ids for done in found] == [tiny.plain(prompt, 10) for prompt in prompts]


@pytest.mark.sample(1)
def test_padding_is_what_each_buffer_declares(bundle, tiny_tokens):
    """A batch of 4, then one of 3 in the same bucket: nothing of the fourth request is left behind the third."""
    config = {"max_requests": 4, "max_context": 64, "draft_tokens": 3, "graphs": True}
    for speculate in ("eagle", "tree"):
        engine = bundle.engine(speculate=speculate, **config)
        lengths = (24, 24, 24, 6)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        engine.generate([prompt[:9] for prompt in tiny_tokens[:4]], params)
        bundle.backend.synchronize()
        buffers, drafted = engine._parts.buffers, engine._parts.proposer.nodes
        assert buffers.views(4, drafted).inputs.rows.tolist()[:3] != [0, 0, 0]
        for name, spec in buffers._layouts[drafted].items():
            if name.split(".")[0] in ("inputs", "verify", "extend") and name not in UNUSED_BY_GREEDY:
                found = buffers.rows(name, 3, 4, drafted=drafted).cpu()
                assert torch.equal(found, torch.full_like(found, spec.padding + 3 * spec.step)), name


UNUSED_BY_GREEDY = {f"inputs.{name}" for name in ("numbers", "shares", "bias_tokens", "bias_values", "bias_until")}


def test_padding_that_is_left_out_is_found():
    """The sanitizer sees a graph read what an earlier, larger batch has left."""
    backend = get_backend("sim")
    bundle = Tiny(backend)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 3)]

    def watched(meddle):
        with watch(backend) as report:  # what is captured before isn't seen in replays
            engine = bundle.engine(max_requests=2, max_context=48, draft_tokens=3, graphs=True, buckets=(2,))
            meddle(engine._parts.buffers)
            engine.generate(prompts, params)
        return report

    report = watched(lambda buffers: None)
    assert report.clean, str(report)
    report = watched(lambda buffers: setattr(buffers, "pad", lambda *arguments, **named: None))
    assert not report.clean
    assert "stale padding" in str(report)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", MODES)
def test_options_and_logprobs_come_from_the_graph_of_everything(bundle, tiny_tokens, mode):
    prompts = [prompt[:8] for prompt in tiny_tokens[:3]]
    params = [
        SamplingParams(max_tokens=10, temperature=0.9, seed=3, top_p=0.8, logprobs=2),
        SamplingParams(max_tokens=10, repetition_penalty=1.3, logit_bias={5: -4.0}),
        SamplingParams(max_tokens=10),
    ]
    config = {"max_requests": 3, "max_context": 64, "draft_tokens": 3}
    wanted = bundle.engine(**config).generate(prompts, params)
    found = bundle.engine(**config, **MODES[mode]).generate(prompts, params)
    for one, other in zip(wanted, found, strict=True):
        assert one.token_ids == other.token_ids
        assert [each.token for each in one.logprobs] == [each.token for each in other.logprobs]
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def test_stages_have_pools_of_their_own_and_one_iteration_is_one_replay(bundle, tiny_tokens):
    backend = bundle.backend
    made = []
    create = backend.create_graph_pool
    backend.create_graph_pool = lambda name: (made.append(name), create(name))[1]
    try:
        with replayed_prefill(16):
            bundle.engine(max_requests=2, max_context=64, graphs=True)
            assert made == ["draft", "verify", "extend", "prefill"]
            engine = bundle.engine(max_requests=2, max_context=64, mode="fused")
        assert made[4:] == ["iteration", "prefill"]
    finally:
        del backend.create_graph_pool
    engine.add_request(tiny_tokens[0][:8], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.step()  # the prompt
    before, iterations = backend.replays, engine.stats.iterations
    while engine.has_unfinished:
        engine.step()
    assert backend.replays - before == engine.stats.iterations - iterations > 1


class Fails(KernelSet):
    def verify_chain(self, *arguments):  # noqa: ARG002
        raise ValueError("this kernel can't be captured")


def test_a_failed_capture_is_an_error_and_leaves_the_device_as_it_was(tiny_tokens):
    bundle = Tiny(get_backend("sim"))
    model = Decoder(bundle.target.config, bundle.target.weights, Fails())
    from outrider.speculative.eagle import EagleProposer

    config = plain_config(dtype="float64", max_requests=2, max_context=48, graphs=True)
    with pytest.raises(CaptureError, match=r"capturing graph 'verify\[2, greedy\]'.*this kernel can't be captured"):
        Engine(model, bundle.backend, proposer=EagleProposer(bundle.head, draft_tokens=3), config=config)
    prompt = tiny_tokens[0][:8]
    (done,) = bundle.engine(max_requests=2, max_context=48, graphs=True).generate([prompt], SamplingParams(max_tokens=8))
    assert done.token_ids == bundle.plain(prompt, 20).token_ids[:8]


def test_buckets():
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(6) == (1, 2, 4, 6)
    assert buckets_up_to(8) == (1, 2, 4, 8)
    assert buckets_up_to(33) == (1, 2, 4, 8, 16, 24, 32, 33)
    assert buckets_up_to(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256)
    assert buckets_up_to(300)[-3:] == (192, 256, 300)
    assert sizes_of_shorter(buckets_up_to(256)) == (64, 128, 192, 256)
    assert sizes_of_shorter((1, 2, 3)) == (3,)
    for wrong in ((1, 2), (1, 1, 3), (0, 3), [1, 3], ()):
        with pytest.raises(ConfigError, match="buckets"):
            EngineConfig(max_requests=3, buckets=wrong)
    with pytest.raises(ConfigError, match="mode is 'fast'; expected one of staged, fused"):
        EngineConfig(mode="fast")
