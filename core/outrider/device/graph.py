"""Graphs: device work that is captured once and replayed many times.

A capture takes a callable, static inputs, static outputs, frozen host scalars and named host parameters. The callable
reads and writes nothing else that changes between replays, so a device without graphs runs it eagerly at each replay
(:class:`EagerGraph`) with the same meaning: the same storage for the outputs, the same scalars.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from outrider.device.errors import CapabilityError, InterfaceError, StreamOrderError

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.stream import Event, Stream

Scalar = bool | int | float


class HostParam:
    """A named tuple of host integers that a captured operation reads (sequence lengths, on some devices).

    The value at capture is frozen into the graph; ``Graph.update_params`` rebinds it where the device can. A kernel reads
    it through ``Backend.reissue``, which registers the operation with the capture under this name; a value that is read
    in another way may keep the captured value.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Sequence[int]) -> None:
        self.name = name
        self.value = tuple(value)

    def __repr__(self) -> str:
        return f"HostParam({self.name!r}, {self.value!r})"


@dataclass(frozen=True, eq=False)
class CaptureContext:
    """The operands of a captured callable, by name."""

    inputs: Mapping[str, Tensor]
    """Static device tensors that the callable reads."""
    outputs: Mapping[str, Tensor]
    """Static device tensors; the callable writes every output in place."""
    scalars: Mapping[str, Scalar]
    """Host values that the capture freezes."""
    params: Mapping[str, HostParam]
    """Host integers that ``Graph.update_params`` can rebind."""
    handles: dict[str, list[Any]] = field(default_factory=dict)
    """Data of the plugin, by parameter: a kernel that must be re-issued after a rebind appends its handles here."""


GraphCallable = Callable[[CaptureContext], None]


class ActiveCapture:
    """The rules for scopes and events while one thread captures ``stream``; made and dropped by ``Backend.capture``.

    ``rehearsal`` is True during a warm-up, whose work the device runs. ``graph`` is the graph that the capture produces.
    """

    def __init__(
        self,
        backend: Backend,
        context: CaptureContext,
        stream: Stream,
        *,
        rehearsal: bool = False,
        graph: Graph | None = None,
    ) -> None:
        self.backend = backend
        self.context = context
        self.stream = stream
        self.rehearsal = rehearsal
        self.graph = graph
        self.edges: list[Event] = []

    def check_fork(self, stream: Stream) -> None:
        """Raise if a scope of another stream than the captured one is opened, unless the device captures forks."""
        if stream is not self.stream and not self.backend.capabilities.forks_in_capture:
            raise CapabilityError(
                f"a scope of {stream!r} was opened while capturing on {self.stream!r}: {self.backend.label} doesn't declare "
                "forks_in_capture"
            )

    def check_edge_record(self, event: Event) -> None:
        """Raise if a recorded event already has generations of its own, or is an edge of another graph."""
        self.edges.append(event)
        outside = event._generation > 0 or event._captured_by not in (None, self)
        if outside and not self.backend.capabilities.waits_inside_graphs:
            raise StreamOrderError(
                f"event {event.name!r} is used outside this capture and can't be one of its edges: "
                f"{self.backend.label} doesn't declare waits_inside_graphs; use an event of the capture's own"
            )

    def check_edge_wait(self, event: Event) -> None:
        """Raise if a wait joins no branch of this capture, unless the device accepts events from outside."""
        if event._captured_by is self:
            return
        if not self.backend.capabilities.waits_inside_graphs:
            raise StreamOrderError(
                f"a wait for event {event.name!r} was captured, but it wasn't recorded in this capture and "
                f"{self.backend.label} doesn't declare waits_inside_graphs; wait on the stream before the replay"
            )
        event._check_recorded("a captured wait needs a record to start from")


class GraphPool:
    """Memory shared by graphs that never run at the same time. Opaque; made by ``Backend.create_graph_pool``."""

    __slots__ = ("backend", "name", "native")

    def __init__(self, backend: Backend, name: str, native: Any = None) -> None:
        self.backend = backend
        self.name = name
        self.native = native


class Graph(ABC):
    """Captured work, bound to the addresses of its inputs and outputs.

    *Ordering.* ``replay`` enqueues the whole graph on a stream like one operation. Two replays of one graph, or of two
    graphs that share a pool, must be ordered by the caller.

    *Lifetime.* The graph keeps its inputs and outputs alive. An enqueued replay runs even if the Python object is dropped
    meanwhile. An output holds a replay's result until the next replay of any graph of the same pool starts; copy or fence
    the output.

    *Threads.* One thread at a time. *Capture.* A replay can't be captured.
    """

    def __init__(self, backend: Backend, name: str, context: CaptureContext) -> None:
        self.backend = backend
        self.name = name
        self.context = context
        self.released = ""
        """The reason why the captured work was released; empty: the graph can be replayed."""
        self._generation = 0

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Return the static inputs. Write them on a stream that the replay is ordered after."""
        return self.context.inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Return the static outputs. Undefined until the first replay has run."""
        return self.context.outputs

    @property
    def generation(self) -> int:
        """Return how often the graph was replayed."""
        return self._generation

    def replay(self, stream: Stream) -> int:
        """Enqueue the captured work on ``stream``; return the replay's generation, counted from 1. Never a no-op.

        Raises :class:`InterfaceError` for a released graph.
        """
        self.backend.check_not_capturing(f"replay graph {self.name!r}")
        if self.released:
            raise InterfaceError(f"graph {self.name!r} of {self.backend.label} can't be replayed any more: {self.released}")
        self._generation += 1
        self.backend.replays += 1
        self.backend.listener.replayed(self, stream, self._generation)
        with self.backend.guard(f"replaying graph {self.name!r}"):
            self._replay(stream)
        return self._generation

    def release(self, why: str) -> None:
        """Release the captured work; a later replay raises :class:`InterfaceError` with ``why``. Allowed twice.

        Every replay must have run. Release a graph before the resources that it uses: a library of collectives waits for
        the release of each graph that holds its calls.
        """
        if not self.released:
            self.released = why
            self._release()

    def update_params(self, params: Mapping[str, Sequence[int]], *, stream: Stream) -> None:
        """Rebind host parameters for the replays enqueued after this call.

        *Ordering.* The rebinding is work on ``stream``. The caller orders it after the last replay has finished reading
        its parameters, and the next replay after it. The values are copied before the call returns.

        Raises :class:`InterfaceError` for a name that the capture doesn't have or a length that differs, and
        :class:`CapabilityError` where a captured graph can't be rebound: no ``updates_graph_params``, or, on a device that
        rebinds operation by operation, nothing that was issued under the name (``Backend.reissue``).
        """
        bound: dict[str, tuple[int, ...]] = {}
        for name, values in params.items():
            if name not in self.context.params:
                raise InterfaceError(
                    f"graph {self.name!r} has no host parameter {name!r}; it was captured with {sorted(self.context.params)}"
                )
            bound[name] = tuple(values)
            expected = len(self.context.params[name].value)
            if len(bound[name]) != expected:
                raise InterfaceError(
                    f"host parameter {name!r} of graph {self.name!r} has {expected} values, got {len(bound[name])}; "
                    "a rebind can't change the shape that was captured"
                )
        self._update_params(MappingProxyType(bound), stream)
        self.backend.listener.params_updated(self, stream, bound)

    @abstractmethod
    def _replay(self, stream: Stream) -> None:
        """Carry out :meth:`replay` on the vendor's device."""

    def _release(self) -> None:  # noqa: B027  (nothing to give up is right)
        """Carry out :meth:`release` on the vendor's device, called once."""

    def _update_params(self, params: Mapping[str, tuple[int, ...]], stream: Stream) -> None:
        raise CapabilityError(
            f"graph {self.name!r}: {self.backend.label} doesn't declare updates_graph_params, so {sorted(params)} stay "
            f"as captured (stream {stream.name!r}); capture a graph for these values, or pass them as device tensors"
        )

    def __repr__(self) -> str:
        return f"<Graph {self.name!r} replayed {self._generation} times of {self.backend.label}>"


class EagerGraph(Graph):
    """The graph of a device without graphs: each replay runs the callable on the stream."""

    def __init__(self, backend: Backend, name: str, context: CaptureContext, fn: GraphCallable) -> None:
        super().__init__(backend, name, context)
        self._fn = fn

    def _replay(self, stream: Stream) -> None:
        with self.backend.on(stream):
            self._fn(self.context)

    def _update_params(self, params: Mapping[str, tuple[int, ...]], stream: Stream) -> None:
        # The callable reads host values while it enqueues, so a rebind needs no place on `stream`.
        del stream
        for name, values in params.items():
            self.context.params[name].value = values
