"""A block drafter in plain torch, with the parameter names and the config of published DFlash checkpoints.

Letters: B sequences, S positions of the text, N blocks of one sequence, W tokens of a block, H hidden size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model import Attention, Layer, RMSNorm, Rotary, Shape, Target, initialise, rotate


@dataclass(frozen=True)
class BlockShape:
    """The sizes of a block drafter, in addition to those of its target."""

    layers: int = 4
    width: int = 8
    taps: tuple[int, ...] = (0, 1, 2, 3)
    """Indices of the target's layers whose outputs the drafter reads."""


class BlockAttention(Attention):
    """An attention whose queries come from a block, and whose keys and values come from the preceding text and the block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Reshape [B, L, heads * D] to [B, heads, L, D]."""
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.k_norm(self.split(self.k_proj(x), self.kv_heads)), cos, sin)

    def block(
        self, text: Tensor, x: Tensor, text_angles: tuple[Tensor, Tensor], block_angles: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Attend from ``x`` [B, L, H] to ``text`` [B, S, H] and to ``x`` itself. Angles are pairs of cosines and sines."""
        q = rotate(self.q_norm(self.split(self.q_proj(x), self.heads)), *block_angles)
        k = torch.cat((self.keys(text, *text_angles), self.keys(x, *block_angles)), dim=2)
        v = torch.cat([self.split(self.v_proj(part), self.kv_heads) for part in (text, x)], dim=2)
        return self.out(
            F.scaled_dot_product_attention(q.to(v.dtype), self.widen(k).to(v.dtype), self.widen(v), attn_mask=mask)
        )


class BlockHead(nn.Module):
    """DFlash: predicts a block [last token, mask, mask, ...] in one pass. Each position attends to the preceding text and the
    whole block.

    The text is represented by the target's intermediate states, joined by ``fc``. Embedding and output head are the target's.
    """

    def __init__(self, shape: Shape, block: BlockShape) -> None:
        super().__init__()
        self.shape, self.block = shape, block
        self.rotary = Rotary(shape)
        self.fc = nn.Linear(len(block.taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(block.layers))
        for layer in self.layers:
            layer.self_attn = BlockAttention(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        initialise(self)

    def forward(self, taps: Tensor, embedded: Tensor, anchors: Tensor, widths: Tensor | None = None) -> Tensor:
        """Return hidden states [B, N, W, H] of blocks at ``anchors`` [B, N].

        ``taps`` [B, S, taps * H] are states of the whole text; the block at position a attends only to the text before a.
        ``embedded`` [B, N, W, H] are the embeddings of the blocks. ``widths`` [B, N] limits the number of visible positions
        per block, by default all; the states of the other positions are meaningless.
        """
        batch, count, width, size = embedded.shape
        length = taps.shape[1]
        text = self.hidden_norm(self.fc(taps))
        text_angles = self.rotary.cos[:length], self.rotary.sin[:length]
        offsets = torch.arange(width, device=anchors.device)
        positions = (anchors.unsqueeze(2) + offsets).flatten(1)
        block_angles = self.rotary.cos[positions].unsqueeze(1), self.rotary.sin[positions].unsqueeze(1)
        owner = torch.arange(count, device=anchors.device).repeat_interleave(width)
        preceding = torch.arange(length, device=anchors.device) < anchors.repeat_interleave(width, dim=1).unsqueeze(2)
        same_block = (owner.unsqueeze(0) == owner.unsqueeze(1)).expand(batch, -1, -1)
        if widths is not None:
            same_block = same_block & (offsets < widths.unsqueeze(2)).flatten(1).unsqueeze(1)
        mask = torch.cat((preceding, same_block), dim=2).unsqueeze(1)
        x = embedded.flatten(1, 2).float()
        for layer in self.layers:
            x = x + layer.self_attn.block(text, layer.input_layernorm(x), text_angles, block_angles, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).view(batch, count, width, size)


@torch.no_grad()
def target_states(target: Target, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return outputs of the target's layers ``taps`` side by side [B, S, taps * H], and its final hidden states [B, S, H]."""
    length = tokens.shape[1]
    cos, sin = target.rotary.cos[:length], target.rotary.sin[:length]
    x, outputs = target.embed_tokens(tokens), {}
    for i, layer in enumerate(target.layers):
        q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cos, sin)
        x = x + layer.self_attn.causal(q, k, v)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        outputs[i] = x
    return torch.cat([outputs[i] for i in taps], dim=-1), target.norm(x)


def save_block(head: BlockHead, folder: Path, mask: int, eos: int) -> None:
    """Write the drafter's config and weights to ``folder`` in the format of published DFlash checkpoints, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": head.block.width,
        "bos_token_id": eos,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(head.block.taps)},
        "eos_token_id": eos,
        "head_dim": head.shape.head_dim,
        "hidden_act": "silu",
        "model_type": "qwen3",
        "num_target_layers": head.shape.num_hidden_layers,
        **asdict(head.shape),
        "num_hidden_layers": head.block.layers,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    weights = {k: v.detach().bfloat16().contiguous().cpu() for k, v in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_block(folder: Path, device: torch.device) -> tuple[BlockHead, int]:
    """Load a drafter from ``folder``, with the stored bfloat16 converted to float32. Return it and its mask token."""
    config = json.loads((folder / "config.json").read_text())
    dflash_config = config["dflash_config"]
    block = BlockShape(config["num_hidden_layers"], config["block_size"], tuple(dflash_config["target_layer_ids"]))
    head = BlockHead(Shape(**{k: config[k] for k in asdict(Shape())}), block)
    head.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return head.to(device).eval(), dflash_config["mask_token_id"]
