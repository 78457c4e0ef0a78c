"""Simulated faults: errors that the host raises at its next wait, faulty operations, and the error messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from outrider.device import CapabilityError, DeadlockError, DeviceError, DeviceFault, DeviceLost
from outrider_sim.machine.queue import Op, OperationKind, StreamQueue, reason

if TYPE_CHECKING:
    from outrider_sim.machine.host_scheduler import HostScheduler


def describe_operation(op: Op, stream: StreamQueue, index: int) -> str:
    """Return the name of an operation in messages: stream, index, operator, source line."""
    line = f" at {op.line}" if op.line else ""
    return f"operation {stream.label}.{index} ({op.name}{line})"


class _EndlessOperation:
    """The target of a hanging operation's wait; it is never reached."""

    done = False

    def __init__(self, number: int) -> None:
        self._number = number

    def __str__(self) -> str:
        return f"its own end, which never comes (fault=stuck@{self._number})"


def make_endless(op: Op) -> None:
    """Turn `op` into a wait that never ends."""
    op.kind, op.target = OperationKind.WAIT, _EndlessOperation(op.number + 1)


def fail_on_request() -> None:
    """Raise the device fault that a test requested with `provoke_fault`, as the enqueued operation runs."""
    raise DeviceFault("failed on request (provoke_fault); its results are undefined, the device lives on")


def deadlock_error(scheduler: HostScheduler) -> DeadlockError:
    """Return the error for a host on which no operation can run. It lists every wait."""
    lines = []
    for stream in scheduler.streams:
        if stream.queue:
            op = stream.queue[0]
            line = f" ({op.line})" if op.line else ""
            lines.append(f"stream {stream.label!r} is held at operation {stream.done}{line}: {reason(op)}")
    lines.extend(
        f"{thread} waits for {thread.waits_for}" for thread in scheduler.threads if not thread.finished and thread.ready
    )
    return DeadlockError("nothing that is queued can run:\n  " + "\n  ".join(lines))


class FaultState(ABC):
    """Failure state of a machine: at most one pending recoverable error, and the error that lost the device."""

    lost: DeviceLost | None
    _failed: DeviceError | CapabilityError | None

    @abstractmethod
    def drop(self) -> None:
        """Drop all queued operations of this machine without running them."""

    def _raise_failed(self) -> None:
        """Raise the machine's pending recoverable error once, then clear it."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def new_lost_error(self) -> DeviceLost:
        """Return a new error object for a device that an earlier fault has made unusable."""
        assert self.lost is not None
        return DeviceLost(str(self.lost))

    def _inject(self, fault: str, op: Op, stream: StreamQueue, index: int) -> None:
        place = describe_operation(op, stream, index)
        if fault == "error":
            self._failed = self._failed or DeviceFault(
                f"{place} failed on request (fault=error@{op.number + 1}); its results are undefined, the device lives on"
            )
        else:
            self._lose(f"{place} failed on request (fault=lost@{op.number + 1})")

    def _fail(self, op: Op, stream: StreamQueue, index: int, error: Exception) -> None:
        if isinstance(error, NotImplementedError):  # the operation didn't run, so the device survives
            missing = f"the simulated device has no such operator for these operands: {error}; use another backend"
            self._failed = self._failed or CapabilityError(f"{describe_operation(op, stream, index)}: {missing}")
            return
        if isinstance(error, DeviceFault):  # from `provoke_fault`
            self._failed = self._failed or DeviceFault(f"{describe_operation(op, stream, index)}: {error}")
            return
        # A kernel that fails while it runs (an index out of range) is a sticky fault on a device.
        self._lose(f"{describe_operation(op, stream, index)} failed: {type(error).__name__}: {error}")
        assert self.lost is not None
        self.lost.__cause__ = error

    def _lose(self, text: str) -> None:
        self.lost = DeviceLost(f"{text}; the device is lost: queued work is gone, make a new backend")
        self.drop()
