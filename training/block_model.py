"""A block drafter in plain torch with its loss, and the parameter names and the config of published DFlash checkpoints.

Letters: B sequences, S positions of the text, N blocks of one sequence, W tokens of a block, H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import (
    MEASURED_LENGTH,
    Attention,
    Compare,
    DraftHead,
    Layer,
    RMSNorm,
    Rotary,
    Shape,
    Target,
    Texts,
    initialise,
    rotate,
)

_POSITION_DECAY = 4.0
"""Number of block positions over which the weight in the loss falls by a factor of e."""
_MIN_POSITION_WEIGHT = 0.25
"""Factor of a block position's weight if the preceding draft tokens would all be rejected."""
_SHORT_BLOCK_SHARE = 0.5
"""Share of blocks that are shorter than the full width, so that shorter drafts are trained as well."""


class BlockAttention(Attention):
    """An attention whose queries come from a block, and whose keys and values come from the preceding text and the block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

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

    def __init__(
        self, shape: Shape, taps: tuple[int, ...], mask: int, *, layers: int = 4, width: int = 8, blocks: int = 24
    ) -> None:
        """Create a head of ``layers`` layers that reads the outputs of the target's layers ``taps``.

        ``width`` is the number of tokens of a block, of which those after the first are ``mask``. ``blocks`` is the number of
        blocks in each sequence that the loss draws.
        """
        super().__init__()
        self.shape, self.taps, self.mask, self.width, self.blocks = shape, taps, mask, width, blocks
        self.lengths = tuple(sorted({min(MEASURED_LENGTH, width - 1), width - 1}))
        self.rotary = Rotary(shape)
        self.fc = nn.Linear(len(taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        for layer in self.layers:
            layer.self_attn = BlockAttention(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        initialise(self)

    def start_from(self, target: Target) -> None:
        """Set the weights that differ from a random start: the target's output head reads the head's states."""
        with torch.no_grad():
            self.norm.weight.copy_(target.norm.weight)

    def published_config(self) -> dict[str, object]:
        return {
            "architectures": ["DFlashDraftModel"],
            "block_size": self.width,
            "dflash_config": {"mask_token_id": self.mask, "target_layer_ids": list(self.taps)},
            "model_type": "qwen3",
            "num_hidden_layers": len(self.layers),
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

    def embed(self, target: Target, known: Tensor, width: int) -> Tensor:
        """Return the embeddings [B, N, W, H] of the blocks after the tokens ``known`` [B, N]."""
        block = torch.full((*known.shape, width), self.mask, device=known.device)
        block[..., 0] = known
        return target.embed_tokens(block)

    def loss(self, target: Target, texts: Texts, compare: Compare) -> Tensor:
        """Return the loss, then for each draft position the share of greedy drafts that are right."""
        tokens, device, width = texts.tokens, texts.tokens.device, self.width
        size = (len(tokens), self.blocks)
        room = (texts.stops - texts.starts - 1).clamp_min(1).unsqueeze(1)
        anchors = texts.starts.unsqueeze(1) + (torch.rand(size, device=device) * room).long()
        anchors = anchors.clamp(max=tokens.shape[1] - 2)
        shorter = torch.randint(2, width + 1, size, device=device)
        widths = torch.where(torch.rand(size, device=device) < _SHORT_BLOCK_SHARE, shorter, width)
        offsets = torch.arange(width, device=device)
        positions = anchors.unsqueeze(2) + offsets
        valid = ((offsets < widths.unsqueeze(2)) & (positions < texts.stops.view(-1, 1, 1)))[..., 1:].float()
        rows = torch.arange(len(tokens), device=device).view(-1, 1, 1)
        states = texts.final[rows, positions[..., :-1].clamp(max=tokens.shape[1] - 1)]
        logits = target.logits(states).float()
        hidden = self(texts.states, self.embed(target, tokens[rows[..., 0], anchors], width), anchors, widths)
        draft = target.logits(hidden[..., 1:, :])
        divergence, rejected = compare(draft, logits.log_softmax(-1))
        with torch.no_grad():
            kept = (1.0 - rejected).clamp_min(1e-6)
            reached = torch.cat((torch.ones_like(kept[..., :1]), kept[..., :-1]), dim=-1).cumprod(-1)
            weights = torch.exp(-offsets[:-1] / _POSITION_DECAY)
            weights = valid * weights * (_MIN_POSITION_WEIGHT + (1.0 - _MIN_POSITION_WEIGHT) * reached)
            right = (draft.argmax(-1) == logits.argmax(-1)) * valid
            facts = right.sum((0, 1)) / valid.sum((0, 1)).clamp_min(1)
        total = ((divergence + rejected) * weights).sum() / weights.sum().clamp_min(1e-6)
        return torch.cat((total.unsqueeze(0), facts))

    def hits(self, target: Target, texts: Texts, count: int) -> Tensor:
        """Return whether each of ``count`` draft tokens after each position of one row is right, [at most S, count].

        A position is that of the last known token, whose states the head doesn't see.
        """
        anchors = torch.arange(texts.tokens.shape[1] - count, device=texts.tokens.device)
        hidden = self(texts.states, self.embed(target, texts.tokens[:, anchors], count + 1), anchors[None])
        guesses = target.logits(hidden[0, :, 1:]).argmax(-1)
        return guesses == texts.tokens[0][anchors.unsqueeze(1) + torch.arange(1, count + 1, device=anchors.device)]
