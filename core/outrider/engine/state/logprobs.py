"""Log-probabilities of emitted tokens: a device buffer, its rings, and what the host makes of them.

Letters: M most requests, W most new tokens of a request in an iteration, n most likeliest tokens reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import Backend, Group, Stream
from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.state.outgoing import Outgoing


class LogprobBuffers:
    """int32 [2M, W, 1 + 2n]: the bits of the token's float32, the bits of n more, and n ids. One tensor, so one copy.

    Rows as in ``Results``. The caller's fences order everything; they are those of the other results.
    """

    def __init__(
        self, backend: Backend, *, entries: int, max_requests: int, width: int, most: int, data: Group | None = None
    ) -> None:
        """``data``: see ``Results``."""
        self._data = data
        self._most = most
        shape = (2 * max_requests, width, 1 + 2 * most)
        self._device = torch.zeros(shape, dtype=torch.int32, device=backend.device)
        self._shared = self._device.unsqueeze(0) if data is None else self._device.new_zeros((data.size, *shape))
        self._out = Outgoing(backend, "logprobs", self._shared, entries=entries)

    def write(self, first_row: int, values: Tensor, ids: Tensor) -> None:
        """``values`` float32 [B, N, 1+c] and ``ids`` int64 [B, N, c], c at most n, for rows from ``first_row`` on."""
        batch, nodes, count = ids.shape
        rows = self._device[first_row : first_row + batch, :nodes]
        rows[..., : 1 + count] = values.contiguous().view(torch.int32)
        rows[..., 1 + self._most : 1 + self._most + count] = ids.to(torch.int32)

    def share(self, forward: Stream) -> None:
        """Exchange them with the other data-parallel groups; on forward."""
        if self._data is not None:
            self._data.all_gather(self._shared, self._device, stream=forward)

    def keep(self, entry: int) -> None:
        """Copy them within the device, in the caller's scope; on forward."""
        self._out.keep(entry)

    def copy_out(self, entry: int, stream: Stream) -> int:
        """Copy what was kept into the pinned entry on ``stream``; returns the entry's generation."""
        return self._out.copy_out(entry, stream)

    def read(
        self, entry: int, generation: int, row: int, tokens: tuple[int, ...], count: int, group: int = 0
    ) -> tuple[TokenLogprobs, ...]:
        """Host, behind the fence: the report on ``tokens`` of one row of a group, with ``count`` likeliest tokens each."""
        bits = self._out.read(entry, generation)[group, row, : len(tokens)]
        values: list[list[float]] = bits[:, : 1 + count].contiguous().view(torch.float32).tolist()
        ids: list[list[int]] = bits[:, 1 + self._most : 1 + self._most + count].tolist()
        return tuple(
            TokenLogprobs(token, value[0], tuple(zip(best, value[1:], strict=True)))
            for token, value, best in zip(tokens, values, ids, strict=True)
        )
