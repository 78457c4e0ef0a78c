"""Programs over the backend interface as data. Hypothesis generates them, a backend runs them, and the model checks them.

A program lists its resources (streams, buffers of device memory, slots of pinned memory, events, flags) and its steps.
All parts are immutable, and their ``repr`` is Python source, so that a failing program can be printed as a script. One
host thread executes the steps in order unless a step says otherwise. Device work runs when its stream reaches it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args, get_type_hints

import torch


@dataclass(frozen=True, slots=True)
class ElementSpan:
    """A selection of ``count`` elements of buffer ``of``, or of pinned slot ``of`` if ``pinned``: ``start``, ``start +
    stride``, and so on.
    """

    of: int
    start: int
    count: int
    stride: int = 1
    pinned: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """The memory of the elements: a buffer of the device, or a slot of pinned memory."""
        return "slot" if self.pinned else "buffer", self.of

    @property
    def view(self) -> slice:
        """The slice that selects the span's elements from the tensor of its buffer or slot."""
        return slice(self.start, self.start + self.count * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """A buffer or a slot with ``count`` elements of ``dtype`` (``float32``). Its initial contents are :func:`pattern` of
    its index.

    A buffer is allocated on stream ``home``.
    """

    dtype: str
    count: int
    home: int = 0


# -- work of a stream --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slow:
    """A step that keeps its stream busy for a while."""

    stream: int


@dataclass(frozen=True, slots=True)
class WorkStep:
    """A step whose stream writes the elements ``to``.

    ``kind``: ``fill`` writes ``value``. ``copy`` and ``copy_async`` copy ``source``, by an ordinary operation of the device,
    or by the verb, which also copies to and from pinned memory. ``mix`` computes ``source * 3 + value`` of integers through a
    temporary that is dropped at once. ``send`` copies new pageable host memory with the pattern ``value``, dropped at once.
    In a graph the ``value`` of a ``mix`` may name a frozen scalar or a host parameter of the capture.
    """

    stream: int
    kind: Literal["fill", "copy", "copy_async", "mix", "send"]
    to: ElementSpan
    source: ElementSpan | None = None
    value: int | str = 0


@dataclass(frozen=True, slots=True)
class Item:
    """A host read of one element in the scope of the stream, which waits for the value."""

    stream: int
    of: int
    index: int


@dataclass(frozen=True, slots=True)
class Lend:
    """A temporary ``source * 3 + add`` that ``maker`` makes and ``user`` reads late. It is kept alive until then.

    Meanwhile ``maker`` allocates and fills ``churn`` tensors of the same size.
    """

    maker: int
    user: int
    event: int
    to: ElementSpan
    source: ElementSpan
    add: int
    churn: int


@dataclass(frozen=True, slots=True)
class Churn:
    """A step that allocates, fills and drops ``times`` tensors of ``count`` bytes."""

    stream: int
    count: int
    times: int


@dataclass(frozen=True, slots=True)
class Renew:
    """A step that drops a buffer while queued work may use it, and allocates it again on its home stream, filled with
    ``value``.

    ``held``: the old memory is kept alive until the current work of the home stream has completed.
    """

    of: int
    value: int
    held: bool


# -- order -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventStep:
    """A step that calls ``stream.record(event)`` or ``stream.wait(event)``."""

    verb: Literal["record", "wait"]
    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """A host wait. ``how`` is ``event``, ``within`` (an event with a time limit), ``stream`` or ``device``."""

    how: str
    which: int = 0


@dataclass(frozen=True, slots=True)
class Query:
    """A host query of an ``event`` or a ``stream``. If the answer is True, ``slot`` holds the earlier download."""

    what: str
    which: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class DropStep:
    """A step that drops an ``event``, also while waits for it are queued, and replaces it by a new one; or a ``graph``, also
    while replays are queued.
    """

    what: Literal["event", "graph"]
    number: int


@dataclass(frozen=True, slots=True)
class Signal:
    """A step of one round of a flag: ``waiter`` waits and does ``after``; ``setter`` does ``before`` and sets the flag.

    ``early``: the wait is enqueued before the set. The waiter resets the flag, and the setter continues after the reset.
    """

    flag: int
    event: int
    setter: int
    waiter: int
    before: WorkStep
    after: WorkStep
    early: bool


# -- the host ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostWrite:
    """A step in which the host writes the pattern ``seed`` to pinned memory."""

    slot: ElementSpan
    seed: int


@dataclass(frozen=True, slots=True)
class HostRead:
    """A step in which the host reads a slot, which must hold the expected value."""

    slot: int


@dataclass(frozen=True, slots=True)
class ScopeStep:
    """A step that runs ``steps`` inside ``on(stream)``, each in its own inner scope. ``raises``: an exception leaves the
    scope.
    """

    stream: int
    steps: tuple[Step, ...]
    raises: bool = False


@dataclass(frozen=True, slots=True)
class ThreadsStep:
    """A step that new host threads run while this thread waits: ``first`` alone, or both concurrently.

    Two threads share no stream, memory, event or graph.
    """

    first: tuple[Step, ...]
    second: tuple[Step, ...] = ()


# -- graphs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CaptureStep:
    """A step that captures ``body``, then ``branch`` on stream ``fork`` if given, joined before ``tail``.

    Written buffers are outputs, the others are inputs. ``scalar`` is frozen; the caller changes its own copy right after the
    capture. ``param`` is the host parameter at the capture. The outputs are filled with ``value`` afterwards, since a device
    may run the work to warm up.
    """

    graph: int
    stream: int
    body: tuple[WorkStep, ...]
    scalar: int
    value: int
    fork: int | None = None
    branch: tuple[WorkStep, ...] = ()
    tail: tuple[WorkStep, ...] = ()
    param: int | None = None

    @property
    def work(self) -> tuple[WorkStep, ...]:
        """The captured steps in order."""
        return (*self.body, *self.branch, *self.tail)


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """A step that replays a graph ``times`` times, one after the other."""

    graph: int
    stream: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class Update:
    """A step that rebinds the graph's host parameter to ``value``."""

    graph: int
    stream: int
    value: int


Step = (
    Slow
    | WorkStep
    | Item
    | Lend
    | Churn
    | Renew
    | EventStep
    | Synchronize
    | Query
    | DropStep
    | Signal
    | HostWrite
    | HostRead
    | ScopeStep
    | ThreadsStep
    | CaptureStep
    | ReplayStep
    | Update
)


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """A program: resources and steps. At its end the device is synchronised, and all memory is read."""

    streams: int
    buffers: tuple[ProgramMemory, ...]
    slots: tuple[ProgramMemory, ...]
    events: int
    steps: tuple[Step, ...]
    flags: int = 0


def copy_step(stream: int, to: ElementSpan, source: ElementSpan, asynchronous: bool) -> WorkStep:
    """Return a copy of ``source``, by ``copy_async`` if ``asynchronous``."""
    return WorkStep(stream, "copy_async" if asynchronous else "copy", to, source)


Path = tuple[int, ...]
"""The position of a step: its index in the program, then its list and index inside the outer step, and so on."""


def inner(step: Step) -> tuple[tuple[Step, ...], ...]:
    """Return the lists of steps inside a step."""
    if isinstance(step, ScopeStep):
        return (step.steps,)
    return (step.first, step.second) if isinstance(step, ThreadsStep) else ()


def walk(steps: tuple[Step, ...], path: Path = ()) -> Iterator[tuple[Path, Step]]:
    """Yield every step with its path, including steps inside other steps."""
    for index, step in enumerate(steps):
        here = (*path, index)
        yield here, step
        for number, within in enumerate(inner(step)):
            yield from walk(within, (*here, number))


def handlers(owner: type) -> dict[type, Callable[..., None]]:
    """Return the private methods ``(self, step, path)`` of a class, by the types of steps that they declare."""
    found: dict[type, Callable[..., None]] = {}
    for name, method in vars(owner).items():
        if (
            name.startswith("_")
            and inspect.isfunction(method)
            and list(inspect.signature(method).parameters)[1:] == ["step", "path"]
        ):
            declared = get_type_hints(method)["step"]
            found |= dict.fromkeys(get_args(declared) or (declared,), method)
    return found


WAIT_VERBS = {
    "event": "Event.synchronize",
    "within": "Event.synchronize_within",
    "stream": "Stream.synchronize",
    "device": "Backend.synchronize",
}
"""The member of the interface that a :class:`Synchronize` step calls, by its ``how``."""
_EXPONENTS = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(memory: ProgramMemory) -> torch.dtype:
    """Return the torch dtype of a buffer or slot."""
    found = getattr(torch, memory.dtype)
    assert isinstance(found, torch.dtype)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a host tensor as integers of the same width, so that NaN compares like any other value."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def pattern(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``count`` elements with scattered bits, the same for the same seed. Do not write to the result, which is
    cached.

    Every fifth element of a floating dtype is an infinity or a NaN with a payload.
    """
    return _cached_pattern(seed, count, dtype) if count <= _MAX_CACHED_COUNT else _scattered(seed, count, dtype)


def _scattered(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    start = (seed + 1) * 0x3F58476D1CE4E5B9 & 0x7FFFFFFFFFFFFFFF
    numbers = torch.arange(1, count + 1, dtype=torch.int64) * 0x1E3779B97F4A7C15 + start
    numbers ^= numbers >> 29
    numbers *= 0x14D049BB133111EB
    numbers ^= numbers >> 32
    if dtype == torch.bool:
        return (numbers & 1).to(torch.bool)
    if dtype in _EXPONENTS:
        numbers[::5] |= _EXPONENTS[dtype]
    return numbers.to(_BITS[dtype.itemsize]).view(dtype)


_MAX_CACHED_COUNT = 1 << 12
_cached_pattern = lru_cache(1 << 10)(_scattered)
