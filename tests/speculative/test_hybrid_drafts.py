"""Draft models with recurrent layers: their drafts are transformers' greedy continuations, whatever was rejected before."""

from itertools import pairwise

import pytest
import torch

from model.hybrid_checkpoints import MtpOracle, greedy, random_model, save
from outrider import Engine, SamplingParams
from outrider.engine.setup.facts import collect_facts
from outrider.speculative.draft_model import HybridDraftModelProposer
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_proof.tiny import BACKEND, plain_config
from tiny_checkpoints import write_checkpoint

CONFIG = plain_config(max_context=256, max_requests=2, page_size=4, prefill_chunk=72, state_checkpoints=3, draft_tokens=3)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A target and a draft of nearly the same weights, and the oracles of both."""
    directory, models = tmp_path_factory.mktemp("hybrid-drafts"), {}
    for name in ("target", "draft"):
        model = random_model("qwen3_5", 3, tie_word_embeddings=False)
        if name == "draft":
            generator = torch.Generator().manual_seed(9)
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.04 * weight.std() * torch.randn(weight.shape, generator=generator)
        save(model, directory / name)
        models[name] = model
    return directory, models


def engine_of(directory):
    return Engine.from_checkpoint(
        directory / "target", BACKEND, speculate="draft-model", draft_dir=directory / "draft", config=CONFIG
    )


def test_drafts_are_those_of_the_oracle(checkpoints, monkeypatch):
    """After rejections, after a prompt of two chunks, and after a prefix that the cache had."""
    directory, models = checkpoints
    vocabulary, drafted, draft = models["target"].config.vocab_size, [], HybridDraftModelProposer.draft

    def recorded(self, inputs):
        made = draft(self, inputs)
        drafted.extend(zip(inputs.rows.tolist(), inputs.seq_lens.tolist(), made.tokens.tolist(), strict=True))
        return made

    monkeypatch.setattr(HybridDraftModelProposer, "draft", recorded)
    engine = engine_of(directory)
    accepted = set()
    for round_, prompt in enumerate(([5, 6, 7], [number % vocabulary for number in range(3, 400, 5)]) * 2):
        drafted.clear()
        (found,) = engine.generate([prompt], PARAMS)
        assert list(found.token_ids) == greedy(models["target"], prompt, PARAMS.max_tokens)
        text = [*prompt, *found.token_ids]
        checked = [(length, tokens) for _, length, tokens in drafted if len(prompt) <= length <= len(text) - 4]
        assert len(checked) > 3, round_
        for length, tokens in checked:
            assert tokens == greedy(models["draft"], text[: length + 1], 3), (round_, length)
        lengths = [length for length, _ in checked]
        accepted |= {after - before - 1 for before, after in pairwise(lengths)}
    assert len(accepted) > 2, "the drafts are all accepted or all rejected"
    assert engine.stats.prefix_hits == 64


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "nested"), [("qwen3_next", False), ("qwen3_5", True), ("qwen3_5_moe", True)])
def test_a_draft_may_have_a_head_of_its_own(family, nested, tmp_path):
    """As published: within the names of a vision-language model, with experts, and with a head that isn't used."""
    model = random_model(family, 3, tie_word_embeddings=False)
    save(model, tmp_path, head=MtpOracle(model, 4), nested=nested)
    options = {"draft_dir": tmp_path, "config": CONFIG}
    engine = Engine.from_checkpoint(tmp_path, BACKEND, speculate="draft-model", **options)
    (found,) = engine.generate([[5, 6, 7]], PARAMS)
    assert (list(found.token_ids), found.iterations) == (greedy(model, [5, 6, 7], PARAMS.max_tokens), 5)


def test_another_target_keeps_the_states_of_its_draft(checkpoints, tmp_path):
    """A target without recurrent layers gets checkpoints of states and shares prefixes with them."""
    directory, models = checkpoints
    write_checkpoint(tmp_path, "qwen3", vocab_size=models["draft"].config.vocab_size)
    config = {"config": CONFIG, "speculate": "draft-model", "draft_dir": directory / "draft"}
    engine, alone = Engine.from_checkpoint(tmp_path, BACKEND, **config), Engine.from_checkpoint(tmp_path, BACKEND)
    prompt = [number % 40 for number in range(3, 400, 5)]
    wanted = alone.generate([prompt], PARAMS)[0].token_ids
    assert [engine.generate([prompt], PARAMS)[0].token_ids for _ in range(2)] == [wanted, wanted]
    assert (engine.stats.prefix_hits, engine.load.state_checkpoints) == (64, 1)


def test_memory_counts_the_states_of_the_draft(checkpoints):
    directory, _ = checkpoints
    engine = engine_of(directory)
    parts, proposer = engine._parts, engine.proposer

    def size(layers):
        return sum(tensor.numel() * tensor.itemsize for layer in layers for tensor in layer)

    facts, without = (collect_facts(BACKEND, engine.model, each) for each in (proposer, NonSpeculativeProposer()))
    assert size(parts.states) == 6 * facts.state_bytes
    assert size(proposer.states) == 6 * (facts.state_bytes - without.state_bytes) > 0
    # A row of the copy and of the draft's windows for each request.
    held = size(proposer._drafted.states) + size(proposer.cache.windows)
    assert facts.request_bytes - without.request_bytes == held // 3
    assert facts.window_bytes == size(parts.cache.windows) // 3 > 0
