"""The gated delta rule of prompts, 64 tokens of a sequence at once (Yang et al. 2024).

Letters: D key size and E value size of a head, L tokens of a chunk, S the state before it. G_t is the sum of the log decays
up to token t of the chunk.

The corrections of a chunk are u - w S, where u and w solve one triangular system. All chunks are prepared at once
(:func:`corrections`). One program per head and block of values then goes through the chunks, and computes only corrections
and S (:func:`chunk_states`). The results follow from both, again for all chunks at once (:func:`chunk_results`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin
from outrider_triton.jit.recurrent_steps import NORM_EPS, log_decay

_CHUNK = tl.constexpr(64)
_BLOCK = tl.constexpr(16)
"""Number of rows of a diagonal block that is inverted row by row."""


@triton.jit
def _dot(a, b):
    """Return the matrix product of ``a`` and ``b``; float32 operands are not rounded to TF32."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def load_normalized(mixed, rows, lanes, mask, stride):
    """Load ``rows`` and columns ``lanes`` of the queries or keys ``mixed``, and divide each row by its Euclidean norm:
    float32 [rows, lanes].
    """
    x = tl.load(mixed + rows[:, None] * stride + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + NORM_EPS)[:, None]


@triton.jit
def between_tokens(total, lane):
    """Return the matrix [L, L] of decays between tokens, e^(G_i - G_j) for j <= i, else 0."""
    earlier = lane[:, None] >= lane[None, :]
    # The decays of later tokens are positive here; masked before the exponential, which would overflow.
    return tl.where(earlier, tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def _dot_wide(a, b, NARROW: tl.constexpr):
    """Return the matrix product of ``a`` and ``b`` in float32. With a narrower dtype NARROW, each operand is the sum of two
    numbers in that dtype.
    """
    if NARROW.primitive_bitwidth == 32:
        product = _dot(a, b)
    else:
        a_high, b_high = a.to(NARROW), b.to(NARROW)
        a_low, b_low = (a - a_high.to(tl.float32)).to(NARROW), (b - b_high.to(tl.float32)).to(NARROW)
        product = _dot(a_high, b_low) + _dot(a_low, b_high) + _dot(a_high, b_high)
    return product


@triton.jit
def inverse_of_triangle(system, lane, NARROW: tl.constexpr):
    """Return the inverse of I + ``system`` [L, L], which is strictly lower triangular.

    Diagonal blocks are inverted row by row, all at once. Pairs of inverted blocks A and B with C below A then make one block
    of twice the size, twice: below A comes -B C A.
    """
    BLOCKS: tl.constexpr = _CHUNK // _BLOCK
    block = tl.arange(0, BLOCKS)
    on_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(on_diagonal, tl.reshape(system, [BLOCKS, _BLOCK, BLOCKS, _BLOCK]), 0.0), axis=2)
    row_of = tl.arange(0, _BLOCK)
    identity = tl.where(row_of[:, None] == row_of[None, :], 1.0, 0.0)[None, :, :]
    inverses = identity + tl.zeros([BLOCKS, _BLOCK, _BLOCK], dtype=tl.float32)
    for index in range(1, _BLOCK):
        is_row = (row_of == index)[None, :, None]
        factors = tl.sum(tl.where(is_row, diagonal, 0.0), axis=1)
        row = tl.sum(factors[:, :, None] * inverses, axis=1)
        inverses = tl.where(is_row, identity - row[:, None, :], inverses)
    inverse = tl.reshape(tl.where(on_diagonal, inverses[:, :, None, :], 0.0), [_CHUNK, _CHUNK])
    for doublings in tl.static_range(2):
        row, column = lane[:, None] // (_BLOCK << doublings), lane[None, :] // (_BLOCK << doublings)
        below = tl.where((row == column + 1) & (column % 2 == 0), system, 0.0)
        inverse -= _dot_wide(_dot_wide(inverse, below, NARROW), inverse, NARROW)
    return inverse


@triton.jit
def first_chunk(start, sequence):
    """Return the number of a sequence's first chunk. Numbers of chunks are distinct over all sequences; some belong to no
    chunk.
    """
    return (start // _CHUNK + sequence).to(tl.int64)


@triton.jit(do_not_specialize=["tokens"])
def corrections(
    mixed,
    gates,
    a_log,
    dt_bias,
    query_start,
    keys,
    w,
    u,
    totals,
    tokens,
    key_width,
    value_heads,
    values_per_key,
    mixed_stride,
    gates_stride,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Solve the triangular system of one chunk; one program per (value head, chunk, sequence).

    Stores normalised ``keys`` [T, Hk, D], w [T, Hv, D] and u [T, Hv, E] in their dtype, and G [Hv, T] in float32 to
    ``totals``.
    """
    begin(PDL)
    head = tl.program_id(0)
    start = tl.load(query_start + tl.program_id(2))
    count = tl.load(query_start + tl.program_id(2) + 1) - start
    first = tl.program_id(1) * _CHUNK
    if first < count:
        lane = tl.arange(0, _CHUNK)
        rows = (start + first + lane).to(tl.int64)
        inside = first + lane < count
        d = tl.arange(0, BLOCK_D)
        e = tl.arange(0, BLOCK_E)
        in_keys = inside[:, None] & (d < D)[None, :]
        values = inside[:, None] & (e < E)[None, :]
        key_head = head // values_per_key
        k_lane = key_width + key_head * D + d
        b = tl.load(gates + rows * gates_stride + head, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(gates + rows * gates_stride + value_heads + head, mask=inside, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
        decay = log_decay(a, rate, tl.load(dt_bias + head).to(tl.float32))
        total = tl.cumsum(tl.where(inside, decay, 0.0), axis=0)
        beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-b)), 0.0)

        narrow = load_normalized(mixed, rows, k_lane, in_keys, mixed_stride).to(mixed.dtype.element_ty)
        if head % values_per_key == 0:
            tl.store(keys + rows[:, None] * key_width + key_head * D + d[None, :], narrow, mask=in_keys)
        products = _dot(narrow, tl.trans(narrow))
        system = beta[:, None] * products * between_tokens(total, lane)
        system = tl.where(lane[:, None] > lane[None, :], system, 0.0)
        inverse = inverse_of_triangle(system, lane, mixed.dtype.element_ty).to(mixed.dtype.element_ty)
        # Keys are read again: the registers hold the system in between.
        k = load_normalized(mixed, rows, k_lane, in_keys, mixed_stride)
        scaled = (k * (beta * tl.exp(total))[:, None]).to(mixed.dtype.element_ty)
        place = rows[:, None] * value_heads + head
        tl.store(w + place * D + d[None, :], _dot(inverse, scaled).to(w.dtype.element_ty), mask=in_keys)
        v_lane = 2 * key_width + head * E + e
        v = tl.load(mixed + rows[:, None] * mixed_stride + v_lane[None, :], mask=values, other=0.0)
        scaled = (v.to(tl.float32) * beta[:, None]).to(mixed.dtype.element_ty)
        tl.store(u + place * E + e[None, :], _dot(inverse, scaled).to(u.dtype.element_ty), mask=values)
        tl.store(totals + head.to(tl.int64) * tokens + rows, total, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def chunk_states(
    keys,
    w,
    u,
    totals,
    state,
    rows,
    query_start,
    seq_lens,
    chunk_state,
    out,
    tokens,
    key_width,
    value_heads,
    values_per_key,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Go through the chunks of a sequence and write its state; one program per (value head, block of values, sequence).

    Operands are the results of :func:`corrections`. Stores the state before each chunk to ``chunk_state`` [N, Hv, D, E], and
    the corrections to ``out``. The kernel computes nothing else, because it can't process chunks concurrently.
    """
    begin(PDL)
    head = tl.program_id(0)
    sequence = tl.program_id(2)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    row = tl.load(rows + sequence)
    has_state = tl.load(seq_lens + sequence) > count
    lane = tl.arange(0, _CHUNK)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    cells = d[:, None] * E + e[None, :]
    own = state + (row * value_heads + head) * D * E + cells
    before = chunk_state + (first_chunk(start, sequence) * value_heads + head) * D * E + cells
    in_state = (d < D)[:, None] & (e < E)[None, :]
    current = tl.load(own, mask=in_state & has_state, other=0.0).to(tl.float32)
    for first in range(0, count, _CHUNK):
        tokens_of = (start + first + lane).to(tl.int64)
        inside = first + lane < count
        in_keys = inside[:, None] & (d < D)[None, :]
        values = inside[:, None] & (e < E)[None, :]
        place = tokens_of[:, None] * value_heads + head
        total = tl.load(totals + head.to(tl.int64) * tokens + tokens_of, mask=inside, other=0.0)
        last = tl.load(totals + head.to(tl.int64) * tokens + start + tl.minimum(first + _CHUNK, count) - 1)
        narrow = current.to(w.dtype.element_ty)
        tl.store(before, narrow, mask=in_state)
        before += value_heads * D * E
        correction = tl.load(u + place * E + e[None, :], mask=values, other=0.0).to(tl.float32)
        correction -= _dot(tl.load(w + place * D + d[None, :], mask=in_keys, other=0.0), narrow)
        tl.store(out + place * E + e[None, :], correction.to(out.dtype.element_ty), mask=values)
        to_end = tl.where(inside, tl.exp(tl.where(inside, last - total, 0.0)), 0.0)
        k_lane = head // values_per_key * D + d[None, :]
        k = tl.load(keys + tokens_of[:, None] * key_width + k_lane, mask=in_keys, other=0.0)
        added = _dot(tl.trans(k), (correction * to_end[:, None]).to(k.dtype))
        current = current * tl.exp(last) + added
    tl.store(own, current.to(state.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["tokens"])
def chunk_results(
    mixed,
    keys,
    totals,
    query_start,
    chunk_state,
    out,
    tokens,
    key_width,
    value_heads,
    values_per_key,
    mixed_stride,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replace the corrections in ``out`` [T, Hv, E] by the results of one chunk; one program per (value head, chunk,
    sequence).
    """
    begin(PDL)
    head, sequence = tl.program_id(0), tl.program_id(2)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    first = tl.program_id(1) * _CHUNK
    if first < count:
        lane = tl.arange(0, _CHUNK)
        d = tl.arange(0, BLOCK_D)
        e = tl.arange(0, BLOCK_E)
        tokens_of = (start + first + lane).to(tl.int64)
        inside = first + lane < count
        in_keys = inside[:, None] & (d < D)[None, :]
        values = inside[:, None] & (e < E)[None, :]
        q_lane = head // values_per_key * D + d
        q = (load_normalized(mixed, tokens_of, q_lane, in_keys, mixed_stride) * (D**-0.5)).to(mixed.dtype.element_ty)
        k = tl.load(keys + tokens_of[:, None] * key_width + q_lane[None, :], mask=in_keys, other=0.0)
        total = tl.load(totals + head.to(tl.int64) * tokens + tokens_of, mask=inside, other=0.0)
        scores = (_dot(q, tl.trans(k)) * between_tokens(total, lane)).to(q.dtype)
        chunk = first_chunk(start, sequence) + tl.program_id(1)
        before = chunk_state + ((chunk * value_heads + head) * D + d[:, None]) * E + e[None, :]
        made = _dot(q, tl.load(before, mask=(d < D)[:, None] & (e < E)[None, :], other=0.0)) * tl.exp(total)[:, None]
        place = out + (tokens_of[:, None] * value_heads + head) * E + e[None, :]
        made += _dot(scores, tl.load(place, mask=values, other=0.0))
        tl.store(place, made.to(out.dtype.element_ty), mask=values)
