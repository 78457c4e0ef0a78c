"""Failures of the simulated machine: pending errors that the host raises later, and loss of the device."""

from __future__ import annotations

from abc import ABC, abstractmethod

from outrider.device import CapabilityError, DeviceError, DeviceFault, DeviceLost
from outrider_sim.machine.fault_messages import describe_operation
from outrider_sim.machine.queue import Op, StreamQueue


class FaultState(ABC):
    """Failure state of a machine: at most one pending recoverable error, and the error that lost the device."""

    lost: DeviceLost | None
    _failed: DeviceError | CapabilityError | None

    @abstractmethod
    def drop(self) -> None:
        """Drop all queued operations of the machine."""

    def _raise_failed(self) -> None:
        """Raise the machine's pending recoverable error once, then clear it."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def lost_again(self) -> DeviceLost:
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
