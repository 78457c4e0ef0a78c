"""Error messages for simulated faults and deadlocks, and the operations that a fault replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.device import DeadlockError, DeviceFault
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
    """Raise the device fault that `provoke_fault` has requested."""
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
