"""SpeculativeSync: how one device orders an overlapped iteration of speculative decoding.

Core names every edge that crosses streams (the table in ``outrider.engine.fences``); a backend's SpeculativeSync supplies
the mechanism of each, and declares what else its device needs between plan and replay. This is the policy that other
engines scatter as ``if is_<vendor>`` over scheduler and workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from outrider.device.stream import poll

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.stream import Event, Stream


class StepMode(StrEnum):
    """The way in which an iteration is launched: stage by stage, or as one graph."""

    STAGED = "staged"
    """Stages on their own streams, ordered by fences; graphs per stage."""
    FUSED = "fused"
    """The whole iteration, draft to stash, is one captured callable; all per-request state lives on the device."""


class Waiter(StrEnum):
    """The side that waits at a fence: the consumer's stream or the host."""

    STREAM = "stream"
    HOST = "host"


class Recompute(StrEnum):
    """Values that may have to be computed again, from source, after the plan stream has joined."""

    MROPE_POSITIONS = "mrope_positions"


class Fence(ABC):
    """The mechanism of one named edge between streams, or from a stream to the host.

    ``signal`` comes first; a ``wait`` takes the generation that is visible when the wait is enqueued. The engine signals
    each fence of an initially free resource once when it is built, so that no wait is conditional.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def mechanism(self) -> str:
        """Return the word that ``outrider fences`` prints: ``event``, ``flag``, …"""

    @abstractmethod
    def signal(self, stream: Stream) -> None:
        """Open a new generation after everything enqueued on ``stream`` so far."""

    @abstractmethod
    def wait(self, stream: Stream) -> None:
        """Hold what is enqueued on ``stream`` from now on until the visible generation."""

    @abstractmethod
    def wait_host(self) -> None:
        """Block the calling thread until the visible generation."""

    def wait_host_within(self, seconds: float) -> bool:
        """Block the calling thread for at most ``seconds``; return True if the visible generation completed.

        See :meth:`Event.synchronize_within`. The default polls :meth:`done`, and then calls :meth:`wait_host`, which
        raises the error of a failed operation. A fence that wraps another fence passes the call on.
        """
        if not poll(self.done, seconds):
            return False
        self.wait_host()
        return True

    @abstractmethod
    def done(self) -> bool:
        """Return True if the visible generation has completed. Never blocks."""


class EventFence(Fence):
    """A fence made of one event: the mechanism of every device whose events have generations."""

    def __init__(self, name: str, event: Event) -> None:
        super().__init__(name)
        self.event = event

    @property
    def mechanism(self) -> str:
        """Return the word for an event fence: ``event``."""
        return "event"

    def signal(self, stream: Stream) -> None:
        """Record the event on ``stream``."""
        stream.record(self.event)

    def wait(self, stream: Stream) -> None:
        """Wait for the event's latest record."""
        stream.wait(self.event)

    def wait_host(self) -> None:
        """Synchronize with the event's latest record."""
        self.event.synchronize()

    def wait_host_within(self, seconds: float) -> bool:
        """Synchronize with the event's latest record, with a limit."""
        return self.event.synchronize_within(seconds)

    def done(self) -> bool:
        """Query the event's latest record."""
        return self.event.query()


class JoinedPlan(Protocol):
    """The actions that core offers after the plan stream has joined. Repeating an action changes nothing."""

    @property
    def idle(self) -> bool:
        """Return True if the batch has no request, so that nothing must be recomputed."""

    def recompute(self, what: Recompute) -> None:
        """Compute ``what`` again, from source, on the stream that joined.

        Do nothing if the model has no such value (for example, text positions in one dimension).
        """

    def refresh(self, buffer: str) -> None:
        """Copy ``buffer``, ``rope_positions``, into the graph's static input again. Do nothing if no graph is used.

        Raises :class:`~outrider.device.InterfaceError` for another name.
        """


class SpeculativeSync:
    """The policy of one backend. The defaults suit a device whose stream waits are cheap and whose events have generations.

    Every attribute is a declaration that core reads when the engine is built. ``create_fence`` and ``after_join`` are
    called by the step itself: keep them short, and never block in them.
    """

    step_modes: frozenset[StepMode] = frozenset({StepMode.STAGED})
    """The modes that are right on this device."""

    published_waiter: Waiter = Waiter.STREAM
    """Who waits for the lengths that a verify published: the schedule stream, or the host where a stream wait costs more
    than a host wait."""

    exact_host_lengths: bool = False
    """Planning reads exact lengths on the host (attention that takes host integers), after *lengths on host*."""

    results_on_forward: bool = False
    """Results are copied to the host on the forward stream, because a copy stream is unsafe or not faster."""

    fused_host_wait: bool = False
    """Fused mode is correct only if the host waits for the previous iteration."""

    recompute_after_join: frozenset[Recompute] = frozenset()
    """Values that are computed again after the plan stream has joined and before the replay."""

    refresh_before_replay: frozenset[str] = frozenset()
    """Static graph inputs that are copied again before the replay, by name: ``rope_positions``, or none."""

    draft_lengths: frozenset[int] | None = None
    """Draft lengths, in tokens, that verification works with on this device; None: all. A configuration with another length
    is refused when the engine is created, and the error names these lengths."""

    bytes_per_request: int = 0
    """Device memory in bytes that the plugin's kernels and runtime hold for each concurrent request, such as workspaces and
    plans. The engine leaves this memory free when it sizes the KV cache."""

    rebind_params: bool = False
    """Captured graphs hold host parameters that are rebound for each replay."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def create_fence(self, name: str) -> Fence:
        """Create the mechanism of the fence ``name``; called once per fence and engine."""
        return EventFence(name, self.backend.create_event(name))

    def after_join(self, plan: JoinedPlan) -> None:
        """Do what this device needs between the join and the replay. Idempotent; called on the joining stream's scope.

        The default carries out ``recompute_after_join`` and ``refresh_before_replay`` unless the batch is idle.
        """
        if plan.idle:
            return
        for what in sorted(self.recompute_after_join):
            plan.recompute(what)
        for buffer in sorted(self.refresh_before_replay):
            plan.refresh(buffer)
