"""Token choice: argmax, random sampling, and acceptance of drafts.

Programs share a vocabulary: each stores the best of its share, and a last kernel decides. The randomness of index i at a
position is word i % 4 of Philox block i // 4, as in :mod:`outrider.device.kernels.reference.model`. It depends on
seed, position, lane and index only, not on the number of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin


@triton.jit
def _uniform(words):
    """Return 32 random bits ``words`` as a uniform float32 in (0, 1)."""
    return ((words >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))


@triton.jit
def uniforms(seed, position, LANE: tl.constexpr, start, COUNT: tl.constexpr):
    """Return uniform random numbers of the indices from ``start`` (a multiple of 4) to ``start + COUNT``."""
    block = (start // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    zero = block * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed.to(tl.uint64, bitcast=True), block, low, high, zero + LANE)
    return _uniform(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def gumbel(seed, position, LANE: tl.constexpr, start, COUNT: tl.constexpr):
    """Return Gumbel noise of the indices from ``start`` to ``start + COUNT``."""
    return -tl.log(-tl.log(uniforms(seed, position, LANE, start, COUNT)))


@triton.jit
def _update_argmax(best, best_at, values, start):
    """Return the larger of ``best`` and the largest of ``values``, with its index; ties take the lower index."""
    top = tl.max(values, axis=0)
    at = start + tl.argmax(values, axis=0, tie_break_left=True)
    return tl.where(top > best, top, best), tl.where(top > best, at, best_at)


@triton.jit
def _argmax(best, index, row, SHARES: tl.constexpr):
    """Return the index of a row's maximum over the results of all SHARES shares; earlier shares hold lower indices."""
    share = tl.arange(0, SHARES)
    at = tl.argmax(tl.load(best + row * SHARES + share), axis=0, tie_break_left=True)
    return tl.load(index + row * SHARES + at)


@triton.jit
def _depth(parents, node, DEPTH: tl.constexpr):
    """Return the distance of tree node ``node`` from the root, at most DEPTH."""
    depth = 0
    parent = tl.load(parents + node)
    for _ in tl.static_range(DEPTH):
        inside = parent >= 0
        depth += inside.to(tl.int32)
        parent = tl.load(parents + tl.maximum(parent, 0), mask=inside, other=-1)
    return depth


@triton.jit(do_not_specialize=["nodes"])
def partial_argmax(
    logits,
    temperature,
    seeds,
    positions,
    parents,
    best,
    index,
    firsts,
    nodes,
    vocabulary,
    row_stride,
    SAMPLING: tl.constexpr,
    LANE: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the largest logit of a share and its index; one program per (row, share), with ``nodes`` rows per request.

    SAMPLING: the choice is random, by Gumbel noise on logits / temperature. Row r is node r % nodes of request r // nodes.
    Its position is the request's, plus the node's depth in a tree (DEPTH > 0) given by ``parents`` [B, nodes]. With
    ``firsts``, also store the share's first NaN there; a NaN wins the choice.

    Each lane of a block tracks its own best, and the lanes are compared once at the end. A comparison across threads in each
    block would delay the next loads, and loading is most of the work.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    request = row // nodes
    span = tl.cdiv(tl.cdiv(vocabulary, SHARES), BLOCK) * BLOCK
    is_sampling = False
    divisor = 1.0
    seed = tl.zeros([], dtype=tl.int64)
    position = tl.zeros([], dtype=tl.int64)
    if SAMPLING:
        divisor = tl.load(temperature + request)
        is_sampling = divisor > 0
        divisor = tl.where(is_sampling, divisor, 1.0)
        seed = tl.load(seeds + request)
        position = tl.load(positions + request)
        if DEPTH > 0:
            position += _depth(parents + request * nodes, row % nodes, DEPTH)
    lane_best = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    lane_best_at = share * span + tl.arange(0, BLOCK)
    for start in range(share * span, tl.minimum(share * span + span, vocabulary), BLOCK):
        lane = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + lane, mask=lane < vocabulary, other=-float("inf")).to(tl.float32)
        if SAMPLING:
            if is_sampling:
                values = tl.div_rn(values, tl.zeros_like(values) + divisor) + gumbel(seed, position, LANE, start, BLOCK)
        better = values > lane_best
        if firsts is not None:  # a stored NaN wins every comparison, so the lane's first NaN stays
            better = better | ((values != values) & (lane_best == lane_best))
        lane_best = tl.where(better, values, lane_best)
        lane_best_at = tl.where(better, lane, lane_best_at)
    if firsts is not None:
        is_nan = lane_best != lane_best
        tl.store(firsts + row * SHARES + share, tl.min(tl.where(is_nan, lane_best_at, 0x7FFFFFFF), axis=0))
        lane_best = tl.where(is_nan, float("inf"), lane_best)
    largest = tl.max(lane_best, axis=0)
    tl.store(best + row * SHARES + share, largest)
    tl.store(index + row * SHARES + share, tl.min(tl.where(lane_best == largest, lane_best_at, 0x7FFFFFFF), axis=0))


@triton.jit
def reduce_argmax(best, index, tokens, SHARES: tl.constexpr, PDL: tl.constexpr):
    """Store the token of one row: the best over all shares; one program per row."""
    begin(PDL)
    row = tl.program_id(0)
    tl.store(tokens + row, _argmax(best, index, row, SHARES).to(tl.int64))


@triton.jit
def accept_greedy(
    best,
    index,
    firsts,
    drafts,
    tokens,
    accepted,
    found,
    num_draft_tokens,
    vocabulary,
    found_stride,
    SHARES: tl.constexpr,
    NUM_DRAFT_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Accept one request's drafts up to the first that isn't the argmax, and store tokens and accepted count; one program per
    request. ``num_draft_tokens`` equals NUM_DRAFT_TOKENS.

    With ``firsts``, also store the index of the request's first NaN or -1, then -1, to ``found``.
    """
    begin(PDL)
    request = tl.program_id(0)
    alive = True
    count = 0
    bad = tl.full([], -1, dtype=tl.int64)
    for step in tl.static_range(NUM_DRAFT_TOKENS + 1):
        row = request * (num_draft_tokens + 1) + step
        choice = _argmax(best, index, row, SHARES).to(tl.int64)
        tl.store(tokens + row, tl.where(alive, choice, -1))
        if step < NUM_DRAFT_TOKENS:
            alive = alive & (tl.load(drafts + request * num_draft_tokens + step) == choice)
            count += alive.to(tl.int32)
        if firsts is not None:
            first = tl.min(tl.load(firsts + row * SHARES + tl.arange(0, SHARES)), axis=0).to(tl.int64)
            bad = tl.where((bad < 0) & (first < 0x7FFFFFFF), first + vocabulary * step, bad)
    tl.store(accepted + request, count.to(tl.int64))
    if firsts is not None:
        tl.store(found + request * found_stride, bad)
        tl.store(found + request * found_stride + 1, tl.full([], -1, dtype=tl.int64))


@triton.jit
def walk_tree(
    best,
    index,
    drafts,
    parents,
    tokens,
    path,
    accepted,
    nodes,
    SHARES: tl.constexpr,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Walk one request's tree from the root, always to the first child that holds the chosen token, and store tokens, path
    and accepted count; one program per request.

    ``drafts`` and ``parents`` are [B, nodes].
    """
    begin(PDL)
    request = tl.program_id(0)
    node = tl.arange(0, NODES)
    node_mask = node < nodes
    parent = tl.load(parents + request * nodes + node, mask=node_mask, other=-2)
    token = tl.load(drafts + request * nodes + node, mask=node_mask, other=-1)
    current = tl.zeros([], dtype=tl.int32)
    alive = tl.full([], 1, dtype=tl.int1)
    count = 0
    for level in tl.static_range(DEPTH + 1):
        choice = _argmax(best, index, request * nodes + current, SHARES).to(tl.int64)
        tl.store(tokens + request * (DEPTH + 1) + level, tl.where(alive, choice, -1))
        tl.store(path + request * (DEPTH + 1) + level, tl.where(alive, current, 0).to(tl.int64))
        if level < DEPTH:
            match = node_mask & (parent == current) & (token == choice)
            child = tl.min(tl.where(match, node, NODES), axis=0)
            alive = alive & (child < NODES)
            count += alive.to(tl.int32)
            current = tl.where(alive, child, current)
    tl.store(accepted + request, count.to(tl.int64))


@triton.jit(do_not_specialize=["num_draft_tokens"])
def partial_softmax(
    logits,
    temperature,
    best,
    index,
    sums,
    num_draft_tokens,
    vocabulary,
    request_stride,
    row_stride,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the maximum of logits / temperature of a share of a row, its index, and the sum of exponentials, to [rows,
    SHARES] each; one program per (row, share).
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    request = row // (num_draft_tokens + 1)
    divisor = tl.load(temperature + request)
    divisor = tl.where(divisor > 0, divisor, 1.0)
    span = tl.cdiv(tl.cdiv(vocabulary, SHARES), BLOCK) * BLOCK
    source = logits + request * request_stride + (row % (num_draft_tokens + 1)) * row_stride
    top = tl.full([], -float("inf"), dtype=tl.float32)
    top_at = share * span
    total = tl.zeros([], dtype=tl.float32)
    for start in range(share * span, tl.minimum(share * span + span, vocabulary), BLOCK):
        lane = start + tl.arange(0, BLOCK)
        values = tl.load(source + lane, mask=lane < vocabulary, other=-float("inf")).to(tl.float32)
        before = top
        top, top_at = _update_argmax(top, top_at, values, start)
        floor = tl.where(top == -float("inf"), 0.0, top)
        fresh = tl.exp(tl.div_rn(values - floor, tl.zeros_like(values) + divisor))
        total = total * tl.exp((before - floor) / divisor) + tl.sum(fresh, axis=0)
    tl.store(best + row * SHARES + share, top)
    tl.store(index + row * SHARES + share, top_at)
    tl.store(sums + row * SHARES + share, total)


@triton.jit
def _softmax(best, sums, row, divisor, SHARES: tl.constexpr):
    """Return the maximum and the sum of exponentials of a row, joined from those of its shares."""
    share = tl.arange(0, SHARES)
    share_maxima = tl.load(best + row * SHARES + share)
    top = tl.max(share_maxima, axis=0)
    total = tl.sum(tl.load(sums + row * SHARES + share) * tl.exp((share_maxima - top) / divisor), axis=0)
    return top, total


@triton.jit(do_not_specialize=["num_draft_tokens"], do_not_specialize_on_alignment=["positions"])
def partial_residual(
    logits,
    draft_probs,
    temperature,
    seeds,
    positions,
    best,
    sums,
    picked,
    picked_at,
    residual_mass,
    num_draft_tokens,
    vocabulary,
    request_stride,
    row_stride,
    LANE: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sample from max(p - q, 0) and from p within a share, and store the mass of the former; one program per (row, share). p
    is the target's distribution, q the draft's.

    ``picked`` and ``picked_at`` are [2, rows, SHARES]. After the last draft there is no q.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    rows = tl.num_programs(0)
    request = row // (num_draft_tokens + 1)
    step = row % (num_draft_tokens + 1)
    divisor = tl.load(temperature + request)
    if divisor > 0:
        top, total = _softmax(best, sums, row, divisor, SHARES)
        seed = tl.load(seeds + request)
        position = tl.load(positions + request) + step
        span = tl.cdiv(tl.cdiv(vocabulary, SHARES), BLOCK) * BLOCK
        source = logits + request * request_stride + step * row_stride
        draft = draft_probs + (request * num_draft_tokens + step) * vocabulary
        first = tl.full([], -float("inf"), dtype=tl.float32)
        second = tl.full([], -float("inf"), dtype=tl.float32)
        first_at = share * span
        second_at = share * span
        mass = tl.zeros([], dtype=tl.float32)
        for start in range(share * span, tl.minimum(share * span + span, vocabulary), BLOCK):
            lane = start + tl.arange(0, BLOCK)
            values = tl.load(source + lane, mask=lane < vocabulary, other=-float("inf")).to(tl.float32)
            target = tl.exp(tl.div_rn(values - top, tl.zeros_like(values) + divisor)) / total
            draft_p = tl.load(draft + lane, mask=(lane < vocabulary) & (step < num_draft_tokens), other=0.0)
            residual = tl.maximum(target - draft_p, 0.0)
            mass += tl.sum(residual, axis=0)
            noise = gumbel(seed, position, LANE, start, BLOCK)
            first, first_at = _update_argmax(first, first_at, tl.log(residual) + noise, start)
            second, second_at = _update_argmax(second, second_at, tl.log(target) + noise, start)
        tl.store(picked + row * SHARES + share, first)
        tl.store(picked_at + row * SHARES + share, first_at)
        tl.store(picked + (rows + row) * SHARES + share, second)
        tl.store(picked_at + (rows + row) * SHARES + share, second_at)
        tl.store(residual_mass + row * SHARES + share, mass)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions"])
def accept_sampling(
    logits,
    drafts,
    draft_probs,
    temperature,
    seeds,
    positions,
    best,
    index,
    sums,
    picked,
    picked_at,
    residual_mass,
    tokens,
    accepted,
    rows,
    num_draft_tokens,
    vocabulary,
    request_stride,
    row_stride,
    LANE: tl.constexpr,
    SHARES: tl.constexpr,
    NUM_DRAFT_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Accept one request's drafts, each with probability min(1, p / q), or at temperature 0 if it is the argmax, and store
    tokens and accepted count; one program per request.
    """
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    divisor = tl.load(temperature + request)
    is_sampling = divisor > 0
    divisor = tl.where(is_sampling, divisor, 1.0)
    seed = tl.load(seeds + request)
    position = tl.load(positions + request)
    share = tl.arange(0, SHARES)
    alive = tl.full([], 1, dtype=tl.int1)
    count = 0
    for step in tl.static_range(NUM_DRAFT_TOKENS + 1):
        row = request * (num_draft_tokens + 1) + step
        candidate = _argmax(best, index, row, SHARES)
        is_accepted = alive
        draft = tl.zeros([], dtype=tl.int64)
        if step < NUM_DRAFT_TOKENS:
            draft = tl.load(drafts + request * num_draft_tokens + step)
            is_accepted_draft = draft == candidate
            if is_sampling:
                top, total = _softmax(best, sums, row, divisor, SHARES)
                logit = tl.load(logits + request * request_stride + step * row_stride + draft).to(tl.float32)
                p = tl.exp(tl.div_rn(logit - top, divisor)) / total
                q = tl.load(draft_probs + (request * num_draft_tokens + step) * vocabulary + draft)
                uniform = uniforms(seed, position + step, LANE, 0, 4)
                uniform = tl.sum(tl.where(tl.arange(0, 4) == 0, uniform, 0.0), axis=0)
                is_accepted_draft = uniform * q < p
            is_accepted = alive & is_accepted_draft
        if is_sampling:
            mass = tl.sum(tl.load(residual_mass + row * SHARES + share), axis=0)
            source_row = tl.where(mass > 0, 0, 1) * rows
            candidate = _argmax(picked, picked_at, source_row + row, SHARES)
        chosen = candidate.to(tl.int64)
        if step < NUM_DRAFT_TOKENS:
            chosen = tl.where(is_accepted, draft, chosen)
            count += is_accepted.to(tl.int32)
        tl.store(tokens + row, tl.where(alive, chosen, -1))
        if step < NUM_DRAFT_TOKENS:
            alive = is_accepted
    tl.store(accepted + request, count.to(tl.int64))


@triton.jit
def apply_token_bitmask(
    logits, bitmask, out, nodes, vocabulary, words, batch_stride, node_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Store a chunk of a row of logits [rows, vocabulary] to ``out``, with -inf for tokens that the bitmask excludes; one
    program per (row, chunk). Bit i of word w keeps token 32w + i.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    word = tl.load(bitmask + row * words + token // 32, mask=inside, other=0)
    offset = row // nodes * batch_stride + row % nodes * node_stride
    value = tl.load(logits + offset + token, mask=inside, other=0.0)
    is_allowed = ((word >> (token % 32)) & 1) != 0
    tl.store(out + row * vocabulary + token, tl.where(is_allowed, value, float("-inf")), mask=inside)
