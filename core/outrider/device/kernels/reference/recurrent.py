"""Torch references of the kernels of recurrent layers: short convolution, gated delta rule and gated norm.

The gated delta rule is that of Gated DeltaNet (Yang et al. 2024). Letters: T new tokens, B sequences, Q most new tokens of a
sequence, R state rows, C channels, K kernel size, Hk key heads, Hv value heads, D key size, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Number of tokens that prefill processes at once.

Prompts that are cut at multiples of this number leave the bits of later tokens alone.
"""
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class _SequenceLanes:
    """The tokens of ragged sequences as a rectangle [B, Q]."""

    index: Tensor
    """int64 [B, Q]: index of each token among the T tokens of the pass; of padding, any valid index."""
    is_token: Tensor
    """bool [B, Q]: True where the rectangle holds a token, False where it holds padding."""
    has_state: Tensor
    """bool [B]: True if earlier tokens left a state. A sequence without earlier tokens starts from zeros."""

    @classmethod
    def from_offsets(cls, query_start: Tensor, seq_lens: Tensor, max_query: int, tokens: int) -> _SequenceLanes:
        start = query_start[:-1].to(torch.int64).unsqueeze(1)
        count = query_start[1:].to(torch.int64).unsqueeze(1) - start
        lane = torch.arange(max_query, device=query_start.device)
        has_state = seq_lens.to(torch.int64) > count.squeeze(1)
        return cls((start + lane).clamp(max=max(tokens - 1, 0)), lane < count, has_state)

    def columns(self, part: slice) -> _SequenceLanes:
        """Return the tokens ``part`` of each sequence, as sequences of these tokens alone."""
        return _SequenceLanes(self.index[:, part], self.is_token[:, part], self.has_state)

    def state_of(self, state: Tensor, rows: Tensor) -> Tensor:
        """Return the states of ``rows`` [B, ...], zeros for sequences without earlier tokens."""
        found = state.index_select(0, rows)
        return torch.where(self.has_state.view(-1, *([1] * (state.dim() - 1))), found, 0.0)

    def flatten(self, dense: Tensor, tokens: int) -> Tensor:
        """Return the tokens [T, ...] of ``dense`` [B, Q, ...]; zeros for tokens of no sequence."""
        out = dense.new_zeros(tokens + 1, *dense.shape[2:])  # the last row takes padding
        out[torch.where(self.is_token, self.index, tokens).flatten()] = dense.flatten(0, 1)
        return out[:tokens]

    def pending_of(self, pending: Tensor, rows: Tensor) -> Tensor:
        """Return the signed numbers of pending tokens of ``rows``, int64 [B]; 0 for sequences without earlier tokens."""
        return torch.where(self.has_state, pending.index_select(0, rows), 0)

    def write_window(self, window: Tensor, place: Tensor, values: Tensor) -> None:
        """Write the tokens ``values`` [B, Q, W] to ``window`` [P, N, W] at ``place`` int64 [B]."""
        count = self.index.shape[1]
        kept = torch.where(self.is_token.unsqueeze(2), values.to(window.dtype), window[place, :count])
        window.index_copy_(0, place, torch.cat((kept, window[place, count:]), dim=1))


def short_convolution(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query: int,
    pending: Tensor | None,
    window: Tensor | None,
) -> Tensor:
    """Compute the causal depthwise convolution over the last K tokens, then SiLU. See ``KernelSet.short_convolution``."""
    lanes = _SequenceLanes.from_offsets(query_start, seq_lens, max_query, x.shape[0])
    before = lanes.state_of(state, rows).to(x.dtype)
    new, size = x[lanes.index], before.shape[1]
    if window is not None and pending is not None:
        before = _rows_from(torch.cat((before, window[rows]), dim=1), lanes.pending_of(pending, rows).abs(), size)
        state.index_copy_(0, rows, before.to(state.dtype))
        lanes.write_window(window, rows, new)
    inputs = torch.cat((before, new), dim=1)  # [B, K - 1 + Q, C]
    wide = torch.promote_types(x.dtype, torch.float32)
    made = torch.zeros_like(inputs[:, :max_query], dtype=wide)
    for tap in range(weight.shape[1]):  # a fixed order, so that a token's bits don't depend on Q
        made = made + inputs[:, tap : tap + max_query].to(wide) * weight[:, tap].to(wide)
    if window is None:
        state.index_copy_(0, rows, _rows_from(inputs, lanes.is_token.sum(1), size).to(state.dtype))
    # Vector code computes the end of a buffer differently from its middle: decoding calls it with one shape for every Q.
    parts = made.unbind(1) if max_query <= CHUNK else (made,)
    activated = torch.stack([F.silu(part.contiguous()) for part in parts], dim=1).view(made.shape)
    return lanes.flatten(activated.to(x.dtype), x.shape[0])


def _rows_from(inputs: Tensor, first: Tensor, count: int) -> Tensor:
    """Return ``count`` tokens of each sequence of ``inputs`` [B, N, C] from index ``first`` int64 [B] on."""
    index = first.unsqueeze(1) + torch.arange(count, device=inputs.device)
    return inputs.gather(1, index.unsqueeze(2).expand(-1, -1, inputs.shape[2]))


@dataclass(frozen=True, slots=True)
class _RuleOperands:
    """Operands of the delta rule in float32 or wider, dense: zeros for padding, so that padding changes no state."""

    q: Tensor
    """[B, Q, Hv, D]: queries, normalized and scaled."""
    k: Tensor
    """[B, Q, Hv, D]: keys, normalized."""
    v: Tensor
    """[B, Q, Hv, E]: values, as the convolution made them."""
    decay: Tensor
    """[B, Q, Hv]: logarithm of the factor by which a token decays the state; at most 0."""
    beta: Tensor
    """[B, Q, Hv]: share, from 0 to 1, of a key's stored value that the token replaces."""

    @classmethod
    def from_inputs(
        cls, mixed: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, lanes: _SequenceLanes
    ) -> _RuleOperands:
        value_heads, key_size, value_size = state.shape[1:]
        key_width = (mixed.shape[1] - value_heads * value_size) // 2
        wide = torch.promote_types(mixed.dtype, torch.float32)
        q, k, v = mixed[lanes.index].to(wide).split((key_width, key_width, value_heads * value_size), dim=2)
        repeats = value_heads * key_size // key_width

        def heads(x: Tensor, size: int) -> Tensor:
            split: Tensor = x.unflatten(2, (-1, size))
            return split

        def normalized(x: Tensor) -> Tensor:
            x = heads(x, key_size)
            each: Tensor = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
            return each.repeat_interleave(repeats, dim=2)

        b, a = gates[lanes.index].to(wide).chunk(2, dim=2)
        token = lanes.is_token.unsqueeze(2)
        decay = -a_log.to(wide).exp() * F.softplus(a + dt_bias.to(wide))
        return cls(
            normalized(q) * key_size**-0.5,
            torch.where(token.unsqueeze(3), normalized(k), 0.0),
            heads(v, value_size),
            torch.where(token, decay, 0.0),
            torch.where(token, b.sigmoid(), 0.0),
        )


def gated_delta_rule(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query: int,
    pending: Tensor | None,
    updates: Tensor | None,
) -> Tensor:
    """Compute the delta rule token by token, so that a token's bits don't depend on Q. See ``KernelSet.gated_delta_rule``."""
    lanes = _SequenceLanes.from_offsets(query_start, seq_lens, max_query, mixed.shape[0])
    wide = torch.promote_types(mixed.dtype, torch.float32)
    current = lanes.state_of(state, rows).to(wide)  # [B, Hv, D, E]
    kept_half = None
    if updates is not None and pending is not None:
        held = lanes.pending_of(pending, rows)
        current = _settled(current, updates.flatten(0, 1)[2 * rows + (held < 0)], held.abs())
        state.index_copy_(0, rows, current.to(state.dtype))
        current = current.to(state.dtype).to(wide)  # as if the row were settled by another call
        kept_half = 2 * rows + (pending.index_select(0, rows) > 0)
    made, kept = [], []
    for token in range(max_query):
        rule = _RuleOperands.from_inputs(mixed, gates, a_log, dt_bias, state, lanes.columns(slice(token, token + 1)))
        q, k, factor = rule.q[:, 0].unsqueeze(3), rule.k[:, 0], rule.decay[:, 0].exp()
        current = current * factor[..., None, None]
        found = (current * k.unsqueeze(3)).sum(2)
        correction = (rule.v[:, 0] - found) * rule.beta[:, 0].unsqueeze(2)
        current = current + k.unsqueeze(3) * correction.unsqueeze(2)
        made.append((current * q).sum(2))
        own_keys = k[:, :: state.shape[1] * k.shape[2] * 2 // (mixed.shape[1] - correction[0].numel())]
        kept.append(torch.cat((own_keys.flatten(1), correction.flatten(1), factor), dim=1))
    if updates is None:
        state.index_copy_(0, rows, current.to(state.dtype))
    elif kept_half is not None:
        lanes.write_window(updates.flatten(0, 1), kept_half, torch.stack(kept, dim=1))
    return lanes.flatten(torch.stack(made, dim=1).to(mixed.dtype), mixed.shape[0])


def _settled(current: Tensor, updates: Tensor, count: Tensor) -> Tensor:
    """Return the states ``current`` [B, Hv, D, E] after the first ``count`` int64 [B] of ``updates`` [B, N, W]."""
    heads, key_size, value_size = current.shape[1:]
    sizes = updates.shape[2] - heads * (value_size + 1), heads * value_size, heads
    for token in range(updates.shape[1]):
        keys, corrections, factors = updates[:, token].to(current.dtype).split(sizes, dim=1)
        k = keys.unflatten(1, (-1, key_size)).repeat_interleave(heads * key_size // sizes[0], dim=1)
        changed = current * factors[..., None, None] + k.unsqueeze(3) * corrections.view(-1, heads, 1, value_size)
        current = torch.where((count > token).view(-1, 1, 1, 1), changed, current)
    return current


def chunk_gated_delta_rule(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query: int,
) -> Tensor:
    """Compute the delta rule for :data:`CHUNK` tokens at once. See ``KernelSet.chunk_gated_delta_rule``.

    The corrections u of a chunk solve one triangular system: u_t = beta_t (v_t - k_t . (e^(G_t) S + sum_j<t e^(G_t - G_j) k_j
    u_j)), where S is the state before the chunk and G_t the sum of the decays up to t.
    """
    lanes = _SequenceLanes.from_offsets(query_start, seq_lens, max_query, mixed.shape[0])
    current = lanes.state_of(state, rows).to(torch.promote_types(mixed.dtype, torch.float32))
    made = []
    for start in range(0, max_query, CHUNK):
        # Vector code computes the end of a buffer differently from its middle: the buffers of a chunk have one size, however
        # many tokens precede.
        part = lanes.columns(slice(start, min(start + CHUNK, max_query)))
        rule = _RuleOperands.from_inputs(mixed, gates, a_log, dt_bias, state, part)
        q, k, v = (x.transpose(1, 2) for x in (rule.q, rule.k, rule.v))  # [B, Hv, L, D or E]
        beta = rule.beta.transpose(1, 2).unsqueeze(3)
        total = rule.decay.transpose(1, 2).cumsum(2)  # [B, Hv, L]
        between = total.unsqueeze(3) - total.unsqueeze(2)
        # Decays of later tokens are positive here; masked before the exponential, which would overflow.
        between = between.masked_fill(torch.ones_like(between, dtype=torch.bool).triu(1), float("-inf")).exp()
        since_start = total.exp().unsqueeze(3)
        system = beta * (k @ k.transpose(2, 3)) * between
        right = beta * (v - since_start * (k @ current))
        corrections = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        made.append(since_start * (q @ current) + ((q @ k.transpose(2, 3)) * between) @ corrections)
        to_end = (total[:, :, -1:] - total).exp().unsqueeze(3)
        current = since_start[:, :, -1:] * current + (k * to_end).transpose(2, 3) @ corrections
    state.index_copy_(0, rows, current.to(state.dtype))
    dense = torch.cat(made, dim=2).transpose(1, 2)
    return lanes.flatten(dense.to(mixed.dtype), mixed.shape[0])


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm of ``x`` [..., E] over the last dimension, times SiLU of ``gate`` [..., E].

    Both factors are computed in float32 or wider, and the norm is rounded to the dtype of ``x`` between. See
    ``KernelSet.gated_rms_norm``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * F.silu(gate.to(wide))).to(x.dtype)
