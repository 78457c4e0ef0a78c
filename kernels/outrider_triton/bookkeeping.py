"""Operators of an iteration's bookkeeping, as overloads of the backend interface's operators."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.device.kernels.operators import expect
from outrider_triton.jit import bookkeeping as jit
from outrider_triton.launch import define, launch, power_of_two, warps_for

_MAX_BLOCK = 4096
"""Maximum number of elements that one program loads at once."""


def _expect_contiguous(name: str, *operands: Tensor) -> None:
    expect(all(operand.is_contiguous() for operand in operands), lambda: f"{name}: state and results must be contiguous")


def _gather_requests(
    rows: Tensor,
    lens: Tensor,
    lens_by_row: bool,
    last_tokens: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    tables: Tensor,
    own_rows: Tensor,
    own_lens: Tensor,
    own_last_tokens: Tensor,
    own_seeds: Tensor,
    own_temperature: Tensor,
    own_tables: Tensor,
    found: Tensor,
    pdl: bool,
) -> None:
    state = (rows, lens, last_tokens, seeds, temperature, tables)
    own = (own_rows, own_lens, own_last_tokens, own_seeds, own_temperature, own_tables)
    _expect_contiguous("gather_requests", *state, *own)
    pages = tables.shape[1]
    launch(
        jit.gather_requests,
        (rows.shape[0],),
        *(*state, *own, found, pages, found.shape[1], found.stride(0)),
        LENS_BY_ROW=lens_by_row,
        BLOCK=min(power_of_two(pages), 1024),
        FOUND=power_of_two(found.shape[1]),
        pdl=pdl,
        warps=1,
    )


define(
    "gather_requests.triton",
    _gather_requests,
    writes=("own_rows", "own_lens", "own_last_tokens", "own_seeds", "own_temperature", "own_tables", "found"),
)


def _gather_checked(source: Tensor, rows: Tensor | None, low: int, high: int, out: Tensor, found: Tensor, pdl: bool) -> None:
    _expect_contiguous("gather_checked", source, out)
    size = out[0].numel() if out.shape[0] else 0
    block = min(power_of_two(size), _MAX_BLOCK)
    launch(
        jit.gather_checked,
        (out.shape[0],),
        *(source, rows, low, high, out, found, size, found.stride(0)),
        NUMBERS=source.is_floating_point(),
        BLOCK=block,
        pdl=pdl,
    )


define("gather_checked.triton", _gather_checked, writes=("out", "found"))


def _find_nan(x: Tensor, found: Tensor, shares: int, pdl: bool) -> None:
    rows, size = x.shape
    firsts = torch.empty((rows, shares), dtype=torch.int32, device=x.device)
    launch(
        jit.partial_nan,
        (rows, shares),
        *(x.contiguous(), firsts, size),
        SHARES=shares,
        BLOCK=_MAX_BLOCK,
        pdl=pdl,
        warps=warps_for(_MAX_BLOCK) // 2,
    )
    launch(jit.reduce_nan, (rows,), firsts, found, found.stride(0), SHARES=shares, pdl=pdl, warps=1)


define("find_nan.triton", _find_nan, writes=("found",))


def _place_tokens(
    lens: Tensor,
    tables: Tensor,
    page_size: int,
    last: int,
    positions: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    pdl: bool,
) -> None:
    _expect_contiguous("place_tokens", lens, tables)
    count, ends = positions.shape[1], seq_lens.shape[1]
    launch(
        jit.place_tokens,
        (lens.shape[0],),
        *(lens, tables, positions, slots, seq_lens, count, ends, tables.shape[1], page_size, last),
        *(*positions.stride(), *slots.stride(), *seq_lens.stride()),
        BLOCK=power_of_two(count),
        pdl=pdl,
        warps=1,
    )


define("place_tokens.triton", _place_tokens, writes=("positions", "slots", "seq_lens"))


def _publish_accepted(
    rows: Tensor,
    lens: Tensor,
    tokens: Tensor,
    accepted: Tensor,
    lengths: Tensor,
    last_tokens: Tensor,
    results: Tensor,
    own_tokens: Tensor,
    own_accepted: Tensor,
    pending: Tensor | None,
    pdl: bool,
) -> None:
    _expect_contiguous("publish_accepted", rows, lens, lengths, last_tokens, own_tokens, own_accepted)
    batch, path = tokens.shape
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    launch(
        jit.publish_accepted,
        (batch,),
        *(rows, lens, tokens, accepted, lengths, last_tokens, results, own_tokens, own_accepted, pending),
        *(path, results.stride(0), tokens.stride(0), accepted.stride(0)),
        BLOCK=power_of_two(path),
        pdl=pdl,
        warps=1,
    )


define(
    "publish_accepted.triton",
    _publish_accepted,
    writes=("lengths", "last_tokens", "results", "own_tokens", "own_accepted", "pending"),
)


def _place_accepted(
    lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor, pdl: bool
) -> None:
    _expect_contiguous("place_accepted", lens, tokens, accepted, following, last, positions)
    batch, path = tokens.shape
    launch(
        jit.place_accepted,
        (batch,),
        *(lens, tokens, accepted, following, last, positions, path),
        BLOCK=power_of_two(path),
        pdl=pdl,
        warps=1,
    )


define("place_accepted.triton", _place_accepted, writes=("following", "last", "positions"))


def expect_beside(weight: Tensor, hidden: Tensor) -> None:
    """Raise RuntimeError unless rows of ``weight`` and ``hidden`` have one dtype and contiguous columns, so that a
    kernel can concatenate them.
    """
    expect(
        weight.is_contiguous() and hidden.stride(-1) == 1 and weight.dtype is hidden.dtype,
        lambda: "embed_beside: embeddings and features must be of one dtype, and their columns contiguous",
    )


def _embed_beside(tokens: Tensor, weight: Tensor, hidden: Tensor, pdl: bool) -> Tensor:
    expect_beside(weight, hidden)
    out = hidden.new_empty((tokens.shape[0], weight.shape[1] + hidden.shape[1]))
    block = 1024
    launch(
        jit.embed_beside,
        (out.shape[0], triton.cdiv(out.shape[1], block)),
        *(tokens.contiguous(), weight, hidden, out, weight.shape[1], hidden.shape[1], hidden.stride(0)),
        BLOCK=block,
        pdl=pdl,
    )
    return out


define("embed_beside.triton", _embed_beside)
