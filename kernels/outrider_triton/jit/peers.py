"""Kernels that write into the memory of other ranks' devices, and wait for what those write into theirs.

A rank's memory has a room for each rank, twice: calls use the two in turn. What is sent is words of 32 bits, each beside the
call's number in one store of 64 bits, which arrives as a whole. So the receiver needs no flag apart from the data and no
fence: a word is there when its number is. A rank's next call but one overwrites what was sent here. By then the others have
sent their part of the next call, which they begin after they have read this one.

``epochs`` counts the calls of each program of this rank; it's the same on every rank, since they make the same calls.
``peers`` [SIZE] holds the address of each rank's memory as this device sees it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin

# What a word holds.
WORD_FLOAT32 = tl.constexpr(0)
WORD_BFLOAT16 = tl.constexpr(1)  # two of them
WORD_FLOAT16 = tl.constexpr(2)  # two of them

# What becomes of the ranks' words.
GATHER = tl.constexpr(0)
SUM = tl.constexpr(1)
ROOT = tl.constexpr(2)


@triton.jit
def _send(words, lane, inside, epoch, peers, room, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Write ``words`` into this rank's room at every other rank."""
    packed = (epoch.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    start = ((epoch & 1) * SIZE + RANK).to(tl.int64) * room
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            there = tl.load(peers + rank).to(tl.pointer_type(tl.int64))
            tl.store(tl.multiple_of(there, 16) + start + lane, packed, mask=inside)


@triton.jit
def _receive(lane, inside, epoch, peers, room, rank: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until all words of ``rank`` are here."""
    here = tl.multiple_of(tl.load(peers + RANK).to(tl.pointer_type(tl.int64)), 16)
    place = here + ((epoch & 1) * SIZE + rank).to(tl.int64) * room + lane
    wanted = epoch.to(tl.int64)
    got = tl.load(place, mask=inside, other=0, volatile=True)
    missing = tl.max(tl.where(inside & ((got >> 32) != wanted), 1, 0), axis=0)
    while missing > 0:
        got = tl.load(place, mask=inside, other=0, volatile=True)
        missing = tl.max(tl.where(inside & ((got >> 32) != wanted), 1, 0), axis=0)
    return got.to(tl.int32)


@triton.jit
def _low(words, KIND: tl.constexpr):
    """The word's first number in float32."""
    if KIND == WORD_FLOAT32:
        return words.to(tl.float32, bitcast=True)
    elif KIND == WORD_BFLOAT16:
        return (words << 16).to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, KIND: tl.constexpr):
    """The word's second number in float32; 0 where it has one."""
    if KIND == WORD_FLOAT32:
        return words.to(tl.float32) * 0.0
    elif KIND == WORD_BFLOAT16:
        return (words & -65536).to(tl.float32, bitcast=True)
    else:
        return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _rounded(wide, KIND: tl.constexpr):
    """A number of float32 with no more digits than a word's have."""
    if KIND == WORD_FLOAT32:
        return wide
    elif KIND == WORD_BFLOAT16:
        return wide.to(tl.bfloat16).to(tl.float32)
    else:
        return wide.to(tl.float16).to(tl.float32)


@triton.jit
def _packed(low, high, KIND: tl.constexpr):
    """Two numbers of float32 as a word."""
    if KIND == WORD_FLOAT32:
        return low.to(tl.int32, bitcast=True)
    elif KIND == WORD_BFLOAT16:
        first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        first = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["count", "root"])
def exchange(
    words,
    out,
    peers,
    epochs,
    count,
    root,
    room,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MODE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i takes part i of ``count`` words. ``out``: all ranks' words in their order, their sum, or those of ``root``.

    Sums are in float32 and in the ranks' order, so that each rank has the same bits.
    """
    begin(PDL)
    part = tl.program_id(0).to(tl.int64)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    epoch = tl.load(epochs + part) + 1
    own = tl.load(words + lane, mask=inside, other=0)
    _send(own, lane, inside, epoch, peers, room, RANK, SIZE)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        got = own
        if rank != RANK:
            got = _receive(lane, inside, epoch, peers, room, rank, RANK, SIZE)
        if MODE == GATHER:
            tl.store(out + rank * count.to(tl.int64) + lane, got, mask=inside)
        elif MODE == SUM:
            low += _low(got, KIND)
            high += _high(got, KIND)
        elif rank == root:
            tl.store(out + lane, got, mask=inside)
    if MODE == SUM:
        tl.store(out + lane, _packed(low, high, KIND), mask=inside)
    tl.store(epochs + part, epoch)


@triton.jit
def all_reduce_rms_norm(
    x,
    residual,
    weight,
    out,
    peers,
    epochs,
    eps,
    size,
    room,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program a row of ``size`` words: its sum over the ranks, added to the residual, and the norm of that."""
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    scale = tl.load(weight + lane, mask=inside, other=0)  # a weight: on its way while the kernel before still runs
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = row * size + lane
    epoch = tl.load(epochs + row) + 1
    own = tl.load(x + at, mask=inside, other=0)
    _send(own, at, inside, epoch, peers, room, RANK, SIZE)
    before = tl.load(residual + at, mask=inside, other=0)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        got = own
        if rank != RANK:
            got = _receive(at, inside, epoch, peers, room, rank, RANK, SIZE)
        low += _low(got, KIND)
        high += _high(got, KIND)
    low = _rounded(low + _low(before, KIND), KIND)
    high = _rounded(high + _high(before, KIND), KIND)
    tl.store(residual + at, _packed(low, high, KIND), mask=inside)
    numbers = size if KIND == WORD_FLOAT32 else 2 * size
    factor = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / numbers + eps)
    low = _low(scale, KIND) * _rounded(low * factor, KIND)
    high = _high(scale, KIND) * _rounded(high * factor, KIND)
    tl.store(out + at, _packed(low, high, KIND), mask=inside)
    tl.store(epochs + row, epoch)
