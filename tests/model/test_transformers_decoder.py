"""The door: other decoders of transformers on paged attention give the tokens of their own ``generate``."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.harness import Driver
from model.test_decoder import PROMPT, expect
from outrider.device import ConfigError
from outrider.errors import CheckpointError
from outrider.model import load_through_transformers
from tiny_checkpoints import OTHER_FAMILIES, write_checkpoint


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", [*OTHER_FAMILIES, "mixtral", "qwen3_moe"])
def test_as_transformers(tmp_path, backend, family):
    reference = write_checkpoint(tmp_path, family)
    decoder = load_through_transformers(tmp_path, backend=backend, dtype=torch.float32)
    assert not decoder.native
    driver = Driver(decoder)
    reference.generation_config.eos_token_id = None
    expected, logits = expect(reference, PROMPT, 16)
    for chunk in (None, 8):
        tokens, ours = driver.greedy(PROMPT, 16, chunk=chunk)
        assert tokens == expected
        assert torch.allclose(ours, logits, rtol=0, atol=1e-3), (ours - logits).abs().max()


def test_batches_and_captured_states(tmp_path, backend):
    reference = write_checkpoint(tmp_path, "gemma3_text")
    driver = Driver(load_through_transformers(tmp_path, backend=backend, dtype=torch.float32))
    first, second = driver.sequence(), driver.sequence()
    driver.logits([(first, PROMPT[:5])])
    inputs = driver.inputs([(first, PROMPT[5:9]), (second, PROMPT)], padding=2)
    with torch.no_grad():
        final, captured = driver.model.forward_with_aux_hidden_states(inputs, driver.cache, (2, 0))
        states = reference(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    assert torch.allclose(final[4:-2], states[3][0], atol=1e-3)
    assert torch.allclose(captured[0][4:-2], states[2][0], atol=1e-3)
    assert torch.allclose(captured[1][4:-2], states[0][0], atol=1e-3)
    assert torch.equal(driver.model.embed(torch.tensor(PROMPT)), captured[1][4:-2])
    with pytest.raises(ConfigError, match=r"no layers \[3\]"):
        driver.model.forward_with_aux_hidden_states(inputs, driver.cache, (3,))


def test_native_families_pass_the_door_too(tmp_path, backend):
    reference = write_checkpoint(tmp_path, "mistral-window")
    driver = Driver(load_through_transformers(tmp_path, backend=backend, dtype=torch.float32))
    reference.generation_config.eos_token_id = None
    assert driver.greedy(PROMPT, 8)[0] == expect(reference, PROMPT, 8)[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gemma2", {"head_dim": 8}, "attention uses softcap"),
        ("stablelm", {}, "has no replaceable attention"),
        ("phimoe", {"sliding_window": 64}, "layer 0 has a sliding window of 64 positions by its config, and .* no "),
        ("diffllama", {}, "ran 6 attentions in 3 layers, and the paged cache has keys and values for one in each"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope scaling 'dynamic'"),
        ("mamba", {}, "layers of kind linear_attention have no place|have no num_attention_heads"),
        ("bloom", {}, "has no replaceable attention|have no max_position_embeddings"),
        ("opt", {"word_embed_proj_dim": 32, "num_key_value_heads": 4}, "its output head reaches into the body"),
        ("nemotron", {}, "its layers don't hand on to the attention what they don't know"),
        ("gemma4_text", {"head_dim": 8}, "may differ in head_dim, and the paged cache has one shape for all"),
    ],
)
def test_what_does_not_pass(tmp_path, backend, family, overrides, message):
    write_checkpoint(tmp_path, family, **overrides)
    with pytest.raises(CheckpointError, match=message):
        load_through_transformers(tmp_path, backend=backend, dtype=torch.float32)


@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_incomplete(tmp_path, backend, key):
    write_checkpoint(tmp_path, "olmo2")
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    tensor = state.pop(key)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"missing keys: {key}"):
        load_through_transformers(tmp_path, backend=backend, dtype=torch.float32)
    save_file(state | {key: tensor, "model.more": torch.zeros(1)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected keys: model\.more"):
        load_through_transformers(tmp_path, backend=backend, dtype=torch.float32)
    save_file(state | {key: torch.zeros(3)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="can't load it|mismatched keys"):
        load_through_transformers(tmp_path, backend=backend, dtype=torch.float32)


def test_the_check_at_load_sees_a_wrong_attention(tmp_path, backend, monkeypatch):
    """What the paged attention computes is compared, so a kernel that differs doesn't pass."""
    write_checkpoint(tmp_path, "granite")
    right = type(backend.kernels).paged_attention
    monkeypatch.setattr(type(backend.kernels), "paged_attention", lambda *args, **kwargs: right(*args, **kwargs) * 1.1)
    with pytest.raises(CheckpointError, match="its logits through the paged cache differ"):
        load_through_transformers(tmp_path, backend=backend, dtype=torch.float32)
