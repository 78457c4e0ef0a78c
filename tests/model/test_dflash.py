"""The DFlash head against its published definition, of transformers' Qwen3 parts, over what transformers' target computes."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model.wrong_configs import WRONG_CONFIGS
from outrider import Engine, SamplingParams
from outrider.errors import CheckpointError
from outrider.model import load_decoder, load_dflash, open_head
from outrider.speculative.parallel import BlockProposer
from outrider_proof.tiny import plain_config
from tiny_checkpoints import rewrite, tiny_config, write_checkpoint, write_dflash

PROMPTS = [[1, 17, 44, 90, 5, 61, 61, 8, 33], [7, 3]]


class Reference:
    """A block drafted without a cache, from the whole text."""

    def __init__(self, root):
        from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

        self.state = load_file(root / "head" / "model.safetensors")
        self.raw = json.loads((root / "head" / "config.json").read_text())
        self.target = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32).eval()
        self.config = config = tiny_config("qwen3", num_hidden_layers=2)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.mlp = [Qwen3MLP(config) for _ in range(2)]
        for index, mlp in enumerate(self.mlp):
            mlp.load_state_dict(self.part(f"layers.{index}.mlp."))
        self.norms = {}
        for key, value in self.state.items():
            if "norm" in key:
                self.norms[key] = Qwen3RMSNorm(len(value), config.rms_norm_eps)
                self.norms[key].load_state_dict({"weight": value})

    def part(self, prefix):
        return {key.removeprefix(prefix): value for key, value in self.state.items() if key.startswith(prefix)}

    def heads(self, index, name, x):
        made = F.linear(x, self.state[f"layers.{index}.self_attn.{name}_proj.weight"])
        return made.view(1, len(x), -1, self.config.head_dim)

    @torch.no_grad()
    def logits(self, text, *, causal=(False, False), windows=(0, 0)):
        """Of the places behind the first one; ``text`` ends with the token that the block begins with. ``causal`` and
        ``windows``: of each layer.
        """
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        own, width = self.raw.get("dflash_config", self.raw), self.raw["block_size"]
        read = [i + 1 for i in own["target_layer_ids"]] if "target_layer_ids" in own else own["aux_hidden_state_layer_ids"]
        states = self.target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        fused = F.linear(torch.cat([states[i][0] for i in read], -1), self.state["fc.weight"])
        before = self.norms["hidden_norm.weight"](fused)
        block = torch.tensor([text[-1]] + [own["mask_token_id"]] * (width - 1))
        x, count = self.target.get_input_embeddings()(block), len(before)
        cos, sin = self.rotary(x, torch.arange(count + width).unsqueeze(0))
        for index in range(2):
            mask = (
                torch.ones(width, count + width).tril(count).bool()
                if causal[index]
                else torch.ones(width, count + width).bool()
            )
            mask = mask.triu(count - windows[index] + 1) if windows[index] else mask
            normed = self.norms[f"layers.{index}.input_layernorm.weight"](x)
            both = torch.cat((before, normed))
            q = self.norms[f"layers.{index}.self_attn.q_norm.weight"](self.heads(index, "q", normed)).transpose(1, 2)
            k = self.norms[f"layers.{index}.self_attn.k_norm.weight"](self.heads(index, "k", both)).transpose(1, 2)
            v = self.heads(index, "v", both).transpose(1, 2)
            q = apply_rotary_pos_emb(q, q, cos[:, count:], sin[:, count:])[0]
            k = apply_rotary_pos_emb(k, k, cos, sin)[0]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2).reshape(width, -1)
            x = x + F.linear(out, self.state[f"layers.{index}.self_attn.o_proj.weight"])
            x = x + self.mlp[index](self.norms[f"layers.{index}.post_attention_layernorm.weight"](x))
        normed = self.norms["norm.weight"](x)[1:]
        return normed @ self.state["lm_head.weight"].T if "lm_head.weight" in self.state else self.target.lm_head(normed)


@pytest.fixture
def root(tmp_path):
    write_checkpoint(tmp_path / "target", "llama")
    write_dflash(tmp_path / "head")
    return tmp_path


def load(root, backend):
    target = load_decoder(root / "target", backend=backend, dtype=torch.float32)
    return target, load_dflash(open_head(root / "head", target=target, backend=backend, dtype=torch.float32))


def edit(root, **fields):
    path = root / "head" / "config.json"
    raw = json.loads(path.read_text())
    for key, value in fields.items():
        if isinstance(value, dict):
            raw[key] = raw[key] | value
        else:
            raw[key] = value
    path.write_text(json.dumps(raw))


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}


def envelope(root, **fields):
    """As the library speculators writes it: a config inside, layers by their inputs, a draft vocabulary of 40 tokens."""
    path = root / "head" / "config.json"
    raw = json.loads(path.read_text())
    own = raw.pop("dflash_config")
    said = {"mask_token_id": own["mask_token_id"], "aux_hidden_state_layer_ids": [1, 2], "draft_vocab_size": 40}
    said |= {"speculators_model_type": "dflash", "block_size": raw.pop("block_size"), "sample_from_anchor": False}
    path.write_text(json.dumps(said | {"transformer_layer_config": raw | SLIDING} | fields))
    state, generator = load_file(root / "head" / "model.safetensors"), torch.Generator().manual_seed(3)
    kept = torch.randperm(96, generator=generator)[:40].sort().values
    state |= {"lm_head.weight": torch.randn(40, 32, generator=generator), "d2t": kept - torch.arange(40)}
    save_file(state, root / "head" / "model.safetensors")


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"is_causal": False}, {}),
        ({"is_causal": True}, {"causal": (True, True)}),
        (SLIDING, {"causal": (True, False), "windows": (5, 0)}),
        (SLIDING | {"is_causal": False}, {"windows": (5, 0)}),
        (None, {"causal": (True, False), "windows": (5, 0)}),
    ],
)
def test_blocks_are_the_published_ones(root, backend, fields, rule):
    """Every block that an engine drafts, behind prompts in chunks and whatever was accepted, with another beside it."""
    envelope(root) if fields is None else edit(root, **fields)
    target, head = load(root, backend)
    proposer = BlockProposer(head)
    config = plain_config(max_context=48, page_size=4, prefill_chunk=4, max_requests=2)
    engine = Engine(target, backend, proposer=proposer, config=config)
    reference, compared, worst = Reference(root), 0, 0.0
    inner, logits = proposer.draft, head.logits
    seen, made = [], []

    def draft(inputs):
        seen.append(inputs.seq_lens.tolist())
        return inner(inputs)

    def noted(hidden):
        made.append(logits(hidden))
        return made[-1]

    proposer.draft, head.logits = draft, noted
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=14, ignore_eos=True))
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, results, strict=True)]
    for lengths, each in zip(seen, made, strict=True):
        for index, length in enumerate(lengths):
            # Behind the end that was asked for there are no pages, so that no whole block is there.
            if len(lengths) == len(texts) and length + head.block_size < len(texts[index]):
                expected = reference.logits(texts[index][: length + 1], **rule)
                difference = each.view(len(lengths), -1, each.shape[-1])[index] - expected
                worst = max(worst, float(difference.abs().max()))
                compared += 1
    assert compared > 15
    assert worst < 1e-3
    plain = Engine(target, backend, config=config).generate(PROMPTS, SamplingParams(max_tokens=14, ignore_eos=True))
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]


def test_another_rule_would_show(root, backend):
    """The same comparison tells a block that sees itself from a causal one, and a window from none."""
    reference = Reference(root)
    plain = reference.logits(PROMPTS[0])
    for rule in ({"causal": (True, False)}, {"windows": (5, 0)}):
        assert (plain - reference.logits(PROMPTS[0], **rule)).abs().max() > 0.1


def test_an_envelope_must_say_what_its_positions_predict(root, backend):
    envelope(root, sample_from_anchor=None)
    with pytest.raises(CheckpointError, match="sample_from_anchor is missing, and readers of transformer_layer_config"):
        load(root, backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("hidden_norm.weight"), r"missing: 'hidden_norm\.weight'"),
        (lambda state: state.pop("layers.1.self_attn.k_norm.weight"), r"missing: 'layers\.1\.self_attn\.k_norm\.weight'"),
        (lambda state: state.update({"fc.weight": torch.zeros(32, 32)}), r"'fc\.weight' has shape \[32, 32\]"),
        (lambda state: state.update({"markov_head.markov_w1": torch.zeros(96, 4)}), r"'markov_head\.markov_w1'"),
        (lambda state: state.update({"conv.weight": torch.zeros(4)}), r"'conv\.weight'"),
    ],
)
def test_wrong_tensors_are_named(root, backend, change, message):
    rewrite(root / "head", change)
    with pytest.raises(CheckpointError, match=message):
        load(root, backend)


@pytest.mark.parametrize(("fields", "message"), WRONG_CONFIGS["dflash"])
def test_wrong_configs_are_refused(root, backend, fields, message):
    edit(root, **fields)
    with pytest.raises(CheckpointError, match=message):
        load(root, backend)
