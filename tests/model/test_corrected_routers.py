"""Routers with sigmoids and groups of experts (GLM-4.5, dots.llm1): engines, formats, draft heads beside them, refusals.

The head of Hunyuan 3, too, which is stored as GLM's with other names.
"""

import re

import pytest
import torch
from transformers.modeling_layers import MtpLayer

from model.harness import Driver
from model.test_decoder import PROMPT, agree, engines_agree, expect
from model.test_mixtures import edited, expect_refusal, reshaped, without
from model.wrong_configs import WRONG_CONFIGS
from outrider import Engine, SamplingParams
from outrider.cli.options.models import Speculation
from outrider.device import ConfigError, CorrectedRouting, KernelSet
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


@pytest.mark.sample(1, per="device")
@pytest.mark.parametrize("speculate", ["none", "ngram", "draft-model"])
@pytest.mark.parametrize("device", ["cpu", "sim", "sim:like=npu"])
def test_engines_give_the_tokens_of_transformers(glm, device, speculate):
    engines_agree(*glm, device, speculate)


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


HEAD = "model.layers.3"
NAMES = {"post_norm": "shared_head.norm"}
HUNYUAN_NAMES = {
    "post_norm": "final_layernorm",
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts": "mlp.shared_mlp",
}


def with_head(source, target, model, *, names=NAMES, **config):
    """The checkpoint with a head of multi-token prediction as one more layer, as published. Returns transformers' layer.
    ``names``: the published one for each part of a name in transformers.
    """
    norm = type(model.model.norm)
    torch.manual_seed(5)
    head = MtpLayer(model.config, type(model.model.layers[1]), norm, 1)
    for name, tensor in (*head.named_parameters(), *head.named_buffers()):
        torch.nn.init.normal_(tensor, 1.0 if "norm" in name else 0.0, 0.3)
    stored = {}
    for name, tensor in head.state_dict().items():
        place = name.replace("mtp_block.", "")
        for own, published in names.items():
            place = place.replace(own, published)
        if "experts." in name and tensor.dim() == 3:
            for expert, rows in enumerate(tensor):
                gated = "gate_up_proj" in name
                parts = zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True) if gated else (("down_proj", rows),)
                stored |= {f"{HEAD}.mlp.experts.{expert}.{part}.weight": each.clone() for part, each in parts}
        else:
            stored[f"{HEAD}.{place}"] = tensor
    stored[f"{HEAD}.embed_tokens.weight"] = model.model.embed_tokens.weight.data
    stored[f"{HEAD}.shared_head.head.weight"] = model.lm_head.weight.data
    edited(source, target, lambda tensors: tensors | stored, num_nextn_predict_layers=1, **config)
    return head.eval()


def test_the_head_in_the_checkpoint_drafts_as_in_transformers(tmp_path, backend, glm):
    drafts_as_in_transformers(glm[0], tmp_path, backend, glm[1])


def test_hunyuans_head_drafts_as_in_transformers(tmp_path, backend):
    model = write_checkpoint(tmp_path / "model", "hy_v3")
    drafts_as_in_transformers(tmp_path / "model", tmp_path / "with head", backend, model, names=HUNYUAN_NAMES)


def drafts_as_in_transformers(path, target, backend, model, *, names=NAMES):
    """The checkpoint with a head in ``target``: the head's states are those of transformers' layer, and the tokens agree."""
    oracle = with_head(path, target, model, names=names)
    assert Speculation.with_defaults(None, model=target, draft=None, draft_tokens=3).kind == "mtp"
    config = plain_config(dtype="float32", max_context=128, page_size=4, prefill_chunk=9, draft_tokens=3)
    engine = Engine.from_checkpoint(target, backend, speculate="mtp", config=config)
    head, prompt = engine.proposer.head, [number % model.config.vocab_size for number in range(3, 60, 5)]
    driver = Driver(engine.model)
    states = driver.hidden([(driver.sequence(), prompt)])
    draft = Driver(engine.model, config=head.config)
    with torch.no_grad():
        made = head.forward(draft.inputs([(draft.sequence(), prompt[1:])]), states[:-1], draft.cache)
        ids, positions = torch.tensor([prompt]), torch.arange(len(prompt) - 1).unsqueeze(0)
        embedded, last = model.model.embed_tokens(ids[:, 1:]), model.model(ids).last_hidden_state[:, :-1]
        angles = model.model.rotary_emb(embedded, positions)
        mask = torch.full((len(prompt) - 1,) * 2, float("-inf")).triu(1)[None, None]
        wanted = oracle(embedded, last, angles, mask, positions, None)[0]
    torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)
    model.generation_config.eos_token_id = None
    (found,) = engine.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert list(found.token_ids) == expect(model, prompt, NEW_TOKENS)[0]
    agree(target, backend, model)  # the head is ignored without speculation


def test_a_head_at_another_place_is_refused_by_name(tmp_path, backend, glm):
    with_head(glm[0], tmp_path, glm[1], num_hidden_layers=2, first_k_dense_replace=1)
    edited(tmp_path, tmp_path / "short", lambda tensors: {n: t for n, t in tensors.items() if "layers.2." not in n})
    with pytest.raises(CheckpointError, match=r"the head is model\.layers\.3, expected model\.layers\.2, after"):
        Engine.from_checkpoint(tmp_path / "short", backend, speculate="mtp", config=plain_config(max_context=64))


def test_a_layer_too_many_that_is_no_head_is_refused(tmp_path, backend, glm):
    edited(glm[0], tmp_path, lambda tensors: tensors | {f"{HEAD}.enorm.weight": torch.randn(32)})
    with pytest.raises(CheckpointError, match=re.escape(f"not expected: '{HEAD}.enorm.weight' [32]")):
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
    expect_refusal(glm[0], tmp_path, backend, re.escape(told), change)


@pytest.mark.parametrize(("config", "told"), WRONG_CONFIGS["glm4_moe"], ids=lambda value: next(iter(value)))
def test_a_config_that_cannot_be(tmp_path, backend, glm, config, told):
    expect_refusal(glm[0], tmp_path, backend, told, **config)


def test_kernels_that_route_by_a_softmax_alone_are_refused(backend, glm):
    class Routes(KernelSet):
        name = "routes"

        def route(self, *operands, **named):
            return super().route(*operands, **named)

    told = "a glm4_moe model needs corrected_routing, which the kernels 'routes' don't take"
    with pytest.raises(ConfigError, match=told):
        plan_decoder(glm[0], backend=backend, dtype=torch.float32, kernels=Routes())


def test_a_token_of_each_kind():
    """Group 1 wins with 0.9 + 0.8, though expert 0 is the best; the correction chooses and doesn't weigh."""
    scores = torch.tensor([[0.95, 0.1, 0.9, 0.8], [0.6, 0.5, 0.55, 0.5]])
    logits = scores.log() - (1 - scores).log()
    routing = CorrectedRouting(torch.tensor([0.0, 0.0, 0.0, 0.0]), groups=2, chosen_groups=1, factor=2.0)
    weights, chosen = KernelSet().route(logits, 2, renormalize=True, routing=routing)
    assert chosen.tolist() == [[2, 3], [0, 1]]
    torch.testing.assert_close(weights, 2.0 * torch.tensor([[0.9 / 1.7, 0.8 / 1.7], [0.6 / 1.1, 0.5 / 1.1]]))
    corrected = routing._replace(correction=torch.tensor([0.0, 1.0, 0.0, 0.0]))
    weights, chosen = KernelSet().route(logits, 1, renormalize=False, routing=corrected)
    assert chosen.tolist() == [[1], [1]]
    torch.testing.assert_close(weights, 2.0 * torch.tensor([[0.1], [0.5]]))
    _, held = KernelSet().route(logits, 2, renormalize=True, routing=routing, held=(2, 4))
    assert held.tolist() == [[0, 1], [-1, -1]]


@pytest.mark.parametrize(("groups", "chosen"), [(3, 1), (4, 1), (2, 3)])
def test_groups_that_do_not_fit_are_known_before_anything_runs(groups, chosen):
    routing = CorrectedRouting(torch.zeros(8, device="meta"), groups, chosen)
    with pytest.raises(RuntimeError, match="expected groups of one size"):
        KernelSet().route(torch.zeros(1, 8, device="meta"), 3, renormalize=True, routing=routing)
