"""Random batches over a paged cache: attention, rotation with the cache write, and moves within the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.device import CACHE_FORMATS, AttentionMetadata, HeadNorms, KernelSet, RotaryArgs
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dense import EPS, TOKENS
from outrider_conformance.random_kernels.problem import (
    MANY,
    Operand,
    Problem,
    RandomValues,
    Shape,
    among,
    between,
    in_formats,
    kernel_call,
    row_counts,
)

HEADS = ((1, 1), (4, 4), (8, 2), (7, 1), (12, 4), (16, 1), (4, 2), (5, 1), (10, 2), (12, 2), (8, 1), (12, 1))
"""Query heads and key heads, with 1 to 8, 12 and 16 query heads for each key head."""
SIZES = (64, 96, 128, 256)
_PAGES = (4, 16, 32, 128)
Mapped = Mapping[str, Tensor]
UNBOUNDED = float("inf")
_SHORT = 300
_SINKS = 3.0
"""Magnitude of random sinks: the largest takes most of the weight of a short context."""
_SHARP = 24.0
"""Factor of queries by which the exponentials of scores overflow."""
SPREAD: Mapping[str | None, float] = {None: 1.0, "fp8": 300.0}
"""Magnitude of random keys and values by cache format: some values lie outside the format's range."""


def random_lengths(shape: Shape, dice: RandomValues) -> tuple[list[int], list[int]]:
    """Return the random numbers of new tokens and of cached context tokens of each sequence."""
    batch, most, context = shape["batch"], shape["new"], shape["context"]
    new = dice.integers(1, most + 1, batch).tolist() if shape["ragged"] else [most] * batch
    before = dice.integers(0, context + 1, batch).tolist()
    if context > MANY:
        before = [each % _SHORT for each in before]  # one long sequence is enough
    new[-1], before[-1] = most, context
    if batch > 2:
        before[0] = 0  # a prompt from its beginning
    return new, before


def random_tree(counts: list[int], padding: int, width: int, dice: RandomValues) -> Tensor:
    """Return a random tree mask: each node sees its ancestors and itself. Columns beyond the nodes hold random values."""
    mask = dice.integers(0, 2, sum(counts) + padding, width).bool()
    first = 0
    for count in counts:
        mask[first : first + count, :count] = False
        for node in range(count):
            if node:
                mask[first + node] = mask[first + int(dice.integers(0, node, 1))]
                mask[first + node, count:] = dice.integers(0, 2, width - count).bool()
            mask[first + node, node] = True
        first += count
    return mask


class SequenceOperands(NamedTuple):
    """Float64 operands of one sequence: ``q`` [n, Hq, D], ``keys`` and ``values`` [L, Hkv, D], and the ``tree`` mask [n,
    n].
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    tree: Tensor | None
    sinks: Tensor | None = None
    """[Hq]: logits of one more column of each head's softmax, or None."""


def _attention(
    shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None, *, has_sinks: bool = False
) -> Problem:
    """Return a problem of random queries over a cache in the format ``cache``, with sinks if ``has_sinks``. Slots of the
    cache that no sequence uses hold NaN. Rows of padding follow the rows of all sequences.
    """
    heads, kv_heads, size, page = _cache_sizes(shape)
    new, before = random_lengths(shape, dice)
    batch, tokens, padding = len(new), sum(new), shape["padding"]
    width = max(n + c for n, c in zip(new, before, strict=True)) // page + 2
    used = [-(-(n + c) // page) for n, c in zip(new, before, strict=True)]
    pages = 1 + sum(used) + 2
    if shape.get("far"):
        pages += MANY if dtype.itemsize < 4 else MANY // 2
    table, free = torch.zeros(batch, width, dtype=torch.int32), page_order(dice, pages)
    caches = [torch.full((pages, page, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2)]
    kept = []
    for row, (count, context) in enumerate(zip(new, before, strict=True)):
        mine = [free.pop() for _ in range(used[row])]
        table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        total = count + context
        pair = (dice.normal(total, kv_heads, size, dtype=dtype), dice.normal(total, kv_heads, size, dtype=dtype))
        pair[0][total - 1] *= 2
        pair[1][0] += 3  # a kernel that skips a block is far off
        if total > MANY:
            pair[1][total - 1] += _SHORT  # also if the block has a small part of all tokens
        kept.append([as_stored(part, cache) for part in pair])
        for pages_of, part in zip(caches, kept[-1], strict=True):
            slot = torch.arange(total)
            pages_of[torch.tensor(mine)[slot // page], slot % page] = part.to(dtype)
    q = dice.normal(tokens + padding, heads, size, dtype=dtype, scale=_SHARP if shape.get("sharp") else 1.0)
    window = 1 + shape["window"] * 7 if shape["window"] else 0  # no engine drafts trees for layers with a window
    mask = random_tree(new, padding, max(new) + shape["padding"], dice) if shape["tree"] and not window else None
    starts = torch.tensor([sum(new[:row]) for row in range(batch + 1)], dtype=torch.int32)
    operands = {
        "q": Operand(q, "wide"),  # a part of the heads of one product
        "k_cache": Operand(as_stored(caches[0], cache)),
        "v_cache": Operand(as_stored(caches[1], cache)),
        "query_start": Operand(starts),
        "seq_lens": Operand(torch.tensor([n + c for n, c in zip(new, before, strict=True)], dtype=torch.int32)),
        "block_table": Operand(table),
    }
    if mask is not None:
        operands["tree_mask"] = Operand(mask)
    sinks = dice.normal(heads, dtype=torch.promote_types(dtype, torch.float32), scale=_SINKS) if has_sinks else None
    if sinks is not None:
        operands["sinks"] = Operand(sinks)
    most = mask.shape[1] if mask is not None else max(new)
    longest = max(n + c for n, c in zip(new, before, strict=True)) + shape["padding"]

    def metadata(o: Mapped) -> AttentionMetadata:
        uniform = not padding and len(set(new)) == 1 and most == new[0]
        operands = o["query_start"], o["seq_lens"], o["block_table"]
        return AttentionMetadata(*operands, most, longest, tree_mask=o.get("tree_mask"), uniform=uniform)

    scale = size**-0.5 * (1.0 + shape["ragged"])

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        options: dict[str, Any] = {"scale": scale, "window": window} | ({"sinks": o["sinks"]} if has_sinks else {})
        return {"out": kernels.paged_attention(o["q"], o["k_cache"], o["v_cache"], metadata(o), **options)}

    parts, first = [], 0
    for (keys, values), count in zip(kept, new, strict=True):
        own = None if mask is None else mask[first : first + count, :count]
        sequence = SequenceOperands(q[first : first + count].double(), keys.double(), values.double(), own, sinks)
        parts.append(attend(sequence, window, scale, dtype))
        first += count
    return Problem(operands, call, {"out": with_padding(parts, padding)})


def _cache_sizes(shape: Shape) -> tuple[int, int, int, int]:
    """Return query heads, key heads, head size and page size. A cache of many pages (``far``) and a long context have the
    smallest ones.
    """
    is_large = shape.get("far") or shape.get("context", 0) > MANY
    heads, size, page = (0, 0, 0) if is_large else (shape.get("heads", 0), shape["size"], shape["page"])
    return *HEADS[heads], SIZES[size], _PAGES[page]


def page_order(dice: RandomValues, pages: int) -> list[int]:
    """Return the pages from 1 in a random order, the last page at the end."""
    order = (dice.permutation(pages - 1) + 1).tolist()
    order.remove(pages - 1)
    return [*order, pages - 1]


def with_padding(parts: Sequence[bounds.Number], padding: int) -> bounds.Number:
    """Return the rows of all sequences, followed by rows of padding that may hold any finite number."""
    rest = torch.zeros(padding, *parts[0].value.shape[1:], dtype=torch.float64)
    value = torch.cat([part.value for part in parts] + [rest])
    return bounds.Number(value, torch.cat([part.error for part in parts] + [rest + UNBOUNDED]))


def attend(sequence: SequenceOperands, window: int, scale: float, dtype: torch.dtype) -> bounds.Number:
    """Return the float64 attention of one sequence, [n, Hq, D]."""
    weights, relative = _weights(sequence, window, scale, dtype)
    v = _of_queries(sequence.values, sequence)
    relative = relative + bounds.growth(v.shape[1], bounds.wide(dtype))
    error = (weights * relative + bounds.smallest_normal(dtype)) @ v.abs()  # an exponential may underflow to 0
    return bounds.rounded(bounds.Number((weights @ v).transpose(0, 1), error.transpose(0, 1)), dtype)


def _of_queries(x: Tensor, sequence: SequenceOperands) -> Tensor:
    """Return the keys or values ``x`` [L, Hkv, D] repeated for each query head of the sequence, [Hq, L, D]."""
    return x.repeat_interleave(sequence.q.shape[1] // x.shape[1], dim=1).transpose(0, 1)


def _weights(sequence: SequenceOperands, window: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the softmax [Hq, n, L] and its relative error.

    Scores lose precision in their sum of D products, and a kernel may scale the query in its own dtype first. A weight
    has the error of its score, twice since all weights are divided by their sum, and may be rounded to the dtype before
    the last product.
    """
    k, queries = _of_queries(sequence.keys, sequence), sequence.q.transpose(0, 1)
    count, total, size = queries.shape[1], k.shape[1], k.shape[2]
    place, node = torch.arange(total), torch.arange(count)
    index = place - (total - count)
    visible = index <= node.unsqueeze(1)
    if sequence.tree is not None:
        visible = (index < 0) | sequence.tree[:, index.clamp(min=0)]
    if window:
        visible = visible & (index > node.unsqueeze(1) - window)
    scores = (queries @ k.transpose(1, 2)) * scale
    unit = bounds.wide(dtype)
    loss = (queries.abs() @ k.abs().transpose(1, 2)) * abs(scale)
    slack = (bounds.growth(size, unit) + bounds.UNIT[dtype]) * loss + 4 * unit * scores.abs() + 8 * unit
    scores, worst = scores.masked_fill(~visible, -torch.inf), slack.masked_fill(~visible, 0.0)
    if sequence.sinks is not None:
        column = sequence.sinks.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)
        scores, worst = torch.cat((scores, column), -1), torch.cat((worst, 4 * unit * column.abs() + 8 * unit), -1)
    weights = torch.softmax(scores, dim=-1)
    mean = (weights * worst).sum(-1, keepdim=True)  # what the sum of all weights is off
    return weights[..., :total], torch.expm1(worst[..., :total] + mean) + bounds.UNIT[dtype]


def as_stored(x: Tensor, cache: str | None) -> Tensor:
    """Return ``x`` as a cache of the given format stores it; without a format, ``x`` itself."""
    return x if cache is None else x.to(CACHE_FORMATS[cache])


# -- rotation and the cache ------------------------------------------------------------------------------------------


def rotary_operands(
    shape: Shape, dtype: torch.dtype, dice: RandomValues, tokens: int, kv_heads: int, size: int, cache: str | None = None
) -> tuple[dict[str, Operand], Tensor]:
    """Return cos, sin, caches in the format ``cache`` and slots, and which tokens are real. Padding writes to page 0."""
    page = _cache_sizes(shape)[-1]
    pages = tokens // page + 3 + (MANY // page if shape.get("far") else 0)
    slots = _distinct_slots(tokens, page, pages * page, dice)
    real = torch.arange(tokens) < max(tokens - shape["padding"], 1)
    slots = torch.where(real, slots, torch.arange(tokens) % page)
    turned = size // 4 if shape.get("partial") else size // 2
    angle = dice.uniform(tokens, turned) * 6.28
    caches = [dice.normal(pages, page, kv_heads, size, dtype=dtype) for _ in range(2)]
    for pages_of in caches:
        pages_of[:, -1] = torch.nan  # the write must not change other slots
    made = {"cos": angle.cos(), "sin": angle.sin()}
    operands = {name: Operand(value.repeat(1, 2).to(dtype), "wide") for name, value in made.items()}
    keys, values = (as_stored(each, cache) for each in caches)
    operands |= {"k_cache": Operand(keys), "v_cache": Operand(values), "slots": Operand(slots)}
    return operands, real


def _distinct_slots(count: int, first: int, end: int, dice: RandomValues) -> Tensor:
    """Return distinct slots from ``first`` to ``end`` (exclusive), also those at which integers of few bits overflow."""
    edges = torch.tensor([2**16 + 1, 2**16 - 1, 2**15, end - 1, first])
    edges = edges[(edges >= first) & (edges < end)].unique()
    slots = dice.permutation(end - first) + first
    return torch.cat((edges, slots[~torch.isin(slots, edges)]))[:count]


def cache_after_write(cache: Tensor, slots: Tensor, made: bounds.Number, real: Tensor) -> bounds.Number:
    """Return the expected cache after the write, with any contents allowed in page 0, where padding writes."""
    page = cache.shape[1]
    if cache.dtype in CACHE_FORMATS.values():
        made = bounds.stored(made, cache.dtype)
    wanted = bounds.exact(cache)
    wanted.error[0] = UNBOUNDED
    wanted.value[0] = torch.nan
    at = slots[real]
    wanted.value[at // page, at % page] = made.value[real]
    wanted.error[at // page, at % page] = made.error[real]
    return wanted


def of_real_tokens(x: bounds.Number, real: Tensor) -> bounds.Number:
    """Return ``x`` with an unlimited error for rows of padding, which may hold any finite number."""
    return bounds.Number(x.value, torch.where(real.view(-1, *[1] * (x.value.dim() - 1)), x.error, UNBOUNDED))


def _rope(shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None) -> Problem:
    heads, kv_heads, size, _ = _cache_sizes(shape)
    tokens = shape["tokens"]
    q, k, v = (dice.normal(tokens, n, size, dtype=dtype, scale=SPREAD[cache]) for n in (heads, kv_heads, kv_heads))
    operands, real = rotary_operands(shape, dtype, dice, tokens, kv_heads, size, cache)
    if shape["nan"]:
        k[0, 0, 0] = v[0, 0, 0] = torch.nan  # NaN differs from a number outside the format's range
    cos, sin, slots = (operands[name].tensor for name in ("cos", "sin", "slots"))
    turned = {name: bounds.rotate(bounds.exact(x), cos, sin, dtype) for name, x in (("q", q), ("k", k))}
    wanted = {name: of_real_tokens(x, real) for name, x in turned.items()}
    wanted["k_cache"] = cache_after_write(operands["k_cache"].tensor, slots, turned["k"], real)
    wanted["v_cache"] = cache_after_write(operands["v_cache"].tensor, slots, bounds.exact(v), real)
    operands |= {"q": Operand(q, "wide"), "k": Operand(k, "wide"), "v": Operand(v, "wide")}

    names = ("q", "k", "v", "cos", "sin", "k_cache", "v_cache", "slots")
    return Problem(operands, kernel_call("rope_write_cache", *names), wanted)


def _head_norm_rope(
    shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None, *, is_joint: bool = False
) -> Problem:
    """Return a problem with norms of each head, or of all heads of a token if ``is_joint``."""
    heads, kv_heads = HEADS[shape["heads"]]
    if shape["alone"]:  # keys and values without queries
        heads = 0
    tokens, size = shape["tokens"], SIZES[shape["size"]]
    operands, real = rotary_operands(shape, dtype, dice, tokens, kv_heads, size, cache)
    made = dice.normal(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    # Heads differ in size, so that a norm of all of them is told from one of each.
    made[:, : heads + kv_heads] *= 4.0 ** dice.integers(-4, 5, heads + kv_heads)[:, None]
    made[:, heads + kv_heads :] *= SPREAD[cache]
    kept = torch.promote_types(dtype, torch.float32) if shape["wide_norm"] else dtype
    norms = {
        name: dice.factors(size * max(count, 1) if is_joint else size, dtype=kept) * factor
        for name, count, factor in (("q_norm", heads, 1.0), ("k_norm", kv_heads, SPREAD[cache]))
    }
    cos, sin, slots = (operands[name].tensor for name in ("cos", "sin", "slots"))
    q, k, v = made.split((heads, kv_heads, kv_heads), dim=1)
    turned = {}
    for name, each in (("q", q), ("k", k)):
        if is_joint and each.shape[1]:
            rows = bounds.rms_norm(bounds.exact(each.flatten(1)), norms[f"{name}_norm"], EPS, dtype)
            normed = bounds.Number(rows.value.view(each.shape), rows.error.view(each.shape))
        else:
            normed = bounds.rms_norm(bounds.exact(each), norms[f"{name}_norm"][:size], EPS, dtype)
        turned[name] = bounds.rotate(normed, cos, sin, dtype)
    wanted = {
        "out": of_real_tokens(turned["q"], real),
        "k_cache": cache_after_write(operands["k_cache"].tensor, slots, turned["k"], real),
        "v_cache": cache_after_write(operands["v_cache"].tensor, slots, bounds.exact(v), real),
    }
    operands |= {"made": Operand(made.flatten(1))} | {name: Operand(norm) for name, norm in norms.items()}

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        rotary = RotaryArgs(o["cos"], o["sin"], o["k_cache"], o["v_cache"], o["slots"])
        given = HeadNorms(o["q_norm"], o["k_norm"], EPS, is_joint)
        return {"out": kernels.head_norm_rope_write_cache(o["made"], given, rotary)}

    return Problem(operands, call, wanted)


def _move(shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None) -> Problem:
    """Return the problem of overlapping moves in a cache; some have equal source and destination, and padding moves in page
    0. With ``latent``, values are larger than keys.
    """
    _, _, size, page = _cache_sizes(shape)
    moves = shape["moves"]
    pages = moves // page + 3 + (MANY // page if shape.get("far") else 0)
    kv_heads = 1 if shape.get("far") else 2
    sizes = (size, 2 * size if shape["latent"] else size)
    caches = [dice.normal(pages, page, kv_heads, each, dtype=dtype) for each in sizes]
    sources = dice.integers(page, pages * page, moves)
    destinations = _distinct_slots(moves, page, pages * page, dice)
    half = moves // 2
    sources[:half] = destinations[:half].roll(1)  # a ring: each source is the destination of another move
    destinations[half : half + moves // 8] = sources[half : half + moves // 8] = 0
    if moves > 8:
        kept = torch.ones(pages * page, dtype=torch.bool)
        kept[destinations] = False
        alone = int(kept[page:].nonzero()[0]) + page
        sources[-1] = destinations[-1] = alone
    stale = destinations[~torch.isin(destinations, sources)]
    for pages_of in caches:  # a product with zeros isn't zero
        pages_of.flatten(0, 1)[stale] = torch.nan
    wanted = {}
    caches = [as_stored(each, cache) for each in caches]
    for name, pages_of in zip(("k_cache", "v_cache"), caches, strict=True):
        after = pages_of.to(torch.float64, copy=True).flatten(0, 1)
        after[destinations] = after[sources].clone()
        wanted[name] = bounds.exact(after.view(pages_of.shape))
    operands = {"k_cache": Operand(caches[0]), "v_cache": Operand(caches[1])}
    operands |= {"sources": Operand(sources), "destinations": Operand(destinations)}

    return Problem(operands, kernel_call("move_cache", *operands), wanted)


_HEAD, _SIZE, _PAGE = (among(*range(len(each))) for each in (HEADS, SIZES, _PAGES))
_FLAG = between(0, 1)
BATCHES = {
    "batch": row_counts(1, 6),
    "new": between(1, 9, 33, 65),
    "context": between(0, 300, 511, 512, 1023, 1025, rare=(MANY + 1,)),
    "ragged": _FLAG,
    "tree": _FLAG,
    "window": among(0, 0, 1, 9),
    "padding": among(0, 0, 1, 5),
    "heads": _HEAD,
    "size": _SIZE,
    "page": _PAGE,
}
_PLAIN = {"ragged": 0, "tree": 0, "window": 0, "padding": 0, "heads": 2, "size": 0, "page": 1}
ROTARY = {"tokens": TOKENS, "heads": _HEAD, "size": _SIZE, "page": _PAGE, "padding": among(0, 3), "partial": _FLAG}
TURNED = {"tokens": 17, "heads": 2, "size": 0, "page": 1, "padding": 3, "partial": 0}
_FAR = {"far": among(0, rare=(1,))}
_ENDS = (
    *({**_PLAIN, "batch": 2, "new": 1, "context": context} for context in (15, 16, 31)),  # of pages of 16 tokens
    *({**_PLAIN, "batch": 2, "new": 1, "context": context, "window": 9} for context in (62, 63, 64)),  # of a window of 64
)
"""Batches whose last token ends a page or a window, or is next to its end."""
_CASES = (
    (
        "paged_attention",
        _attention,
        BATCHES | _FAR | {"sharp": _FLAG},
        (
            *_ENDS,
            {**_PLAIN, "batch": 2, "new": 1, "context": 4500},
            {**_PLAIN, "batch": 3, "new": 9, "context": 2100, "tree": 1, "ragged": 1, "size": 2, "heads": 3},
            {**_PLAIN, "batch": 3, "new": 70, "context": 131, "ragged": 1, "padding": 5, "size": 1},
            {**_PLAIN, "batch": 2, "new": 5, "context": 1500, "window": 9, "heads": 1, "size": 3, "page": 3, "sharp": 1},
            {**_PLAIN, "batch": 260, "new": 1, "context": 30, "heads": 0, "page": 0},
        ),
    ),
    (
        "rope_write_cache",
        _rope,
        {**ROTARY, "nan": _FLAG} | _FAR,
        ({**TURNED, "nan": 1}, {**TURNED, "tokens": 257, "size": 2, "heads": 3, "page": 0, "nan": 0, "partial": 1}),
    ),
    (
        "head_norm_rope_write_cache",
        _head_norm_rope,
        {**ROTARY, "alone": _FLAG, "wide_norm": _FLAG},
        (
            {**TURNED, "alone": 0, "wide_norm": 0},
            {**TURNED, "tokens": 257, "size": 2, "heads": 3, "page": 0, "alone": 0, "wide_norm": 0, "partial": 1},
            {**TURNED, "tokens": 1, "size": 1, "heads": 1, "alone": 0, "wide_norm": 1},
            {**TURNED, "alone": 1, "wide_norm": 1},
        ),
    ),
    (
        "move_cache",
        _move,
        {"moves": row_counts(1, 40, 255, rare=(1100,)), "size": _SIZE, "page": _PAGE, "latent": _FLAG} | _FAR,
        ({"moves": 33, "size": 0, "page": 1, "latent": 1}, {"moves": 300, "size": 1, "page": 0, "latent": 0}),
    ),
)
_IN_FORMATS = tuple(problems for case in _CASES for problems in in_formats(*case, caches=(None, *CACHE_FORMATS)))
_HEAD_NORMS = next(each for each in _IN_FORMATS if each.kernel == "head_norm_rope_write_cache")
ATTENTION = (
    *_IN_FORMATS,
    _HEAD_NORMS.with_operand("joint_head_norms", partial(_head_norm_rope, is_joint=True)),
    _IN_FORMATS[0].with_operand("attention_sinks", partial(_attention, has_sinks=True)),
)
