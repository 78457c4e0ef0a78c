"""Queued operations of simulated streams, and the events and flags that operations set and wait for.

`(stream, index)` identifies an operation. The index counts the operations enqueued on that stream since the last reset,
so it is independent of the order in which streams ran. These classes hold state; `machine` executes the operations.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy
import torch
import typing_extensions

from outrider.device import Access


class OperationKind:
    """Kinds of operations. Kinds up to POISON run a function; the others change events and flags or wait for them.

    The kinds are plain integers for fast comparison, because each operation is compared when it runs.
    """

    KERNEL = 0
    COPY = 1
    POISON = 2
    RECORD = 3
    WAIT = 4
    FLAG_SET = 5
    FLAG_WAIT = 6
    FLAG_RESET = 7
    LAUNCH = 8
    COLLECTIVE_START = 9
    COLLECTIVE = 10


class EventGeneration:
    """One record of an event. A wait enqueued after the record waits for this generation."""

    __slots__ = ("captured", "done", "event", "issued", "number", "stream", "time")

    def __init__(self, event: EventState, number: int, stream: StreamQueue, issued: int) -> None:
        self.event = event
        self.number = number
        self.stream = stream
        self.issued = issued  # index of the record on its stream
        self.done = False
        self.time = 0.0
        self.captured: Any = None  # the capture that this record is an edge of

    def __str__(self) -> str:
        return f"{self.event.label} generation {self.number} (recorded at {self.stream.label}.{self.issued})"


class EventState:
    """An event that streams record repeatedly; `latest` is the generation for which the next wait waits."""

    __slots__ = ("count", "id", "latest", "name")

    def __init__(self, ident: int, name: str) -> None:
        self.id = ident
        self.name = name
        self.latest: EventGeneration | None = None
        self.count = 0

    @property
    def label(self) -> str:
        """The event's name in messages: the given name, or the kind and number."""
        return self.name or f"event {self.id}"


class FlagState:
    """A resettable flag. A wait may precede its set; a second set before the reset has no effect."""

    __slots__ = ("id", "is_set", "lost", "name", "time")

    def __init__(self, ident: int, name: str) -> None:
        self.id = ident
        self.name = name
        self.is_set = False
        self.lost = 0
        self.time = 0.0

    def apply(self, kind: int, now: float) -> float:
        """Carry out a set, wait or reset at virtual time `now`; return the virtual time after the operation."""
        if kind == OperationKind.FLAG_WAIT:
            return max(now, self.time)
        if kind == OperationKind.FLAG_SET:
            self.lost += self.is_set  # the device remembers one set: a second one is lost
            self.time = now
        self.is_set = kind == OperationKind.FLAG_SET
        return now

    @property
    def label(self) -> str:
        """The flag's name in messages: the given name, or the kind and number."""
        return self.name or f"flag {self.id}"


class Op:
    """One operation, in a queue or in a captured graph.

    `fn(*args, **kwargs)` runs on plain host tensors that alias the simulated memory. `post`, if set, is called with the
    result and copies it to its tensor. `target` is the generation, flag or graph of the kinds that have one.
    """

    __slots__ = (
        "accesses",
        "after",
        "args",
        "cost",
        "fn",
        "host_time",
        "kind",
        "kwargs",
        "line",
        "name",
        "number",
        "order",
        "post",
        "report",
        "rows",
        "seed",
        "seq",
        "target",
    )

    def __init__(
        self,
        kind: int,
        name: str,
        fn: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        post: Any = None,
        target: Any = None,
        cost: float = 0.0,
    ) -> None:
        self.kind = kind
        self.name = name
        self.fn = fn
        self.args = args
        self.kwargs = kwargs if kwargs is not None else {}
        self.post = post
        self.target = target
        self.cost = cost  # microseconds on the device
        self.seq = -1  # place in the order of the program; -1: as the graph launch before it
        self.order = 0  # place in a graph
        self.number = -1  # place among what its device was given
        self.host_time = 0.0
        self.accesses: tuple[Access, ...] = ()
        self.line = ""
        self.report: Any = None  # what a tool made of it when it was enqueued
        self.rows: Any = None  # how to find the rows that it touches, from its operands when it runs
        self.after = False  # they are known only when it has run
        self.seed: Any = None

    def again(self) -> Op:
        """Return a copy of this operation, so that it can be enqueued once more."""
        op = Op(self.kind, self.name, self.fn, self.args, self.kwargs, self.post, self.target, self.cost)
        op.order, op.accesses, op.line, op.rows, op.after, op.seed, op.report = (
            self.order,
            self.accesses,
            self.line,
            self.rows,
            self.after,
            self.seed,
            self.report,
        )
        return op


class StreamQueue:
    """The queue of one simulated stream. `done` of its `issued` operations have run; `queue` holds the others in order."""

    __slots__ = (
        "base_seq",
        "capture",
        "clock",
        "done",
        "id",
        "issued",
        "label",
        "late",
        "machine",
        "name",
        "poison",
        "priority",
        "queue",
    )

    def __init__(self, ident: int, name: str, priority: int = 0, machine: Any = None) -> None:
        self.machine = machine
        self.id = ident
        self.label = str(ident)  # the actor's name in schedules
        self.name = name
        self.priority = priority
        self.queue: deque[Op] = deque()
        self.issued = 0
        self.done = 0
        self.clock = 0.0  # virtual microseconds
        self.base_seq = 0
        self.capture: Any = None
        self.late = False
        self.poison: deque[tuple[int, Any]] = deque()

    @property
    def step(self) -> int:
        """Number of the operation that this stream runs next, counted from the last reset."""
        return self.done

    def __str__(self) -> str:
        return f"stream {self.id}" + (f" ({self.name})" if self.name else "")


class HostThread:
    """A host thread as an actor of the schedule: it takes a step at each point where it uses a device."""

    __slots__ = (
        "action",
        "baton",
        "clock",
        "error",
        "finished",
        "id",
        "label",
        "machine",
        "name",
        "os",
        "ready",
        "refused",
        "saved",
        "step",
        "streams",
        "waits_for",
    )

    def __init__(self, ident: int, name: str, streams: Any) -> None:
        self.id = ident
        self.label = f"host{ident}"
        self.name = name
        self.step = 0
        self.streams = streams  # each machine's current stream, where it starts
        self.machine: Any = None  # whose work it waits for
        self.ready: Callable[[], bool] | None = None  # what it waits for; None: it can go on
        self.waits_for = ""
        self.action: Action = FREE
        self.baton: Any = None
        self.os: Any = None
        self.finished = False
        self.error: BaseException | None = None
        self.clock = 0.0
        self.refused = 0  # how often it asked, and the answer was no
        self.saved: list[Any] = []  # what it saw of the process when it last ran

    def __str__(self) -> str:
        return f"host thread {self.id}" + (f" ({self.name})" if self.name else "")


class Action(NamedTuple):
    """The next action of a host thread, if its order relative to device operations can matter."""

    what: str  # enqueue, query, flag, sync, host, free
    target: Any = None
    accesses: tuple[Access, ...] = ()


FREE = Action("free")
ENQUEUE = Action("enqueue")


def action_text(action: Action) -> str:
    """Return the verb that describes a host thread's action in messages."""
    return {"enqueue": "enqueues", "query": "asks", "host": "touches pinned memory", "sync": "waits"}.get(
        action.what, action.what
    )


def can_run(op: Op) -> bool:
    """Return whether the event, flag or collective that `op` waits for lets it run."""
    kind = op.kind
    if kind == OperationKind.WAIT:
        return bool(op.target.done)
    if kind == OperationKind.FLAG_WAIT:
        return bool(op.target.is_set)
    if kind == OperationKind.COLLECTIVE_START:
        return bool(op.target.can_start)
    if kind == OperationKind.COLLECTIVE:
        return bool(op.target.can_end)
    return True


def age(stream: StreamQueue) -> tuple[int, int]:
    """Return the sort key of a stream's next operation in program order."""
    op = stream.queue[0]
    return (op.seq, 0) if op.seq >= 0 else (stream.base_seq, op.order)


def reason(op: Op) -> str:
    """Describe the event, flag or collective that `op` waits for."""
    if op.kind == OperationKind.WAIT:
        return f"it waits for {op.target}"
    if op.kind == OperationKind.FLAG_WAIT:
        lost = f" ({op.target.lost} sets were lost)" if op.target.lost else ""
        return f"it waits for {op.target.label}, which is down{lost}"
    if op.kind in (OperationKind.COLLECTIVE_START, OperationKind.COLLECTIVE):
        return f"{op.target} can't begin"
    return f"{op.name} can run"


def reached_at(target: object, streams: Sequence[StreamQueue]) -> float:
    """Return the virtual time at which `target` is complete: a stream, an event generation, or else every stream."""
    if isinstance(target, StreamQueue):
        return target.clock
    return target.time if isinstance(target, EventGeneration) else max(stream.clock for stream in streams)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_NODES = 1 << 16
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NUMPY = os.path.dirname(numpy.__file__) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep
_PARTS = tuple(os.sep.join(("", *parts, "")) for parts in (("outrider", "device"), ("triton", "runtime"), ("outrider_vllm",)))
_CONSTRUCTORS = os.path.join("outrider_sanitizer", "observation", "host_arrays.py")
_MODES = ("__torch_function__", "__torch_dispatch__")
"""Methods of tensor classes and modes that torch calls on the way to an operator. Their frames are skipped, whichever file
they are in: the caller's line is meant.
"""


@cache
def _inside(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith(_STANDARD) and not name.startswith(_PACKAGES):
        return "site-packages" not in name
    return (
        name.startswith((_TORCH, _HERE, _NUMPY, typing_extensions.__file__, "<"))
        or code.co_name in _MODES
        or name.endswith(_CONSTRUCTORS)
        or any(part in name for part in _PARTS)
    )


@cache
def _line(code: CodeType, number: int) -> str:
    return f"{code.co_filename}:{number}"


def python_line() -> str:
    """Return `file:line` of the running code, or an empty string if every frame is inside torch or this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _inside(frame.f_code):
            return _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


class SourceLines:
    """Source lines of operations. A backward operation has the line of the forward operation that created its autograd node.

    Torch numbers autograd nodes in creation order and creates an operator's node right before it runs the operator.
    """

    def __init__(self) -> None:
        self._of_nodes: dict[int, tuple[int, str]] = {}

    def now(self) -> str:
        """Return `file:line` of the operator call that torch is running."""
        if torch._C._current_graph_task_id() != -1:
            node: Any = torch._C._current_autograd_node()
            known = self._of_nodes.get(node._sequence_nr()) if node is not None else None
            if known is not None:
                return known[1]
            return python_line()
        line = python_line()
        if line and torch.is_grad_enabled():
            number = torch._C._autograd._get_sequence_nr() - 1
            thread = get_ident()
            known = self._of_nodes.get(number)
            if known is None or known[0] != thread:
                if len(self._of_nodes) > _NODES:
                    for old in list(self._of_nodes)[: _NODES // 2]:
                        del self._of_nodes[old]
                self._of_nodes[number] = (thread, line)
        return line
