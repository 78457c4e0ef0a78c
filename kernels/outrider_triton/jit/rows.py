"""Kernels with one token or row per program: norms, SwiGLU, rotation with the cache write, and row copies."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin, prefetch_lines
from outrider_triton.quantized.jit.nibble_planes import store_in_planes


@triton.jit
def norm(wide, weight, out_type: tl.constexpr, size, eps):
    """Return the RMS norm of one row ``wide`` (float32), rounded as the reference rounds it: before the weight and after it.

    A weight in another dtype than the result is wider, and multiplies what isn't rounded yet.
    """
    mean = tl.sum(wide * wide, axis=0) / size
    normed = wide * tl.rsqrt(mean + eps)
    if weight.dtype == out_type:
        normed = normed.to(out_type).to(tl.float32)
    return (weight.to(tl.float32) * normed).to(out_type)


@triton.jit(do_not_specialize=["inner"])
def rms_norm(x, weight, out, eps, size, inner, stride_outer, stride_inner, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Store the RMS norm of row r of ``x`` [..., size], at (r // inner, r % inner), to the contiguous ``out``, with
    ``weight`` [size]; one program per row.
    """
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    scale = tl.load(weight + lane, mask=inside, other=0.0)  # a weight, so its load may precede the wait
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    wide = tl.load(x + (row // inner) * stride_outer + (row % inner) * stride_inner + lane, mask=inside, other=0.0)
    tl.store(out + row * size + lane, norm(wide.to(tl.float32), scale, out.dtype.element_ty, size, eps), mask=inside)


@triton.jit
def add_row(
    x,
    bias,
    residual,
    row,
    size,
    part_stride,
    x_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for the preceding kernel, compute ``residual += sum of x's parts (+ bias)`` in row ``row``, and return that row in
    the residual's dtype. The sum of parts in 16 bits is rounded to these first.
    """
    lane = tl.arange(0, BLOCK)
    mask = lane < size
    if PDL and BLOCK >= 16:
        # Weights have evicted the residual since the last product used it. One of 16 elements addresses each memory sector.
        prefetch_lines(residual + row * size + tl.minimum(tl.arange(0, BLOCK // 16) * 16, size - 1))
    begin(PDL)
    address = x + row * x_stride + lane
    total = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(address + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 1:
        total = total.to(x.dtype.element_ty).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + lane, mask=mask, other=0.0).to(tl.float32)
    updated = total + tl.load(residual + row * size + lane, mask=mask, other=0.0).to(tl.float32)
    updated = updated.to(residual.dtype.element_ty)
    tl.store(residual + row * size + lane, updated, mask=mask)
    return updated


@triton.jit
def add_gated(value, part, x, weight, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Add row r of ``part`` [rows, size], times the sigmoid of the product of row r of ``x`` [rows, size] and ``weight``
    [size], to row r of ``value`` [rows, size], with the rounding of the reference; one program per row.
    """
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    factors = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)  # a weight, so its load may precede the wait
    begin(PDL)
    kind: tl.constexpr = value.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * size + lane
    gate = tl.sum(tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factors, axis=0).to(kind).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    added = (tl.load(part + at, mask=inside, other=0.0).to(tl.float32) * share).to(kind).to(tl.float32)
    total = tl.load(value + at, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(value + at, total.to(kind), mask=inside)


@triton.jit(do_not_specialize=["part_stride"])
def add_rms_norm(
    x,
    bias,
    residual,
    weight,
    out,
    grains,
    eps,
    size,
    part_stride,
    x_stride,
    stride,
    PARTS: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ``residual [rows, size] += sum of x's parts (+ bias)``, then store the RMS norm of the row to ``out``; one
    program per row. Parts are those of a split matrix product, or the results of a token's experts.

    PLANES: store the norm like :func:`outrider_triton.quantized.jit.nibble_planes.store_in_planes`, with or without
    ``grains``.
    """
    lane = tl.arange(0, BLOCK)
    mask = lane < size
    scale = tl.load(weight + lane, mask=mask, other=0.0)
    row = tl.program_id(0).to(tl.int64)
    updated = add_row(x, bias, residual, row, size, part_stride, x_stride, PARTS, BLOCK, PDL)
    normed = norm(updated.to(tl.float32), scale, residual.dtype.element_ty, size, eps)
    if PLANES:
        store_in_planes(out, grains, row, 0, normed, size, stride, BLOCK)
    else:
        tl.store(out + row * stride + lane, normed, mask=mask)


@triton.jit
def silu_mul(gate_up, out, grains, size, stride, PLANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Store SwiGLU of a chunk of a row of ``gate_up`` [rows, 2 size] to ``out`` [rows, size]; one program per (row, chunk).
    PLANES: as in :func:`add_rms_norm`.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    begins = tl.program_id(1) * BLOCK
    lane = begins + tl.arange(0, BLOCK)
    inside = lane < size
    gate = tl.load(gate_up + row * 2 * size + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + lane, mask=inside, other=0.0)
    gate = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    gated = (gate * up.to(tl.float32)).to(up.dtype)
    if PLANES:
        store_in_planes(out, grains, row, begins, gated, size, stride, BLOCK)
    else:
        tl.store(out + row * stride + lane, gated, mask=inside)


@triton.jit
def nearest_e4m3(value):
    """Return ``value`` rounded to the nearest e4m3 value, as float32: the step is an eighth of the next lower power of two,
    and at least 2**-9.
    """
    exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    shift = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)  # 1.5 * 2**23 steps
    return (value + shift) - shift


@triton.jit
def as_cached(x, cache):
    """Return ``x`` in the dtype of ``cache``: e4m3 values are clamped to the format's range as in the reference, and NaN
    stays NaN.
    """
    if cache.dtype.element_ty == tl.float8e4nv:
        wide = x.to(tl.float32)
        wide = tl.where(wide > 448.0, 448.0, wide)
        wide = tl.where(wide < -448.0, -448.0, wide)
        return nearest_e4m3(wide).to(tl.float8e4nv)  # exact, since the interpreter rounds incorrectly
    else:
        return x


@triton.jit
def _rotate(heads, first, second, cos_low, sin_low, cos_high, sin_high, mask):
    """Rotate the elements ``first`` and ``second`` of some ``heads`` in place, and return them."""
    low = tl.load(heads + first, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(heads + second, mask=mask, other=0.0).to(tl.float32)
    rotated_low = (low * cos_low - high * sin_low).to(heads.dtype.element_ty)
    rotated_high = (high * cos_high + low * sin_high).to(heads.dtype.element_ty)
    tl.store(heads + first, rotated_low, mask=mask)
    tl.store(heads + second, rotated_high, mask=mask)
    return rotated_low, rotated_high


@triton.jit
def _pairs(pair, half, rotated):
    """Return the elements of a head that rotate together. Those after the first 2 ``rotated`` are paired in order; they keep
    their values.
    """
    return tl.where(pair < rotated, pair, pair + rotated), tl.where(pair < rotated, pair + rotated, pair + half)


@triton.jit
def rope_write_cache(
    q,
    k,
    v,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    heads,
    kv_heads,
    half,
    rotated,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    angles_token,
    cache_slot,
    cache_head,
    PARTLY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate one token's queries and keys in place, and write its keys and values to its cache slot; one program per token.
    Strides are in elements; ``cache_slot`` is that of a slot. If PARTLY, the first 2 ``rotated`` elements of a head rotate.
    """
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = pair < half
    first, second = pair, pair + half
    if PARTLY:
        first, second = _pairs(pair, half, rotated)
    angle = token * angles_token + pair
    cos_low, sin_low, cos_high, sin_high = _load_angles(cos, sin, angle, angle + rotated, pair < rotated)

    head = tl.arange(0, BLOCK_Q)[:, None]
    queries = q + token * q_token + head * q_head
    _rotate(queries, first, second, cos_low, sin_low, cos_high, sin_high, inside & (head < heads))

    head = tl.arange(0, BLOCK_KV)[:, None]
    mask = inside & (head < kv_heads)
    keys = k + token * k_token + head * k_head
    low, high = _rotate(keys, first, second, cos_low, sin_low, cos_high, sin_high, mask)
    place = tl.load(slots + token) * cache_slot + head * cache_head
    _store_halves(k_cache, place, first, second, low, high, mask)
    values = v + token * v_token + head * v_head
    low = tl.load(values + first, mask=mask, other=0.0)
    high = tl.load(values + second, mask=mask, other=0.0)
    _store_halves(v_cache, place, first, second, low, high, mask)


@triton.jit
def _load_angles(cos, sin, low, high, mask):
    """Load the cosines and sines ``low`` and ``high`` of a token in float32; the angle is 0 outside the mask."""
    cos_low = tl.load(cos + low, mask=mask, other=1.0).to(tl.float32)
    sin_low = tl.load(sin + low, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + high, mask=mask, other=1.0).to(tl.float32)
    sin_high = tl.load(sin + high, mask=mask, other=0.0).to(tl.float32)
    return cos_low, sin_low, cos_high, sin_high


@triton.jit
def _store_halves(cache, place, first, second, low, high, mask):
    """Store both halves of heads to the elements ``first`` and ``second`` at ``place`` in ``cache``, in its dtype."""
    tl.store(cache + place + first, as_cached(low, cache), mask=mask)
    tl.store(cache + place + second, as_cached(high, cache), mask=mask)


@triton.jit
def _norm_factors(q_norm, k_norm, element, mask, is_query):
    """Load the norm weights of the elements ``element`` of a head, of queries where ``is_query`` and of keys elsewhere."""
    of_queries = tl.load(q_norm + element, mask=mask, other=0.0).to(tl.float32)
    of_keys = tl.load(k_norm + element, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_query, of_queries, of_keys)


@triton.jit
def _normalise_heads(low, high, low_factor, high_factor, size, eps, norm_type: tl.constexpr, out_type: tl.constexpr):
    """Return both halves of each head, divided by its root mean square and multiplied by the factors of its norm, in float32.

    Values are rounded where the reference rounds: a weight of a wider type multiplies what isn't rounded yet.
    """
    scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / size + eps)[:, None]
    low *= scale
    high *= scale
    if norm_type == out_type:
        low = low.to(out_type).to(tl.float32)
        high = high.to(out_type).to(tl.float32)
    return (low * low_factor).to(out_type).to(tl.float32), (high * high_factor).to(out_type).to(tl.float32)


@triton.jit(do_not_specialize=["part_stride"])
def add_parts_rope_write_cache(
    parts,
    bias,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    q,
    k_cache,
    v_cache,
    slots,
    heads,
    kv_heads,
    half,
    rotated,
    token_stride,
    part_stride,
    angles_token,
    cache_slot,
    cache_head,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute :func:`rope_write_cache` on the sum of ``parts [PARTS, m, (heads + 2 kv_heads) 2 half]`` (+ bias), rounded to
    q's dtype; one program per (token, HEADS heads). Queries go to ``q [m, heads, 2 half]``. With norms, queries and keys are
    normalised per head before the rotation, with ``q_norm`` and ``k_norm [2 half]``. The first 2 ``rotated`` elements of a
    head rotate.
    """
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_query = head < heads
    is_rotated = head < heads + kv_heads
    inside = (pair < half) & (head < heads + 2 * kv_heads)
    first, second = _pairs(pair, half, rotated)
    if q_norm is not None:  # weights, so their loads may precede the wait
        is_element = pair < half
        low_factor = _norm_factors(q_norm, k_norm, first, is_element, is_query)
        high_factor = _norm_factors(q_norm, k_norm, second, is_element, is_query)
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    angle = token * angles_token + pair
    cos_low, sin_low, cos_high, sin_high = _load_angles(cos, sin, angle, angle + rotated, pair < rotated)
    source = parts + token * token_stride + head * (2 * half)
    low = tl.zeros([HEADS, BLOCK_HALF], dtype=tl.float32)
    high = tl.zeros([HEADS, BLOCK_HALF], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        low += tl.load(source + part * part_stride + first, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(source + part * part_stride + second, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        low += tl.load(bias + head * (2 * half) + first, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + head * (2 * half) + second, mask=inside, other=0.0).to(tl.float32)
    # Rounded where the reference rounds: after the product and after the rotation. Values are rounded and copied.
    value_low = low.to(q.dtype.element_ty)
    value_high = high.to(q.dtype.element_ty)
    low = value_low.to(tl.float32)
    high = value_high.to(tl.float32)
    if q_norm is not None:
        norm_type: tl.constexpr = q_norm.dtype.element_ty
        low, high = _normalise_heads(low, high, low_factor, high_factor, 2 * half, eps, norm_type, q.dtype.element_ty)
    rotated_low = (low * cos_low - high * sin_low).to(q.dtype.element_ty)
    rotated_high = (high * cos_high + low * sin_high).to(q.dtype.element_ty)

    queries = inside & is_query
    place = q + (token * heads + head) * (2 * half)
    tl.store(place + first, rotated_low, mask=queries)
    tl.store(place + second, rotated_high, mask=queries)
    keys = inside & is_rotated & (head >= heads)
    key = slot * cache_slot + (head - heads) * cache_head
    _store_halves(k_cache, key, first, second, rotated_low, rotated_high, keys)
    values = inside & (head >= heads + kv_heads)
    value = slot * cache_slot + (head - heads - kv_heads) * cache_head
    _store_halves(v_cache, value, first, second, value_low, value_high, values)


@triton.jit(do_not_specialize=["moves"])
def move_cache(
    k_cache,
    v_cache,
    sources,
    destinations,
    moves,
    k_size,
    v_size,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Move the cache rows ``sources`` to ``destinations``; one program per block of columns. A program reads all rows before
    it writes any. Rows of keys have ``k_size`` elements, those of values ``v_size``.
    """
    begin(PDL)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    move = tl.arange(0, MOVES)
    source = tl.load(sources + move, mask=move < moves, other=0)[:, None]
    destination = tl.load(destinations + move, mask=move < moves, other=0)[:, None]
    is_move = (move < moves)[:, None]
    keys = tl.load(k_cache + source * k_size + lane, mask=(lane < k_size) & is_move, other=0.0)
    values = tl.load(v_cache + source * v_size + lane, mask=(lane < v_size) & is_move, other=0.0)
    tl.debug_barrier()  # another thread's source row may be this thread's destination
    tl.store(k_cache + destination * k_size + lane, keys, mask=(lane < k_size) & is_move)
    tl.store(v_cache + destination * v_size + lane, values, mask=(lane < v_size) & is_move)


@triton.jit
def gather_rows(state, rows, out, size, state_row, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy a chunk of row ``rows[i]`` of ``state`` [R, size], with rows ``state_row`` elements apart, to row i of ``out``
    [B, size]; one program per (i, chunk).
    """
    begin(PDL)
    index = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index)
    tl.store(out + index * size + lane, tl.load(state + row * state_row + lane, mask=lane < size), mask=lane < size)


@triton.jit
def copy_rows(source, out, size, source_row, out_row, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy a chunk of a row of ``size`` elements from ``source`` to ``out``, with strides ``source_row`` and ``out_row`` in
    elements; one program per (row, chunk).
    """
    begin(PDL)
    index = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + index * source_row + lane, mask=lane < size)
    tl.store(out + index * out_row + lane, values, mask=lane < size)


@triton.jit
def scatter_rows(state, rows, values, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write a chunk of row i of ``values`` [B, size] to row ``rows[i]`` of ``state`` [R, size]; one program per (i, chunk).
    Row 0 is reserved and isn't written.
    """
    begin(PDL)
    index = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index)
    mask = (lane < size) & (row > 0)
    tl.store(state + row * size + lane, tl.load(values + index * size + lane, mask=mask), mask=mask)
