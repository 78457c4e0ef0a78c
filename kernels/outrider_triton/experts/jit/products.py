"""Mixtures of experts: routing, and the products of the experts that have a token.

With few tokens, a program finds its expert on the device and multiplies all tokens by it, but only stores the expert's own.
Each weight is read once, and nothing is sorted. With many tokens, one program per expert first sorts the token-expert pairs.
Products with quantised weights share the lookup of experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin, begin_late
from outrider_triton.products.jit.matmul import prefetch_gates, sum_of_tiles, sums_of_gates, swiglu
from outrider_triton.quantized.jit.products import scales_of, sum_of_products

PREFETCHED_COLUMNS = tl.constexpr(768)
"""Number of columns of an expert's weight that are prefetched: a program per multiprocessor then prefetches half of Hopper's
second-level cache.
"""


@triton.jit
def _in_best_groups(scores, lane, experts, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr):
    """Return ``scores``, with minus infinity outside the CHOSEN_GROUPS of GROUPS equal groups of experts whose two best
    scores have the largest sums.
    """
    LOWEST: tl.constexpr = float("-inf")
    group = lane // (experts // GROUPS)
    kept = lane < 0
    sums = tl.zeros_like(scores) + LOWEST  # of group g in lane g
    for each in tl.static_range(GROUPS):
        own = tl.where((group == each) & (lane < experts), scores, LOWEST)
        best = tl.argmax(own, axis=0)
        second = tl.max(tl.where(lane == best, LOWEST, own), axis=0)
        total = tl.max(own, axis=0) + tl.where(second == LOWEST, 0.0, second)
        sums = tl.where(lane == each, total, sums)
    for _ in tl.static_range(CHOSEN_GROUPS):
        best = tl.argmax(sums, axis=0)
        kept |= group == best
        sums = tl.where(lane == best, LOWEST, sums)
    return tl.where(kept, scores, LOWEST)


@triton.jit(do_not_specialize=["first", "last", "factor", "epsilon", "minimum"])
def route(
    logits,
    correction,
    weights,
    chosen,
    experts,
    stride,
    count,
    first,
    last,
    factor,
    epsilon,
    minimum,
    SOFTMAX: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store one token's expert weights and expert numbers, ``count`` of each: the largest of the scores of its ``experts``
    logits, in descending order; ties take the first. One program per token.

    Scores are sigmoids, or the softmax. With ``correction [experts]``, experts are chosen by the scores plus ``correction``
    from the best groups. The weights are the scores, divided by at least ``minimum`` if they are normalised, times
    ``factor``.

    Experts count from ``first``; those before it, and from ``last`` on, become -1 with weight 0.
    """
    begin(PDL)
    token = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    is_expert = lane < experts
    value = tl.load(logits + token.to(tl.int64) * stride + lane, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        value = tl.exp(value - tl.max(value, axis=0))
        value = value / tl.sum(value, axis=0)
    else:
        value = tl.sigmoid(tl.where(is_expert, value, 0.0))
    if correction is None:
        remaining = tl.where(is_expert, value, -1.0)
    else:
        remaining = value + tl.load(correction + lane, mask=is_expert, other=0.0)
        remaining = tl.where(is_expert, remaining, float("-inf"))
        if GROUPS > 1:
            remaining = _in_best_groups(remaining, lane, experts, GROUPS, CHOSEN_GROUPS)
    place = tl.arange(0, COUNT)
    shares = tl.zeros([COUNT], dtype=tl.float32)
    chosen_experts = tl.zeros([COUNT], dtype=tl.int64)
    for rank in range(count):
        # With NaN the argmax is arbitrary: clamp it to a valid expert.
        largest = tl.minimum(tl.argmax(remaining, axis=0), experts - 1)
        shares = tl.where(place == rank, tl.sum(tl.where(lane == largest, value, 0.0), axis=0), shares)
        chosen_experts = tl.where(place == rank, largest.to(tl.int64), chosen_experts)
        remaining = tl.where(lane == largest, float("-inf"), remaining)
    if RENORMALIZE:
        shares = shares / tl.maximum(tl.sum(shares, axis=0) + epsilon, minimum)
    shares *= factor
    slot_mask = place < count
    is_held = (chosen_experts >= first) & (chosen_experts < last)
    tl.store(weights + token * count + place, tl.where(is_held, shares, 0.0), mask=slot_mask)
    tl.store(chosen + token * count + place, tl.where(is_held, chosen_experts - first, -1), mask=slot_mask)


@triton.jit(do_not_specialize=["pairs", "experts", "size", "blocks"])
def lay_out_pairs(
    chosen,
    order,
    expert_of,
    pairs,
    experts,
    size,
    blocks,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store one expert's token-expert pairs in order to ``order [blocks * size]``, and its blocks to ``expert_of [blocks]``.

    A block has one expert. Empty places are -1; pairs without an expert have no place. All programs share the blocks that no
    expert uses and mark them as the last expert's. BINS is larger than ``experts``.
    """
    begin(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for at in range(0, pairs, BLOCK):
        pair_expert = tl.load(chosen + at + lane, mask=at + lane < pairs, other=experts)
        counts += tl.histogram(tl.where(pair_expert < 0, experts, pair_expert).to(tl.int32), BINS)
    bins = tl.arange(0, BINS)
    block_counts = tl.where(bins < experts, (counts + size - 1) // size, 0)  # blocks of each expert
    used = tl.sum(block_counts, axis=0)
    first = tl.sum(tl.where(bins < expert, block_counts, 0), axis=0)
    end = first + tl.sum(tl.where(bins == expert, block_counts, 0), axis=0)
    place = first * size
    for at in range(0, pairs, BLOCK):
        pair_expert = tl.load(chosen + at + lane, mask=at + lane < pairs, other=experts)
        is_own = pair_expert == expert
        tl.store(order + place + tl.cumsum(is_own.to(tl.int32), axis=0) - 1, (at + lane).to(tl.int64), mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)
    empty = tl.full([BLOCK], -1, dtype=tl.int64)
    for at in range(place, end * size, BLOCK):
        tl.store(order + at + lane, empty, mask=at + lane < end * size)
    for at in range(first, end, BLOCK):
        tl.store(expert_of + at + lane, empty + 1 + expert, mask=at + lane < end)
    for at in range(used * size + expert * BLOCK, blocks * size, experts * BLOCK):
        tl.store(order + at + lane, empty, mask=at + lane < blocks * size)
    for at in range(used + expert * BLOCK, blocks, experts * BLOCK):
        tl.store(expert_of + at + lane, empty + experts, mask=at + lane < blocks)


@triton.jit(do_not_specialize=["pairs", "experts"])
def count_pairs(chosen, counts, pairs, experts, BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Store the number of each expert's pairs among BLOCK of the token-expert pairs to ``counts [programs, BINS]``; one
    program per BLOCK. Pairs without an expert count as ``experts``; BINS is larger.
    """
    begin(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair_expert = tl.load(chosen + at, mask=at < pairs, other=experts)
    found = tl.histogram(tl.where(pair_expert < 0, experts, pair_expert).to(tl.int32), BINS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["pairs", "experts", "size", "blocks"])
def place_pairs(
    chosen,
    counts,
    expert_of,
    places,
    blocks_used,
    pairs,
    experts,
    size,
    blocks,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Give token-expert pairs places in blocks of ``size`` with one expert each, in order; one program per BLOCK pairs.

    ``counts`` is the result of :func:`count_pairs`. Store each pair's place to ``places [pairs]``, each block's expert to
    ``expert_of [blocks]``, and the number of blocks with an expert to ``blocks_used``; pairs without an expert have no place.
    PIECE rows of counts, and PIECE pairs, are loaded at a time.
    """
    begin(PDL)
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, PIECE)
    at = program * BLOCK + tl.arange(0, BLOCK)
    pair_expert = tl.load(chosen + at, mask=at < pairs, other=-1).to(tl.int32)
    total = tl.zeros([BINS], dtype=tl.int32)
    before = tl.zeros([BINS], dtype=tl.int32)
    for others in range(0, tl.num_programs(0), PIECE):
        other = (others + lane)[:, None]
        found = tl.load(counts + other * BINS + bins[None, :], mask=other < tl.num_programs(0), other=0)
        total += tl.sum(found, axis=0)
        before += tl.sum(tl.where(other < program, found, 0), axis=0)
    block_counts = tl.where(bins < experts, (total + size - 1) // size, 0)
    ends = tl.cumsum(block_counts, axis=0)
    if program == 0:
        tl.store(blocks_used, tl.sum(block_counts, axis=0).to(tl.int64))
    for block in range(program * PIECE, blocks, tl.num_programs(0) * PIECE):
        is_later = (ends[None, :] <= (block + lane)[:, None]) & (bins < experts)[None, :]
        own = tl.minimum(tl.sum(is_later.to(tl.int32), axis=1), experts - 1)
        tl.store(expert_of + block + lane, own.to(tl.int64), mask=block + lane < blocks)
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for piece in tl.static_range(0, BLOCK, PIECE):  # unrolled, so that all loads are in flight
        other_at = program * BLOCK + piece + lane
        other_expert = tl.load(chosen + other_at, mask=other_at < pairs, other=-1).to(tl.int32)
        is_earlier = (other_expert[None, :] == pair_expert[:, None]) & (other_at[None, :] < at[:, None])
        rank += tl.sum(is_earlier.to(tl.int32), axis=1)
    starts = (ends - block_counts) * size + before
    place = tl.gather(starts, tl.maximum(pair_expert, 0), 0) + rank
    tl.store(places + at, place.to(tl.int64), mask=(at < pairs) & (pair_expert >= 0))


@triton.jit
def gather_pairs(x, chosen, places, out, count, n, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy each token's row of ``x [m, n]`` to the places of its ``count`` pairs in ``out [places, n]``; one program per
    (token, block of columns). Empty places are not written.

    The kernel begins late (:func:`outrider_triton.jit.dependent.begin_late`), so that the next kernel can read the blocks'
    experts at once.
    """
    begin_late(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    row = tl.load(x + token.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
    for slot in range(count):
        pair = (token * count + slot).to(tl.int64)
        has_expert = tl.load(chosen + pair) >= 0
        place = tl.load(places + pair, mask=has_expert, other=0)
        tl.store(out + place * n + column, row, mask=inside & has_expert)


@triton.jit
def _nth_expert(chosen, nth, pairs, PAIRS: tl.constexpr):
    """Return the ``nth`` distinct expert in the order of the token-expert pairs; -1 if there are fewer."""
    pair = tl.arange(0, PAIRS)
    name = tl.load(chosen + pair, mask=pair < pairs, other=-1)
    other = tl.load(chosen + pair, mask=pair < pairs, other=-2)
    is_repeated = (name[:, None] == other[None, :]) & (pair[None, :] < pair[:, None])
    first = (tl.max(is_repeated.to(tl.int32), axis=1) == 0) & (pair < pairs)
    place = tl.cumsum(first.to(tl.int32), axis=0) - 1
    return tl.max(tl.where(first & (place == nth), name, -1), axis=0)


@triton.jit
def own_pairs(
    chosen,
    order,
    expert_of,
    m,
    count,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return the expert of a program (tile of rows, block), and the indices of its token-expert pairs, -1 for none."""
    block = tl.program_id(1)
    lane = tl.arange(0, BLOCK_M)
    if SORTED:
        pairs = tl.load(order + block * BLOCK_M + lane)
        expert = tl.load(expert_of + block)
    else:
        expert = _nth_expert(chosen, block, m * count, PAIRS) if PAIRS else block.to(tl.int64)
        slot = tl.arange(0, COUNT)
        token_experts = tl.load(
            chosen + lane[:, None] * count + slot[None, :], mask=(lane < m)[:, None] & (slot < count)[None, :], other=-2
        )
        own_slot = tl.max(tl.where(token_experts == expert, slot[None, :], -1), axis=1)
        pairs = tl.where(own_slot >= 0, lane * count + own_slot, -1).to(tl.int64)
    expert = tl.where(tl.max(pairs, axis=0) >= 0, expert, -1)
    return expert, pairs


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Compute ``(up + 1) * gate * sigmoid(ALPHA * gate)``, with ``gate`` at most LIMIT and ``up`` within LIMIT of 0."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))


@triton.jit
def _gelu_mul(gate, up, out_type: tl.constexpr):
    """Compute the GELU of ``gate``, approximated by a hyperbolic tangent, times ``up``, rounded where the reference rounds.

    ``(1 + tanh(z)) / 2`` is ``sigmoid(2 z)``.
    """
    TWICE_ROOT: tl.constexpr = 1.5957691216057308  # twice the square root of 2 / pi
    gate = gate.to(out_type).to(tl.float32)
    twice = TWICE_ROOT * (gate + 0.044715 * gate * gate * gate)
    gate = (gate / (1.0 + tl.exp(-twice))).to(out_type).to(tl.float32)
    return (gate * up.to(out_type).to(tl.float32)).to(out_type)


@triton.jit(do_not_specialize=["m", "prefetched"])
def expert_gates(
    x,
    chosen,
    order,
    expert_of,
    weight,
    bias,
    out,
    m,
    count,
    n,
    k,
    x_stride,
    prefetched,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GELU: tl.constexpr,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store SwiGLU of ``x [m, k]`` with each pair's expert, ``weight [experts, 2 n, k]`` (gate, then up), to ``out [pairs,
    n]``. If GELU, the activation is that of :func:`_gelu_mul`. With ``bias [experts, 2 n]``, which is added before, it is
    that of :func:`_clamped`.

    The kernel begins late (:func:`outrider_triton.jit.dependent.begin_late`), so that the next kernel can read the pairs'
    experts at once. While tokens are still routed, the first programs prefetch columns of the first ``prefetched`` experts'
    weights, as if each expert had one block.
    """
    if PDL:
        if tl.program_id(1) < prefetched:
            lane = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
            prefetch_gates(weight + tl.program_id(1).to(tl.int64) * 2 * n * k, lane, n, k, tl.minimum(k, PREFETCHED_COLUMNS))
    begin_late(PDL)
    expert, pairs = own_pairs(chosen, order, expert_of, m, count, SORTED, PAIRS, COUNT, BLOCK_M)
    if expert >= 0:
        pair_mask = pairs >= 0
        column_mask = pair_mask[None, :]  # before the loops: after them, one compiler release looks for it inside
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = rows < n
        lane = tl.arange(0, BLOCK_K)
        gates = weight + (expert * 2 * n + rows).to(tl.int64)[:, None] * k + lane[None, :]
        ups = gates + tl.cast(n, tl.int64) * k
        column = x + tl.where(pair_mask, pairs // count, 0)[None, :] * x_stride + lane[:, None]
        if bias is not None:  # before the loop, as the mask
            gate_bias = tl.load(bias + expert * 2 * n + rows, mask=row_mask, other=0.0).to(tl.float32)
            up_bias = tl.load(bias + (expert * 2 + 1) * n + rows, mask=row_mask, other=0.0).to(tl.float32)
        gate, up = sums_of_gates(gates, ups, column, row_mask, pair_mask, k, BLOCK_N, BLOCK_M, BLOCK_K, EVEN)
        address = out + tl.where(pair_mask, pairs, 0)[None, :] * n + rows[:, None]
        if bias is not None:
            activated = _clamped(gate + gate_bias[:, None], up + up_bias[:, None], LIMIT, ALPHA).to(out.dtype.element_ty)
        elif GELU:
            activated = _gelu_mul(gate, up, out.dtype.element_ty)
        else:
            activated = swiglu(gate, up, out.dtype.element_ty)
        tl.store(address, activated, mask=column_mask & row_mask[:, None])


@triton.jit(do_not_specialize=["m"])
def expert_outputs(
    x,
    shares,
    chosen,
    order,
    expert_of,
    weight,
    bias,
    out,
    m,
    count,
    n,
    k,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply each pair's ``x [pairs, k]`` by its expert's ``weight [experts, n, k]``, add its ``bias [experts, n]`` unless
    that is None, and multiply by its share, into ``out [pairs, n]``.

    The kernel follows :func:`expert_gates`, which begins late, so it reads the pairs' experts while that kernel still runs.
    """
    expert, pairs = own_pairs(chosen, order, expert_of, m, count, SORTED, PAIRS, COUNT, BLOCK_M)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin(PDL)
    if expert >= 0:
        pair_mask = pairs >= 0
        column_mask = pair_mask[None, :]  # before the loops: after them, one compiler release looks for it inside
        row_mask = rows < n
        lane = tl.arange(0, BLOCK_K)
        tile = weight + (expert * n + rows).to(tl.int64)[:, None] * k + lane[None, :]
        column = x + tl.where(pair_mask, pairs, 0)[None, :] * k + lane[:, None]
        share = tl.load(shares + tl.where(pair_mask, pairs, 0), mask=pair_mask, other=0.0)
        if bias is not None:
            row_bias = tl.load(bias + expert * n + rows, mask=row_mask, other=0.0).to(tl.float32)
        total = sum_of_tiles(tile, column, None, row_mask, pair_mask, 0, 0, k, BLOCK_N, BLOCK_M, BLOCK_K, EVEN)
        if bias is not None:
            total += row_bias[:, None]
        total *= share[None, :]
        address = out + tl.where(pair_mask, pairs, 0)[None, :] * n + rows[:, None]
        tl.store(address, total.to(out.dtype.element_ty), mask=column_mask & row_mask[:, None])


@triton.jit
def add_experts(parts, weights, chosen, places, out, count, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Sum a token's ``count`` rows of ``parts`` in order and in float32 into its row of ``out [m, n]``; one program per
    (token, block of columns). No row is read of a pair without an expert.

    Without ``places``, pair p's row is row p of ``parts [pairs, n]``, multiplied by the pair's weight already. With
    ``places``, the row is at the pair's place, and is multiplied by the pair's weight here.
    """
    begin(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(count):
        pair = (token * count + slot).to(tl.int64)
        has_expert = tl.load(chosen + pair) >= 0
        if places is not None:
            place = tl.load(places + pair, mask=has_expert, other=0)
            part = tl.load(parts + place * n + column, mask=inside & has_expert, other=0.0).to(tl.float32)
            total += part * tl.load(weights + pair)
        else:
            total += tl.load(parts + pair * n + column, mask=inside & has_expert, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * n + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate_pairs(
    gate_up,
    chosen,
    out,
    n,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store :func:`_clamped` of a chunk of a pair's row of ``gate_up [pairs, 2 n]`` to ``out [pairs, n]``, or if GELU
    :func:`_gelu_mul`; one program per (pair, chunk). Pairs without an expert have no result.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (lane < n) & (tl.load(chosen + row) >= 0)
    gate = tl.load(gate_up + row * 2 * n + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + lane, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        activated = _gelu_mul(gate, up, out.dtype.element_ty)
    else:
        activated = _clamped(gate, up, LIMIT, ALPHA).to(out.dtype.element_ty)
    tl.store(out + row * n + lane, activated, mask=inside)


@triton.jit(do_not_specialize=["m"])
def expert_quantized(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    bias,
    shares,
    chosen,
    order,
    expert_of,
    out,
    m,
    count,
    n,
    k,
    x_stride,
    x_groups,
    scale_columns,
    BY_PAIR: tl.constexpr,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    NATIVE: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    ASM: tl.constexpr,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply by an expert's quantised ``weight [experts * n, k]`` into ``out [pairs, n]``, and add its ``bias [experts,
    n]`` unless that is None.

    BY_PAIR: a row of ``x`` belongs to a token-expert pair, and the result is multiplied by the pair's share; else a row
    belongs to a token. Other operands are those of :func:`outrider_triton.quantized.jit.products.linear_quantized`.
    """
    begin(PDL)
    expert, pairs = own_pairs(chosen, order, expert_of, m, count, SORTED, PAIRS, COUNT, BLOCK_M)
    if expert >= 0:
        WIDE: tl.constexpr = 2 if PACKED else 1
        pair_mask = pairs >= 0
        column_mask = pair_mask[None, :]
        source = tl.where(pair_mask, pairs if BY_PAIR else pairs // count, 0)
        row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = row < n
        rows = expert * n + tl.minimum(row, n - 1)
        row_bytes = k // WIDE
        lane = tl.arange(0, SUB // WIDE)
        tile = weight + rows.to(tl.int64)[:, None] * row_bytes + lane[None, :]
        if WIDE == 2:
            column = x.to(tl.pointer_type(tl.int32)) + source.to(tl.int64)[None, :] * (x_stride // 2) + lane[:, None]
        else:
            column = x + source.to(tl.int64)[None, :] * x_stride + lane[:, None]
        first_scale = (rows // ROWS) * scale_columns
        # Loaded before the loop: one compiler release fails to lower these loads after it.
        factor = tl.where(pair_mask, 1.0, 0.0)
        if x_scales is not None and not GROUP:
            factor *= tl.load(x_scales + source, mask=pair_mask, other=0.0)
        if BY_PAIR:
            share = tl.load(shares + source, mask=pair_mask, other=0.0)
        if MODE == "row":
            row_scale = scales_of(tl.load(scales + first_scale, mask=row_mask, other=0))
        if bias is not None:
            row_bias = tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)
        weights = tile, row_mask, scales, first_scale, zeros, scale_columns, row_bytes
        activations = column, pair_mask, source, x_scales, x_groups
        total = sum_of_products(
            weights, activations, 0, k, x.dtype.element_ty, PACKED, FLOAT, NATIVE, MODE, COLUMNS, GROUP, FP8, ASM,
            BLOCK_M, BLOCK_N, BLOCK_K, SUB, EVEN,
        )  # fmt: skip
        if MODE == "row":
            total *= row_scale[:, None]
        total *= factor[None, :]
        if bias is not None:
            total += row_bias[:, None]
        if BY_PAIR:
            total *= share[None, :]
        address = out + tl.where(pair_mask, pairs, 0)[None, :] * n + row[:, None]
        tl.store(address, total.to(out.dtype.element_ty), mask=column_mask & row_mask[:, None])
