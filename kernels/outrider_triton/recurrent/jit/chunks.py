"""The gated delta rule of prompts, 64 tokens of a sequence at once (Yang et al. 2024).

Letters: D key size and E value size of a head, L tokens of a chunk, S the state before it. G_t is the sum of the log decays
up to token t of the chunk.

The corrections of a chunk are u - w S, where u and w solve one triangular system (:func:`corrections`). All chunks of a
prompt are prepared at once. Then one program per head goes through its chunks (:func:`chunk_states`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin
from outrider_triton.recurrent.jit.steps import _NORM_EPS, log_decay

_CHUNK = tl.constexpr(64)
_BLOCK = tl.constexpr(16)
"""Rows of a diagonal block that is inverted row by row."""


@triton.jit
def _dot(a, b):
    """Multiply; operands in float32 aren't rounded."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def load_normalized(mixed, rows, lanes, mask, stride):
    """Load rows of queries or keys and divide each by its Euclidean norm, in float32."""
    x = tl.load(mixed + rows[:, None] * stride + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + _NORM_EPS)[:, None]


@triton.jit
def between_tokens(total, lane):
    """Return e^(G_i - G_j) for j <= i, else 0."""
    earlier = lane[:, None] >= lane[None, :]
    # The decays of later tokens are positive here; masked before the exponential, which would overflow.
    return tl.where(earlier, tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def inverse_of_triangle(system, lane):
    """Return the inverse of I + ``system`` [L, L], which is strictly lower triangular.

    Diagonal blocks are inverted row by row, all at once. The other blocks N then satisfy (I + N)^-1 = (I - N) (I + N^2),
    because N^4 = 0.
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
    same_block = lane[:, None] // _BLOCK == lane[None, :] // _BLOCK
    identity = tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)
    others = _dot(inverse, tl.where(same_block, 0.0, system))
    squared = _dot(others, others)
    return _dot(_dot(identity - others, identity + squared), inverse)


@triton.jit(do_not_specialize=["tokens"])
def corrections(
    mixed,
    gates,
    a_log,
    dt_bias,
    query_start,
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
    """Solve the triangular system of one chunk; program (value head, chunk, sequence).

    Stores w [T, Hv, D] and u [T, Hv, E] in their dtype, and G [Hv, T] in float32 to ``totals``.
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
        keys = inside[:, None] & (d < D)[None, :]
        values = inside[:, None] & (e < E)[None, :]
        k = load_normalized(mixed, rows, key_width + head // values_per_key * D + d, keys, mixed_stride)
        v = tl.load(mixed + rows[:, None] * mixed_stride + 2 * key_width + head * E + e[None, :], mask=values, other=0.0)
        b = tl.load(gates + rows * gates_stride + head, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(gates + rows * gates_stride + value_heads + head, mask=inside, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
        decay = log_decay(a, rate, tl.load(dt_bias + head).to(tl.float32))
        total = tl.cumsum(tl.where(inside, decay, 0.0), axis=0)
        beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-b)), 0.0)

        narrow = k.to(mixed.dtype.element_ty)
        products = _dot(narrow, tl.trans(narrow))
        system = beta[:, None] * products * between_tokens(total, lane)
        system = tl.where(lane[:, None] > lane[None, :], system, 0.0)
        inverse = inverse_of_triangle(system, lane).to(mixed.dtype.element_ty)
        scaled = (k * (beta * tl.exp(total))[:, None]).to(mixed.dtype.element_ty)
        place = rows[:, None] * value_heads + head
        tl.store(w + place * D + d[None, :], _dot(inverse, scaled).to(w.dtype.element_ty), mask=keys)
        scaled = (v.to(tl.float32) * beta[:, None]).to(mixed.dtype.element_ty)
        tl.store(u + place * E + e[None, :], _dot(inverse, scaled).to(u.dtype.element_ty), mask=values)
        tl.store(totals + head.to(tl.int64) * tokens + rows, total, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def chunk_states(
    mixed,
    w,
    u,
    totals,
    state,
    rows,
    query_start,
    seq_lens,
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
    """Go through the chunks of a sequence and write its results and its state; program (value head, block of values,
    sequence). Operands are the results of :func:`corrections`.
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
    cells = state + ((row * value_heads + head) * D + d[:, None]) * E + e[None, :]
    in_state = (d < D)[:, None] & (e < E)[None, :]
    current = tl.load(cells, mask=in_state & has_state, other=0.0).to(tl.float32)
    q_lane = head // values_per_key * D + d
    for first in range(0, count, _CHUNK):
        tokens_of = (start + first + lane).to(tl.int64)
        inside = first + lane < count
        keys = inside[:, None] & (d < D)[None, :]
        values = inside[:, None] & (e < E)[None, :]
        place = tokens_of[:, None] * value_heads + head
        q = (load_normalized(mixed, tokens_of, q_lane, keys, mixed_stride) * (D**-0.5)).to(mixed.dtype.element_ty)
        k = load_normalized(mixed, tokens_of, key_width + q_lane, keys, mixed_stride)
        total = tl.load(totals + head.to(tl.int64) * tokens + tokens_of, mask=inside, other=0.0)
        last = tl.load(totals + head.to(tl.int64) * tokens + start + tl.minimum(first + _CHUNK, count) - 1)
        narrow = current.to(mixed.dtype.element_ty)
        correction = tl.load(u + place * E + e[None, :], mask=values, other=0.0).to(tl.float32)
        correction -= _dot(tl.load(w + place * D + d[None, :], mask=keys, other=0.0), narrow)
        correction = correction.to(mixed.dtype.element_ty)
        scores = _dot(q, tl.trans(k.to(mixed.dtype.element_ty))) * between_tokens(total, lane)
        made = _dot(q, narrow) * tl.exp(total)[:, None]
        made += _dot(scores.to(mixed.dtype.element_ty), correction)
        tl.store(out + place * E + e[None, :], made.to(out.dtype.element_ty), mask=values)
        to_end = tl.where(inside, tl.exp(tl.where(inside, last - total, 0.0)), 0.0)
        added = (k * to_end[:, None]).to(mixed.dtype.element_ty)
        current = current * tl.exp(last) + _dot(tl.trans(added), correction)
    tl.store(cells, current.to(state.dtype.element_ty), mask=in_state)
