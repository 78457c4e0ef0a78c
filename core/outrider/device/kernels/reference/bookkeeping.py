"""Torch references of an iteration's bookkeeping: gathered rows, token positions, accepted tokens, findings of probes.

Each function calls a few small operators. A device on which launches dominate implements each as one kernel.
Shapes: B requests, K drafted tokens, E tokens of an accepted chain (K + 1), P pages of a table, R rows of state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device.kernels.reference.model import find_nan, find_outside


def gather_requests(
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
) -> None:
    """Copy the state of the requests in ``rows`` int64 [B] to the iteration's own tensors, and fill ``found`` with -1.

    ``lens_by_row``: ``lens`` has one entry per row of state, else one per request. See ``KernelSet.gather_requests``.
    """
    own_rows.copy_(rows)
    own_lens.copy_(lens.index_select(0, rows) if lens_by_row else lens)
    for state, own in (
        (last_tokens, own_last_tokens),
        (seeds, own_seeds),
        (temperature, own_temperature),
        (tables, own_tables),
    ):
        own.copy_(state.index_select(0, rows))
    found.fill_(-1)


def gather_checked(source: Tensor, rows: Tensor | None, low: int, high: int, out: Tensor, found: Tensor) -> None:
    """Copy rows ``rows`` of ``source``, or all, to ``out``, and write the first invalid value of each to ``found`` [B, 2].

    Invalid are NaN and integers outside ``low`` to ``high``; a row with an invalid integer is replaced by ``low``. See
    ``KernelSet.gather_checked``.
    """
    value = source if rows is None else source.index_select(0, rows)
    flat = value.reshape(value.shape[0], -1)
    if source.is_floating_point():
        find_nan(flat, found)
        out.copy_(value)
        return
    outside = find_outside(flat, low, high)
    found.copy_(outside)
    is_valid = (outside[:, 0] < 0).view(-1, *([1] * (value.dim() - 1)))
    out.copy_(torch.where(is_valid, value, low))


def place_tokens(
    lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
) -> None:
    """Write positions, cache slots and lengths of the tokens that follow ``lens`` int64 [B] cached tokens.

    See ``KernelSet.place_tokens``.
    """
    count, ends = positions.shape[1], seq_lens.shape[1]
    unbounded = lens.unsqueeze(1) + torch.arange(count, device=lens.device)
    index = unbounded // page_size
    inside = index < tables.shape[1]
    page = tables.gather(1, index.clamp(max=tables.shape[1] - 1)).to(torch.int64)
    slots.copy_(torch.where(inside, page, 0) * page_size + unbounded % page_size)
    positions.copy_(unbounded.clamp(max=last))
    seq_lens.copy_((unbounded[:, count - ends :] + 1).clamp(max=tables.shape[1] * page_size))


def publish_accepted(
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
) -> None:
    """Write the decision of verify to the next iteration's rows, to ``results`` [B, 1 + E] and to draft-extend's inputs.

    Row 0 takes padding and stays zero. See ``KernelSet.publish_accepted``.
    """
    real = rows > 0
    lengths.index_copy_(0, rows, torch.where(real, lens + accepted + 1, 0))
    decided = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
    last_tokens.index_copy_(0, rows, torch.where(real, decided, 0))
    results[:, 0] = accepted
    results[:, 1:] = tokens
    own_tokens.copy_(tokens)
    own_accepted.copy_(accepted)
    if pending is not None:
        held = torch.where(pending.index_select(0, rows) > 0, -1 - accepted, accepted + 1)
        pending.index_copy_(0, rows, torch.where(real, held, 0))


def place_accepted(
    lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor
) -> None:
    """Write the inputs of draft-extend after ``tokens`` [B, E], of which the first ``accepted`` [B] and the next are final.

    ``last`` [B] receives the index of each request's last token in the flat ``following``. See ``KernelSet.place_accepted``.
    """
    batch, path = tokens.shape
    following.copy_(tokens.clamp(min=0))
    last.copy_(torch.arange(0, batch * path, path, device=tokens.device) + accepted)
    positions.copy_(lens + accepted + 2)
