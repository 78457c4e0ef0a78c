"""The P-EAGLE head against its published definition in plain torch, without a cache, over what transformers computes."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model.wrong_configs import WRONG_CONFIGS
from outrider import Engine, SamplingParams
from outrider.errors import CheckpointError
from outrider.model import load_decoder, load_eagle3, load_peagle, open_head
from outrider.speculative.eagle import EagleProposer
from outrider.speculative.parallel import PEagleProposer
from outrider_proof.tiny import plain_config
from tiny_checkpoints import rewrite, tiny_config, write_checkpoint, write_eagle3, write_peagle

PROMPTS = [[1, 17, 44, 90, 5, 61, 61, 8, 33], [7, 3]]
HIDDEN, HEAD, K = 32, 8, 4


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class Reference:
    """K tokens guessed from the whole text: a sequence of pairs of state and next token, and K - 1 unknown ones behind it."""

    def __init__(self, root, *, reads=(0, 1, 2), mask=95, before_residual=False, output=False):
        state = load_file(root / "head" / "model.safetensors")
        self.state = {key.replace("midlayer.", "layers.0."): value for key, value in state.items()}
        self.target = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32).eval()
        self.reads, self.mask = reads, mask
        self.before_residual, self.output = before_residual, output

    def fused(self, states):
        """Three states side by side [T, 3 H] → [T, H]."""
        if "fc_norm.0.weight" in self.state:
            parts = states.chunk(3, -1)
            states = torch.cat([norm(part, self.state[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        if "input_norm.weight" in self.state:
            states = norm(states, self.state["input_norm.weight"])
        return F.linear(states, self.state["fc.weight"])

    def layer(self, index, x, residual):
        part = {key.removeprefix(f"layers.{index}."): value for key, value in self.state.items()}
        count = len(x)
        q, k, v = (
            F.linear(x, part[f"self_attn.{name}_proj.weight"], part.get(f"self_attn.{name}_proj.bias"))
            .view(1, count, -1, HEAD)
            .transpose(1, 2)
            for name in "qkv"
        )
        cos, sin = LlamaRotaryEmbedding(tiny_config("llama"))(x, torch.arange(count).unsqueeze(0))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        residual = residual + F.linear(out.transpose(1, 2).reshape(count, -1), part["self_attn.o_proj.weight"])
        x = norm(residual, part["post_attention_layernorm.weight"])
        gated = F.silu(F.linear(x, part["mlp.gate_proj.weight"])) * F.linear(x, part["mlp.up_proj.weight"])
        return residual + F.linear(gated, part["mlp.down_proj.weight"])

    @torch.no_grad()
    def logits(self, text, count=K):
        """Of ``count`` tokens behind ``text``, whose last token the target hasn't seen."""
        states = self.target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        known = torch.cat([states[each][0] for each in self.reads], -1)
        unknown = self.state.get("mask_hidden", known[:0]).reshape(-1, known.shape[1]).expand(count - 1, -1)
        hidden = self.fused(torch.cat((known, unknown)))
        tokens = torch.tensor(text[1:] + [self.mask] * (count - 1))
        embedded = norm(F.embedding(tokens, self.state["embed_tokens.weight"]), self.state["layers.0.input_layernorm.weight"])
        normed = norm(hidden, self.state["layers.0.hidden_norm.weight"])
        hidden = self.layer(0, torch.cat((embedded, normed), -1), normed if self.before_residual else hidden)
        if "layers.1.input_layernorm.weight" in self.state:
            hidden = self.layer(1, norm(hidden, self.state["layers.1.input_layernorm.weight"]), hidden)
        return F.linear(norm(hidden, self.state["norm.weight"])[-count:], self.state["lm_head.weight"])


@pytest.fixture
def root(tmp_path):
    write_checkpoint(tmp_path / "target", "llama")
    write_peagle(tmp_path / "head")
    return tmp_path


def load(root, backend):
    target = load_decoder(root / "target", backend=backend, dtype=torch.float32)
    return target, load_peagle(open_head(root / "head", target=target, backend=backend, dtype=torch.float32))


def edit(root, config=None, *, change=None, envelope=False):
    """``config``: keys to say, or not to, where None; ``change``: of the tensors."""
    file = root / "head" / "config.json"
    said = json.loads(file.read_text())
    if envelope:
        said = {"speculators_model_type": "peagle", "transformer_layer_config": said}
        for key in ("draft_vocab_size", "mask_token_id", "eagle_config"):
            said[key] = said["transformer_layer_config"].pop(key)
    file.write_text(json.dumps({key: value for key, value in (said | (config or {})).items() if value is not None}))
    rewrite(root / "head", change)


def check(root, backend, reference, *, tokens=K):
    """Every draft that an engine makes, behind prompts in chunks, whatever was accepted, with another request beside it."""
    target, head = load(root, backend)
    config = plain_config(max_context=64, page_size=4, prefill_chunk=4, max_requests=2)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = Engine(target, backend, config=config).generate(PROMPTS, params)
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, plain, strict=True)]
    proposer = PEagleProposer(head, draft_tokens=tokens)
    engine = Engine(target, backend, proposer=proposer, config=config)
    inner, logits, made, seen, worst = proposer.draft, head.logits, [], [], 0.0

    def draft(inputs):
        """What was drafted, with as many right tokens in place of it as it's the turn of."""
        found = inner(inputs)
        lengths, changed = inputs.seq_lens.tolist(), found.tokens.clone()
        seen.append(lengths)
        if len(lengths) == len(texts):
            for row, (length, text) in enumerate(zip(lengths, texts, strict=True)):
                right = text[length + 1 : length + 1 + (len(seen) + row) % (tokens + 1)]
                changed[row, : len(right)] = torch.tensor(right)
        return replace(found, tokens=changed)

    def noted(hidden):
        made.append(logits(hidden))
        return made[-1]

    proposer.draft, head.logits = draft, noted
    results = engine.generate(PROMPTS, params)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    compared = set()
    for turn, (lengths, each) in enumerate(zip(seen, made, strict=True)):
        for row, length in enumerate(lengths):
            # Behind the end that was asked for there are no pages, so that not all places are there.
            if len(lengths) == len(texts) and length + 2 * tokens < len(texts[row]):
                expected = reference.logits(texts[row][: length + 1], tokens)
                worst = max(worst, float((each.view(len(lengths), tokens, -1)[row] - expected).abs().max()))
                compared.add((turn + row) % (tokens + 1))
    assert len(compared) >= min(tokens, 3)  # different numbers of tokens were accepted before
    assert worst < 1e-4


def renamed(state):
    """The first layer as speculators calls it."""
    for key in [key for key in state if key.startswith("midlayer.")]:
        state[key.replace("midlayer.", "layers.0.")] = state.pop(key)


def biases(state):
    torch.manual_seed(3)
    for prefix in ("midlayer", "layers.1"):
        for name in "qkv":
            state[f"{prefix}.self_attn.{name}_proj.bias"] = torch.randn(HIDDEN if name == "q" else 16) * 0.3


def norms(*names):
    def change(state):
        torch.manual_seed(4)
        renamed(state)
        state["mask_hidden"] = state["mask_hidden"].view(1, -1)
        for name in names:
            state[f"{name}.weight"] = torch.rand(HIDDEN if "." in name else 3 * HIDDEN) + 0.5

    return change


def test_drafts_are_the_published_ones(root, backend):
    check(root, backend, Reference(root))


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        ({"ptd_token_id": 11, "mask_token_id": None, "parallel_drafting": True}, biases, {"mask": 11}),
        ({"pard_token": 95}, norms(), {}),
        ({"norm_before_fc": True, "norm_before_residual": True}, norms("input_norm"), {"before_residual": True}),
        ({"fc_norm": True, "norm_output": True}, norms("fc_norm.0", "fc_norm.1", "fc_norm.2"), {"output": True}),
        ({"aux_hidden_state_layer_ids": [2, 1, 0], "eagle_config": None}, None, {"reads": (2, 1, 0)}),
    ],
)
def test_what_configs_say(root, backend, config, change, told):
    edit(root, config, change=change)
    check(root, backend, Reference(root, **told))


def test_the_envelope_of_speculators(root, backend):
    """Without ``norm_before_residual``, which its readers take as false for these heads."""
    edit(root, change=renamed, envelope=True)
    check(root, backend, Reference(root))


@pytest.mark.parametrize(("depth", "tokens"), [(1, 3), (2, 1), (2, 7)])
def test_other_depths_and_lengths(root, backend, depth, tokens):
    write_peagle(root / "head", depth=depth)
    check(root, backend, Reference(root), tokens=tokens)


def test_other_rules_would_show(root):
    """The same comparison tells the mask's token and state, and how many places lie behind the text, from others."""
    text, right, wrong = PROMPTS[0], Reference(root).logits(PROMPTS[0]), Reference(root)
    wrong.state["mask_hidden"] = wrong.state["mask_hidden"].flip(-1)
    for other in (Reference(root, mask=94).logits(text), wrong.logits(text)):
        assert torch.allclose(other[0], right[0], atol=1e-5)  # the first token doesn't depend on them
        assert ((other[1:] - right[1:]).abs().amax(-1) > 0.05).all()
    assert ((right[1:] - right[:-1]).abs().amax(-1) > 0.05).all()


def test_a_head_of_two_layers_that_drafts_one_token_after_the_other(root, backend):
    state = write_eagle3(root / "head", depth=2)
    target = load_decoder(root / "target", backend=backend, dtype=torch.float32)
    head = load_eagle3(open_head(root / "head", target=target, backend=backend, dtype=torch.float32))
    assert len(head.weights.layers) == 2
    reference = Reference(root)
    reference.state["embed_tokens.weight"] = target.embedding
    proposer = EagleProposer(head, draft_tokens=2)
    engine = Engine(target, backend, proposer=proposer, config=plain_config(max_context=48, page_size=4, prefill_chunk=4))
    inner, drafts = proposer.draft, []

    def draft(inputs):
        found = inner(inputs)
        drafts.append((int(inputs.seq_lens[0]), int(found.tokens[0, 0])))
        return found

    proposer.draft = draft
    (result,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=20, ignore_eos=True))
    text = [*PROMPTS[0], *result.token_ids]
    compared = [(length, token) for length, token in drafts if length < len(text)]
    assert len(compared) > 10
    for length, token in compared:
        guess = reference.logits(text[: length + 1], 1)[0].argmax()
        assert token == int(guess + state["d2t"][guess])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("mask_hidden"), "has no tensor 'mask_hidden': .*speculate eagle3"),
        (
            lambda state: state.update(mask_hidden=torch.zeros(1, 1, 64)),
            r"'mask_hidden' has shape \[1, 1, 64\], .*\[1, 1, 96\]",
        ),
        (lambda state: state.update(mask_hidden=torch.zeros(3, 32)), r"'mask_hidden' has shape \[3, 32\]"),
        (lambda state: state.update(mask_hidden=torch.zeros(1, 1, 96, dtype=torch.int64)), "'mask_hidden' is torch.int64"),
        (lambda state: state.pop("layers.1.input_layernorm.weight"), r"missing: 'layers\.1\.input_layernorm\.weight'"),
        (
            lambda state: state.update({"layers.2.mlp.up_proj.weight": torch.zeros(4, 4)}),
            r"'layers\.2\.mlp\.up_proj\.weight'",
        ),
        (lambda state: state.update({"fc.weight": torch.zeros(32, 32)}), r"'fc\.weight' has shape \[32, 32\]"),
        (
            lambda state: state.update({"layers.1.self_attn.q_proj.weight": torch.zeros(32, 64)}),
            r"'layers\.1\.self_attn\.q_proj\.weight' has shape \[32, 64\], expected \[32, 32\]",
        ),
        (lambda state: state.pop("d2t"), r"missing: 'd2t' \[40\]"),
    ],
)
def test_wrong_tensors_are_named(root, backend, change, message):
    edit(root, change=change)
    with pytest.raises(CheckpointError, match=message):
        load(root, backend)


@pytest.mark.parametrize(("config", "message"), WRONG_CONFIGS["peagle"])
def test_wrong_configs_are_refused(root, backend, config, message):
    edit(root, config)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(root, backend)
    assert str(root / "head") in str(caught.value)


def test_the_other_kind_of_head_is_named(root, backend):
    target, _ = load(root, backend)
    with pytest.raises(CheckpointError, match=r"'mask_hidden': it drafts in parallel .P-EAGLE.*speculate peagle"):
        load_eagle3(open_head(root / "head", target=target, backend=backend, dtype=torch.float32))


def test_pickled_heads_are_read(root, backend):
    (root / "head/model.safetensors").rename(root / "kept")
    state = write_peagle(root / "head", fmt="bin")
    _, head = load(root, backend)
    assert torch.equal(head.weights.layers[1].output.cpu(), state["layers.1.self_attn.o_proj.weight"])
