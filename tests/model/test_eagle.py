"""The EAGLE head against its published definition, written out with plain torch."""

import pytest
import torch
import torch.nn.functional as F

from model.harness import Driver
from outrider.errors import CheckpointError
from outrider.model import load_decoder, load_eagle, open_head
from outrider_proof.checkpoints import write_eagle
from tiny_checkpoints import tiny_config, write_checkpoint, write_eagle_variant
from tiny_vision_checkpoints import write_vision_checkpoint

TOKENS = [1, 17, 44, 90, 5, 61, 61, 8, 33]


def reference_head(state, tokens, hidden, embedding):
    """fc over embedding and hidden state, then one Llama layer whose input norm may be absent; no final norm."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = tiny_config("llama", num_hidden_layers=1, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0)
    own = {key.removeprefix("layers.0."): value for key, value in state.items() if key.startswith("layers.0.")}
    if "input_layernorm.weight" not in own:
        layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(own)
    x = F.linear(torch.cat((F.embedding(tokens, embedding), hidden), -1), state["fc.weight"], state.get("fc.bias"))
    x = x.unsqueeze(0)
    positions = torch.arange(len(tokens)).unsqueeze(0)
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        return layer(x, attention_mask=mask, position_embeddings=LlamaRotaryEmbedding(config)(x, positions))[0]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"bias": False},
        {"input_norm": True},
        {"embedding": False},
        {"fmt": "bin"},
    ],
    ids=str,
)
def test_head_is_the_published_one(tmp_path, backend, shape):
    write_checkpoint(tmp_path / "target", "llama")
    state = write_eagle_variant(tmp_path / "head", **shape)
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float32)
    head = load_eagle(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))
    driver = Driver(target)
    hidden = driver.hidden([(driver.sequence(), TOKENS)])
    shifted = torch.tensor([*TOKENS[1:], 12])
    embedding = state.get("embed_tokens.weight", target.weights.embedding)
    expected = reference_head(state, shifted, hidden, embedding)

    def run(*spans):
        """The same through the head's own cache, in one pass or several."""
        draft = Driver(target, config=head.config)
        sequence = draft.sequence()
        out = []
        with torch.no_grad():
            for begin, end in spans:
                inputs = draft.inputs([(sequence, shifted[begin:end].tolist())])
                out.append(head.forward(inputs, hidden[begin:end], draft.cache))
        return torch.cat(out)

    whole = run((0, 9))
    assert torch.allclose(whole, expected, atol=1e-4), (whole - expected).abs().max()
    assert torch.allclose(run((0, 4), (4, 8), (8, 9)), expected, atol=1e-4)
    assert torch.allclose(head.logits(whole), whole @ target.weights.head.T, atol=1e-5)


def test_head_of_a_target_with_axes(tmp_path, backend):
    """Over a vision-language target the head takes positions on three axes; on text they change nothing."""
    write_vision_checkpoint(tmp_path / "target", "qwen2_vl", rope={"mrope_section": [1, 1, 2]})
    state = write_eagle(tmp_path / "head")
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float32)
    head = load_eagle(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))
    assert head.config.rope.sections == (1, 1, 2)
    driver = Driver(target)
    hidden = driver.hidden([(driver.sequence(), TOKENS)])
    draft = Driver(target, config=head.config)
    with torch.no_grad():
        out = head.forward(draft.inputs([(draft.sequence(), TOKENS)]), hidden, draft.cache)
    expected = reference_head(state, torch.tensor(TOKENS), hidden, state["embed_tokens.weight"])
    assert torch.allclose(out, expected, atol=1e-4), (out - expected).abs().max()


def test_wrong_fusion(tmp_path, backend):
    write_checkpoint(tmp_path / "target", "llama")
    write_eagle_variant(tmp_path / "head", fmt="bin")
    state = torch.load(tmp_path / "head/pytorch_model.bin", weights_only=True)
    state["fc.weight"] = torch.zeros(32, 96)
    torch.save(state, tmp_path / "head/pytorch_model.bin")
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"fc.weight' has shape \[32, 96\], expected \[32, 64\]"):
        load_eagle(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))


def test_dtype_must_be_the_targets(tmp_path, backend):
    write_checkpoint(tmp_path / "target", "llama")
    write_eagle(tmp_path / "head")
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"can't be loaded as torch\.bfloat16"):
        load_eagle(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.bfloat16))


def test_bin_with_code_is_refused(tmp_path, backend):
    """A pickle that would run something isn't loaded."""
    write_checkpoint(tmp_path / "target", "llama")
    write_eagle_variant(tmp_path / "head", fmt="bin")

    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    torch.save({"fc.weight": Evil()}, tmp_path / "head/pytorch_model.bin")
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: can't be read"):
        load_eagle(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))
