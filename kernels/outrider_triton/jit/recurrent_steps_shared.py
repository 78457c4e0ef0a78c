"""The gated delta rule of few tokens, in warps that share the keys and queries of a head.

Each warp normalises keys and queries of another token and stores them to shared memory. Then all warps go through the tokens,
each with its own values of the state. A thread has consecutive keys of a few values, so it loads four keys at a time, and
sums over keys cross few lanes. Pending updates pass through the same shared memory.

The code is Gluon, Triton's language for explicit layouts, copies and synchronisation.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outrider_triton.jit.dependent import allow_next_kernel, wait_for_previous_kernel
from outrider_triton.jit.recurrent_steps import NORM_EPS, apply_update, load_pending, log_decay, sequence_of

LANES = gl.constexpr(8)
"""Number of lanes of a warp that have different keys of the same values."""
_SHARED_TOKENS = gl.constexpr(4)
"""Number of tokens in shared memory."""


@gluon.jit
def _allocate(SIZE: gl.constexpr):
    """Allocate shared memory for SIZE values of each token."""
    return gl.allocate_shared_memory(gl.float32, [_SHARED_TOKENS, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _share(memory, rows):
    """Store ``rows`` [_SHARED_TOKENS, SIZE] to :func:`_allocate`'s memory; the compiler adds the barriers."""
    memory._reinterpret(gl.float32, rows.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(rows)


@gluon.jit(do_not_specialize=["reads_early"])
def delta_rule_shared(
    mixed,
    gates,
    a_log,
    dt_bias,
    state,
    rows,
    query_start,
    seq_lens,
    pending,
    updates,
    out,
    key_width,
    value_heads,
    values_per_key,
    mixed_stride,
    gates_stride,
    reads_early,
    D: gl.constexpr,
    E: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_E: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute the results of :func:`~outrider_triton.jit.recurrent_steps.delta_rule`, from the same operands and in as many
    programs.
    """
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = BLOCK_E * LANES // (32 * WARPS)  # values of a thread
    CELLS: gl.constexpr = gl.BlockedLayout([BLOCK_D // LANES, WIDTH], [LANES, 32 // LANES], [1, WARPS], [1, 0])
    KEYS: gl.constexpr = gl.SliceLayout(1, CELLS)
    VALUES: gl.constexpr = gl.SliceLayout(0, CELLS)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])  # a warp has whole rows
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ROWS)
    allow_next_kernel(PDL)
    head, block, sequence = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    rate = gl.exp(gl.load(a_log + head).to(gl.float32))  # weights, so their loads may precede the wait
    bias = gl.load(dt_bias + head).to(gl.float32)
    if reads_early == 0:
        wait_for_previous_kernel(PDL)
    start, count, row, has_state = sequence_of(query_start, rows, seq_lens, sequence)
    d = gl.arange(0, BLOCK_D, KEYS)[:, None]
    column = gl.arange(0, BLOCK_E, VALUES)
    e = block * BLOCK_E + column
    # One address per thread and constant distances, like the other kernel.
    cells = state + (row * value_heads + head) * D * E + block * BLOCK_E + (d * E + column[None, :])
    inside = (d < D) & (e < E)[None, :]
    current = gl.load(cells, mask=inside & has_state, other=0.0).to(gl.float32)
    own = gl.arange(0, _SHARED_TOKENS, gl.SliceLayout(1, ROWS))
    key = gl.arange(0, BLOCK_D, COLUMNS)[None, :]
    value = block * BLOCK_E + gl.arange(0, BLOCK_E, COLUMNS)[None, :]
    q_lane = head // values_per_key * D + key
    v_lane = head * E + value
    keys, queries, values = _allocate(BLOCK_D), _allocate(BLOCK_D), _allocate(BLOCK_E)
    products, decays, rates = _allocate(1), _allocate(1), _allocate(1)
    if updates is not None:
        width = key_width + value_heads * (E + 1)
        held, half, new_half = load_pending(pending, row, has_state)
        factor_lane = key_width + value_heads * E + head
        kept = updates + (row * 2 + half) * TOKENS * width
        for first in range(0, held, _SHARED_TOKENS):
            is_held = first + own < held
            update = kept + (first + own) * width
            lanes = is_held[:, None] & (key < D)
            _share(keys, gl.load(update[:, None] + q_lane, mask=lanes, other=0.0))
            lanes = is_held[:, None] & (value < E)
            _share(values, gl.load(update[:, None] + (key_width + v_lane), mask=lanes, other=0.0))
            _share(decays, gl.load(update + factor_lane, mask=is_held, other=0.0)[:, None])
            for token in range(gl.minimum(held - first, _SHARED_TOKENS)):
                k, factor = keys.index(token).load(KEYS), decays.index(token).load(VALUES)[None, :]
                current = apply_update(current, k, factor, values.index(token).load(VALUES))
        current = current.to(state.dtype.element_ty).to(gl.float32)  # as if another call had written the state
        kept = updates + (row * 2 + new_half) * TOKENS * width
        update_cells = kept + key_width + head * E + e
    if reads_early != 0:
        wait_for_previous_kernel(PDL)

    if updates is not None:
        if held > 0:
            gl.store(cells, current.to(state.dtype.element_ty), mask=inside)
    place = out + (start.to(gl.int64) * value_heads + head) * E + e
    for first in range(0, count, _SHARED_TOKENS):
        is_token = first + own < count
        index = (start + first + own).to(gl.int64)
        channels = mixed + (index * mixed_stride)[:, None]
        lanes = is_token[:, None] & (key < D)
        q = gl.load(channels + q_lane, mask=lanes, other=0.0).to(gl.float32)
        k = gl.load(channels + (key_width + q_lane), mask=lanes, other=0.0).to(gl.float32)
        v = gl.load(channels + (2 * key_width + v_lane), mask=is_token[:, None] & (value < E), other=0.0).to(gl.float32)
        b = gl.load(gates + index * gates_stride + head, mask=is_token, other=0.0).to(gl.float32)
        a = gl.load(gates + index * gates_stride + value_heads + head, mask=is_token, other=0.0).to(gl.float32)
        q *= (gl.rsqrt(gl.sum(q * q, axis=1) + NORM_EPS) * (D**-0.5))[:, None]
        k *= gl.rsqrt(gl.sum(k * k, axis=1) + NORM_EPS)[:, None]
        decay = gl.exp(log_decay(a, rate, bias))
        _share(queries, q)
        _share(keys, k)
        _share(values, v)
        _share(products, gl.sum(q * k, axis=1)[:, None])
        _share(decays, decay[:, None])
        _share(rates, (1.0 / (1.0 + gl.exp(-b)))[:, None])
        if updates is not None:
            if block == 0:
                update = kept + (first + own) * width
                gl.store(update + factor_lane, decay, mask=is_token)
                if head % values_per_key == 0:
                    gl.store(update[:, None] + q_lane, k, mask=lanes)
        for token in range(gl.minimum(count - first, _SHARED_TOKENS)):
            k_own, decay_own = keys.index(token).load(KEYS), decays.index(token).load(VALUES)
            found = gl.sum(current * k_own[:, None], axis=0) * decay_own
            correction = (values.index(token).load(VALUES) - found) * rates.index(token).load(VALUES)
            read = gl.sum(current * queries.index(token).load(KEYS)[:, None], axis=0) * decay_own
            result = read + products.index(token).load(VALUES) * correction
            gl.store(place, result.to(out.dtype.element_ty), mask=e < E)
            place += value_heads * E
            current = apply_update(current, k_own, decay_own[None, :], correction)
            if updates is not None:
                gl.store(update_cells, correction, mask=e < E)
                update_cells += width
    if updates is None:
        gl.store(cells, current.to(state.dtype.element_ty), mask=inside)
