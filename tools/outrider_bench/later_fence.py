"""A fence that makes the plan stream wait longer than it must, for comparison (``outrider bench overlap``)."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.device import Backend, Fence, Stream


class LaterFence(Fence):
    """*Shared reads done*, but plan waits for something behind the draft: the fence named ``waits_for``, or ``everything``
    that is on the stream where it was signalled.
    """

    def __init__(self, inner: Fence, waits_for: str, fences: Mapping[str, Fence], device: Backend) -> None:
        super().__init__(inner.name)
        self._inner, self._waits_for, self._fences = inner, waits_for, fences
        self._everything = device.create_event("everything")
        self._forward: Stream | None = None

    @property
    def mechanism(self) -> str:
        """That of the fence itself."""
        return self._inner.mechanism

    def signal(self, stream: Stream) -> None:
        """That of the fence itself."""
        self._forward = stream
        self._inner.signal(stream)

    def wait(self, stream: Stream) -> None:
        """On plan, wait for the later work; on other streams, as the fence itself."""
        if stream.name.split(".")[0] != "plan":
            self._inner.wait(stream)
        elif self._waits_for == "everything":
            assert self._forward is not None
            self._forward.record(self._everything)
            stream.wait(self._everything)
        else:
            self._fences[self._waits_for].wait(stream)

    def wait_host(self) -> None:
        """That of the fence itself."""
        self._inner.wait_host()

    def done(self) -> bool:
        """That of the fence itself."""
        return self._inner.done()
