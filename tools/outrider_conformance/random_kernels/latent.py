"""Random problems of latent attention: products of heads, the cache write, and attention to latent vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import CACHE_FORMATS, AttentionMetadata, KernelSet, RotaryArgs
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.attention import (
    BATCHES,
    ROTARY,
    SPREAD,
    TURNED,
    Mapped,
    SequenceOperands,
    as_stored,
    attend,
    cache_after_write,
    of_real_tokens,
    page_order,
    random_lengths,
    random_tree,
    rotary_operands,
    with_padding,
)
from outrider_conformance.random_kernels.dense import EPS, TOKENS, norm_weight
from outrider_conformance.random_kernels.problem import (
    Operand,
    Problem,
    RandomValues,
    Shape,
    among,
    between,
    in_formats,
    kernel_call,
)

_SIZES = ((512, 64), (256, 32), (40, 8))
"""Sizes of latent vectors and of the rotated parts of keys. Published models have the first pair."""
_HEADS = (20, 1, 5, 16, 32, 128)
_PAGES = (16, 4, 32, 128)


def _head_linear(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return a problem whose weight is stored by rows, or by columns as that of absorbed keys."""
    heads = _HEADS[shape["heads"]]
    x = dice.factors(shape["tokens"], heads, shape["inner"], dtype=dtype)
    weight = dice.normal(heads, shape["outer"], shape["inner"], dtype=dtype, scale=shape["inner"] ** -0.5)
    made = [bounds.product(bounds.exact(x[:, head]), weight[head], None, dtype) for head in range(heads)]
    wanted = bounds.Number(*(torch.stack([getattr(each, part) for each in made], dim=1) for part in ("value", "error")))
    layout = "columns" if shape["absorbed"] else "rows"
    operands = {"x": Operand(x, "wide"), "weight": Operand(weight, layout)}
    return Problem(operands, kernel_call("head_linear", "x", "weight"), {"out": wanted})


def _write(shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None) -> Problem:
    rank, rotated = _SIZES[shape["size"]]
    tokens, heads = shape["tokens"], _HEADS[shape["heads"]]
    latent, k = dice.normal(tokens, rank, dtype=dtype), dice.normal(tokens, rotated, dtype=dtype, scale=SPREAD[cache])
    q = dice.normal(tokens, heads, rotated, dtype=dtype)
    norm = norm_weight(rank, dtype, shape, dice)
    operands, real = rotary_operands(shape, dtype, dice, tokens, 1, rotated, cache)
    pages = operands["k_cache"].tensor.shape
    latents = as_stored(dice.normal(*pages[:3], rank, dtype=dtype), cache)
    operands["v_cache"] = Operand(latents)
    cos, sin, slots = (operands[name].tensor for name in ("cos", "sin", "slots"))
    turned = {"q": bounds.rotate(bounds.exact(q), cos, sin, dtype)}
    turned["k"] = bounds.rotate(bounds.exact(k.unsqueeze(1)), cos, sin, dtype)
    normed = bounds.rms_norm(bounds.exact(latent.unsqueeze(1)), norm, EPS, dtype)
    wanted: dict[str, bounds.Number | Tensor] = {
        "q": of_real_tokens(turned["q"], real),
        "k": of_real_tokens(turned["k"], real)[:, 0],
    }
    wanted["k_cache"] = cache_after_write(operands["k_cache"].tensor, slots, turned["k"], real)
    wanted["v_cache"] = cache_after_write(latents, slots, normed, real)
    operands |= {"latent": Operand(latent, "wide"), "norm": Operand(norm), "q": Operand(q, "wide"), "k": Operand(k, "wide")}

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        rotary = RotaryArgs(*(o[name] for name in RotaryArgs._fields))
        kernels.latent_norm_rope_write_cache(o["latent"], o["norm"], EPS, o["q"], o["k"], rotary)
        return {}

    return Problem(operands, call, wanted)


def _attention(shape: Shape, dtype: torch.dtype, dice: RandomValues, cache: str | None = None) -> Problem:
    """Return a problem of random queries over a cache in the format ``cache``, in whose unused slots NaN is stored."""
    rank, rotated = _SIZES[shape["size"]]
    heads, page, padding = _HEADS[shape["heads"]], _PAGES[shape["page"]], shape["padding"]
    new, before = random_lengths(shape, dice)
    lengths = [n + c for n, c in zip(new, before, strict=True)]
    used = [-(-length // page) for length in lengths]
    pages, width = 3 + sum(used), max(used) + 2
    table, free = torch.zeros(len(new), width, dtype=torch.int32), page_order(dice, pages)
    joined = torch.full((pages, page, 1, rank + rotated), torch.nan, dtype=dtype)
    kept = []
    for row, length in enumerate(lengths):
        mine = torch.tensor([free.pop() for _ in range(used[row])])
        table[row, : len(mine)] = mine
        vectors = dice.normal(length, 1, rank + rotated, dtype=dtype)
        vectors[0] += 3  # a kernel that skips a block is far off
        kept.append(as_stored(vectors, cache).to(dtype))
        slot = torch.arange(length)
        joined[mine[slot // page], slot % page] = kept[-1]
    stored = joined.to(CACHE_FORMATS[cache]) if cache is not None else joined
    q = dice.normal(sum(new) + padding, heads, rank + rotated, dtype=dtype)
    mask = random_tree(new, padding, max(new) + padding, dice) if shape["tree"] else None
    starts = torch.tensor([sum(new[:row]) for row in range(len(new) + 1)], dtype=torch.int32)
    operands = {
        "q": Operand(q[..., :rank].contiguous()),
        "q_rotated": Operand(q[..., rank:].contiguous(), "wide"),
        "k_cache": Operand(stored[..., rank:].contiguous()),
        "v_cache": Operand(stored[..., :rank].contiguous()),
        "query_start": Operand(starts),
        "seq_lens": Operand(torch.tensor(lengths, dtype=torch.int32)),
        "block_table": Operand(table),
    }
    if mask is not None:
        operands["tree_mask"] = Operand(mask)
    most = max(new) if mask is None else mask.shape[1]
    scale = 1.0 / 16

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        batch = o["query_start"], o["seq_lens"], o["block_table"]
        metadata = AttentionMetadata(*batch, most, max(lengths) + padding, tree_mask=o.get("tree_mask"))
        vectors = o["q"], o["q_rotated"], o["k_cache"], o["v_cache"]
        return {"out": kernels.latent_attention(*vectors, metadata, scale=scale)}

    parts, first = [], 0
    for vectors, count in zip(kept, new, strict=True):
        own = None if mask is None else mask[first : first + count, :count]
        wide = vectors.double()
        sequence = SequenceOperands(q[first : first + count].double(), wide, wide[..., :rank], own)
        parts.append(attend(sequence, 0, scale, dtype))
        first += count
    return Problem(operands, call, {"out": with_padding(parts, padding)})


_HEAD, _SIZE, _PAGE = (among(*range(len(each))) for each in (_HEADS, _SIZES, _PAGES))
_PLAIN = {"ragged": 0, "tree": 0, "padding": 0, "heads": 0, "size": 0, "page": 0}
_BATCHES = {name: BATCHES[name] for name in ("batch", "new", "ragged", "tree", "padding")}
_TURNED = {**{name: TURNED[name] for name in ("tokens", "padding")}, "heads": 0, "size": 0, "page": 1, "wide_norm": 0}
LATENT = (
    *in_formats(
        "head_linear",
        _head_linear,
        {"tokens": TOKENS, "heads": _HEAD, "inner": among(192, 128, 40, 512), "outer": among(512, 128, 40, 256)}
        | {"absorbed": between(0, 1)},
        (
            {"tokens": 4, "heads": 0, "inner": 192, "outer": 512, "absorbed": 1},
            {"tokens": 257, "heads": 1, "inner": 512, "outer": 128, "absorbed": 0},
            {"tokens": 1, "heads": 2, "inner": 40, "outer": 40, "absorbed": 1},
        ),
    ),
    *in_formats(
        "latent_norm_rope_write_cache",
        _write,
        {name: ROTARY[name] for name in ("tokens", "padding", "page")}
        | {"heads": _HEAD, "size": _SIZE, "wide_norm": between(0, 1)},
        (_TURNED, {**_TURNED, "tokens": 257, "heads": 5, "page": 0}, {**_TURNED, "heads": 2, "size": 2, "wide_norm": 1}),
        caches=(None, *CACHE_FORMATS),
    ),
    *in_formats(
        "latent_attention",
        _attention,
        {**_BATCHES, "context": between(0, 300, 511, 512, 1025), "heads": _HEAD, "size": _SIZE, "page": _PAGE},
        (
            *({**_PLAIN, "batch": 2, "new": 1, "context": context} for context in (15, 16, 31)),
            {**_PLAIN, "batch": 1, "new": 4, "context": 2100, "page": 2},
            {**_PLAIN, "batch": 3, "new": 9, "context": 700, "tree": 1, "ragged": 1, "heads": 3},
            {**_PLAIN, "batch": 3, "new": 70, "context": 131, "ragged": 1, "padding": 5, "size": 1},
            {**_PLAIN, "batch": 20, "new": 1, "context": 30, "heads": 5, "page": 1},
            {**_PLAIN, "batch": 2, "new": 3, "context": 40, "heads": 2, "size": 2},
        ),
        caches=(None, *CACHE_FORMATS),
    ),
)
