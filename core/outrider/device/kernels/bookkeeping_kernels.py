"""The bookkeeping part of a KernelSet: rows of requests, positions and slots of tokens, accepted tokens.

These kernels move little data, so their cost is the number of launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device.kernels import ops as _ops  # noqa: F401  (registers the operators)
from outrider.device.kernels.metadata import RequestInputs, RequestRows


class BookkeepingKernels:
    """The engine's bookkeeping. Rules and letters: :class:`~outrider.device.KernelSet`.

    Each method writes into existing tensors. Written and read memory don't overlap.
    """

    # -- rows of state ---------------------------------------------------------------------------------------------

    def gather_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        """Rows ``rows`` int64 [B] of ``state`` [R, ...] → [B, ...]."""
        return torch.ops.outrider.gather_rows(state, rows)  # type: ignore[no-any-return]

    def scatter_rows(self, state: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write ``values`` [B, ...] to rows ``rows`` int64 [B] of ``state`` [R, ...]. Rows are distinct, except row 0, which
        is reserved: what padding has for it isn't written.
        """
        torch.ops.outrider.scatter_rows(state, rows, values)

    def copy_rows(self, source: Tensor, out: Tensor) -> None:
        """Write ``source`` [T, H] to ``out`` [T, H] of the same dtype: columns of a wider tensor, say."""
        torch.ops.outrider.copy_rows(source, out)

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
        """Private copies of what an iteration reads of its B requests, and no findings yet.

        ``rows`` int64 [B]; ``lens`` int64 [B], or [R] ``lens_by_row``; ``state``: what is read; ``own``: what is written.
        ``found`` int64 [B, F] becomes -1.
        """
        torch.ops.outrider.gather_requests(rows, lens, lens_by_row, *state, *own, found)

    def gather_checked(
        self, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor, *, bounds: tuple[int, int] | None
    ) -> None:
        """Rows ``rows`` int64 [B] of ``source`` [R, ...] (None: all, in order) into ``out`` [B, ...], looked at on the way.

        ``found`` int64 [B, 2]: what :meth:`find_nan` says of each row of numbers (``bounds`` None). Whole numbers must be at
        least the first of ``bounds`` and below the second: the index of the first one that isn't, and that number; -1 and
        -1 where there is none. A row with a bad number is filled with the lower bound: an index out of range would crash the
        device before the error could be reported.
        """
        low, high = bounds or (0, 0)
        torch.ops.outrider.gather_checked(source, rows, low, high, out, found)

    def find_nan(self, x: Tensor, found: Tensor) -> None:
        """Look at each row of ``x`` [B, n], n at least 1. ``found`` int64 [B, 2] becomes the index of the first NaN, or -1,
        and then -1.
        """
        torch.ops.outrider.find_nan(x, found)

    # -- places of tokens, and what was accepted -------------------------------------------------------------------

    def place_tokens(
        self, lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
    ) -> None:
        """Where n tokens behind each request's ``lens`` int64 [B] go, under block tables int32 [B, P].

        Writes, strided as they may be: ``positions`` int64 [B, n], at most ``last``; cache ``slots`` int64 [B, n], in the
        reserved page 0 beyond the table; ``seq_lens`` int32 [B, m], m at most n: how many are cached with each of the last
        m tokens, at most what the table holds.
        """
        torch.ops.outrider.place_tokens(lens, tables, page_size, last, positions, slots, seq_lens)

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
        """Write what was ``decided``, tokens int64 [B, E] and accepted int64 [B], to rows, results and copies.

        By ``rows`` int64 [B], of which row 0 becomes 0: ``lengths`` int64 [R], the new ``lens`` (accepted and one more), and
        ``last_tokens`` int64 [R], the last token. ``results`` int64 [B, 1 + E]: accepted, then tokens. ``own``: copies.
        """
        torch.ops.outrider.publish_accepted(rows, lens, *decided, lengths, last_tokens, results, *own)

    def place_accepted(
        self, lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor
    ) -> None:
        """What draft-extend takes in of ``tokens`` int64 [B, E], ``accepted`` int64 [B].

        ``following`` int64 [B, E]: the tokens, 0 where there is none; ``last`` int64 [B]: where each request's last one lies
        among all of them; ``positions`` int64 [B]: of the token to draft next, two behind ``lens + accepted``.
        """
        torch.ops.outrider.place_accepted(lens, tokens, accepted, following, last, positions)

    def move_cache(self, k_cache: Tensor, v_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values [pages, page size, Hkv, D] from slots ``sources`` to ``destinations``, both int64 [M].

        As if every source were read before any destination is written: the two may overlap. Destinations are distinct,
        except in the reserved page 0, where padding goes. A source equal to its destination leaves it as it is.
        """
        torch.ops.outrider.move_cache(k_cache, v_cache, sources, destinations)
