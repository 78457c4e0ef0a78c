"""The EAGLE-3 head against its published definition, written out with plain torch."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from model.harness import Driver
from outrider.errors import CheckpointError
from outrider.model import load_decoder, load_eagle3, open_head
from tiny_checkpoints import rewrite, tiny_config, write_checkpoint, write_eagle3

TOKENS = [1, 17, 44, 90, 5, 61, 61, 8, 33]
EPS = 1e-6


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def reference_head(state, tokens, hidden, embedding, *, before_residual=False):
    """hidden -> norms of embedding and hidden side by side -> attention -> MLP, each added to hidden, or to its norm."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = tiny_config("llama")
    mid = {key.removeprefix("midlayer."): value for key, value in state.items() if key.startswith("midlayer.")}
    normed = norm(hidden, mid["hidden_norm.weight"])
    x = torch.cat((norm(F.embedding(tokens, embedding), mid["input_layernorm.weight"]), normed), -1)
    hidden = normed if before_residual else hidden
    q, k, v = (
        F.linear(x, mid[f"self_attn.{name}_proj.weight"]).view(1, len(tokens), -1, 8).transpose(1, 2) for name in "qkv"
    )
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(len(tokens)).unsqueeze(0))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    hidden = hidden + F.linear(out.transpose(1, 2).reshape(len(tokens), -1), mid["self_attn.o_proj.weight"])
    x = norm(hidden, mid["post_attention_layernorm.weight"])
    gated = F.silu(F.linear(x, mid["mlp.gate_proj.weight"])) * F.linear(x, mid["mlp.up_proj.weight"])
    return hidden + F.linear(gated, mid["mlp.down_proj.weight"])


def load(tmp_path, backend, **shape):
    write_checkpoint(tmp_path / "target", "llama")
    state = write_eagle3(tmp_path / "head", **shape)
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float32)
    return state, target, load_eagle3(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_head_is_the_published_one(tmp_path, backend, fmt):
    state, target, head = load(tmp_path, backend, fmt=fmt, layers=(2, 0, 1))
    driver = Driver(target)
    inputs = driver.inputs([(driver.sequence(), TOKENS)])
    shifted = torch.tensor([*TOKENS[1:], 12])
    with torch.no_grad():
        final, captured = target.forward_with_aux_hidden_states(inputs, driver.cache, head.aux_hidden_state_layers)
        hidden = head.condition(final, captured)
        assert torch.allclose(hidden, torch.cat(captured, -1) @ state["fc.weight"].T, atol=1e-5)
        expected = reference_head(state, shifted, hidden, target.weights.embedding)
        given = hidden.clone()
        draft = Driver(target, config=head.config)
        sequence = draft.sequence()
        first = head.forward(draft.inputs([(sequence, shifted[:6].tolist())]), hidden[:6], draft.cache)
        rest = head.forward(draft.inputs([(sequence, shifted[6:].tolist())]), hidden[6:], draft.cache)
    assert torch.equal(hidden, given), "the head must not write what the target computed"
    out = torch.cat((first, rest))
    assert torch.allclose(out, expected, atol=1e-4), (out - expected).abs().max()
    assert torch.allclose(head.logits(out), norm(out, state["norm.weight"]) @ state["lm_head.weight"].T, atol=1e-4)
    assert head.draft_vocab_size == 40
    assert torch.equal(head.target_ids.sort().values, state["t2d"].nonzero().flatten())


def test_a_head_without_an_output_head_drafts_with_rows_of_the_targets(tmp_path, backend):
    state, target, own = load(tmp_path, backend)
    del state["lm_head.weight"]
    save_file(state, tmp_path / "head" / "model.safetensors")
    head = load_eagle3(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))
    assert torch.equal(head.target_ids, own.target_ids.sort().values)
    hidden = torch.randn(3, target.config.hidden_size)
    with torch.no_grad():
        expected = norm(hidden, state["norm.weight"]) @ target.weights.head[head.target_ids].T
        assert torch.allclose(head.logits(hidden), expected, atol=1e-4)


def test_published_choice_of_layers(tmp_path, backend):
    write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=8)
    write_eagle3(tmp_path / "head", layers=None)
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float32)
    head = load_eagle3(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))
    assert head.aux_hidden_state_layers == (2, 4, 5)


@pytest.mark.parametrize("layers", [(0, 1), (0, 1, 4)])
def test_layers_that_the_target_does_not_have(tmp_path, backend, layers):
    with pytest.raises(CheckpointError, match=r"of a target of 3 layers, expected three layers"):
        load(tmp_path, backend, layers=layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(d2t=state["d2t"] + 90), r"'d2t' points to tokens \d+ to \d+, outside"),
        (lambda state: state.update(d2t=state["d2t"][:7].clone()), r"'d2t' has shape \[7\], expected \[40\]"),
        (lambda state: state.update(d2t=state["d2t"].float()), r"'d2t' is torch.float32, expected int64"),
        (lambda state: state.pop("d2t"), r"missing: 'd2t' \[40\]"),
        (lambda state: state.pop("midlayer.hidden_norm.weight"), r"missing: 'midlayer\.hidden_norm\.weight'"),
        (lambda state: state.update({"fc.weight": torch.zeros(32, 64)}), r"'fc.weight' has shape \[32, 64\]"),
    ],
)
def test_wrong_tensors(tmp_path, backend, change, message):
    _, target, _ = load(tmp_path, backend)
    rewrite(tmp_path / "head", change)
    with pytest.raises(CheckpointError, match=message):
        load_eagle3(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))
