"""What an iteration tells the host: one device buffer, a pinned ring, a ticket for each iteration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import Backend, Fence, PinnedBuffer, Stream
from outrider.engine.staging import Batch


@dataclass(frozen=True, slots=True)
class Ticket:
    """Redeems the results of one launched iteration, once."""

    batch: Batch
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results on the host, in the order of the batch. ``decoded``: new tokens of each decoding request.
    ``first_tokens``: the token after each prefill chunk, None where the prompt goes on.
    """

    decoded: tuple[tuple[int, ...], ...]
    first_tokens: tuple[int | None, ...]


class Results:
    """Rows 0..M-1 hold decoding requests, M..2M-1 prefill chunks: accepted, then K+1 tokens padded with -1."""

    def __init__(self, backend: Backend, *, slots: int, max_requests: int, draft_tokens: int) -> None:
        self._backend = backend
        self._max_requests = max_requests
        shape = (2 * max_requests, draft_tokens + 2)
        self._device = torch.zeros(shape, dtype=torch.int64, device=backend.device)
        self._ring: list[PinnedBuffer] = [
            backend.empty_pinned(f"results[{slot}]", shape, torch.int64) for slot in range(slots)
        ]

    def write_decode(self, accepted: Tensor, tokens: Tensor) -> None:
        """``accepted`` [B], ``tokens`` [B, K+1]; on forward."""
        count = accepted.shape[0]
        self._device[:count, 0] = accepted
        self._device[:count, 1:] = tokens

    def write_prefill(self, tokens: Tensor) -> None:
        """First tokens [S]; on forward."""
        start = self._max_requests
        self._device[start : start + tokens.shape[0], 1] = tokens

    def copy_out(self, batch: Batch, slot: int, stream: Stream) -> Ticket:
        """Copy into the pinned slot on ``stream``."""
        buffer = self._ring[slot]
        generation = buffer.renew()
        self._backend.copy_async(buffer.tensor, self._device, stream=stream)
        return Ticket(batch, slot, generation)

    def redeem(self, ticket: Ticket, copied: Fence) -> Outcome:
        """Host: wait until the copy has landed, then read it."""
        copied.wait_host()
        rows: list[list[int]] = self._ring[ticket.slot].read(ticket.generation).tolist()
        decoded = tuple(tuple(rows[i][1 : rows[i][0] + 2]) for i in range(len(ticket.batch.decode)))
        firsts = tuple(
            rows[self._max_requests + i][1] if chunk.final else None for i, chunk in enumerate(ticket.batch.prefill)
        )
        return Outcome(decoded, firsts)
