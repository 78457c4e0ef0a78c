"""Run test programs in many orders: by schedules on a device that a tool controls, by delays on other devices.

A *program* is a function that creates the streams it needs on a backend, enqueues work, and checks data.
:meth:`Lab.check_in_every_order` requires that the checks hold in every order that the waits allow.
:meth:`Lab.check_in_some_order` requires that a function observes overlap in at least one order.
"""

from __future__ import annotations

import builtins
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NoReturn
from unittest.mock import Mock, create_autospec

import pytest
import torch
from torch import Tensor

from outrider.device import Backend, Event, Observer, ScheduleFailure, Stream

Program = Callable[[Backend], None]

WIDTH = 64
SCHEDULES = 24
"""Number of schedules in which a program runs that must hold in every order."""
CALLS = 8
"""Number of calls of one verb of one object: a driver may reuse a handle, or flush a queue, in every third or
seventh call.
"""
SIGHTINGS = 64
"""Maximum number of schedules in which a program runs that must observe something in one order."""
THREADS = 8
"""Number of host threads that call a backend at the same time."""
_START_TIMEOUT_S = 30.0
_SWITCH_INTERVAL_S = 1e-6
"""Seconds after which Python may switch to another thread. The default of 5 ms hides most races."""
_LARGEST_DELAY = 1 << 40
"""Device clocks of a delay that takes minutes on any device."""
_DELAY_FACTORS = (1, 4, 16, 64)
"""Factors of the delays in repeated runs of a program that observed nothing: a busy host must not fail the backend."""
_SIMULATED_CYCLES = 100_000
_MATRIX_SIZE = 192
_TIMINGS = 3
_PRODUCT = 256
_SLOW_RATIO = 4.0
_SLOW_PRODUCT_S = 0.02
"""A dtype is slow if a product takes more than this time, and more than four times the time in float32. Products then take
longer than the kit's own work for an operand set on the host.
"""


@dataclass
class StreamDelay:
    """The length of a delay, measured once per session, since devices differ by orders of magnitude."""

    target_ms: float = 20.0
    """Milliseconds for which a delay should keep a stream busy."""
    length: int = 0
    """Device clocks of one delay, or matrix products on a device without ``delay``; 0 until they are measured."""
    product_s: dict[torch.dtype, float] = field(default_factory=dict)
    """Seconds of a product of 256 x 256 factors, by dtype."""


class Lab:
    """The means to run test programs on one backend. ``seed`` and ``draws`` are the seed and the number of random operand
    sets per kernel.

    ``longest_delays``: repeat a program that observes nothing with the longest delays too, which take three quarters of the
    time.
    """

    def __init__(
        self,
        backend: Backend,
        pace: StreamDelay | None = None,
        *,
        seed: int = 0,
        draws: int = 0,
        longest_delays: bool = True,
    ) -> None:
        self.backend = backend
        self.seed = seed
        self.draws = draws
        self.pace = pace or StreamDelay()
        self._delay_factors = _DELAY_FACTORS if longest_delays else _DELAY_FACTORS[:-1]
        self._delay_factor = 1
        self._shared_streams: list[Stream] = []

    @property
    def asynchronous(self) -> bool:
        """True if work may be pending when its call returns."""
        return self.backend.capabilities.asynchronous

    # -- orders ----------------------------------------------------------------------------------------------------

    def check_in_every_order(self, program: Program, *, schedules: int = SCHEDULES) -> None:
        """Run ``program`` in many orders. A failure on a device that takes schedules names the smallest failing schedule."""
        control = self.backend.control
        if control is None:
            for _ in range(2 if self.asynchronous else 1):
                try:
                    program(self.backend)
                finally:
                    self.backend.synchronize()
            return
        failure = control.explore(program, strategy="mixed", iterations=schedules, seed=0).failure
        if failure is not None:
            raise_failed_schedule(failure)

    def check_in_some_order(self, observes: Callable[[], bool], otherwise: str) -> None:
        """Fail with the message ``otherwise`` unless ``observes`` returns True in at least one order."""
        control, observed = self.backend.control, Exception("of check_in_some_order")

        def program(_: Backend) -> None:
            if observes():
                raise observed

        if control is not None:
            failure = control.explore(program, strategy="mixed", iterations=SIGHTINGS, seed=0).failure
            if failure is None:
                raise AssertionError(otherwise)
            if failure.error is not observed:
                raise failure.error
            return
        try:
            for factor in self._delay_factors:
                self._delay_factor = factor
                try:
                    if observes():
                        return
                finally:
                    self.backend.synchronize()
        finally:
            self._delay_factor = 1
        raise AssertionError(otherwise)

    # -- slowness --------------------------------------------------------------------------------------------------

    def slow(self, stream: Stream) -> None:
        """Keep ``stream`` busy for about ``StreamDelay.target_ms``, so that missing waits show.

        Does nothing on a device that finishes each operation before its call returns.
        """
        if self.asynchronous:
            self._occupy(stream, self.delay_length * self._delay_factor)

    @property
    def delay_length(self) -> int:
        """Device clocks of one delay, or matrix products on a device without ``delay``, measured at the first use."""
        if self.backend.control is not None and self.backend.capabilities.perturbs_timing:
            return _SIMULATED_CYCLES
        if not self.pace.length:
            self.pace.length = self._measured_length()
        return self.pace.length

    def _measured_length(self) -> int:
        """Return the smallest power of two that makes a delay take the target time.

        The shortest of several timings counts: a busy host must not make delays short. Raises :class:`AssertionError` if
        no length takes the target time: delays that delay nothing would hide missing waits.
        """
        length, (stream,) = 1, self.streams("pace")

        def timed_ms() -> float:
            start = time.perf_counter()
            self._occupy(stream, length)
            stream.synchronize()
            return (time.perf_counter() - start) * 1e3

        while min(timed_ms() for _ in range(_TIMINGS)) < self.pace.target_ms:
            length *= 2
            if length > _LARGEST_DELAY:
                raise AssertionError(
                    f"a delay of {length} device clocks on {self.backend.label} keeps its stream busy for less than "
                    f"{self.pace.target_ms} ms, in at least one of {_TIMINGS} calls"
                )
        return length

    def _occupy(self, stream: Stream, length: int) -> None:
        if self.backend.capabilities.perturbs_timing:
            self.backend.delay(stream, length)
            return
        with self.backend.on(stream):
            matrix = torch.full((_MATRIX_SIZE, _MATRIX_SIZE), 1.0 / _MATRIX_SIZE, device=self.backend.device)
            for _ in range(length):
                matrix = matrix @ matrix

    def product_s(self, dtype: torch.dtype) -> float:
        """Return the seconds of a matrix product of 256 x 256 factors in ``dtype``; measured once per session."""
        if dtype not in self.pace.product_s:
            self.pace.product_s[dtype] = self._product_time(dtype)
        return self.pace.product_s[dtype]

    def slowdown(self, dtype: torch.dtype) -> float:
        """Return how many times as long as in float32 a product takes in ``dtype``."""
        return self.product_s(dtype) / max(self.product_s(torch.float32), 1e-9)

    def draws_in(self, dtype: torch.dtype) -> int:
        """Return the number of random operand sets per kernel in ``dtype``: fewer, at least one, where products are slow.

        A processor without float16 or bfloat16 may take hundreds of times as long for them.
        """
        seconds = self.product_s(dtype)
        if seconds <= _SLOW_PRODUCT_S or self.slowdown(dtype) <= _SLOW_RATIO:
            return self.draws
        return min(self.draws, max(1, int(self.draws * _SLOW_PRODUCT_S / seconds)))

    def _product_time(self, dtype: torch.dtype) -> float:
        """Return the seconds of one matrix product in ``dtype``: the shortest of several timings, because a busy host makes
        some longer.
        """
        (stream,) = self.streams("slowdown")
        with self.backend.on(stream):
            factor = torch.full((_PRODUCT, _PRODUCT), 1.0 / _PRODUCT, device=self.backend.device).to(dtype)

        def seconds() -> float:
            stream.synchronize()
            start = time.perf_counter()
            with self.backend.on(stream):
                factor @ factor
            stream.synchronize()
            return time.perf_counter() - start

        return min(seconds() for _ in range(_TIMINGS + 1))  # the first one may load a library

    # -- data ------------------------------------------------------------------------------------------------------

    def upload(self, stream: Stream, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the operands of a kernel to the device on ``stream``, and wait for the copies."""
        with self.backend.on(stream):
            made = {name: tensor.to(self.backend.device, copy=True) for name, tensor in operands.items()}
        stream.synchronize()
        return made

    def full(self, stream: Stream, value: float, *, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> Tensor:
        """Return a device tensor filled with one value on ``stream``, after the host has waited for the fill."""
        with self.backend.on(stream):
            tensor = torch.full((width,), value, dtype=dtype, device=self.backend.device)
        stream.synchronize()
        return tensor

    def fill_late(self, stream: Stream, tensor: Tensor, value: float) -> None:
        """Write ``value`` into ``tensor`` on ``stream``, after a delay of the stream."""
        self.slow(stream)
        self.fill(stream, tensor, value)

    def fill(self, stream: Stream, tensor: Tensor, value: float) -> None:
        """Write ``value`` into ``tensor`` on ``stream``."""
        with self.backend.on(stream):
            tensor.fill_(value)

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        """Copy one device tensor to another on ``stream``, by an ordinary torch operation."""
        with self.backend.on(stream):
            destination.copy_(source)

    def read_tensor(self, stream: Stream, tensor: Tensor) -> Any:
        """Wait for ``stream``, and return the contents of ``tensor`` as :meth:`current_values` does."""
        stream.synchronize()
        return self.current_values(tensor)

    def current_values(self, tensor: Tensor) -> Any:
        """Return the tensor's current contents without waiting for other streams: one number if all elements agree, else a
        list.
        """
        values = tensor.cpu().flatten().tolist()
        return values[0] if len(set(values)) == 1 else values

    def record(self, stream: Stream, name: str = "e") -> Event:
        """Create an event and record it on ``stream``."""
        event = self.backend.create_event(name)
        stream.record(event)
        return event

    def streams(self, *names: str) -> Sequence[Stream]:
        """Create streams with these names, in this order."""
        return [self.backend.create_stream(name) for name in names]

    def shared_streams(self, count: int) -> Sequence[Stream]:
        """Return the first ``count`` streams that successive programs share, since devices have a limited number.

        Every second one is urgent, where the backend has priorities.
        """
        while (number := len(self._shared_streams)) < count:
            priority = -(number % 2) if self.backend.capabilities.stream_priorities else 0
            self._shared_streams.append(self.backend.create_stream(f"s{number}", priority=priority))
        return self._shared_streams[:count]

    def one_stream(self) -> tuple[Stream, Tensor]:
        """Create stream ``a`` and a tensor of zeros on it."""
        (a,) = self.streams("a")
        return a, self.full(a, 0)

    def two_streams(self) -> tuple[Stream, Stream, Tensor, Tensor]:
        """Create the streams ``a`` and ``b``, and a tensor of zeros on each."""
        a, b = self.streams("a", "b")
        return a, b, self.full(a, 0), self.full(b, 0)

    def expect_read(self, stream: Stream, copy: Tensor, source: Tensor, wanted: object, what: str) -> None:
        """Copy ``source`` to ``copy`` on ``stream``, wait for the stream, and fail unless the copy holds ``wanted``."""
        self.copy(stream, copy, source)
        expect(self.read_tensor(stream, copy), wanted, what)


def in_every_order(*, schedules: int = SCHEDULES) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test as a program of :meth:`Lab.check_in_every_order`: its checks must hold in every order that
    the waits allow.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def check(lab: Lab, **fixtures: Any) -> None:
            lab.check_in_every_order(lambda _: test(lab, **fixtures), schedules=schedules)

        return check

    return decorate


def in_some_order(otherwise: str) -> Callable[[Callable[..., bool]], Callable[..., None]]:
    """Pass the decorated test to :meth:`Lab.check_in_some_order`: the test must return True in at least one order.

    ``otherwise`` is the message of the failure.
    """

    def decorate(test: Callable[..., bool]) -> Callable[..., None]:
        @wraps(test)
        def check(lab: Lab, **fixtures: Any) -> None:
            lab.check_in_some_order(lambda: test(lab, **fixtures), otherwise)

        return check

    return decorate


@contextmanager
def observed_calls(backend: Backend) -> Generator[Mock]:
    """Attach an observer that records its calls in ``method_calls`` for this scope, and yield it."""
    observer = create_autospec(Observer, instance=True)
    backend.attach(observer)
    try:
        yield observer
    finally:
        backend.detach()


def raise_failed_schedule(failure: ScheduleFailure) -> NoReturn:
    """Raise :class:`AssertionError` with the smallest failing schedule, caused by the program's own error. A program that
    ends its test as not applicable fails in no schedule.
    """
    if isinstance(failure.error, pytest.skip.Exception):
        raise failure.error
    orderings = "".join(f"\n  {sentence}" for sentence in failure.orderings) or "\n  (the program's own order)"
    raise AssertionError(
        f"{type(failure.error).__name__}: {failure.error}\nsmallest schedule: {failure.shrunk}{orderings}"
    ) from failure.error


def expect(found: object, wanted: object, what: str) -> None:
    """Fail unless the value ``found`` equals ``wanted``. ``what`` names the value in the message."""
    if found != wanted:
        shown = str(found)
        shown = shown if len(shown) < 200 else shown[:200] + " …"
        raise AssertionError(f"{what}: found {shown}, expected {wanted}")


def check_not_overridden(thing: object, base: type, *more: str) -> None:
    """Fail if the class of ``thing`` overrides a public method of ``base`` that calls a verb of the plugin (``wait`` calls
    ``_wait``), or one of the members ``more``. These methods check the rules of the interface and report to observers. A
    plugin may extend ``create_stream``, as a simulated device does to keep names valid in schedules.
    """
    checked = {name for name in vars(base) if not name.startswith("_") and hasattr(base, f"_{name}")} - {"create_stream"}
    lost = [name for name in sorted({*checked, *more}) if getattr(type(thing), name) is not getattr(base, name)]
    assert not lost, f"{type(thing).__name__} overrides {', '.join(lost)}: implement {', '.join(f'_{n}' for n in lost)}"


def call_on_new_thread(act: Callable[[], object]) -> None:
    """Call ``act`` on a new thread, wait for it, and raise its exception here."""
    failed = run_concurrently(act)
    if failed:
        raise failed[0]


def run_concurrently(*bodies: Callable[[], object]) -> list[BaseException]:
    """Call each body on a thread of its own, wait for all of them, and return their exceptions in the order of arrival."""
    failed: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(body,), name=f"body {n}", daemon=True) for n, body in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def call_at_once(body: Callable[[int], None]) -> None:
    """Call ``body`` with a number on each of :data:`THREADS` threads, which start at one moment. Raise their first
    exception. Python switches between the threads as often as possible.
    """
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        start.wait(_START_TIMEOUT_S)
        body(number)

    with switching_threads_often():
        failed = run_concurrently(*(partial(run, number) for number in range(THREADS)))
    if failed:
        raise failed[0]


@contextmanager
def switching_threads_often() -> Generator[None]:
    """Let Python switch between its threads as often as possible inside the scope."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def builtin_exceptions() -> Sequence[BaseException]:
    """Return an exception of each builtin type that takes a message alone, in the order of their names."""
    made = []
    for kind in {kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)}:
        with suppress(TypeError):
            made.append(kind("of the test"))
    return sorted(made, key=repr)


def error_of(act: Callable[[], object]) -> BaseException | None:
    """Return the exception that ``act`` raises, of any type; None if it raises nothing."""
    try:
        act()
    except BaseException as error:
        return error
    return None
