"""Routers with sigmoids and groups of experts (GLM-4.5, dots.llm1): engines, formats, draft heads beside them, refusals."""

import re

import pytest
import torch

from model.test_decoder import PROMPT, agree, expect
from model.test_mixtures import edited, reshaped, without
from model.wrong_configs import WRONG_CONFIGS
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, KernelSet, SigmoidRouting
from outrider.errors import CheckpointError
from outrider.model import load_decoder, plan_decoder
from outrider.registry import get_backend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import write_checkpoint

NEW_TOKENS = 20
STEM = "model.layers.1.mlp"
CORRECTION = f"{STEM}.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    path = tmp_path_factory.mktemp("glm")
    return path, write_checkpoint(path, "glm4_moe")


@pytest.mark.parametrize("chunk", [3, 5])
def test_chunks_of_a_prompt(backend, glm, chunk):
    agree(glm[0], backend, glm[1], chunk=chunk)


@pytest.mark.parametrize("speculate", ["none", "ngram", "draft-model"])
@pytest.mark.parametrize("device", ["cpu", "sim", "sim:like=npu"])
def test_engines_give_the_tokens_of_transformers(glm, device, speculate):
    path, reference = glm
    reference.generation_config.eos_token_id = None
    prompts = [PROMPT * 2, [*PROMPT, 4, 4], [9, 2, 9, 2, 9, 2, 9, 2, 9]]
    expected = [tuple(expect(reference, prompt, NEW_TOKENS)[0]) for prompt in prompts]
    config = plain_config(max_requests=3, max_context=96, page_size=4, prefill_chunk=16, draft_tokens=3)
    draft = path if speculate == "draft-model" else None
    engine = Engine.from_checkpoint(path, get_backend(device), draft_dir=draft, speculate=speculate, config=config)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time from the pages of the prefix cache
        assert [result.token_ids for result in engine.generate(prompts, params)] == expected
    assert engine.stats.prefix_hits > 0


def test_invariant_kernels_give_the_tokens_of_transformers(glm):
    path, reference = glm
    expected = tuple(expect(reference, PROMPT, NEW_TOKENS)[0])
    config = plain_config(max_context=96, batch_invariant=True)
    engine = Engine.from_checkpoint(path, get_backend("cpu"), config=config)
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert completion.token_ids == expected


def test_the_router_is_as_wide_as_its_correction(backend, glm):
    """A choice among experts that are nearly equal needs more bits than the model's dtype may have."""
    layer = load_decoder(glm[0], backend=backend, dtype=torch.bfloat16).weights.layers[1]
    gate = glm[1].model.layers[1].mlp.gate
    assert torch.equal(layer.router, gate.weight)
    assert torch.equal(layer.router_correction, gate.e_score_correction_bias)
    assert layer.gate_up.dtype is torch.bfloat16


def test_a_draft_head_in_the_checkpoint_is_not_read(tmp_path, backend, glm):
    """Published as one more layer, with projections of its own."""
    more = {"enorm.weight": 32, "hnorm.weight": 32, "shared_head.norm.weight": 32, "mlp.gate.weight": 32}
    head = {f"model.layers.3.{name}": torch.randn(size) for name, size in more.items()}
    assert glm[1].config.num_hidden_layers == 3
    agree(edited(glm[0], tmp_path, lambda tensors: tensors | head), backend, glm[1])
    edited(glm[0], tmp_path, lambda tensors: tensors | {"model.layers.4.enorm.weight": torch.randn(32)})
    with pytest.raises(CheckpointError, match=re.escape("not expected: 'model.layers.4.enorm.weight' [32]")):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(CORRECTION), f"missing: '{CORRECTION}' [8]"),
        (reshaped(CORRECTION, 1, 8), f"tensor '{CORRECTION}' has shape [1, 8], expected [8]"),
        (without(f"{STEM}.shared_experts.up_proj.weight"), f"missing: '{STEM}.shared_experts.up_proj.weight' [24, 32]"),
        (
            lambda tensors: tensors | {f"{STEM}.shared_expert_gate.weight": torch.zeros(1, 32)},
            f"not expected: '{STEM}.shared_expert_gate.weight' [1, 32]",
        ),
    ],
)
def test_a_broken_checkpoint_names_the_tensor(tmp_path, backend, glm, change, told):
    edited(glm[0], tmp_path, change)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)


@pytest.mark.parametrize(("config", "told"), WRONG_CONFIGS["glm4_moe"], ids=lambda value: next(iter(value)))
def test_a_config_that_cannot_be(tmp_path, backend, glm, config, told):
    edited(glm[0], tmp_path, **config)
    with pytest.raises(CheckpointError, match=told):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)


def test_kernels_that_route_by_a_softmax_alone_are_refused(backend, glm):
    class Routes(KernelSet):
        name = "routes"

        def route(self, *operands, **named):
            return super().route(*operands, **named)

    told = "a glm4_moe model needs sigmoid_routing, which the kernels 'routes' don't take"
    with pytest.raises(ConfigError, match=told):
        plan_decoder(glm[0], backend=backend, dtype=torch.float32, kernels=Routes())


def test_a_token_of_each_kind():
    """Group 1 wins with 0.9 + 0.8, though expert 0 is the best; the correction chooses and doesn't weigh."""
    scores = torch.tensor([[0.95, 0.1, 0.9, 0.8], [0.6, 0.5, 0.55, 0.5]])
    logits = scores.log() - (1 - scores).log()
    routing = SigmoidRouting(torch.tensor([0.0, 0.0, 0.0, 0.0]), groups=2, chosen_groups=1, factor=2.0)
    weights, chosen = KernelSet().route(logits, 2, renormalize=True, sigmoid=routing)
    assert chosen.tolist() == [[2, 3], [0, 1]]
    torch.testing.assert_close(weights, 2.0 * torch.tensor([[0.9 / 1.7, 0.8 / 1.7], [0.6 / 1.1, 0.5 / 1.1]]))
    corrected = routing._replace(correction=torch.tensor([0.0, 1.0, 0.0, 0.0]))
    weights, chosen = KernelSet().route(logits, 1, renormalize=False, sigmoid=corrected)
    assert chosen.tolist() == [[1], [1]]
    torch.testing.assert_close(weights, 2.0 * torch.tensor([[0.1], [0.5]]))
    _, held = KernelSet().route(logits, 2, renormalize=True, sigmoid=routing, held=(2, 4))
    assert held.tolist() == [[0, 1], [-1, -1]]


@pytest.mark.parametrize(("groups", "chosen"), [(3, 1), (4, 1), (2, 3)])
def test_groups_that_do_not_fit_are_known_before_anything_runs(groups, chosen):
    routing = SigmoidRouting(torch.zeros(8, device="meta"), groups, chosen)
    with pytest.raises(RuntimeError, match="expected groups of one size"):
        KernelSet().route(torch.zeros(1, 8, device="meta"), 3, renormalize=True, sigmoid=routing)
