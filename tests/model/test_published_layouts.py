"""Layouts of published checkpoints that differ from what transformers writes: the tokens are those of transformers, plain and
with drafts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import Engine, SamplingParams
from outrider.errors import CheckpointError
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import write_checkpoint, write_mtp
from outrider_proof.tiny import plain_config

PROMPTS, COUNT = [[5, 6, 7, 8, 5, 6], [9]], 10
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


def rewrite(directory, change, **config):
    """Apply ``change`` to a dictionary of the checkpoint's tensors and write the result; ``config`` replaces fields."""
    state = {key: value.clone() for key, value in load_file(directory / "model.safetensors").items()}
    state = change(state) or state
    save_file({key: value.contiguous() for key, value in state.items()}, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def oracle(model):
    """Return the greedy tokens of transformers' model in float64."""
    model, found = model.double(), []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        for _ in range(COUNT):
            with torch.no_grad():
                logits = model(tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat((tokens, logits.argmax().view(1, 1)), dim=1)
        found.append(tuple(tokens[0, len(prompt) :].tolist()))
    return found


def engine_of(directory, speculate="none", *, draft=None, max_context=48, **options):
    config = plain_config(dtype="float64", draft_tokens=3, max_context=max_context)
    return Engine.from_checkpoint(directory, CpuBackend(), draft_dir=draft, speculate=speculate, config=config, **options)


def tokens_of(engine):
    return [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]


def check(directory, model, speculate="draft-model", *, draft=None, **options):
    """Compare with transformers' ``model``, plain and with drafts: by default the checkpoint drafts for itself."""
    expected = oracle(model)
    assert tokens_of(engine_of(directory, **options)) == expected
    draft = directory if speculate == "draft-model" and draft is None else draft
    drafting = engine_of(directory, speculate, draft=draft, **options)
    assert tokens_of(drafting) == expected
    return drafting


# -- heads of multi-token prediction inside the model's checkpoint ---------------------------------------------------


def write_mimo(directory):
    """Write a MiMo checkpoint: Qwen2's decoder and heads of multi-token prediction. Return transformers' Qwen2 model."""
    model = write_checkpoint(directory, "qwen2")
    heads = write_mtp(directory / "heads")
    rewrite(
        directory,
        lambda state: state | heads,
        model_type="mimo",
        architectures=["MiMoForCausalLM"],
        num_nextn_predict_layers=2,
        attention_bias=True,
        head_dim=8,
        auto_map={"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
    )
    return model


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mimo")
    return directory, write_mimo(directory)


def test_mimo_drafts_with_the_heads_in_its_own_checkpoint(mimo):
    directory, model = mimo
    inside = check(directory, model, "mtp")
    outside = engine_of(directory, "mtp", draft=directory / "heads")
    assert inside.proposer.depth == outside.proposer.depth == 2
    for mine, other in zip(inside.proposer._heads, outside.proposer._heads, strict=True):
        assert torch.equal(mine.weights.projection, other.weights.projection)


def test_heads_inside_are_checked(mimo, tmp_path):
    directory, _ = mimo
    for path in ("config.json", "model.safetensors"):
        (tmp_path / path).write_bytes((directory / path).read_bytes())
    rewrite(tmp_path, lambda state: state | {"model.mtp_layers.0.extra": torch.zeros(1)})
    engine_of(tmp_path)
    with pytest.raises(CheckpointError, match="not expected: 'model.mtp_layers.0.extra'"):
        engine_of(tmp_path, "mtp")


def test_a_model_without_heads_is_refused_before_it_is_read(tmp_path):
    write_checkpoint(tmp_path, "llama")
    read = []
    with pytest.raises(CheckpointError, match=r"has no heads of multi-token prediction; expected tensors model\.mtp_layers"):
        engine_of(tmp_path, "suffix+mtp", progress=lambda *told: read.append(told))
    assert read == []
