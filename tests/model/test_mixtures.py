"""Mixtures of experts: logits and tokens of transformers, both layouts of a checkpoint, and what is refused."""

import json
import re
import shutil
from dataclasses import fields

import pytest
import torch

from model.test_decoder import PROMPT, TOLERANCE, agree
from model.wrong_configs import WRONG_CONFIGS
from outrider.device import ConfigError, QuantizedWeight
from outrider.errors import CheckpointError
from outrider.model import ModelRanks, Shard, Shards, load_decoder, plan_decoder
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.layer_configs import REFUSED
from outrider.model.config.shapes import SHAPES, shard_config
from tiny_checkpoints import MIXTURES, rewrite, write_checkpoint

OLD = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixtral")
    return path, write_checkpoint(path, "mixtral", num_hidden_layers=2)


def edited(source, target, change=None, **config):
    """A copy of a checkpoint with other tensors and another config."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    rewrite(target, change, **config)
    return target


def expect_refusal(source, target, backend, told, change=None, **config):
    """The copy that :func:`edited` makes is refused with an error that matches ``told``."""
    edited(source, target, change, **config)
    with pytest.raises(CheckpointError, match=told):
        load_decoder(target, backend=backend, dtype=torch.float32)


def fused(tensors):
    """The stacks that transformers has in memory, in place of a tensor for each expert."""
    made, stacks = {}, {}
    for key, value in tensors.items():
        found = re.fullmatch(r"(.*)\.experts\.(\d+)\.(w\d)\.weight", key)
        if found is None:
            made[key] = value
        else:
            stacks.setdefault(found[1], {})[found[3], int(found[2])] = value
    for stem, parts in stacks.items():
        count = 1 + max(number for _, number in parts)
        both = [torch.cat((parts["w1", number], parts["w3", number])) for number in range(count)]
        made[f"{stem}.experts.gate_up_proj"] = torch.stack(both)
        made[f"{stem}.experts.down_proj"] = torch.stack([parts["w2", number] for number in range(count)])
    return made


def renamed(tensors):
    """As other writers name Mixtral's experts."""
    made = {}
    for key, value in tensors.items():
        name = key.replace("block_sparse_moe", "mlp")
        for old, new in OLD.items():
            name = name.replace(f".{old}.", f".{new}.")
        made[name] = value
    return made


@pytest.mark.parametrize("name", MIXTURES)
def test_tokens_and_logits_of_transformers(tmp_path, backend, name):
    agree(tmp_path, backend, write_checkpoint(tmp_path, name))


@pytest.mark.parametrize(
    "change", [fused, renamed, lambda tensors: renamed(fused(tensors))], ids=["fused", "renamed", "both"]
)
def test_other_layouts(tmp_path, backend, mixtral, change):
    path, reference = mixtral
    agree(edited(path, tmp_path, change), backend, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["read as it is", "cast"])
@pytest.mark.parametrize("change", [lambda tensors: tensors, fused], ids=["each", "fused"])
def test_ranks_have_parts_of_every_expert(tmp_path, backend, mixtral, change, dtype):
    path, _ = mixtral
    edited(path, tmp_path, change)
    whole = load_decoder(tmp_path, backend=backend, dtype=dtype).weights.layers[1]
    parts = []
    for rank in range(2):
        own = Shard(rank, 2)
        ranks = ModelRanks(Shards(attention=own, mlp=own, vocabulary=own))
        loaded = load_decoder(tmp_path, backend=backend, dtype=dtype, ranks=ranks)
        assert loaded.config.experts.intermediate_size == 24
        parts.append(loaded.weights.layers[1])
    halves = [torch.cat([part.gate_up.chunk(2, dim=1)[half] for part in parts], dim=1) for half in range(2)]
    assert torch.equal(torch.cat(halves, dim=1), whole.gate_up)
    assert torch.equal(torch.cat([part.down for part in parts], dim=2), whole.down)
    assert all(torch.equal(part.router, whole.router) for part in parts)


@pytest.mark.parametrize("change", [lambda tensors: tensors, fused], ids=["each", "fused"])
def test_ranks_that_divide_experts_read_their_own_alone(tmp_path, backend, mixtral, change):
    path, _ = mixtral
    edited(path, tmp_path, change)
    whole = load_decoder(tmp_path, backend=backend, dtype=torch.float32).weights.layers[1]
    parts = []
    for rank in range(2):
        ranks = ModelRanks(Shards(mlp=Shard(rank, 2), divides_experts=True))
        plan = plan_decoder(tmp_path, backend=backend, dtype=torch.float32, ranks=ranks)
        loaded = plan.load()
        assert (loaded.config.experts.intermediate_size, loaded.config.experts.held) == (48, 2)
        assert plan.weight_bytes == sum(map(nbytes, (loaded.weights, *loaded.weights.layers)))
        assert loaded._layers[1].blocks[1].weights.held == (2 * rank, 2 * rank + 2)
        parts.append(loaded.weights.layers[1])
    assert torch.equal(torch.cat([part.gate_up for part in parts]), whole.gate_up)
    assert torch.equal(torch.cat([part.down for part in parts]), whole.down)
    assert all(torch.equal(part.router, whole.router) for part in parts)


def nbytes(weights):
    """Bytes of the tensors of a record of weights."""
    values = (getattr(weights, field.name) for field in fields(weights))
    return sum(each.nbytes for each in values if isinstance(each, torch.Tensor | QuantizedWeight))


def test_models_and_ranks_that_expert_parallelism_is_refused_for(tmp_path, backend, mixtral):
    config = read_model_config(mixtral[0])
    with pytest.raises(ConfigError, match=r"4 experts can't be divided among 3 ranks"):
        Shards(mlp=Shard(0, 3), divides_experts=True).local(config, "it")
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="has no experts to divide among ranks"):
        plan_decoder(
            tmp_path,
            backend=backend,
            dtype=torch.float32,
            ranks=ModelRanks(Shards(mlp=Shard(0, 2), divides_experts=True)),
        )


def without(key):
    return lambda tensors: {name: value for name, value in tensors.items() if name != key}


def reshaped(key, *shape):
    return lambda tensors: tensors | {key: torch.zeros(shape)}


EXPERT, GATE = "model.layers.1.block_sparse_moe.experts.3.w2.weight", "model.layers.0.block_sparse_moe.gate.weight"
BIAS = "model.layers.0.block_sparse_moe.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(EXPERT), rf"missing: '{re.escape(EXPERT)}' \[32, 48\]"),
        (without(GATE), re.escape(f"missing: '{GATE}' [4, 32]")),
        (reshaped(EXPERT, 32, 40), rf"'{re.escape(EXPERT)}' has shape \[32, 40\], expected \[32, 48\]"),
        (reshaped(GATE, 5, 32), rf"'{re.escape(GATE)}' has shape \[5, 32\], expected \[4, 32\]"),
        (reshaped(BIAS, 4), rf"not expected: '{re.escape(BIAS)}' \[4\]"),
        (
            lambda tensors: fused(tensors) | {"model.layers.0.block_sparse_moe.experts.down_proj": torch.zeros(3, 32, 48)},
            r"experts.down_proj' has shape \[3, 32, 48\], expected \[4, 32, 48\]",
        ),
        (
            lambda tensors: without("model.layers.1.block_sparse_moe.experts.gate_up_proj")(fused(tensors)),
            r"missing: 'model.layers.1.block_sparse_moe.experts.gate_up_proj' \[4, 96, 32\]",
        ),
    ],
    ids=["no expert", "no router", "expert's shape", "router's shape", "bias of the router", "stack's shape", "no stack"],
)
def test_a_broken_checkpoint_names_the_tensor(tmp_path, backend, mixtral, change, told):
    expect_refusal(mixtral[0], tmp_path, backend, told, change)


@pytest.mark.parametrize(
    ("config", "told"), WRONG_CONFIGS["mixtral"], ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_a_config_that_cannot_be(tmp_path, backend, mixtral, config, told):
    expect_refusal(mixtral[0], tmp_path, backend, told, **config)


@pytest.mark.parametrize(
    ("family", "told"), [("deepseek_v32", "chooses the keys"), ("exaone_moe", "attention or its router")]
)
def test_families_that_are_refused_say_why(tmp_path, family, told):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(CheckpointError, match=rf"model_type is '{family}', which isn't supported: .*{told}"):
        read_model_config(tmp_path)


def test_what_is_refused_is_known_to_transformers():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert not [name for name in REFUSED if name not in CONFIG_MAPPING]


def test_padding_and_company_leave_a_token_alone(tmp_path, backend, mixtral):
    from model.harness import Driver

    path, reference = mixtral
    driver = Driver(load_decoder(path, backend=backend, dtype=torch.float32))
    logits = driver.logits([(driver.sequence(), PROMPT), (driver.sequence(), PROMPT[3:9])], padding=5)
    for prompt, found in ((PROMPT, logits[: len(PROMPT)]), (PROMPT[3:9], logits[len(PROMPT) : len(PROMPT) + 6])):
        with torch.no_grad():
            assert torch.allclose(found, reference(torch.tensor([prompt])).logits[0], rtol=0, atol=TOLERANCE)


def test_shapes_with_experts():
    config = SHAPES["qwen3-30b-a3b"]
    assert (config.experts.count, config.experts.per_token, config.inner_width) == (128, 8, 8 * 768)
    assert shard_config(config, 4).experts.intermediate_size == 192
    assert shard_config(SHAPES["mixtral-8x7b"], 2).experts.intermediate_size == 7168


def test_experts_that_cannot_be_shared_out(mixtral):
    config = read_model_config(mixtral[0])
    with pytest.raises(ConfigError, match="can't be shared out among 5 ranks"):
        Shards(mlp=Shard(0, 5)).local(config, "it")
