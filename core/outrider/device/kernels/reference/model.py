"""Torch references of the kernels: plain, vectorised, without a read back to the host.

They define what a kernel must compute. Shapes: T new tokens, B sequences, Hq query heads, Hkv key heads, D head size,
H hidden size, V vocabulary, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels.formats import QUANTIZED_FORMATS, ElementFormat
from outrider.device.kernels.operators import check_copy

LANE_SAMPLE, LANE_ACCEPT, LANE_DRAFT, LANE_RESIDUAL = 0, 1, 2, 3


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm of ``x`` [..., H] over the last dimension, times ``weight`` [H].

    Statistics are in float32 or wider (Zhang and Sennrich 2019).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype is not x.dtype:  # a weight in float32 multiplies what isn't rounded yet
        return (weight * normed).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``residual += x``, both [T, H], in place; return the norm of ``residual`` [T, H]."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` [T, I] of the two halves of ``gate_up`` [T, 2 I] (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Return ``x`` times the sigmoid of ``gate``, which has the same shape."""
    return x * torch.sigmoid(gate)


def rope_write_cache(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place, then write k and v to the cache at ``slots`` int64 [T]."""
    rotate_heads(q, cos, sin)
    rotate_heads(k, cos, sin)
    page_size = k_cache.shape[1]
    page, offset = slots // page_size, slots % page_size
    k_cache[page, offset] = as_cached(k, k_cache.dtype)
    v_cache[page, offset] = as_cached(v, v_cache.dtype)


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first Dr dimensions of ``heads`` [T, heads, D] in place by ``cos`` and ``sin`` [T, Dr].

    The halves of these dimensions are rotated against each other, as Hugging Face lays them out.
    """
    x = heads[..., : cos.shape[-1]]
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    x.copy_(x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1))


def as_cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as a cache of ``dtype`` stores it: a narrow dtype clamps values, so that none becomes infinite or NaN."""
    if dtype.itemsize > 1:
        return x
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tree_mask: Tensor | None,
    max_query: int,
    max_kv: int,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [T, Hq, D] of the new tokens over each sequence's pages; padding tokens give zeros.

    See ``KernelSet.paged_attention``.
    """
    tokens, heads, head_size = q.shape
    batch = seq_lens.shape[0]
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    pages = min((max_kv + page_size - 1) // page_size, block_table.shape[1])
    span = pages * page_size
    device = q.device

    start = query_start[:-1].to(torch.int64)
    query_lens = query_start[1:].to(torch.int64) - start
    lane = torch.arange(max_query, device=device)
    flat = (start.unsqueeze(1) + lane).clamp_(max=tokens - 1)  # [B, max_query]
    queries = q[flat].transpose(1, 2)  # [B, Hq, max_query, D]

    table = block_table[:, :pages].to(torch.int64)
    keys = k_cache[table].to(q.dtype).reshape(batch, span, kv_heads, head_size).transpose(1, 2)
    values = v_cache[table].to(q.dtype).reshape(batch, span, kv_heads, head_size).transpose(1, 2)

    context = (seq_lens.to(torch.int64) - query_lens).view(batch, 1, 1)
    position = torch.arange(span, device=device).view(1, 1, span)
    new_index = position - context  # index among the new tokens; negative in the context
    if tree_mask is None:
        visible = new_index <= lane.view(1, max_query, 1)
    else:
        index = new_index.clamp(0, max_query - 1).expand(batch, max_query, span)
        visible = (new_index < 0) | tree_mask[flat].gather(2, index)
    inside = position < seq_lens.to(torch.int64).view(batch, 1, 1)
    # A weight of zero doesn't hide a NaN that an earlier owner of the page, or padding, left after the sequence.
    keys = torch.where(inside.unsqueeze(-1), keys, 0.0)
    values = torch.where(inside.unsqueeze(-1), values, 0.0)
    visible = visible & inside
    if window > 0:
        visible = visible & (new_index > lane.view(1, max_query, 1) - window)
    real = (lane.view(1, max_query) < query_lens.view(batch, 1)).unsqueeze(-1)
    visible = visible | ~real  # a row that sees nothing would be NaN

    if sinks is None:
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible.unsqueeze(1), scale=scale, enable_gqa=heads != kv_heads
        )
    else:
        out = attend_with_sinks(queries, keys, values, visible.unsqueeze(1), scale, sinks)
    result = q.new_zeros(tokens + 1, heads, head_size)  # the last row takes what padding lanes would write
    target = torch.where(real.squeeze(-1), flat, tokens)
    result[target.flatten()] = out.transpose(1, 2).reshape(batch * max_query, heads, head_size)
    return result[:tokens]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of each head of ``x`` [T, Hq, K] with the head's ``weight`` [Hq, N, K] → [T, Hq, N]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()


def latent_attention(
    q: Tensor,
    q_rotated: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tree_mask: Tensor | None,
    max_query: int,
    max_kv: int,
    scale: float,
) -> Tensor:
    """Return attention [T, Hq, R] to latent vectors: that of joined queries to joined pages. See
    ``KernelSet.latent_attention``.
    """
    pages = min(-(-max_kv // k_cache.shape[1]), block_table.shape[1])
    joined, table = joined_pages(k_cache, v_cache, block_table[:, :pages], q.dtype)
    batch = query_start, seq_lens, table, tree_mask, max_query, max_kv, scale, 0
    return paged_attention(torch.cat((q, q_rotated), dim=-1), joined, joined, *batch)[..., : q.shape[2]].contiguous()


def joined_pages(k_cache: Tensor, v_cache: Tensor, block_table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return copies of the pages in ``block_table`` [B, N], and the block table of the copies.

    A copy [B N, page size, 1, R + Dr] in ``dtype`` has the latent vectors and the rotated keys side by side.
    """
    table = block_table.to(torch.int64)
    joined = torch.cat((v_cache[table].to(dtype), k_cache[table].to(dtype)), dim=-1).flatten(0, 1)
    return joined, torch.arange(table.numel(), dtype=torch.int32, device=table.device).view(table.shape)


def attend_with_sinks(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Return attention [B, Hq, N, D] of ``queries`` [B, Hq, N, D] over keys and values [B, Hkv, S, D], in float32 or wider.

    The softmax of each row has one more column, the head's logit in ``sinks`` [Hq], which has no value. ``visible`` [B, 1, N,
    S] masks the other columns.
    """
    batch, heads, count, size = queries.shape
    wide = torch.promote_types(queries.dtype, torch.float32)
    # The heads that share keys are rows of one product, which copies no keys.
    rows = queries.to(wide).reshape(batch, keys.shape[1], -1, size)
    scores = (rows @ keys.to(wide).mT).mul_(scale).view(batch, heads, count, -1).masked_fill_(~visible, float("-inf"))
    column = sinks.to(wide).view(1, heads, 1, 1).expand(batch, heads, count, 1)
    shares = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    out = shares.reshape(batch, keys.shape[1], -1, keys.shape[2]) @ values.to(wide)
    return out.view(queries.shape).to(queries.dtype)


def _gumbel(seeds: Tensor, positions: Tensor, lane: int, count: int) -> Tensor:
    return -torch.log(-torch.log(uniforms(seeds, positions, lane, count)))


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, lane: int) -> Tensor:
    """Return one token per row: argmax at temperature 0, else a sample of softmax(logits / temperature) by Gumbel-max."""
    hot = temperature > 0
    scaled = logits.float() / torch.where(hot, temperature, 1.0).unsqueeze(-1)
    noisy = scaled + _gumbel(seeds, positions, lane, logits.shape[-1])
    return torch.where(hot, noisy.argmax(-1), logits.argmax(-1))


def verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each chain and sample the token after it (Leviathan et al. 2023, Chen et al. 2023)."""
    batch, num_draft_tokens = draft_tokens.shape
    vocabulary = target_logits.shape[-1]
    choice = target_logits.argmax(-1)  # [B, K+1]
    accept = choice[:, :num_draft_tokens] == draft_tokens
    following = choice
    if draft_probs is not None:
        hot = (temperature > 0).unsqueeze(-1)
        steps = torch.arange(num_draft_tokens + 1, device=positions.device)
        where = positions.unsqueeze(-1) + steps  # position of the token that is decided
        seed = seeds.unsqueeze(-1).expand(batch, num_draft_tokens + 1)
        scale = torch.where(temperature > 0, temperature, 1.0).view(batch, 1, 1)
        target_probs = torch.softmax(target_logits.float() / scale, dim=-1)
        p = target_probs[:, :num_draft_tokens].gather(2, draft_tokens.unsqueeze(-1)).squeeze(-1)
        q = draft_probs.gather(2, draft_tokens.unsqueeze(-1)).squeeze(-1)
        coin = uniforms(seed[:, :num_draft_tokens], where[:, :num_draft_tokens], LANE_ACCEPT, 1).squeeze(-1)
        accept = torch.where(hot, coin * q < p, accept)
        padding = draft_probs.new_zeros(batch, 1, vocabulary)
        residual = (target_probs - torch.cat((draft_probs, padding), dim=1)).clamp_(min=0)
        # p == q leaves an empty residual, which is reached only through rounding: sample from p then.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs)
        sampled = (residual.log() + _gumbel(seed, where, LANE_RESIDUAL, vocabulary)).argmax(-1)
        following = torch.where(hot, sampled, choice)
    accepted = accept.to(torch.int64).cumprod(dim=1).sum(dim=1)  # [B]
    lane = torch.arange(num_draft_tokens + 1, device=draft_tokens.device).unsqueeze(0)
    drafts = torch.cat((draft_tokens, draft_tokens.new_zeros(batch, 1)), dim=1)
    last = following.gather(1, accepted.unsqueeze(1))
    tokens = torch.where(lane < accepted.unsqueeze(1), drafts, torch.where(lane == accepted.unsqueeze(1), last, -1))
    return tokens, accepted


def verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    depth: int,
    sampling: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root: choose the target's token at each node, follow the child that holds it, stop where none does."""
    batch, device = tokens.shape[0], tokens.device
    row = torch.arange(batch, device=device)
    here = row.new_zeros(batch)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    accepted = row.new_zeros(batch)
    out, path = [], []
    for level in range(depth + 1):
        logits = target_logits[row, here]
        choice = sample(logits, temperature, seeds, positions + level, LANE_SAMPLE) if sampling else logits.argmax(-1)
        out.append(torch.where(alive, choice, -1))
        path.append(torch.where(alive, here, 0))
        match = (parents == here.unsqueeze(1)) & (tokens == choice.unsqueeze(1))
        alive = alive & match.any(dim=1)
        if level < depth:
            accepted = accepted + alive.to(torch.int64)
            here = torch.where(alive, match.to(torch.int8).argmax(dim=1), here)
    return torch.stack(out, dim=1), torch.stack(path, dim=1), accepted


def gather_rows(state: Tensor, rows: Tensor) -> Tensor:
    """Return the rows ``rows`` int64 [n] of ``state`` [R, ...] as a new tensor [n, ...]."""
    return state.index_select(0, rows)


def scatter_rows(state: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write ``values`` [n, ...] to the rows ``rows`` int64 [n] of ``state`` [R, ...], except to row 0, which takes
    padding.
    """
    real = (rows > 0).view(-1, *([1] * (state.dim() - 1)))
    state.index_copy_(0, rows, torch.where(real, values, state[:1]))


def copy_rows(source: Tensor, out: Tensor) -> None:
    """Copy ``source`` to ``out``, both of one shape and dtype."""
    check_copy(source, out)
    out.copy_(source)


def move_cache(k_cache: Tensor, v_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy cache rows ``sources`` to ``destinations``, int64 slots; every row is read before any is written."""
    page_size = k_cache.shape[1]
    for cache in (k_cache, v_cache):
        rows = cache[sources // page_size, sources % page_size]  # a copy, so sources and destinations may overlap
        cache[destinations // page_size, destinations % page_size] = rows


def find_nan(x: Tensor, found: Tensor) -> None:
    """Write the index of the first NaN of each row of ``x`` [B, n], or -1, to ``found[:, 0]``."""
    is_nan = torch.isnan(x)
    index = torch.where(is_nan.any(dim=1), is_nan.to(torch.int8).argmax(dim=1), -1)
    found.copy_(torch.stack((index, torch.full_like(index, -1)), dim=1))


def find_outside(x: Tensor, low: int, high: int) -> Tensor:
    """Return the index and value of the first integer of each row of ``x`` [B, n] outside the range, or -1 and -1."""
    bad = (x < low) | (x >= high)
    first = bad.to(torch.int8).argmax(dim=1)
    value = x.gather(1, first.unsqueeze(1)).squeeze(1).to(torch.int64)
    found = bad.any(dim=1)
    return torch.stack((torch.where(found, first, -1), torch.where(found, value, -1)), dim=1)


# -- random numbers ----------------------------------------------------------------------------------------------------


_MASK = 0xFFFFFFFF
_ROUND_0, _ROUND_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def _multiply(constant: int, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of ``constant * value``. The signed product modulo 2**64 has the unsigned bits."""
    product = value * constant
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit words of Philox4x32-10 per counter, which depend only on the key and the counter.

    All arguments are int64 tensors below 2**32 that broadcast together. Salmon et al., "Parallel Random Numbers: As Easy as
    1, 2, 3", SC 2011; constants and known-answer vectors as in Random123.
    """
    c0, c1, c2, c3 = counter
    rounds = torch.arange(_ROUNDS, dtype=torch.int64, device=c0.device).view(-1, *[1] * key[0].dim())
    for k0, k1 in zip((key[0] + rounds * _WEYL_0) & _MASK, (key[1] + rounds * _WEYL_1) & _MASK, strict=True):
        high_0, low_0 = _multiply(_ROUND_0, c0)
        high_1, low_1 = _multiply(_ROUND_1, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
    return c0, c1, c2, c3


def uniforms(seeds: Tensor, positions: Tensor, lane: int, count: int) -> Tensor:
    """Return uniform float32 values in (0, 1), of shape ``seeds.shape + (count,)``.

    ``seeds`` (any int64) and ``positions`` (non-negative) have one shape; ``lane`` separates values for different purposes at
    one position. The value at index i depends on the seed, the position, the lane and i, and on nothing else.
    """
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=seeds.device)
    seed = seeds.to(torch.int64).unsqueeze(-1)
    position = positions.to(torch.int64).unsqueeze(-1)
    words = philox(
        (blocks, position & _MASK, (position >> 32) & _MASK, torch.full_like(blocks, lane)),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    flat = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :count]
    # 23 bits and the half after them fill a float32's mantissa. With one bit more, the largest would round up to 1, whose
    # Gumbel noise is infinite: one sample in 131 over a vocabulary of 128256 would then be an arbitrary token.
    return ((flat >> 9).to(torch.float32) + 0.5) * (1.0 / (1 << 23))


def dequantize(
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    format: str,
    block: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Return the dequantized weight [out, in] in ``dtype``, computed in float32 or wider and rounded once."""
    if scales.dtype.itemsize == 1:  # powers of two, which torch doesn't promote
        scales = scales.to(torch.float32)
    wide = torch.promote_types(dtype, torch.promote_types(scales.dtype, torch.float32))
    values = QUANTIZED_FORMATS[format].decode(data, shape[1], wide)
    if zero_points is not None:
        values = values - spread(zero_points, block, shape).to(wide)
    return (values * spread(scales, block, shape).to(wide)).to(dtype)


def spread(grid: Tensor, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Expand a tensor of one value per block to one value per element; a dimension with a single block keeps size 1."""
    for dim in (0, 1):
        if grid.shape[dim] > 1 and block[dim] > 1:
            grid = grid.repeat_interleave(block[dim], dim=dim)
        if grid.shape[dim] > 1:
            grid = grid.narrow(dim, 0, shape[dim])
    return grid


def quantize_activations(x: Tensor, format: str, group: int, input_scale: Tensor | None) -> Tensor:
    """Return ``x`` [..., in], quantised and then multiplied by its scales; see ``linear_quantized``."""
    wide, elements = x.to(torch.promote_types(x.dtype, torch.float32)), QUANTIZED_FORMATS[format]
    if input_scale is not None:
        scale = input_scale.to(wide.dtype)
        return (elements.round(wide / scale) * scale).to(x.dtype)
    if not group or group >= x.shape[-1]:
        return _scaled(wide, elements).to(x.dtype)
    width = x.shape[-1]
    grouped = F.pad(wide, (0, -width % group)).unflatten(-1, (-1, group))
    return _scaled(grouped, elements).flatten(-2)[..., :width].to(x.dtype)


def _scaled(x: Tensor, elements: ElementFormat) -> Tensor:
    """Return ``x`` [..., n], quantised with one scale per last dimension, from its largest magnitude. Zeros stay zeros."""
    assert elements.activation_divisor is not None  # a QuantizedWeight has no other activations
    scale = x.abs().amax(dim=-1, keepdim=True) / elements.activation_divisor
    scale = torch.where(scale > 0, scale, 1.0)
    return elements.round(x / scale) * scale


def linear_quantized(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    block: Sequence[int],
    shape: Sequence[int],
    activations: str,
    activation_group: int,
) -> Tensor:
    """Return ``x`` [..., in] times the transpose of the dequantized weight [out, in] → [..., out].

    ``activations`` names their format; empty if they aren't quantised. See ``KernelSet.linear_quantized``.
    """
    if activations:
        x = quantize_activations(x, activations, activation_group, input_scale)
    # Contiguous as in ``ModelKernels.linear``: a library may read a strided row past its end.
    return F.linear(x.contiguous(), dequantize(data, scales, zero_points, format, block, shape, x.dtype), bias)
