"""Images and videos in requests: greedy tokens equal transformers' generate, whatever else runs and however it's drafted."""

import functools
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.conftest import replayed_prefill
from tests.engine.test_prefill_graphs import noted_replays

from model.hybrid_checkpoints import MtpOracle
from model.test_vision import IMAGE, PROMPTS, VIDEO, frames, picture, reference_inputs
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, InterfaceError, Recompute, SpeculativeSync
from outrider.engine.state.plans import PlanAtJoin
from outrider.errors import RequestError
from outrider.model import (
    MediaProcessor,
    expand_placeholders,
    load_decoder,
    load_eagle,
    load_eagle3,
    load_mtp,
    load_peagle,
    load_vision,
    open_head,
)
from outrider.model.checkpoint.mapping import SINGLE_RANK
from outrider.model.heads.mtp import chained_head_config, chained_mtp_targets
from outrider.registry import get_backend
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer, HybridDraftModelProposer
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.lookup import NgramProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.parallel import PEagleProposer
from outrider.speculative.tree import DynamicTree
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import write_eagle
from outrider_proof.tiny import plain_config
from outrider_sanitizer import watch
from tiny_checkpoints import write_checkpoint, write_eagle3, write_mtp, write_peagle
from tiny_vision_checkpoints import VISION_FAMILIES, write_vision_checkpoint

TOKENS = 12
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


class Checkpoint:
    """A tiny checkpoint in transformers and in ours, and what transformers generates."""

    def __init__(self, directory, family, backend):
        self.directory, self.family, self.backend = directory, family, backend
        self.reference = write_vision_checkpoint(directory, family)
        self.reference.generation_config.eos_token_id = None
        self.target = load_decoder(directory, backend=backend, dtype=torch.float32)
        self.tower = load_vision(directory, backend=backend, dtype=torch.float32)
        write_eagle(directory / "eagle")
        self.head = load_eagle(open_head(directory / "eagle", target=self.target, backend=backend, dtype=torch.float32))
        write_eagle3(directory / "eagle3")
        self.head3 = load_eagle3(open_head(directory / "eagle3", target=self.target, backend=backend, dtype=torch.float32))
        processor = MediaProcessor.from_checkpoint(directory)
        self.prompts = {name: make(processor) for name, make in PROMPTS.items()}
        self.processor = processor
        self.is_hybrid = self.target.config.recurrent is not None

    def engine(self, proposer=None, *, backend=None, **fields):
        config = plain_config(**{"page_size": 4, "max_context": 192, "prefill_chunk": 64} | fields)
        return Engine(self.target, backend or self.backend, proposer=proposer, config=config, vision=self.tower)

    @functools.cache  # noqa: B019  (as long as the module's tests)
    def expected(self, name):
        return self.generated(*self.prompts[name])

    def generated(self, tokens, media):
        tokens = expand_placeholders(tokens, media, self.target.config.vision)
        inputs = reference_inputs(tokens, media, self.family)
        out = self.reference.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        return tuple(out[0, len(tokens) :].tolist())

    def check(self, engine, names=tuple(PROMPTS)):
        pages, rows = engine.free_pages, engine.free_rows
        prompts = [self.prompts[name] for name in names]
        results = engine.generate([tokens for tokens, _ in prompts], GREEDY, media=[media for _, media in prompts])
        for name, result in zip(names, results, strict=True):
            assert result.token_ids == self.expected(name), name
        assert (engine.free_pages, engine.free_rows) == (pages, rows)
        return engine


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.set_num_threads(1)
    backend = CpuBackend()

    class Made(dict):
        def __missing__(self, family):
            self[family] = Checkpoint(tmp_path_factory.mktemp(family), family, backend)
            return self[family]

    return Made()


@pytest.fixture(params=VISION_FAMILIES)
def checkpoint(request, made):
    return made[request.param]


@pytest.mark.sample(1, per="overlap")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [5, 64])
def test_plain_tokens_are_those_of_generate(checkpoint, overlap, chunk):
    """Images of several sizes, videos and text in one batch; chunks that cut images."""
    checkpoint.check(checkpoint.engine(overlap=overlap, prefill_chunk=chunk))


def proposers(checkpoint):
    target = checkpoint.target
    drafts = HybridDraftModelProposer if checkpoint.is_hybrid else DraftModelProposer
    return {
        "ngram": lambda: NgramProposer(vocab_size=target.config.vocab_size, draft_tokens=3),
        "ngram-tree": lambda: NgramProposer(vocab_size=target.config.vocab_size, draft_tokens=2, branches=2),
        "same-model": lambda: drafts(target, target=target, draft_tokens=3),
        "same-model-tree": lambda: DraftModelTreeProposer(target, target=target, shape=DynamicTree(topk=2, depth=3)),
        "eagle": lambda: EagleProposer(checkpoint.head, draft_tokens=3),
        "eagle-tree": lambda: EagleTreeProposer(checkpoint.head, DynamicTree(topk=2, depth=3)),
        "eagle3": lambda: EagleProposer(checkpoint.head3, draft_tokens=3),
    }


HYBRIDS = ("qwen3_5", "qwen3_5_moe")
NAMES = ("ngram", "ngram-tree", "same-model", "same-model-tree", "eagle", "eagle-tree", "eagle3")
CASES = [(family, name) for family in VISION_FAMILIES for name in NAMES]


@pytest.mark.sample(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("checkpoint", "name"), CASES, indirect=["checkpoint"])
def test_speculative_tokens_are_those_of_generate(checkpoint, name, overlap):
    if checkpoint.is_hybrid and "tree" in name:
        with pytest.raises(ConfigError, match="recurrent"):
            checkpoint.engine(proposers(checkpoint)[name]())
        return
    engine = checkpoint.engine(proposers(checkpoint)[name](), overlap=overlap, prefill_chunk=7, max_requests=3)
    checkpoint.check(engine)
    if name == "same-model":
        # It's accepted whole only if it sees the features and the positions of the target.
        assert engine.stats.acceptance_length > 3
    if name == "same-model-tree":
        assert engine.stats.acceptance_length > 2.5


def test_a_text_draft_model_gets_plain_positions(made, tmp_path):
    """It was made for them; it's only worse for the images that it doesn't see."""
    write_checkpoint(tmp_path, "qwen2")
    checkpoint = made["qwen2_vl"]
    draft = load_decoder(tmp_path, backend=checkpoint.backend, dtype=torch.float32)
    checkpoint.check(checkpoint.engine(DraftModelProposer(draft, target=checkpoint.target, draft_tokens=2), overlap=True))


class Watched(MtpProposer):
    """Keeps the drafts and states of every call."""

    def extend(self, inputs):
        relay = super().extend(inputs)
        self.calls.append({name: value.clone() for name, value in relay.items()})
        return relay


def test_mtp_over_axes(made, tmp_path):
    """Its heads see three axes, also of positions that run again and lie in an image: the state behind a prompt and all
    drafts are the same whether chunks cut the image or not.
    """
    checkpoint = made["qwen2_5_vl"]
    write_mtp(tmp_path, heads=3)
    heads = load_mtp(open_head(tmp_path, target=checkpoint.target, backend=checkpoint.backend, dtype=torch.float32))
    assert heads[0].config.rope.sections
    calls = {}
    for chunk in (3, 64):
        proposer = Watched(heads)
        proposer.calls = calls[chunk] = []
        checkpoint.check(checkpoint.engine(proposer, prefill_chunk=chunk), ("image",))
    whole = calls[64]
    cut = calls[3][-len(whole) :]
    assert len(whole) > TOKENS / 2
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert torch.equal(one["rope_positions"], other["rope_positions"])
        assert torch.allclose(one["hidden"][:, 1:], other["hidden"][:, 1:], atol=1e-4)
    axes = whole[0]["rope_positions"][0].tolist()
    assert any(len(set(place)) > 1 for call in calls[3] for place in call["rope_positions"][0].tolist()), (
        "no place is in the image"
    )
    assert len(axes) == 2


@pytest.mark.sample(1, per="branches")
@pytest.mark.parametrize("branches", [1, 2])
def test_mtp_over_axes_keeps_every_token(checkpoint, tmp_path, branches):
    write_mtp(tmp_path)
    heads = load_mtp(open_head(tmp_path, target=checkpoint.target, backend=checkpoint.backend, dtype=torch.float32))
    proposer = MtpProposer(heads, branches=branches)
    if checkpoint.is_hybrid and branches > 1:
        with pytest.raises(ConfigError, match="recurrent"):
            checkpoint.engine(proposer)
        return
    checkpoint.check(checkpoint.engine(proposer, overlap=True, prefill_chunk=7, max_requests=3))


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_head_of_a_hybrid_drafts_behind_images(made, tmp_path, family):
    """With cached states, chunks that cut images, and pages so few that requests are preempted."""
    checkpoint = made[family]
    shutil.copytree(checkpoint.directory, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(3)
    targets = chained_mtp_targets(chained_head_config(checkpoint.target.config), state, SINGLE_RANK)
    head = {piece.key: torch.randn(piece.shape) * 0.2 for target in targets for piece in target.pieces}
    save_file(state | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sizes = {"page_size": 4, "max_context": 192, "prefill_chunk": 9, "max_requests": 3, "num_pages": 40, "draft_tokens": 3}
    config = plain_config(**sizes, overlap=True, state_checkpoints=4, dtype="float32")
    engine = Engine.from_checkpoint(tmp_path, checkpoint.backend, speculate="mtp", config=config)
    checkpoint.check(engine)
    checkpoint.check(engine, ("image", "images-of-several-sizes"))
    assert engine.stats.acceptance_length > 1


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_the_head_of_a_hybrid_reads_features(made, tmp_path, family):
    """Its state after a prompt with images is that of transformers' parts over the embeddings that the model reads."""
    checkpoint = made[family]
    shutil.copytree(checkpoint.directory, tmp_path, dirs_exist_ok=True)
    oracle = MtpOracle(checkpoint.reference, 4)
    head = {f"mtp.{key}": value.contiguous() for key, value in oracle.state_dict().items()}
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | head, path, metadata={"format": "pt"})
    config = plain_config(page_size=4, max_context=128, draft_tokens=3, dtype="float32")
    engine = Engine.from_checkpoint(tmp_path, checkpoint.backend, speculate="mtp", config=config)
    found, extend = [], engine.proposer.extend

    def noted(inputs):
        relay = extend(inputs)
        found.append(relay["hidden"][0].clone())
        return relay

    engine.proposer.extend = noted
    tokens, media = checkpoint.prompts["images-of-several-sizes"]
    (result,) = engine.generate([tokens], GREEDY, media=[media])
    assert result.token_ids == checkpoint.expected("images-of-several-sizes")
    whole = [*expand_placeholders(tokens, media, engine.model.config.vision), result.token_ids[0]]
    inputs, model = reference_inputs(whole, media, family), checkpoint.reference.model
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
        features = torch.cat(model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output)
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
        embeddings[inputs["mm_token_type_ids"] == 1] = features
        axes, _ = model.get_rope_index(**{key: value for key, value in inputs.items() if "pixel" not in key})
    wanted = oracle.states(model.language_model, states, embeddings, axes[:, :, :-1])[-1]
    torch.testing.assert_close(found[0], wanted, rtol=1e-3, atol=1e-3)


def test_a_parallel_head_over_axes(made, tmp_path):
    """Its states behind accepted tokens are those behind a prompt of the same text, whose image puts positions behind it."""
    checkpoint = made["qwen2_5_vl"]
    write_peagle(tmp_path)
    head = load_peagle(open_head(tmp_path, target=checkpoint.target, backend=checkpoint.backend, dtype=torch.float32))
    assert head.config.rope.sections

    def states(tokens, media, count):
        proposer, found = PEagleProposer(head, draft_tokens=3), {}
        extend = proposer.extend

        def noted(inputs):
            relay = extend(inputs)
            found[int(inputs.next_positions[0])] = relay["hidden"][0].clone()
            return relay

        proposer.extend = noted
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        (result,) = checkpoint.engine(proposer, prefill_chunk=7).generate([tokens], params, media=[media])
        return found, result.token_ids

    tokens, media = checkpoint.prompts["image"]
    decoded, text = states(tokens, media, TOKENS)
    again, _ = states([*tokens, *text[:5]], media, 1)
    place = max(again)
    assert place in decoded
    assert place > min(decoded)
    assert torch.allclose(decoded[place], again[place], atol=1e-4)


def counting(checkpoint):
    """The tower's calls, by digest."""
    seen = []

    class Tower:
        def encode(self, media):
            seen.extend(each.digest for each in media)
            return checkpoint.tower.encode(media)

    return Tower(), seen


@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_image_is_a_prefix_hit_and_another_is_not(checkpoint, overlap):
    image, other = (checkpoint.processor.image(picture(32, 32, seed=seed)) for seed in (1, 2))
    tokens = [1, 5, 6, 7, *IMAGE, *range(9, 69)]
    expected = [checkpoint.generated(tokens, [each]) for each in (image, other)]
    tower, seen = counting(checkpoint)
    sizes = {"page_size": 2, "max_context": 128, "prefill_chunk": 64}  # a hybrid's hit ends with a chunk of 64 tokens
    config = plain_config(**sizes, overlap=overlap, state_checkpoints=4 * checkpoint.is_hybrid)
    engine = Engine(checkpoint.target, checkpoint.backend, config=config, vision=tower)
    for index, (chosen, calls) in enumerate([(image, 1), (image, 1), (other, 2), (image, 2), (other, 2)]):
        (result,) = engine.generate([tokens], GREEDY, media=[[chosen]])
        assert result.token_ids == expected[chosen is other], index
        assert len(seen) == calls, index


def test_what_comes_before_an_image_is_shared(made):
    checkpoint = made["qwen2_vl"]
    engine = checkpoint.engine(page_size=2)
    start = [1, 5, 6, 7, 8, 9]
    image = checkpoint.processor.image(picture(16, 16))
    engine.generate([[*start, *IMAGE, 9]], GREEDY, media=[[image]])
    pages, _ = engine._scheduler.pages.match((*start, 20, 21))
    assert len(pages) == 3
    engine._scheduler.pages.give_back(pages)


def test_samples_of_an_image(made):
    checkpoint = made["qwen2_5_vl"]
    tokens, media = checkpoint.prompts["image"]
    almost_greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=3, temperature=1e-6)
    results = checkpoint.engine().generate([tokens], almost_greedy, media=[media])
    assert [result.token_ids for result in results] == [checkpoint.expected("image")] * 3


def test_streaming(made):
    checkpoint = made["qwen2_vl"]
    tokens, media = checkpoint.prompts["image"]
    outputs = list(checkpoint.engine(overlap=True).stream(tokens, GREEDY, media=media))
    assert tuple(token for output in outputs for token in output.tokens) == checkpoint.expected("image")


@pytest.mark.parametrize("name", ["cpu", pytest.param("sim", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
def test_text_is_replayed_from_graphs_of_prompts_and_images_are_not(made, monkeypatch, family, name):
    checkpoint, backend = made[family], get_backend(name)
    target, tower = (load(checkpoint.directory, backend=backend, dtype=torch.float32) for load in (load_decoder, load_vision))
    found, texts = noted_replays(monkeypatch), [list(range(3, length)) for length in (4, 9, 26, 60)]
    prompts = [*((text, []) for text in texts), checkpoint.prompts["image"], checkpoint.prompts["images-of-several-sizes"]]
    config = plain_config(max_requests=4, max_context=128, page_size=4, prefill_chunk=24, mode="fused", overlap=True)
    with replayed_prefill(24), watch(backend) as report:
        proposer = NgramProposer(vocab_size=target.config.vocab_size, draft_tokens=2)
        engine = Engine(target, backend, config=config, vision=tower, proposer=proposer)
        results = engine.generate([tokens for tokens, _ in prompts], GREEDY, media=[media for _, media in prompts])
    assert [result.token_ids for result in results] == [checkpoint.generated(*prompt) for prompt in prompts]
    assert len(found) > 1
    assert name == "cpu" or not report.findings, str(report)  # on the host, the tower reads sizes without asking


class RecomputingSync(SpeculativeSync):
    """A policy that computes mrope positions again, twice, after the plan's result was spoilt."""

    recompute_after_join = frozenset({Recompute.MROPE_POSITIONS})
    refresh_before_replay = frozenset({"rope_positions"})
    calls = 0

    def after_join(self, plan):
        positions = plan.verify.rope_positions
        before = positions.clone()
        if positions.dim() == 2:
            positions.fill_(99)
        super().after_join(plan)
        assert torch.equal(positions, before)
        super().after_join(plan)
        assert torch.equal(positions, before)
        type(self).calls += 1


class RecomputingBackend(CpuBackend):
    @property
    def speculative_sync(self):
        return RecomputingSync(self)


@pytest.mark.parametrize("name", [None, "same-model", "ngram-tree"])
def test_positions_are_computed_again_after_the_join(made, name):
    checkpoint = made["qwen2_5_vl"]
    proposer = None if name is None else proposers(checkpoint)[name]()
    calls = RecomputingSync.calls
    checkpoint.check(checkpoint.engine(proposer, backend=RecomputingBackend(), overlap=True))
    assert RecomputingSync.calls > calls


def test_nothing_is_computed_again_for_text_or_an_idle_batch(made, bundle32):
    def at_join(engine, batch, static):
        parts = engine._parts
        views = parts.buffers.views(batch, parts.proposer.nodes)
        return PlanAtJoin(views.inputs, views.verify, static), views

    text = bundle32.engine(max_requests=2)
    axes = made["qwen2_5_vl"].engine(max_requests=2)
    for engine in (text, axes):
        for static in (False, True):
            join, views = at_join(engine, 2, static)
            places = torch.arange(views.verify.positions.shape[0])
            views.verify.positions.copy_(places)
            join.recompute(Recompute.MROPE_POSITIONS)
            join.refresh("rope_positions")
            with pytest.raises(InterfaceError, match="refreshes 'positions' before a replay"):
                join.refresh("positions")
            expected = places if engine is text else places.expand(3, -1)
            assert torch.equal(views.verify.rope_positions, expected)
            if static or engine is text:
                assert torch.equal(views.verify.static_rope_positions, expected)
            else:  # without graphs nothing reads the copy
                assert torch.equal(views.verify.static_rope_positions, torch.zeros_like(expected))
    assert at_join(axes, 0, False)[0].idle
    assert not at_join(axes, 2, False)[0].idle


def test_requests_that_can_not_be_served(made, bundle32):
    checkpoint = made["qwen2_vl"]
    image = checkpoint.processor.image(picture(16, 16))
    engine = checkpoint.engine()
    with pytest.raises(RequestError, match="one more image than were given"):
        engine.add_request([1, *IMAGE])
    with pytest.raises(RequestError, match="takes text alone"):
        bundle32.engine(speculate="none").add_request([1, 5], media=[image])
    with pytest.raises(RequestError, match="without a vision tower"):
        Engine(checkpoint.target, checkpoint.backend).add_request([1, *IMAGE], media=[image])
    with pytest.raises(RequestError, match="came with media for 1"):
        engine.generate([[1], [2]], media=[[]])
    assert not engine.has_unfinished


def test_expanded_placeholders_are_taken_as_they_are(made):
    checkpoint = made["qwen2_vl"]
    tokens, media = checkpoint.prompts["images-of-several-sizes"]
    whole = expand_placeholders(tokens, media, checkpoint.target.config.vision)
    (result,) = checkpoint.engine().generate([whole], GREEDY, media=[media])
    assert result.token_ids == checkpoint.expected("images-of-several-sizes")


def test_frames_of_a_video_count(made):
    """Another frame at the end gives another output: the features of every frame arrive."""
    checkpoint = made["qwen2_5_vl"]
    tokens = [1, *VIDEO, 9]
    engine = checkpoint.engine()
    for count in (2, 5, 6):
        video = checkpoint.processor.video(frames(count, 16, 16), frames_per_second=2.0)
        (result,) = engine.generate([tokens], GREEDY, media=[[video]])
        assert result.token_ids == checkpoint.generated(tokens, [video])


def test_an_engine_without_a_tower_takes_no_images_over(made):
    checkpoint = made["qwen2_vl"]
    tokens, media = checkpoint.prompts["image"]
    first = checkpoint.engine()
    request = first.add_request(tokens, GREEDY, media=media)
    first.step()
    handed = first.hand_over(request)
    with pytest.raises(RequestError, match="without a vision tower"):
        Engine(checkpoint.target, checkpoint.backend).take_over(handed)


def run_like_npu(directory, graphs):
    """Text through a model with positions on three axes, on a device that computes them again after the join."""
    backend = get_backend("sim:like=npu")
    model = load_decoder(directory, backend=backend, dtype=torch.float32)
    proposer = NgramProposer(vocab_size=model.config.vocab_size, draft_tokens=2)
    config = plain_config(max_requests=2, max_context=48, graphs=graphs, overlap=True, buckets=(2,))
    with watch(backend) as report:  # what is captured before isn't seen in replays
        engine = Engine(model, backend, proposer=proposer, config=config)
        engine.generate([[1, 5, 6, 7], [1, 9]], SamplingParams(max_tokens=6, ignore_eos=True))
    return report


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("graphs", "left_out", "named"),
    [
        (False, None, None),
        (True, None, None),
        (False, "recompute", "verify.rope_positions as they were before the join"),
        (True, "recompute", "verify.rope_positions as they were before the join"),
        (True, "refresh", "verify.static_rope_positions as they were before the join"),
    ],
)
def test_what_a_policy_does_after_the_join_is_missed_by_name(made, monkeypatch, graphs, left_out, named):
    if left_out is not None:
        monkeypatch.setattr(PlanAtJoin, left_out, lambda self, what: None)
    report = run_like_npu(made["qwen2_vl"].directory, graphs)
    assert report.clean is (named is None), str(report)
    assert named is None or named in str(report)
