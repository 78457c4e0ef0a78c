"""Kernels that exchange data by writing into the memory of other ranks' devices.

A rank's memory has a slot for each rank, twice: calls alternate between both. A message consists of 32-bit words, each
stored together with the call's number in one 64-bit store, which arrives as a whole. A word has arrived when its number has,
so the receiver needs neither a flag nor a fence. A rank overwrites a slot in its next call but one. By then each other rank
has sent it a part of the next call, which that rank begins after it has read this one.

A sum takes one shot or two. With one, each rank sends all its words to each other rank. With two, each rank owns a share of
the words: it receives them from the other ranks, sums them and sends the sums. Every rank must own words, so that each call
brings it words of every other rank. Both add in the order of the ranks and round once, so they give the same bits.

``epochs`` counts the calls of each program of this rank. It is the same on every rank, since all ranks make the same calls.
``peers`` [SIZE] holds the address of each rank's memory as mapped on this device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin

# The contents of a word.
WORD_FLOAT32 = tl.constexpr(0)
WORD_BFLOAT16 = tl.constexpr(1)  # two of them
WORD_FLOAT16 = tl.constexpr(2)  # two of them

# The operation on the ranks' words.
GATHER = tl.constexpr(0)
SUM = tl.constexpr(1)
ROOT = tl.constexpr(2)


@triton.jit
def _send(words, lane, inside, owner, epoch, peers, room, RANK: tl.constexpr, SIZE: tl.constexpr, TO_OWNER: tl.constexpr):
    """Write ``words``, with the call's number ``epoch``, into this rank's slot in every other rank's memory.

    With TO_OWNER each word goes to its owner alone.
    """
    packed = (epoch.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    start = ((epoch & 1) * SIZE + RANK).to(tl.int64) * room
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            destination = tl.load(peers + rank).to(tl.pointer_type(tl.int64))
            sent = inside & (owner == rank) if TO_OWNER else inside
            tl.store(tl.multiple_of(destination, 16) + start + lane, packed, mask=sent)


@triton.jit
def _receive(lane, inside, epoch, peers, room, rank: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until all words of rank ``rank`` have arrived in this rank's memory, and return them."""
    own_memory = tl.multiple_of(tl.load(peers + RANK).to(tl.pointer_type(tl.int64)), 16)
    place = own_memory + ((epoch & 1) * SIZE + rank).to(tl.int64) * room + lane
    wanted = epoch.to(tl.int64)
    received = tl.load(place, mask=inside, other=0, volatile=True)
    missing = tl.max(tl.where(inside & ((received >> 32) != wanted), 1, 0), axis=0)
    while missing > 0:
        received = tl.load(place, mask=inside, other=0, volatile=True)
        missing = tl.max(tl.where(inside & ((received >> 32) != wanted), 1, 0), axis=0)
    return received.to(tl.int32)


@triton.jit
def _first_element(words, KIND: tl.constexpr):
    """Return the first element of each 32-bit word, in float32. KIND names the dtype in the words."""
    if KIND == WORD_FLOAT32:
        return words.to(tl.float32, bitcast=True)
    elif KIND == WORD_BFLOAT16:
        return (words << 16).to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _second_element(words, KIND: tl.constexpr):
    """Return the second element of each 32-bit word, in float32; 0 if a word has one element."""
    if KIND == WORD_FLOAT32:
        return words.to(tl.float32) * 0.0
    elif KIND == WORD_BFLOAT16:
        return (words & -65536).to(tl.float32, bitcast=True)
    else:
        return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _round_to_word(wide, KIND: tl.constexpr):
    """Round float32 values to the dtype that the words of KIND hold."""
    if KIND == WORD_FLOAT32:
        return wide
    elif KIND == WORD_BFLOAT16:
        return wide.to(tl.bfloat16).to(tl.float32)
    else:
        return wide.to(tl.float16).to(tl.float32)


@triton.jit
def _pack(low, high, KIND: tl.constexpr):
    """Pack two float32 values into one 32-bit word of KIND."""
    if KIND == WORD_FLOAT32:
        return low.to(tl.int32, bitcast=True)
    elif KIND == WORD_BFLOAT16:
        first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        first = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _sum_over_ranks(
    own,
    before,
    lane,
    owner,
    inside,
    epoch,
    peers,
    room,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    SHOTS: tl.constexpr,
):
    """Return the words of the sum of all ranks' ``own`` and of ``before``, which is equal on all ranks."""
    summed = inside & (owner == RANK) if SHOTS == 2 else inside
    _send(own, lane, inside, owner, epoch, peers, room, RANK, SIZE, SHOTS == 2)
    low = tl.zeros_like(own).to(tl.float32)
    high = low
    for rank in tl.static_range(SIZE):
        received = own
        if rank != RANK:
            received = _receive(lane, summed, epoch, peers, room, rank, RANK, SIZE)
        low += _first_element(received, KIND)
        high += _second_element(received, KIND)
    words = _pack(low + _first_element(before, KIND), high + _second_element(before, KIND), KIND)
    if SHOTS == 2:
        _send(words, lane, summed, owner, epoch, peers, room, RANK, SIZE, False)
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                theirs = inside & (owner == rank)
                words = tl.where(theirs, _receive(lane, theirs, epoch, peers, room, rank, RANK, SIZE), words)
    return words


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
    SHOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exchange part i of ``count`` words among the ranks; one program per part.

    ``out`` receives all ranks' words in rank order, their sum, or those of ``root``, as MODE says. Sums are in float32 and in
    rank order, so that each rank has the same bits.
    """
    begin(PDL)
    part = tl.program_id(0).to(tl.int64)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    epoch = tl.load(epochs + part) + 1
    own = tl.load(words + lane, mask=inside, other=0)
    if MODE == SUM:
        share = (tl.minimum(count - part * BLOCK, BLOCK) + SIZE - 1) // SIZE
        owner = tl.arange(0, BLOCK) // share
        summed = _sum_over_ranks(own, tl.zeros_like(own), lane, owner, inside, epoch, peers, room, RANK, SIZE, KIND, SHOTS)
        tl.store(out + lane, summed, mask=inside)
    else:
        _send(own, lane, inside, lane, epoch, peers, room, RANK, SIZE, False)
        for rank in tl.static_range(SIZE):
            received = own
            if rank != RANK:
                received = _receive(lane, inside, epoch, peers, room, rank, RANK, SIZE)
            if MODE == GATHER:
                tl.store(out + rank * count.to(tl.int64) + lane, received, mask=inside)
            elif rank == root:
                tl.store(out + lane, received, mask=inside)
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
    SHOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce a row of ``size`` words over the ranks, add it to the residual and normalise; one program per row."""
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    scale = tl.load(weight + lane, mask=inside, other=0)  # a weight, so its load may precede the wait
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = row * size + lane
    epoch = tl.load(epochs + row) + 1
    own = tl.load(x + place, mask=inside, other=0)
    before = tl.load(residual + place, mask=inside, other=0)
    owner = lane // ((size + SIZE - 1) // SIZE)
    summed = _sum_over_ranks(own, before, place, owner, inside, epoch, peers, room, RANK, SIZE, KIND, SHOTS)
    tl.store(residual + place, summed, mask=inside)
    low, high = _first_element(summed, KIND), _second_element(summed, KIND)
    numbers = size if KIND == WORD_FLOAT32 else 2 * size
    factor = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / numbers + eps)
    low = _first_element(scale, KIND) * _round_to_word(low * factor, KIND)
    high = _second_element(scale, KIND) * _round_to_word(high * factor, KIND)
    tl.store(out + place, _pack(low, high, KIND), mask=inside)
    tl.store(epochs + row, epoch)
