"""The part of the kernel set that does an iteration's bookkeeping."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.device import BookkeepingKernels, RequestInputs, RequestRows
from outrider_triton import bookkeeping_ops as _bookkeeping_ops  # noqa: F401  (registers the operators)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TRITON = torch.ops.outrider
_LONG = 1 << 14
"""More numbers than this are too many for one program to look at."""


class TritonBookkeeping(BookkeepingKernels):
    """Methods that move whole numbers and look at values. ``processors`` and ``pdl`` as for the whole set."""

    processors: int
    pdl: bool

    @abstractmethod
    def _uses(self, kernel: str, *operands: Tensor) -> bool:
        """Whether a kernel is Triton's for these operands."""

    @abstractmethod
    def _shares(self, shape: Sequence[int]) -> Iterator[int]:
        """Among how many programs rows of so many numbers are shared out, the last one for good."""

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
        """A program a request."""
        if not self._uses("gather_requests"):
            super().gather_requests(rows, lens, state, own, found, lens_by_row=lens_by_row)
            return
        _TRITON.gather_requests.triton(rows, lens, lens_by_row, *state, *own, found, self.pdl)

    def gather_checked(
        self, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor, *, bounds: tuple[int, int] | None
    ) -> None:
        """A program a row; distributions over a vocabulary, which are long, in two steps."""
        if not self._uses("gather_checked", source) or not source.is_contiguous():
            super().gather_checked(source, rows, out, found, bounds=bounds)
        elif bounds is None and source[0].numel() > _LONG:
            value = source if rows is None else source.index_select(0, rows)
            self.find_nan(value.flatten(1), found)
            out.copy_(value)
        else:
            low, high = bounds or (0, 0)
            _TRITON.gather_checked.triton(source, rows, low, high, out, found, self.pdl)

    def place_tokens(
        self, lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
    ) -> None:
        """A program a request."""
        if not self._uses("place_tokens"):
            super().place_tokens(lens, tables, page_size, last, positions, slots, seq_lens)
            return
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
        """A program a request."""
        if not self._uses("publish_accepted"):
            super().publish_accepted(rows, lens, decided, lengths, last_tokens, results, own)
            return
        _TRITON.publish_accepted.triton(rows, lens, *decided, lengths, last_tokens, results, *own, self.pdl)

    def place_accepted(
        self, lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor
    ) -> None:
        """A program a request."""
        if not self._uses("place_accepted"):
            super().place_accepted(lens, tokens, accepted, following, last, positions)
            return
        _TRITON.place_accepted.triton(lens, tokens, accepted, following, last, positions, self.pdl)

    def find_nan(self, x: Tensor, found: Tensor) -> None:
        """A row shared out among programs."""
        if not self._uses("find_nan", x) or not x.is_contiguous():
            super().find_nan(x, found)
            return
        for count in self._shares(x.shape):
            _TRITON.find_nan.triton(x, found, count, self.pdl)
