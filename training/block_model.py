"""A block drafter in plain torch, with the parameter names and the config of published DFlash checkpoints.

Letters: B sequences, S positions of the text, N blocks of one sequence, W tokens of a block, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Attention, DraftHead, Layer, RMSNorm, Rotary, Shape, initialise, rotate


@dataclass(frozen=True)
class BlockShape:
    """The sizes of a block drafter, in addition to those of its target."""

    layers: int = 4
    width: int = 8
    taps: tuple[int, ...] = (0, 1, 2, 3)
    """Indices of the target's layers whose outputs the drafter reads."""
    mask: int = 1
    """Token of the unknown positions of a block."""


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


class BlockHead(DraftHead):
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

    def published_config(self) -> dict[str, object]:
        return {
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block.width,
            "dflash_config": {"mask_token_id": self.block.mask, "target_layer_ids": list(self.block.taps)},
            "model_type": "qwen3",
            "num_hidden_layers": self.block.layers,
            "num_target_layers": self.shape.num_hidden_layers,
        }

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
