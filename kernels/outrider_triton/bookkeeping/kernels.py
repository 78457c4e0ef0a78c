"""TritonBookkeeping: the part of the kernel set that moves integers between the passes of an iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import RequestInputs, RequestRows
from outrider_triton.bookkeeping import operators as _bookkeeping_ops  # noqa: F401  (registers the operators)
from outrider_triton.launch import has_kernel
from outrider_triton.tiles.variants import WarmedKernels

_TRITON = torch.ops.outrider
_MAX_ELEMENTS_PER_PROGRAM = 1 << 14
"""A row with more elements is too long for one program to check."""


class TritonBookkeeping(WarmedKernels):
    """Kernels that gather, place and publish integers, and look for invalid values."""

    def gather_requests(
        self,
        rows: Tensor,
        lens: Tensor,
        state: RequestRows,
        own: RequestInputs,
        found: Tensor,
        *,
        lens_by_row: bool,
    ) -> None:
        """Copy each request's state rows to the iteration's own tensors, one program per request."""
        _TRITON.gather_requests.triton(rows, lens, lens_by_row, *state, *own, found, self.pdl)

    def gather_checked(
        self, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor, *, bounds: tuple[int, int] | None
    ) -> None:
        """Copy rows and report invalid values, one program per row.

        Distributions over a vocabulary are long: one pass finds NaN, another copies.
        """
        if not has_kernel(source) or not source.is_contiguous():
            super().gather_checked(source, rows, out, found, bounds=bounds)
        elif bounds is None and source[0].numel() > _MAX_ELEMENTS_PER_PROGRAM:
            value = source if rows is None else source.index_select(0, rows)
            self.find_nan(value.flatten(1), found)
            out.copy_(value)
        else:
            low, high = bounds or (0, 0)
            _TRITON.gather_checked.triton(source, rows, low, high, out, found, self.pdl)

    def place_tokens(
        self, lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
    ) -> None:
        """Compute positions, slots and lengths of the new tokens, one program per request."""
        _TRITON.place_tokens.triton(lens, tables, page_size, last, positions, slots, seq_lens, self.pdl)

    def publish_accepted(
        self,
        rows: Tensor,
        lens: Tensor,
        decided: tuple[Tensor, Tensor],
        lengths: Tensor,
        last_tokens: Tensor,
        results: Tensor,
        own: tuple[Tensor, Tensor],
    ) -> None:
        """Publish accepted tokens and lengths to state rows and results, one program per request."""
        _TRITON.publish_accepted.triton(rows, lens, *decided, lengths, last_tokens, results, *own, self.pdl)

    def place_accepted(
        self, lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor
    ) -> None:
        """Compute the draft pass's tokens and positions from the accepted ones, one program per request."""
        _TRITON.place_accepted.triton(lens, tokens, accepted, following, last, positions, self.pdl)

    def find_nan(self, x: Tensor, found: Tensor) -> None:
        """Report the first NaN of each row; several programs share a row."""
        if not has_kernel(x) or not x.is_contiguous():
            super().find_nan(x, found)
            return
        for count in self._shares(x.shape):
            _TRITON.find_nan.triton(x, found, count, self.pdl)
