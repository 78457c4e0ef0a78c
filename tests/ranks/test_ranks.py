"""Ranks that must agree, and what they say where one of them fails."""

import pytest
import torch
from threads import failing, run, run_bodies

from outrider import Engine, SamplingParams
from outrider.device import ConfigError, OutOfDeviceMemory
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.ranks.records import RanksDiffer, RanksFailed
from outrider.model import load_decoder
from outrider.model.checkpoint import bulk
from outrider.model.config.checkpoint_config import read_model_config
from outrider_cpu.backend import CpuBackend
from outrider_proof import proposers, tiny
from outrider_proof.checkpoints import write_eagle
from outrider_proof.tiny import plain_config
from tiny_checkpoints import byte_level_tokenizer, write_checkpoint, write_dflash, write_mtp, write_peagle

TENSOR, DATA, BOTH = ParallelConfig(tensor=2), ParallelConfig(data=2), ParallelConfig(tensor=2, data=2)
PROMPTS = [(3,), (1, 2, 3, 4, 5), (7, 8, 9)]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=28, ignore_eos=True)


def engine_of(ranks, *, name="eagle", kernels=None, **config):
    """An engine of the tiny target; ``ranks`` None: of all of it."""
    backend = CpuBackend() if ranks is None else ranks.backend
    if kernels is not None:
        backend.use_kernels(kernels)
    target = proposers.decoder(tiny.target(), backend, None if ranks is None else ranks.model)
    made = {"max_context": 40, "max_requests": 3, "page_size": 4, "prefill_chunk": 4} | config
    proposer = proposers.MAKERS[name](target, backend)
    return Engine(target, backend, proposer=proposer, config=plain_config(dtype="float64", **made), ranks=ranks)


def tokens_of(engine, params=GREEDY):
    return [each.token_ids for each in engine.generate(PROMPTS, params)]


# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """6 heads, 3 key heads, a vocabulary of 2049."""
    directory = tmp_path_factory.mktemp("odd")
    write_checkpoint(
        directory,
        "qwen3-biases",
        vocab_size=2049,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_hidden_layers=2,
        tie_word_embeddings=False,
    )
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def test_three_ranks_run_what_three_can_share_and_read_their_own_part_alone(odd, monkeypatch):
    read = {}
    fill = bulk._read_exactly

    def counted(file, view):
        read[file.name] = read.get(file.name, 0) + len(view)
        fill(file, view)

    monkeypatch.setattr(bulk, "_read_exactly", counted)
    config = plain_config(dtype="float32", max_context=40, max_requests=3, page_size=4)

    def make(ranks):
        return Engine.from_checkpoint(odd, CpuBackend() if ranks is None else ranks.backend, config=config, ranks=ranks)

    whole = make(None)
    (one,) = read.values()
    read.clear()
    three = ParallelConfig(tensor=3)
    assert run(three, make, tokens_of) == tokens_of(whole)
    (several,) = read.values()
    replicated = sum(weight.nbytes for layer in whole.model.weights.layers for weight in _norms(layer))
    replicated += whole.model.weights.norm.nbytes
    # Each byte once, but for what all hold: norms.
    assert several == one + 2 * replicated


def _norms(layer):
    return [each for each in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if each is not None]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [TENSOR, DATA])
def test_parts_of_a_parallel_head_draft_what_it_drafts_alone(tmp_path, layout):
    write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=4, vocab_size=96)
    byte_level_tokenizer().save(str(tmp_path / "target" / "tokenizer.json"))
    write_peagle(tmp_path / "head")
    config = plain_config(dtype="float64", max_context=40, max_requests=3, page_size=4, draft_tokens=3)

    def make(ranks):
        backend = CpuBackend() if ranks is None else ranks.backend
        head = {"draft_dir": tmp_path / "head", "speculate": "peagle"}
        return Engine.from_checkpoint(tmp_path / "target", backend, config=config, ranks=ranks, **head)

    def drafts_of(engine):
        inner, found = engine.proposer.draft, {}

        def draft(inputs):
            drafted = inner(inputs)
            places = zip(inputs.seq_lens.tolist(), inputs.last_tokens.tolist(), strict=True)
            found.update(zip(places, map(tuple, drafted.tokens.tolist()), strict=True))
            return drafted

        engine.proposer.draft = draft
        return tokens_of(engine), found

    tokens, drafts = drafts_of(make(None))
    assert len(drafts) > 8
    shared, own = run(layout, make, drafts_of)
    assert shared == tokens
    assert own.items() <= drafts.items()


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [TENSOR, DATA])
@pytest.mark.parametrize("name", ["eagle", "dflash", "mtp"])
def test_drafts_from_some_tokens_are_those_of_a_rank_alone(tmp_path, name, layout):
    """As many tokens of each rank's part, so that none of them adds others."""
    write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=4, vocab_size=96)
    byte_level_tokenizer().save(str(tmp_path / "target" / "tokenizer.json"))
    {"eagle": write_eagle, "dflash": write_dflash, "mtp": write_mtp}[name](tmp_path / "head")
    (tmp_path / "some.json").write_text(str([*range(0, 48, 2), *range(49, 96, 2)]))
    config = plain_config(dtype="float64", max_context=40, max_requests=3, page_size=4, draft_tokens=3)

    def make(ranks, some=tmp_path / "some.json"):
        backend = CpuBackend() if ranks is None else ranks.backend
        head = {"draft_dir": tmp_path / "head", "speculate": name, "draft_vocabulary": some}
        return Engine.from_checkpoint(tmp_path / "target", backend, config=config, ranks=ranks, **head)

    def ran(engine):
        return tokens_of(engine), engine.stats.acceptance_length

    alone = ran(make(None))
    assert run(layout, make, ran) == alone
    assert tokens_of(make(None, None)) == alone[0]


def test_each_rank_holds_its_rows_and_no_more(odd):
    def sizes(ranks):
        model = load_decoder(odd, backend=ranks.backend, dtype=torch.float64, ranks=ranks.model)  # cast, not read in place
        return [tuple(each.shape) for each in (model.weights.embedding, model.weights.head, model.weights.layers[0].qkv)]

    config = read_model_config(odd)
    qkv = (2 + 1 + 1) * config.head_size
    assert run_bodies(ParallelConfig(tensor=3), sizes) == [[(683, 32), (683, 32), (qkv, 32)]] * 3


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ({"tensor": 5}, "6 heads, which can't be shared out among 5 ranks"),
        ({"tensor": 2}, "3 key heads, which can't be shared out among 2 ranks"),
        ({"data": 5}, "intermediate_size of 48, which can't be shared out among 5 ranks"),
    ],
)
def test_odd_sizes_are_refused(odd, layout, match):
    shards = ParallelConfig(**layout).shards(0)
    with pytest.raises(ConfigError, match=match):
        shards.local(read_model_config(odd), "the model")


def test_the_bundled_model_is_refused_at_three():
    from outrider.bundled import bundled

    with pytest.raises(ConfigError, match="8 heads, which can't be shared out among 3 ranks"):
        ParallelConfig(tensor=3).shards(0).local(read_model_config(bundled("target")), "the model")


@pytest.mark.parametrize(
    "fields",
    [{"tensor": 0}, {"data": True}, {"tensor": 2.0}, {"timeout_s": 0}, {"timeout_s": "1"}, {"expert": 2}, {"expert": True}],
)
def test_impossible_layouts_are_refused(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} is"):
        ParallelConfig(**fields)


def test_a_model_that_is_there_whole_is_not_spread():
    backend = CpuBackend()
    with pytest.raises(ConfigError, match="parallel is tensor 2, data 1, and the model is loaded here already"):
        Engine(proposers.decoder(tiny.target(), backend, None), backend, parallel=TENSOR)


# -- one authority -----------------------------------------------------------------------------------------------------


class Flipped(type(tiny.BACKEND.kernels)):
    """Kernels of a device that decides ties, and all else, in another way."""

    def sample(self, logits, temperature, seeds, positions, *, draft=False):
        return (super().sample(logits, temperature, seeds, positions, draft=draft) + 1) % logits.shape[-1]

    def verify_chain(self, target_logits, draft_tokens, draft_probs, temperature, seeds, positions):
        tokens, accepted = super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
        return torch.where(tokens >= 0, 0, tokens), torch.zeros_like(accepted)


def test_ranks_that_compute_other_tokens_take_those_of_the_first():
    def make(ranks):
        return engine_of(ranks, kernels=Flipped() if ranks.rank else None)

    assert run(TENSOR, make, tokens_of) == tokens_of(engine_of(None))


def test_a_rank_that_comes_to_another_decision_is_named_with_it():
    def body(ranks):
        engine = engine_of(ranks)
        if ranks.rank:
            engine._scheduler._limits = engine._scheduler._limits.__class__(growth=4, slots=4, spare=0, prefill_chunk=2)
            return engine.follow()
        return tokens_of(engine)

    _, errors = failing(TENSOR, body)
    assert isinstance(errors[1], RanksDiffer)
    assert "rank 1 comes to prefill = (0, 0, 1, 1, 0, 1), and rank 0 decided (0, 0, 1, 1, 0, 3)" in str(errors[1])
    assert isinstance(errors[0], RanksFailed)
    assert "rank 1 failed: RanksDiffer" in str(errors[0])


def test_ranks_with_other_options_or_models_are_refused_at_the_start():
    def other_draft(ranks):
        return engine_of(ranks, name="eagle" if ranks.rank else "none")

    _, errors = failing(TENSOR, other_draft)
    assert any("proposer is 'none' on rank 0 and 'eagle' on rank 1" in str(error) for error in errors.values())


def test_sizes_are_those_that_every_rank_has_room_for():
    def pages(ranks):
        engine = engine_of(ranks, num_pages=30 - 10 * ranks.rank)
        found = engine.config.num_pages
        engine.close()
        return found

    assert run_bodies(TENSOR, pages) == [20, 20]


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [TENSOR, DATA])
def test_a_rank_out_of_memory_ends_the_others_with_its_name_and_last_decision(layout):
    def body(ranks):
        engine = engine_of(ranks)
        if ranks.rank:

            def no_memory(batch):
                raise OutOfDeviceMemory("out of memory while launching")

            engine._step.launch = no_memory
            return engine.follow()
        return tokens_of(engine)

    _, errors = failing(layout, body)
    assert isinstance(errors[0], RanksFailed)
    said = str(errors[0])
    assert "rank 1 failed: OutOfDeviceMemory: out of memory while launching" in said
    assert "last decided" in said
    assert "last called" in said


def test_an_engine_that_follows_takes_no_calls():
    def body(ranks):
        engine = engine_of(ranks)
        if not engine.follows:
            with pytest.raises(ConfigError, match="nothing to follow"):
                engine.follow()
            engine.close()
            return
        with pytest.raises(ConfigError, match="follows that of rank 0"):
            engine.add_request((1, 2))
        engine.follow()

    run_bodies(TENSOR, body)


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [TENSOR, BOTH])
@pytest.mark.slow
def test_a_request_goes_on_in_another_engine_of_the_same_ranks(layout):
    def body(ranks):
        first, second = engine_of(ranks, overlap=True), engine_of(ranks, overlap=True)
        if ranks.rank:
            first.follow()
            second.follow()
            return None
        numbers = [first.add_request(prompt, LONG) for prompt in PROMPTS]
        tokens = {number: [] for number in numbers}
        while not all(tokens.values()):
            for output in first.step():
                tokens[output.request_id] += output.tokens
        handed = [first.hand_over(number) for number in numbers]
        first.close()
        taken = [second.take_over(each) for each in handed]
        with pytest.raises(ConfigError, match="taken over already"):
            second.take_over(handed[0])
        done = {}
        while second.has_unfinished:
            for output in second.step():
                done.setdefault(output.request_id, []).extend(output.tokens)
        second.close()
        return [(*each.output, *done[number]) for each, number in zip(handed, taken, strict=True)]

    found = run_bodies(layout, body)[0]
    assert found == tokens_of(engine_of(None), LONG)


def test_samples_streams_and_stops_are_the_first_rank_s_own():
    params = SamplingParams(max_tokens=6, temperature=0.9, seed=4, n=3, ignore_eos=True)

    def lead(engine):
        samples = [each.token_ids for each in engine.generate([PROMPTS[1]], params)]
        stream = engine.stream(PROMPTS[2], GREEDY)
        some = next(iter(stream)).tokens
        stream.close()
        return samples, some, engine.has_unfinished

    assert run(BOTH, engine_of, lead) == lead(engine_of(None))
