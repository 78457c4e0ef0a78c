"""Flags of the backend ``npu``, on torch_npu's ``ExternalEvent``.

A wait on an external event may be enqueued before its record. The event stays set until it is reset, and a record while it is
set is lost. It is the only event of this device that works the same inside a graph and outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.device import Flag, Stream

if TYPE_CHECKING:
    from outrider_npu.backend import NpuBackend


class NpuFlag(Flag):
    """A flag on an ``ExternalEvent``. torch_npu creates the event at its first wait or record."""

    def __init__(self, backend: NpuBackend, name: str, native: Any) -> None:
        super().__init__(backend, name)
        self.native = native

    def _set(self, stream: Stream) -> None:
        self.native.record(stream.native)

    def _wait(self, stream: Stream) -> None:
        self.native.wait(stream.native)

    def _reset(self, stream: Stream) -> None:
        self.native.reset(stream.native)
