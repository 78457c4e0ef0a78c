"""Kernels between the passes of an iteration: one program per request moves a few integers."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin


@triton.jit
def gather_requests(
    rows,
    lens,
    last_tokens,
    seeds,
    temperature,
    tables,
    own_rows,
    own_lens,
    own_last_tokens,
    own_seeds,
    own_temperature,
    own_tables,
    found,
    pages,
    found_width,
    found_stride,
    LENS_BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    FOUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy one request's row of state to the iteration's own tensors; one program per request. BLOCK of the ``pages``
    block-table entries are copied at a time.
    """
    begin(PDL)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    tl.store(own_rows + request, row)
    if LENS_BY_ROW:
        tl.store(own_lens + request, tl.load(lens + row))
    else:
        tl.store(own_lens + request, tl.load(lens + request))
    tl.store(own_last_tokens + request, tl.load(last_tokens + row))
    tl.store(own_seeds + request, tl.load(seeds + row))
    tl.store(own_temperature + request, tl.load(temperature + row))
    lane = tl.arange(0, BLOCK)
    for start in range(0, pages, BLOCK):
        inside = start + lane < pages
        page = tl.load(tables + row * pages + start + lane, mask=inside)
        tl.store(own_tables + request.to(tl.int64) * pages + start + lane, page, mask=inside)
    column = tl.arange(0, FOUND)
    none = tl.full([FOUND], -1, dtype=tl.int64)
    tl.store(found + request * found_stride + column, none, mask=column < found_width)


@triton.jit
def _is_nan(value):
    wide = value.to(tl.float32)
    return wide != wide


@triton.jit
def _least_bad_lane(bad, lane, first):
    """Return the lowest index in ``lane`` where ``bad`` is True, or ``first`` if that is lower."""
    return tl.minimum(first, tl.min(tl.where(bad, lane, 0x7FFFFFFF), axis=0))


@triton.jit
def gather_checked(
    source,
    rows,
    low,
    high,
    out,
    found,
    size,
    found_stride,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy one row of ``size`` elements to ``out``, and store the index and value of its first invalid element to ``found``;
    one program per row.

    NUMBERS: NaN is invalid. Otherwise values below ``low``, or not below ``high``, are.
    """
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = request
    if rows is not None:
        row = tl.load(rows + request)
    first = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
    for start in range(0, size, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        value = tl.load(source + row * size + lane, mask=lane < size, other=low)
        if NUMBERS:
            first = _least_bad_lane(_is_nan(value), lane, first)
            tl.store(out + request * size + lane, value, mask=lane < size)
        else:
            first = _least_bad_lane(((value < low) | (value >= high)) & (lane < size), lane, first)
    bad = first < 0x7FFFFFFF
    value_found = tl.full([], -1, dtype=tl.int64)
    if not NUMBERS:
        value_found = tl.load(source + row * size + first, mask=bad, other=-1).to(tl.int64)
        for start in range(0, size, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            value = tl.load(source + row * size + lane, mask=lane < size, other=low)
            tl.store(out + request * size + lane, tl.where(bad, low, value), mask=lane < size)
    tl.store(found + request * found_stride, tl.where(bad, first, -1).to(tl.int64))
    tl.store(found + request * found_stride + 1, value_found)


@triton.jit
def partial_nan(x, firsts, size, SHARES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Store the index of the first NaN in a share of a row of ``x`` [rows, size] to ``firsts`` [rows, SHARES]; one program
    per (row, share).
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    span = tl.cdiv(tl.cdiv(size, SHARES), BLOCK) * BLOCK
    first = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
    for start in range(share * span, tl.minimum(share * span + span, size), BLOCK):
        lane = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * size + lane, mask=lane < size, other=0.0)
        first = _least_bad_lane(_is_nan(value), lane, first)
    tl.store(firsts + row * SHARES + share, first)


@triton.jit
def reduce_nan(firsts, found, found_stride, SHARES: tl.constexpr, PDL: tl.constexpr):
    """Store to ``found`` the index of a row's first NaN, or -1, and then -1 as its value; one program per row."""
    begin(PDL)
    row = tl.program_id(0)
    first = tl.min(tl.load(firsts + row * SHARES + tl.arange(0, SHARES)), axis=0)
    tl.store(found + row * found_stride, tl.where(first < 0x7FFFFFFF, first, -1).to(tl.int64))
    tl.store(found + row * found_stride + 1, tl.full([], -1, dtype=tl.int64))


@triton.jit(
    do_not_specialize=["position_request", "position_token", "slot_request", "slot_token", "end_request", "end_token"]
)  # strides depend on the batch
def place_tokens(
    lens,
    tables,
    positions,
    slots,
    seq_lens,
    count,
    ends,
    pages,
    page_size,
    last,
    position_request,
    position_token,
    slot_request,
    slot_token,
    end_request,
    end_token,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute positions, cache slots and lengths of one request's ``count`` tokens after its cached ones; one program per
    request. The last ``ends`` tokens also store cached lengths.
    """
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    mask = token < count
    cache_position = tl.load(lens + request) + token
    index = cache_position // page_size
    page = tl.load(tables + request * pages + index, mask=mask & (index < pages), other=0).to(tl.int64)
    tl.store(slots + request * slot_request + token * slot_token, page * page_size + cache_position % page_size, mask=mask)
    tl.store(positions + request * position_request + token * position_token, tl.minimum(cache_position, last), mask=mask)
    end = token - (count - ends)
    cached = tl.minimum(cache_position + 1, pages * page_size).to(tl.int32)
    tl.store(seq_lens + request * end_request + end * end_token, cached, mask=mask & (end >= 0))


@triton.jit
def publish_accepted(
    rows,
    lens,
    tokens,
    accepted,
    lengths,
    last_tokens,
    results,
    own_tokens,
    own_accepted,
    pending,
    path,
    results_stride,
    tokens_stride,
    accepted_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write one request's ``path`` tokens, accepted count and new length to the state rows and results; one program per
    request. The accepted tokens may be columns of a wider tensor. ``pending`` counts them in the other half of the window.
    """
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    count = tl.load(accepted + request * accepted_stride)
    decided = tl.load(tokens + request * tokens_stride + count)
    length = tl.load(lens + request) + count + 1
    tl.store(lengths + row, tl.where(row > 0, length, 0))
    tl.store(last_tokens + row, tl.where(row > 0, decided, 0))
    tl.store(results + request * results_stride, count)
    tl.store(own_accepted + request, count)
    if pending is not None:
        held = tl.where(tl.load(pending + row) > 0, -1 - count, count + 1)
        tl.store(pending + row, tl.where(row > 0, held, 0))
    lane = tl.arange(0, BLOCK)
    token = tl.load(tokens + request * tokens_stride + lane, mask=lane < path)
    tl.store(results + request * results_stride + 1 + lane, token, mask=lane < path)
    tl.store(own_tokens + request * path + lane, token, mask=lane < path)


@triton.jit
def place_accepted(lens, tokens, accepted, following, last, positions, path, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute the draft pass's tokens and positions from one request's ``path`` accepted tokens; one program per request."""
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(accepted + request)
    lane = tl.arange(0, BLOCK)
    token = tl.load(tokens + request * path + lane, mask=lane < path, other=0)
    tl.store(following + request * path + lane, tl.maximum(token, 0), mask=lane < path)
    tl.store(last + request, request * path + count)
    tl.store(positions + request, tl.load(lens + request) + count + 2)


@triton.jit
def embed_beside(tokens, weight, hidden, out, size, hidden_size, hidden_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write a token's embedding (``size`` columns) and hidden state (``hidden_size`` columns) side by side to its row of
    ``out``; one program per (token, chunk of columns).
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    embedded = tl.load(weight + token * size + column, mask=column < size, other=0.0)
    features = tl.load(
        hidden + row * hidden_stride + column - size, mask=(column >= size) & (column < size + hidden_size), other=0.0
    )
    value = tl.where(column < size, embedded, features)
    tl.store(out + row * (size + hidden_size) + column, value, mask=column < size + hidden_size)
