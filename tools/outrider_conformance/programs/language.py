"""Programs over the backend interface, as data: what hypothesis draws, a backend runs and the model judges.

A program says what it needs (streams, buffers of device memory, slots of pinned memory, events, flags) and its steps.
Everything is immutable and prints as the Python that makes it, so that a failing program is a script. Steps are carried out
in order by one host thread, unless they say otherwise; device work runs when its stream gets there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``start``, ``start + stride``, … of buffer or slot ``of``, ``count`` of them."""

    of: int
    start: int
    count: int
    stride: int = 1

    @property
    def view(self) -> slice:
        """The same as an index."""
        return slice(self.start, self.start + self.count * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class Memory:
    """A buffer or a slot: ``count`` elements of ``dtype`` (``float32``). Contents at first: :func:`pattern`, by its index.

    A buffer is allocated on stream ``home``.
    """

    dtype: str
    count: int
    home: int = 0


# -- work of a stream --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slow:
    """The stream is busy for a while."""

    stream: int


@dataclass(frozen=True, slots=True)
class Fill:
    """A kernel writes ``value``."""

    stream: int
    to: Span
    value: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Device to device: with ``copy_async``, or as an ordinary operation."""

    stream: int
    to: Span
    source: Span
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class Mix:
    """Kernels: ``to = source * 3 + add`` through a temporary that is dropped at once. Whole numbers alone.

    In a graph ``add`` may be the word of a frozen scalar or of a host parameter of its capture.
    """

    stream: int
    to: Span
    source: Span
    add: int | str


@dataclass(frozen=True, slots=True)
class Upload:
    """Pinned memory to the device, with ``copy_async``."""

    stream: int
    to: Span
    slot: Span


@dataclass(frozen=True, slots=True)
class Download:
    """The device to pinned memory, with ``copy_async``. ``racy``: nothing need order it after the writes that it meets."""

    stream: int
    slot: Span
    source: Span
    racy: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Fresh pageable memory with the pattern ``seed`` to the device, by an ordinary copy; dropped at once."""

    stream: int
    to: Span
    seed: int


@dataclass(frozen=True, slots=True)
class Item:
    """The host reads one element in the scope of the stream, which waits for the value."""

    stream: int
    of: int
    index: int


@dataclass(frozen=True, slots=True)
class Lend:
    """A temporary with ``source * 3 + add``, made on ``maker`` and read late on ``user``, kept alive until then and dropped.

    Meanwhile ``maker`` allocates ``churn`` others of its size and fills them.
    """

    maker: int
    user: int
    event: int
    to: Span
    source: Span
    add: int
    churn: int


@dataclass(frozen=True, slots=True)
class Churn:
    """``times`` tensors of ``count`` bytes, made, filled and dropped."""

    stream: int
    count: int
    times: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Drop the buffer, while work that uses it may be queued, and allocate it anew on its home stream, full of ``value``.

    ``held``: the old memory is kept alive until what the home stream was told to wait for is over.
    """

    of: int
    value: int
    held: bool


# -- order -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """``stream.record(event)``."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """``stream.wait(event)``."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits: ``how`` is ``event``, ``within`` (the same, with a limit), ``stream`` or ``device``."""

    how: str
    which: int = 0


@dataclass(frozen=True, slots=True)
class Query:
    """The host asks an ``event`` or a ``stream``. Where the answer is yes, ``slot`` holds what was downloaded before."""

    what: str
    which: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the event, whatever waits for it, and make another in its place."""

    event: int


@dataclass(frozen=True, slots=True)
class Signal:
    """A round of a flag: ``waiter`` waits and does ``after``, then ``setter`` does ``before`` and raises the flag.

    ``early``: the wait is enqueued before the set. The waiter lowers the flag again, and the setter goes on behind that.
    """

    flag: int
    event: int
    setter: int
    waiter: int
    before: Mix | Fill
    after: Mix | Copy
    early: bool


# -- the host ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostWrite:
    """The host writes the pattern ``seed`` into pinned memory."""

    slot: Span
    seed: int


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host reads a slot: it must hold one of the values that are allowed."""

    slot: int


@dataclass(frozen=True, slots=True)
class Scope:
    """``steps`` inside ``on(stream)``, each in its own scope within; ``raises``: it's left by an exception."""

    stream: int
    steps: tuple[Step, ...]
    raises: bool = False


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """``steps`` on the other host thread, while this one waits for it."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Together:
    """Two host threads at a time, each with steps of its own: they share no stream, memory, event or graph."""

    first: tuple[Step, ...]
    second: tuple[Step, ...]


# -- graphs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capture:
    """Capture ``body``, then ``branch`` on the stream ``fork`` where there is one, joined before ``tail``.

    Buffers that are written are outputs, the others inputs. ``scalar`` is frozen, and changed by the caller right after;
    ``param`` is the host parameter at the capture. What the graph writes is filled with ``value`` afterwards, since a
    device may have run it to warm up.
    """

    graph: int
    stream: int
    body: tuple[Fill | Copy | Mix, ...]
    scalar: int
    value: int
    fork: int | None = None
    branch: tuple[Fill | Copy | Mix, ...] = ()
    tail: tuple[Fill | Copy | Mix, ...] = ()
    param: int | None = None

    @property
    def work(self) -> tuple[Fill | Copy | Mix, ...]:
        """All of it in order."""
        return (*self.body, *self.branch, *self.tail)


@dataclass(frozen=True, slots=True)
class Replay:
    """``times`` replays, one after the other."""

    graph: int
    stream: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class Update:
    """Rebind the host parameter."""

    graph: int
    stream: int
    value: int


@dataclass(frozen=True, slots=True)
class DropGraph:
    """Drop the graph, whatever is queued."""

    graph: int


Step = (
    Slow
    | Fill
    | Copy
    | Mix
    | Upload
    | Download
    | Send
    | Item
    | Lend
    | Churn
    | Renew
    | Record
    | Wait
    | Synchronize
    | Query
    | Forget
    | Signal
    | HostWrite
    | HostRead
    | Scope
    | Elsewhere
    | Together
    | Capture
    | Replay
    | Update
    | DropGraph
)


@dataclass(frozen=True, slots=True)
class Program:
    """What it needs, and what it does. At its end the device is synchronised and everything is read."""

    streams: int
    buffers: tuple[Memory, ...]
    slots: tuple[Memory, ...]
    events: int
    steps: tuple[Step, ...]
    flags: int = 0


Path = tuple[int, ...]
"""Where a step is: its place among the program's steps, then inside of that."""


def inner(step: Step) -> tuple[tuple[Step, ...], ...]:
    """The lists of steps inside a step."""
    if isinstance(step, Scope | Elsewhere):
        return (step.steps,)
    return (step.first, step.second) if isinstance(step, Together) else ()


def walk(steps: tuple[Step, ...], path: Path = ()) -> Iterator[tuple[Path, Step]]:
    """Every step with its path, those inside of others too."""
    for index, step in enumerate(steps):
        here = (*path, index)
        yield here, step
        for number, within in enumerate(inner(step)):
            yield from walk(within, (*here, number))


_EXPONENTS = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(memory: Memory) -> torch.dtype:
    """The torch dtype."""
    found = getattr(torch, memory.dtype)
    assert isinstance(found, torch.dtype)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor as whole numbers of the same bits: NaN is like every other value."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def pattern(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` elements whose bits are scattered over all that the dtype has, the same for the same seed.

    Of a floating dtype each fifth is an infinity or NaN with a payload. Don't write to it: others may have the same tensor.
    """
    return _few(seed, count, dtype) if count <= _FEW else _scattered(seed, count, dtype)


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


_FEW = 1 << 12
_few = lru_cache(1 << 10)(_scattered)
