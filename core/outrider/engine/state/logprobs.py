"""LogprobBuffers: the device buffer with log-probabilities of emitted tokens, and its way to the host.

Letters in shapes: M: maximum number of requests; W: maximum number of new tokens of a request in an iteration; n: maximum
number of reported likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import Backend, Group, Stream
from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.state.outgoing import Outgoing


class LogprobBuffers:
    """Log-probabilities in one int32 tensor [2M, W, 1 + 2n], so that one copy moves all of them.

    Each entry has the float32 bits of the token's value, the float32 bits of n values, and n token ids. The rows are those
    of :class:`~outrider.engine.state.results.Results`, whose fences also order the accesses.
    """

    def __init__(
        self, backend: Backend, *, entries: int, max_requests: int, width: int, most: int, data: Group | None = None
    ) -> None:
        """Allocate the buffers. ``width`` is W and ``most`` is n; ``data`` is the collective group for the exchange, see
        ``Results``.
        """
        self._data = data
        self._max_likeliest = most
        shape = (2 * max_requests, width, 1 + 2 * most)
        self._device = torch.zeros(shape, dtype=torch.int32, device=backend.device)
        self._shared = self._device.unsqueeze(0) if data is None else self._device.new_zeros((data.size, *shape))
        self._outgoing = Outgoing(backend, "logprobs", self._shared, entries=entries)

    def write(self, first_row: int, values: Tensor, ids: Tensor) -> None:
        """Write ``values`` float32 [B, N, 1+c] and ``ids`` int64 [B, N, c] to B rows from ``first_row``. c is at most n."""
        batch, nodes, count = ids.shape
        rows = self._device[first_row : first_row + batch, :nodes]
        rows[..., : 1 + count] = values.contiguous().view(torch.int32)
        rows[..., 1 + self._max_likeliest : 1 + self._max_likeliest + count] = ids.to(torch.int32)

    def share(self, forward: Stream) -> None:
        """Gather the rows of all data-parallel groups, on the forward stream."""
        if self._data is not None:
            self._data.all_gather(self._shared, self._device, stream=forward)

    def copy_on_device(self, entry: int) -> None:
        """Copy the rows to ring entry ``entry`` on the device, on the current stream (forward)."""
        self._outgoing.copy_on_device(entry)

    def copy_out(self, entry: int, stream: Stream) -> int:
        """Copy ring entry ``entry`` to pinned memory on ``stream``. Return the generation of the pinned entry."""
        return self._outgoing.copy_out(entry, stream)

    def read_entry(
        self, entry: int, generation: int, row: int, tokens: tuple[int, ...], count: int, group: int = 0
    ) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of ``tokens`` of one row, with ``count`` likeliest tokens each, after the fence."""
        bits = self._outgoing.read_entry(entry, generation)[group, row, : len(tokens)]
        values: list[list[float]] = bits[:, : 1 + count].contiguous().view(torch.float32).tolist()
        ids: list[list[int]] = bits[:, 1 + self._max_likeliest : 1 + self._max_likeliest + count].tolist()
        return tuple(
            TokenLogprobs(token, value[0], tuple(zip(best, value[1:], strict=True)))
            for token, value, best in zip(tokens, values, ids, strict=True)
        )
