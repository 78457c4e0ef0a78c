"""The target (a Llama) and the EAGLE head in plain torch, with the parameter names of their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MEASURED_LENGTH = 3
"""Draft tokens for which every head is measured."""


@dataclass(frozen=True)
class Shape:
    """The sizes that the target and its head share."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions; cos and sin are [positions, head_dim], x is [..., positions, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Cache:
    """The keys and values of every layer for one batch of equally long sequences."""

    def __init__(self, shape: Shape, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.num_hidden_layers, batch, shape.num_key_value_heads, length, shape.head_dim)
        self.k = torch.zeros(size, device=device, dtype=dtype)
        self.v = torch.zeros(size, device=device, dtype=dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Reshape [B, S, heads * D] to [B, heads, S, D]."""
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, heads, S, D], rotated keys and values [B, kv_heads, S, D]."""
        q = self.split(self.q_proj(x), self.heads)
        k, v = (self.split(project(x), self.kv_heads) for project in (self.k_proj, self.v_proj))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def widen(self, x: Tensor) -> Tensor:
        """Return the keys or values ``x`` [B, kv_heads, S, D] repeated for the query heads that share them, [B,
        heads, S, D].
        """
        return x.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def out(self, x: Tensor) -> Tensor:
        b, _, s, _ = x.shape
        return self.o_proj(x.transpose(1, 2).reshape(b, s, -1))

    def causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(q, self.widen(k), self.widen(v), is_causal=True))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, position: Tensor) -> Tensor:
        """Attend from one new token per sequence, at `position` (a tensor of one element), to the cache, which receives its
        key and value → [B, 1, H].

        `q` is [B, heads, 1, D], `k` and `v` [B, kv_heads, 1, D], each cache [B, kv_heads, length, D].
        """
        cache_k.index_copy_(2, position, k.to(cache_k.dtype))
        cache_v.index_copy_(2, position, v.to(cache_v.dtype))
        b = q.shape[0]
        grouped = q.view(b, self.kv_heads, -1, self.head_dim).to(cache_k.dtype)
        scores = (grouped @ cache_k.transpose(-1, -2)).float() * self.head_dim**-0.5
        visible = torch.arange(cache_k.shape[2], device=q.device) <= position
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(cache_v.dtype)
        return self.out((weights @ cache_v).view(b, self.heads, 1, self.head_dim))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama layer: attention and MLP with norms. The EAGLE head's only layer has no input norm."""

    def __init__(self, shape: Shape, *, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        if input_norm:
            self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Rotary(nn.Module):
    """Tables of cosines and sines in float32, which checkpoints don't store."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.head_dim
        inverse = 1.0 / (shape.rope_theta ** (torch.arange(0, d, 2).float() / d))
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), inverse)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor


class Target(nn.Module):
    """The target, LlamaForCausalLM with tied embeddings. `forward` returns the hidden state after the final norm."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.rotary = Rotary(shape)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        initialise(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Target:
        """Return a target with the sizes of transformers' config of a Llama."""
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        return cls(Shape(**{k: config[k] for k in asdict(Shape()) if k != "rope_theta"}, rope_theta=theta))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def outputs(self, tokens: Tensor, cache: Cache | None = None) -> list[Tensor]:
        """Return the output [B, S, H] of each layer for whole sequences of ``tokens`` [B, S]. A cache, if given, is filled
        from position 0.
        """
        s = tokens.shape[1]
        cos, sin = self.rotary.cos[:s], self.rotary.sin[:s]
        x, outputs = self.drop(self.embed_tokens(tokens)), []
        for i, layer in enumerate(self.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cos, sin)
            if cache is not None:
                cache.k[i, :, :, :s] = k
                cache.v[i, :, :, :s] = v
            x = x + self.drop(layer.self_attn.causal(q, k, v))
            x = x + self.drop(layer.mlp(layer.post_attention_layernorm(x)))
            outputs.append(x)
        return outputs

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the hidden states [B, S, H] of whole sequences; the arguments are those of :meth:`outputs`."""
        return self.norm(self.outputs(tokens, cache)[-1])

    def decode(self, token: Tensor, position: Tensor, cache: Cache) -> Tensor:
        """Return the hidden state [B, 1, H] of one token per sequence at `position` (a tensor of one element)."""
        cos, sin = self.rotary.cos[position], self.rotary.sin[position]
        x = self.embed_tokens(token)[:, None]
        for i, layer in enumerate(self.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cos, sin)
            x = x + layer.self_attn.decode(q, k, v, cache.k[i], cache.v[i], position)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


@torch.no_grad()
def target_states(target: Target, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return outputs of the target's layers ``taps`` side by side [B, S, taps * H], and its final hidden states [B, S, H]."""
    outputs = target.outputs(tokens)
    return torch.cat([outputs[i] for i in taps], dim=-1), target.norm(outputs[-1])


@dataclass(frozen=True)
class Texts:
    """Prompts with their answers, and the target's states of them."""

    tokens: Tensor
    """[B, S]."""
    starts: Tensor
    """Position of each answer's first token [B]."""
    stops: Tensor
    """Position after each answer's last token [B]."""
    states: Tensor
    """Outputs of the target's layers that the heads read, side by side [B, S, A H]."""
    final: Tensor
    """The target's states after its final norm [B, S, H]."""

    def take(self, rows: Tensor) -> Texts:
        return Texts(*(each[rows] for each in vars(self).values()))


Compare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""The function :func:`mismatch`, possibly compiled."""


def mismatch(logits: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence of a draft distribution from the target's ``log_p``, and its probability of a rejection at
    temperature 1.
    """
    log_q = logits.float().log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), 0.5 * (p - log_q.exp()).abs().sum(-1)


class DraftHead(nn.Module):
    """A head that drafts for a target of the same ``shape``."""

    shape: Shape

    def published_config(self) -> dict[str, object]:
        """Return the fields of config.json that heads of this kind have in addition to a model's, or with other values."""
        raise NotImplementedError

    def published_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their published names."""
        return dict(self.state_dict())


class EagleHead(DraftHead):
    """The published EAGLE-1 and -2 head: fc over (next token's embedding, hidden state), then one Llama layer.

    Pair i joins the embedding of token i+1 with the target's final-norm hidden state at i, at rotary position i. Its output
    predicts the hidden state at i+1, which the target's lm_head reads directly.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = Rotary(shape)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(shape, input_norm=False)])
        initialise(self)

    def published_config(self) -> dict[str, object]:
        return {"architectures": ["LlamaForCausalLMEagle"], "bias": False, "num_hidden_layers": 1}

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention and the residual stream, both [B, S, H] and here the same, from the embedding and the
        features of each pair.
        """
        x = self.fc(torch.cat((embedded, features), dim=-1)).float()
        return x, x

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return the predicted hidden states [B, S, H] of all pairs, with causal attention over the pairs."""
        s = features.shape[1]
        joined, residual = self.join(embedded, features)
        q, k, v = self.layer.self_attn.qkv(joined, self.rotary.cos[:s], self.rotary.sin[:s])
        return self.finish(residual, self.layer.self_attn.causal(q, k, v))

    def unroll(self, embedded: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Draft `steps` tokens from every position at once along the given tokens, equivalent to decoding.

        At depth d, pair i holds the head's own output of depth d-1. It attends to the pairs up to i-d as computed at depth 0
        (true states), and to pair i-d+m as computed at depth m, m = 1..d. Output d at pair i is valid only for i >= d.
        """
        attention, s = self.layer.self_attn, features.shape[1]
        cos, sin = self.rotary.cos[:s], self.rotary.sin[:s]
        index = torch.arange(s, device=features.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for depth in range(steps):
            joined, residual = self.join(embedded, features)
            q, k, v = attention.qkv(joined, cos, sin)
            k, v = attention.widen(k), attention.widen(v)
            keys.append(k)
            values.append(v)
            if depth == 0:
                attended = attention.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            else:
                hidden = index[None, :] > index[:, None] - depth
                scores = (q @ keys[0].transpose(-1, -2)).masked_fill(hidden, torch.finfo(q.dtype).min)
                late = [shift(keys[m], depth - m) for m in range(1, depth + 1)]
                scores = torch.cat((scores, torch.stack([(q * t).sum(-1) for t in late], dim=-1)), dim=-1)
                weights = (scores.float() * attention.head_dim**-0.5).softmax(-1).to(v.dtype)
                mixed = weights[..., :s] @ values[0]
                for m in range(1, depth + 1):
                    mixed = mixed + weights[..., s + m - 1, None] * shift(values[m], depth - m)
                attended = attention.out(mixed)
            outputs.append(self.finish(residual, attended))
            features = shift(outputs[-1], 1)
        return outputs


def shift(x: Tensor, by: int) -> Tensor:
    """Move positions (the second to last axis) towards the end by `by`, with zeros in front."""
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


def initialise(module: nn.Module) -> None:
    """Initialize with small normal weights. Projections into the residual stream start at zero."""
    for name, parameter in module.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            nn.init.zeros_(parameter)
        elif "embed" in name:
            nn.init.normal_(parameter, std=0.02)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)


def round_to_bfloat16(module: nn.Module) -> None:
    """Round the module's float32 parameters in place to the values of a bfloat16 checkpoint."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())


# -- checkpoints ------------------------------------------------------------------------------------------


def save_target(target: Target, folder: Path, eos: int, pad: int) -> None:
    """Write the target to ``folder`` with transformers' LlamaForCausalLM.save_pretrained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {k: v for k, v in asdict(target.shape).items() if k != "rope_theta"}
    config = LlamaConfig(
        **sizes,
        head_dim=target.shape.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": target.shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    model.model.load_state_dict(target.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)


def load_target(folder: Path, device: torch.device) -> Target:
    """Load a target from ``folder`` onto ``device``, with the stored bfloat16 converted to float32."""
    target = Target.from_config(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    target.load_state_dict({k.removeprefix("model."): v.float() for k, v in weights.items()})
    return target.to(device).eval()


def save_head(head: DraftHead, folder: Path, *, eos: int) -> None:
    """Write the config and weights of ``head`` to ``folder`` in bfloat16, in the format in which heads of its kind are
    published.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "attention_bias": False,
        "bos_token_id": eos,
        "eos_token_id": eos,
        "head_dim": head.shape.head_dim,
        "hidden_act": "silu",
        "model_type": "llama",
        **asdict(head.shape),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **head.published_config(),
    }
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    tensors = {k: v.detach() for k, v in head.published_tensors().items()}
    weights = {k: (v.bfloat16() if v.is_floating_point() else v).contiguous().cpu() for k, v in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_head(folder: Path, device: torch.device) -> EagleHead:
    """Load a head from ``folder`` onto ``device``, with the stored bfloat16 converted to float32."""
    config = json.loads((folder / "config.json").read_text())
    head = EagleHead(Shape(**{k: config[k] for k in asdict(Shape())}))
    head.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return head.to(device).eval()
