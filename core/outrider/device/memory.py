"""Pinned host buffers and memory figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.device.errors import StaleBufferError

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.stream import Event


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory. ``total`` and ``free`` are 0 where the backend doesn't declare ``memory_limit``."""

    total: int
    free: int
    allocated: int


class PinnedBuffer:
    """Page-locked host memory with an owner and a generation.

    ``tensor`` is the host tensor; slices of it stay pinned. The device reads and writes it in stream order while the host
    does so at once, so each reuse must be fenced. :meth:`renew` starts the next generation before the buffer is used for
    something new; :meth:`read_generation` under an older generation raises instead of returning the data of a later use.

    *Lifetime.* The memory must live until every copy that touches it has run (``Backend.keep_alive``, or a fence).
    *Threads.* One owner at a time.
    """

    __slots__ = ("_backend", "_generation", "owner", "tensor")

    def __init__(self, backend: Backend, owner: str, tensor: Tensor) -> None:
        self._backend = backend
        self.owner = owner
        self.tensor = tensor
        self._generation = 0

    @property
    def generation(self) -> int:
        """Return how often the buffer was renewed."""
        return self._generation

    def renew(self) -> int:
        """Start and return a new generation. The caller has ordered this after the last reader and writer."""
        self._generation += 1
        self._backend.listener.renewed(self.owner, self.tensor, self._generation)
        return self._generation

    def read_generation(self, generation: int) -> Tensor:
        """Return the host tensor to the owner of ``generation``. The caller has waited for the copy that fills the tensor.

        Raises :class:`StaleBufferError` if the buffer has passed to a later generation.
        """
        if generation != self._generation:
            raise StaleBufferError(
                f"pinned buffer {self.owner!r} is at generation {self._generation} and was read under {generation}: its "
                "slot was renewed before it was read; read earlier or use a longer ring"
            )
        return self.tensor


class KeepAlive:
    """References that must not be dropped before an event has completed.

    Give each hold an event that is always recorded on one stream: a later generation then covers an earlier one. If the
    event was recorded again meanwhile, the hold lasts longer than necessary, never shorter.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Event, Sequence[object]]] = []

    def hold(self, objects: Sequence[object], until: Event) -> None:
        """Keep ``objects`` until the generation of ``until`` that is visible now has completed, or a later one."""
        self._held.append((until, tuple(objects)))

    def release_finished(self) -> int:
        """Drop every hold whose event has completed; returns how many remain. Never blocks."""
        finished = {event: event.query() for event, _ in self._held}
        self._held = [(event, objects) for event, objects in self._held if not finished[event]]
        return len(self._held)
