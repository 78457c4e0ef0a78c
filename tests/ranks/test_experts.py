"""Ranks that share every expert of a mixture, and ranks that divide the experts (expert parallelism)."""

from dataclasses import replace

import pytest
import torch
from threads import run

from model.hybrid_checkpoints import MtpOracle, greedy, random_model, save
from model.test_corrected_routers import with_head
from outrider import Engine, SamplingParams
from outrider.disaggregation.codec import server_fit
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.requests.hand_over import check_fit
from outrider.model import load_decoder
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS, decoder
from outrider_proof.tiny import plain_config
from tiny_checkpoints import write_checkpoint

PROMPTS = [(3, 1, 4, 1, 5, 9), (7, 7, 2), (1,)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
CONFIG = plain_config(max_context=40, max_requests=3, page_size=4, prefill_chunk=4, dtype="float64")
LAYOUTS = {
    "tensor": ParallelConfig(tensor=2),
    "data": ParallelConfig(data=2),
    "tensor, divided": ParallelConfig(tensor=2, expert=True),
    "data, divided": ParallelConfig(data=2, expert=True),
    "both, divided": ParallelConfig(tensor=2, data=2, expert=True),
}


def make(ranks, proposer="eagle", config=CONFIG):
    model = decoder(tiny.mixture(), ranks.backend, ranks.model)
    world, experts = ranks.config.world, model.config.experts
    held = model.weights.layers[0].down
    if ranks.config.expert:
        assert (experts.intermediate_size, experts.held, held.shape[0]) == (16, 8 // world, 8 // world)
    else:
        assert (experts.intermediate_size, experts.held, held.shape[0]) == (16 // world, 8, 8)
    return Engine(model, ranks.backend, proposer=MAKERS[proposer](model, ranks.backend), config=config, ranks=ranks)


def tokens(engine):
    return [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def plain():
    return tokens(Engine(tiny.mixture(), tiny.BACKEND, config=CONFIG))


@pytest.mark.sample(1, per="divided")
@pytest.mark.parametrize(
    ("layout", "divided"), [pytest.param(layout, layout.expert, id=name) for name, layout in LAYOUTS.items()]
)
def test_tokens_are_those_of_one_rank(layout, divided, plain):
    assert layout.expert is divided
    assert run(layout, make, tokens) == plain


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A checkpoint of gpt-oss, and the tokens of one rank."""
    path = tmp_path_factory.mktemp("biased")
    write_checkpoint(path, "gpt_oss")
    return path, tokens(Engine(load_decoder(path, backend=tiny.BACKEND, dtype=torch.float64), tiny.BACKEND, config=CONFIG))


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_biases_are_added_once_over_all_ranks(layout, biased):
    path, wanted = biased

    def create(ranks):
        model = load_decoder(path, backend=ranks.backend, dtype=torch.float64, ranks=ranks.model)
        return Engine(model, ranks.backend, config=CONFIG, ranks=ranks)

    assert run(layout, create, tokens) == wanted


ROUTED = [(family, name) for family in ("glm4_moe", "glm4_moe_lite-q", "deepseek_v3") for name in LAYOUTS]
ROUTED += [(family, name) for family in ("hy_v3", "ernie4_5_moe") for name in ("tensor", "data, divided")]
ROUTED += [("minimax_m2", name) for name in ("data", "data, divided")]  # whose norms are of all heads


@pytest.mark.sample(1, per="family")
@pytest.mark.parametrize(("family", "name"), ROUTED)
def test_ranks_route_by_corrected_scores_over_all_experts(family, name, tmp_path):
    write_checkpoint(tmp_path, family)
    layout = LAYOUTS[name]

    def create(ranks):
        model = load_decoder(tmp_path, backend=ranks.backend, dtype=torch.float64, ranks=ranks.model)
        return Engine(model, ranks.backend, config=CONFIG, ranks=ranks)

    alone = Engine(load_decoder(tmp_path, backend=tiny.BACKEND, dtype=torch.float64), tiny.BACKEND, config=CONFIG)
    assert run(layout, create, tokens) == tokens(alone)


def test_engines_of_other_ranks_continue_requests():
    """A prefill server of one rank fits a decode server whose ranks share or divide the experts."""
    proposer = MAKERS["eagle"](tiny.mixture(), tiny.BACKEND)
    prefill = Engine(tiny.mixture(), tiny.BACKEND, proposer=proposer, config=CONFIG)
    for layout in (LAYOUTS["data"], LAYOUTS["data, divided"]):
        check_fit(server_fit(prefill, layout.shards(0)), run(layout, make, server_fit))


def test_a_head_with_experts_divides_them_too(tmp_path):
    """From a checkpoint of Qwen3.5's mixture, whose head of multi-token prediction is a mixture itself."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    model = random_model("qwen3_5_moe", 3, **sizes)
    save(model, tmp_path, head=MtpOracle(model, 4))
    config = plain_config(max_context=40, max_requests=3, page_size=4, prefill_chunk=4, dtype="float32", draft_tokens=2)

    def load(ranks):
        engine = Engine.from_checkpoint(tmp_path, ranks.backend, speculate="mtp", config=config, ranks=ranks)
        head = engine.proposer.head
        assert head.config.experts.held == head.weights.layers[0].gate_up.shape[0] == 2
        return engine

    assert run(LAYOUTS["data, divided"], load, tokens)[0][:4] == tuple(greedy(model, PROMPTS[0], 4))


def test_a_head_with_latent_attention_is_shared_out_too(tmp_path):
    """From a checkpoint of GLM-4.7-Flash, whose head is stored as one more layer."""
    plain = tmp_path / "plain"
    with_head(plain, tmp_path / "head", write_checkpoint(plain, "glm4_moe_lite"))
    config = replace(CONFIG, draft_tokens=2, dtype="float32")

    def load(ranks):
        engine = Engine.from_checkpoint(tmp_path / "head", ranks.backend, speculate="mtp", config=config, ranks=ranks)
        assert engine.proposer.head.config.num_heads == 2
        return engine

    alone = Engine.from_checkpoint(tmp_path / "head", tiny.BACKEND, config=config)
    assert run(LAYOUTS["tensor, divided"], load, tokens) == tokens(alone)


@pytest.mark.slow
def test_the_command_divides_experts(tmp_path, child):
    write_checkpoint(tmp_path, "qwen3_moe", num_experts=4)
    command = ["generate", "--model", str(tmp_path), "--token-ids", "3,1,4,1,5", "--max-tokens", "8", "--backend", "cpu"]
    command += ["--dtype", "float32", "--speculate", "ngram", "--json"]
    whole = child(*command).json["token_ids"]
    for layout in (["--tensor-parallel", "2"], ["--data-parallel", "2"]):
        assert child(*command, *layout, "--expert-parallel").json["token_ids"] == whole
    alone = child(*command, "--expert-parallel")
    assert alone.code == 1
    assert "there is one rank" in alone.err + alone.out
