"""Hybrid models in GGUF against transformers: logits, tokens, and every tensor of the checkpoint that was converted."""

import json

import gguf
import pytest
import torch

from model.harness import Driver
from model.hybrid_checkpoints import FAMILIES, MtpOracle, greedy, logits, random_model, save
from model.hybrid_gguf import write_hybrid_gguf
from outrider import Engine, SamplingParams
from outrider.cli.options.models import Speculation
from outrider.errors import CheckpointError
from outrider.model import find_checkpoint, load_decoder
from outrider.model.checkpoint.opening import open_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GROUPS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 6, "linear_value_head_dim": 4}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


def model_of(family, **fields):
    """A model whose key heads serve three value heads each, so that any other order of value heads is noticed."""
    others = {"norm_topk_prob": True} if family == "qwen3_next" else {}
    return random_model(family, 5, **GROUPS, **others, **fields)


@pytest.mark.parametrize("family", [*FAMILIES, "fused qwen3_next"])
def test_logits_and_tokens(tmp_path, backend, family):
    model = model_of(family.removeprefix("fused "))
    write_hybrid_gguf(tmp_path / "m.gguf", model, fused="fused" in family)
    driver = Driver(load_decoder(find_checkpoint(tmp_path / "m.gguf"), backend=backend, dtype=torch.float32), pages=64)
    ours = driver.logits([(driver.sequence(), PROMPT)])[: len(PROMPT)]
    torch.testing.assert_close(ours, logits(model, PROMPT), rtol=1e-3, atol=1e-3)
    assert driver.greedy(PROMPT, 4)[0] == greedy(model, PROMPT, 4)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_yarn(tmp_path, backend, family):
    """A prompt beyond the original context."""
    rope = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 4}
    rope |= {"partial_rotary_factor": 0.5} | ({} if family == "qwen3_next" else {"mrope_section": [2, 1, 1]})
    model = model_of(family, head_dim=16, rope_parameters=rope, max_position_embeddings=16)

    def scaling(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(4)

    write_hybrid_gguf(tmp_path / "m.gguf", model, metadata=[scaling])
    driver = Driver(load_decoder(find_checkpoint(tmp_path / "m.gguf"), backend=backend, dtype=torch.float32), pages=64)
    made = driver.logits([(driver.sequence(), PROMPT)])
    torch.testing.assert_close(made, logits(model, PROMPT), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_every_tensor_is_that_of_the_checkpoint(tmp_path, family):
    """The head of multi-token prediction too, which ``--speculate mtp`` then finds in the file."""
    model = model_of(family)
    head = MtpOracle(model, 4)
    save(model, tmp_path / "source", head=head)
    write_hybrid_gguf(tmp_path / "m.gguf", model, head=head, kv_heads=[0, model.config.num_key_value_heads])
    expected, directory = open_checkpoint(tmp_path / "source"), find_checkpoint(tmp_path / "m.gguf")
    found = open_checkpoint(directory)
    stacked = {name for name in expected.tensors if ".experts." in name}
    assert {name for name in found.tensors if ".experts." not in name} == expected.tensors.keys() - stacked
    for name in expected.tensors.keys() - stacked:
        torch.testing.assert_close(found.read_tensor(name).float(), expected.read_tensor(name).float(), msg=name)
    assert Speculation.with_defaults(None, model=directory, draft=None, draft_tokens=2).kind == "mtp"
    config = json.loads((directory / "config.json").read_text())
    assert config["layer_types"] == list(model.config.layer_types)


def test_the_head_in_the_file_drafts(tmp_path, backend):
    model = model_of("qwen3_5")
    write_hybrid_gguf(tmp_path / "m.gguf", model, head=MtpOracle(model, 4))
    directory, params = find_checkpoint(tmp_path / "m.gguf"), SamplingParams(max_tokens=6)
    made = [
        Engine.from_checkpoint(directory, backend, speculate=kind, draft_dir=directory if kind == "mtp" else None)
        .generate([PROMPT], params)[0]
        .token_ids
        for kind in ("mtp", "none")
    ]
    assert list(made[0]) == list(made[1]) == greedy(model, PROMPT, 6)


def test_heads_that_do_not_go_together(tmp_path, monkeypatch):
    model = model_of("qwen3_5")
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_ssm_group_count", lambda self, count: self.add_uint32("qwen35.ssm.group_count", 4)
    )
    write_hybrid_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(CheckpointError, match="4 key heads and 6 value heads of 24 values in all don't go together"):
        find_checkpoint(tmp_path / "m.gguf")
