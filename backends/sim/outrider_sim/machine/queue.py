"""Queued operations of simulated streams, and the events and flags that operations set and wait for.

`(stream, index)` identifies an operation. The index counts the operations enqueued on that stream since the last reset,
so it is independent of the order in which streams ran. These classes hold state; `machine` executes the operations.
"""

from __future__ import annotations

import _thread
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False, repr=False, slots=True)
class EventGeneration:
    """One record of an event. A wait enqueued after the record waits for this generation."""

    event: EventState
    number: int
    stream: StreamQueue
    issued: int
    """Index of the record on its stream."""
    done: bool = False
    time: float = 0.0
    captured: Any = None
    """The capture that this record is an edge of."""

    def __str__(self) -> str:
        return f"{self.event.name} generation {self.number} (recorded at {self.stream.label}.{self.issued})"


@dataclass(eq=False, repr=False, slots=True)
class EventState:
    """An event that streams record repeatedly; `latest` is the generation for which the next wait waits."""

    id: int
    name: str
    latest: EventGeneration | None = None
    count: int = 0


@dataclass(eq=False, repr=False, slots=True)
class FlagState:
    """A resettable flag. A wait may precede its set; a second set before the reset has no effect."""

    name: str
    is_set: bool = False
    lost: int = 0
    """Number of sets that had no effect."""
    time: float = 0.0

    def apply(self, kind: int, now: float) -> float:
        """Carry out a set, wait or reset at virtual time `now`; return the virtual time after the operation."""
        if kind == OperationKind.FLAG_WAIT:
            return max(now, self.time)
        if kind == OperationKind.FLAG_SET:
            self.lost += self.is_set  # the device remembers one set: a second one is lost
            self.time = now
        self.is_set = kind == OperationKind.FLAG_SET
        return now


@dataclass(eq=False, repr=False, slots=True)
class Op:
    """One operation, in a queue or in a captured graph.

    `fn(*args, **kwargs)` runs on plain host tensors that alias the simulated memory. `post`, if set, is called with the
    result and copies it to its tensor. `target` is the generation, flag or graph of the kinds that have one.
    """

    kind: int
    name: str
    fn: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    post: Any = None
    target: Any = None
    cost: float = 0.0
    """Microseconds on the device."""
    order: int = 0
    """Position in a graph."""
    accesses: tuple[Access, ...] = ()
    line: str = ""
    rows: Any = None
    """Function that finds the accessed rows from the operands when the operation runs."""
    after: bool = False
    """True if the rows are known only after the run."""
    seed: Any = None
    report: Any = None
    """The object that a tool made of the operation when it was enqueued."""
    seq: int = field(init=False, default=-1)
    """Position in the order of the program; -1: as the preceding graph launch."""
    number: int = field(init=False, default=-1)
    """Position among the operations enqueued on the device."""
    host_time: float = field(init=False, default=0.0)

    def again(self) -> Op:
        """Return a copy of this operation, so that it can be enqueued once more."""
        call = self.fn, self.args, self.kwargs, self.post, self.target, self.cost
        observed = self.accesses, self.line, self.rows, self.after, self.seed, self.report
        return Op(self.kind, self.name, *call, self.order, *observed)


@dataclass(eq=False, repr=False, slots=True)
class StreamQueue:
    """The queue of one simulated stream. `done` of its `issued` operations have run; `queue` holds the others in order."""

    id: int
    name: str
    priority: int = 0
    machine: Any = None
    label: str = field(init=False)
    """Name in schedules."""
    queue: deque[Op] = field(init=False, default_factory=deque)
    issued: int = 0
    done: int = 0
    clock: float = 0.0
    """Virtual microseconds."""
    base_seq: int = 0
    capture: Any = None
    poison: deque[tuple[int, Any]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.label = str(self.id)

    @property
    def step(self) -> int:
        """Number of the operation that this stream runs next, counted from the last reset."""
        return self.done

    def __str__(self) -> str:
        return f"stream {self.id}" + (f" ({self.name})" if self.name else "")


class Action(NamedTuple):
    """The next action of a host thread, if its order relative to device operations can matter."""

    what: str  # enqueue, query, flag, sync, host, free
    target: Any = None
    accesses: tuple[Access, ...] = ()


FREE = Action("free")
ENQUEUE = Action("enqueue")


def acquired_lock() -> Any:
    """Return a lock that is held until another thread releases it.

    It is the interpreter's own lock type, so tools that watch the program's locks don't report the scheduler's turns.
    """
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


@dataclass(eq=False, repr=False, slots=True)
class HostThread:
    """A host thread as an actor of the schedule: it takes a step at each point where it uses a device."""

    id: int
    name: str
    streams: Any
    """Each machine's current stream, where the thread starts."""
    label: str = field(init=False)
    """Name in schedules."""
    step: int = 0
    machine: Any = None
    """The machine whose work the thread waits for."""
    ready: Callable[[], bool] | None = None
    """Condition that the thread waits for; None: it can continue."""
    waits_for: str = ""
    action: Action = FREE
    baton: Any = field(default_factory=acquired_lock)
    """The lock that the thread waits for while it is parked."""
    os: Any = None
    """The operating system's thread."""
    finished: bool = False
    error: BaseException | None = None
    clock: float = 0.0
    refused: int = 0
    """Number of queries with a negative answer."""
    saved: list[Any] = field(default_factory=list)
    """Process-wide values of this thread while another one runs."""

    def __post_init__(self) -> None:
        self.label = f"host{self.id}"

    def pass_baton(self) -> None:
        """Let the parked thread run. Repeated calls have no further effect."""
        if self.baton.locked():
            self.baton.release()

    def __str__(self) -> str:
        return f"host thread {self.id}" + (f" ({self.name})" if self.name else "")


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
        return f"it waits for {op.target.name}, which is down{lost}"
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
