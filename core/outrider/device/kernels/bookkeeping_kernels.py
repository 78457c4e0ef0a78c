"""The bookkeeping part of a KernelSet: rows of requests, positions and slots of tokens, accepted tokens.

These kernels move little data, so their cost is the number of launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device.kernels.metadata import RequestInputs, RequestRows
from outrider.device.kernels.reference import ops as _ops  # noqa: F401  (registers the operators)


class BookkeepingKernels:
    """The engine's bookkeeping. Rules and letters: :class:`~outrider.device.KernelSet`.

    Each method writes into existing tensors. Written and read memory don't overlap.
    """

    # -- rows of state ---------------------------------------------------------------------------------------------

    def gather_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        """Return rows ``rows`` int64 [B] of ``state`` [R, ...] → [B, ...]: states of requests, or embeddings of tokens.

        ``state`` may be columns of a wider tensor.
        """
        return torch.ops.outrider.gather_rows(state, rows)  # type: ignore[no-any-return]

    def scatter_rows(self, state: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write ``values`` [B, ...] to rows ``rows`` int64 [B] of ``state`` [R, ...]. Rows are distinct, except row 0, which
        is reserved: values for row 0 come from padding and aren't written.
        """
        torch.ops.outrider.scatter_rows(state, rows, values)

    def copy_rows(self, source: Tensor, out: Tensor) -> None:
        """Write ``source`` [T, H] to ``out`` [T, H] of the same dtype, which may be columns of a wider tensor."""
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
        """Copy the inputs of an iteration from ``state`` to ``own`` for its B requests, and clear the findings.

        ``rows`` int64 [B]; ``lens`` int64 [B], or int64 [R] if ``lens_by_row``. ``found`` int64 [B, F] is filled with -1.
        """
        torch.ops.outrider.gather_requests(rows, lens, lens_by_row, *state, *own, found)

    def gather_checked(
        self, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor, *, bounds: tuple[int, int] | None
    ) -> None:
        """Copy rows ``rows`` int64 [B] of ``source`` [R, ...] (None: all, in order) to ``out`` [B, ...], and check them.

        ``found`` int64 [B, 2] receives the finding of each row. Without ``bounds``, the finding is that of :meth:`find_nan`.
        With ``bounds``, integers must be at least the first bound and below the second. The finding is then the index of the
        first invalid integer and its value, or -1 and -1. A row with an invalid integer is filled with the lower bound: an
        index out of range would crash the device before the error is reported.
        """
        low, high = bounds or (0, 0)
        torch.ops.outrider.gather_checked(source, rows, low, high, out, found)

    def find_nan(self, x: Tensor, found: Tensor) -> None:
        """Write the index of the first NaN of each row of ``x`` [B, n], n at least 1, or -1, to ``found[:, 0]``.

        ``found`` is int64 [B, 2]; ``found[:, 1]`` becomes -1.
        """
        torch.ops.outrider.find_nan(x, found)

    # -- positions of tokens, and accepted tokens -------------------------------------------------------------------

    def place_tokens(
        self, lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
    ) -> None:
        """Compute the places of n tokens that follow each request's ``lens`` int64 [B], by block ``tables`` int32 [B, P].

        The outputs may be strided. ``positions`` int64 [B, n] are at most ``last``. Cache ``slots`` int64 [B, n] lie in the
        reserved page 0 for tokens beyond the table. ``seq_lens`` int32 [B, m], with m at most n, are the cached lengths that
        include each of the last m tokens, at most the capacity of the table.
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
        pending: Tensor | None = None,
    ) -> None:
        """Write the decision ``decided``, tokens int64 [B, E] and accepted int64 [B], to rows, results and ``own``.

        ``lengths`` int64 [R] and ``last_tokens`` int64 [R] are written at ``rows`` int64 [B]: ``lens + accepted + 1`` and
        the last token; row 0 becomes 0. ``results`` int64 [B, 1 + E] receives accepted, then tokens. ``own`` receives
        copies of both tensors of ``decided``.

        ``pending`` int64 [R] (:class:`~outrider.device.RecurrentBatch`) counts the accepted drafts and the token before them:
        it becomes ``accepted + 1`` at ``rows``, negated where it was positive, because halves of windows alternate. Row 0
        becomes 0.
        """
        torch.ops.outrider.publish_accepted(rows, lens, *decided, lengths, last_tokens, results, *own, pending)

    def place_accepted(
        self, lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor
    ) -> None:
        """Compute the inputs of draft-extend from ``tokens`` int64 [B, E] and ``accepted`` int64 [B].

        ``following`` int64 [B, E] receives the tokens, with 0 in place of -1. ``last`` int64 [B] receives the index of each
        request's last token in the flat [B * E] tokens. ``positions`` int64 [B] receives ``lens + accepted + 2``, the
        position of the token to draft next.
        """
        torch.ops.outrider.place_accepted(lens, tokens, accepted, following, last, positions)

    def move_cache(self, k_cache: Tensor, v_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values [pages, page size, Hkv, D] from slots ``sources`` to ``destinations``, both int64 [M].
        With a cache of latent vectors, values have another D than keys.

        Every source is read before any destination is written, so the two may overlap. Destinations are distinct, except in
        the reserved page 0, which receives padding. A source equal to its destination changes nothing.
        """
        torch.ops.outrider.move_cache(k_cache, v_cache, sources, destinations)
