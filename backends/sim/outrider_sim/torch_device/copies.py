"""Copies between host and device tensors. Device copies are queued; host copies are asynchronous only with pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import CaptureError
from outrider_sim.machine.device_state import host_extent
from outrider_sim.machine.memory import Meta, contiguous
from outrider_sim.machine.pinned import PinnedTensor, alias
from outrider_sim.machine.queue import Op, OperationKind
from outrider_sim.torch_device.operands import CPU, META, extent
from outrider_sim.torch_device.tensor import SimTensor

if TYPE_CHECKING:
    from outrider_sim.torch_device.dispatch import Dispatcher

_COPY_OP = torch.ops.aten.copy_.default


class CopyOperators:
    """Copy operators between host and simulated device, and within the device."""

    def __init__(self, core: Dispatcher) -> None:
        self._core = core

    def copy_(self, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy one tensor to another, each in device, pinned or pageable memory; the device converts the dtype."""
        if isinstance(destination, SimTensor):
            if isinstance(source, SimTensor):
                self._core.compute(self._core.info(_COPY_OP), (destination, source), {})
            else:
                self.host_to_device(destination, source, non_blocking)
        elif isinstance(source, SimTensor):
            self.device_to_host(destination, source, non_blocking)
        else:
            destination.copy_(source)
        return destination

    def copy_from(self, source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy the first operand to the second, for torch's internal operator with exchanged operands."""
        return self.copy_(destination, source, non_blocking)

    def host_to_device(self, destination: SimTensor, source: Tensor, non_blocking: bool) -> None:
        """Copy a host tensor to the device, asynchronously only from contiguous pinned memory of the same dtype.

        From other memory the host waits until the stream is empty, then copies the values and continues.
        """
        sim = self._core.current
        machine = sim.machine
        stream = machine.stream
        meta = destination._meta
        if source.device.type != "cpu":
            raise RuntimeError(f"a copy to {self._core.device} from {source.device} isn't possible")
        cost = meta.nbytes / machine.like.link_bytes_per_us + machine.like.kernel_us
        written = extent(destination, True, "self")
        if isinstance(source, PinnedTensor) and _direct(source, meta):
            op = Op(OperationKind.COPY, "copy to device", destination._inner.copy_, (alias(source),), cost=cost)
            self._core.note(op, host_extent(source, False, "src"), written)
            machine.enqueue(op, stream)
            sim.used_by_copy(source, stream)
        else:
            plain = source.plain(write=False) if isinstance(source, PinnedTensor) else source.detach()
            if stream.capture is not None:
                raise CaptureError(
                    "a copy from pageable host memory can't be captured: it waits for the stream; copy from contiguous "
                    "pinned memory of the same dtype"
                )
            sim.synchronize(stream, "a copy from pageable host memory")
            staged = torch.empty(plain.shape, dtype=meta.dtype)
            staged.copy_(plain)  # always a copy: the caller may change or exchange its tensor's contents
            op = Op(OperationKind.COPY, "copy to device, staged", destination._inner.copy_, (staged,), cost=cost)
            self._core.note(op, written)
            machine.enqueue(op, stream)
        if not non_blocking:
            sim.synchronize(stream, "a blocking copy to the device")

    def device_to_host(self, destination: Tensor, source: SimTensor, non_blocking: bool) -> None:
        """Copy to the host: asynchronously to contiguous pinned memory, synchronously to other memory.

        Raises `CaptureError` for other memory in a capture, and `RuntimeError` if the destination isn't on the host.
        """
        sim = self._core.current
        machine = sim.machine
        stream = machine.stream
        if destination.device.type != "cpu":
            raise RuntimeError(f"a copy from {self._core.device} to {destination.device} isn't possible")
        cost = source._meta.nbytes / machine.like.link_bytes_per_us + machine.like.kernel_us
        read = extent(source, False, "src")
        if isinstance(destination, PinnedTensor) and destination.is_contiguous():
            op = Op(OperationKind.COPY, "copy to host", alias(destination).copy_, (source._inner,), cost=cost)
            self._core.note(op, read, host_extent(destination, True, "self"))
            machine.enqueue(op, stream)
            sim.used_by_copy(destination, stream)
            if not non_blocking:
                sim.synchronize(stream, "a blocking copy to the host")
            return
        if stream.capture is not None:
            raise CaptureError(
                "a copy to pageable host memory can't be captured: it waits for the stream; copy to contiguous pinned memory"
            )
        staged = torch.empty(source.shape, dtype=destination.dtype)
        op = Op(OperationKind.COPY, "copy to host, staged", staged.copy_, (source._inner,), cost=cost)
        self._core.note(op, read)
        machine.enqueue(op, stream)
        sim.synchronize(stream, "a copy to pageable host memory")
        destination.copy_(staged)

    def to_device(self, source: Tensor, dtype: torch.dtype, *, non_blocking: bool) -> SimTensor:
        """Return a copy of a host tensor in new device memory."""
        sim = self._core.current
        meta = self._core.metas.get(source.shape, contiguous(tuple(source.shape)), dtype)
        made = self._core.allocate(sim, meta, sim.machine.stream)
        self.host_to_device(made, source, non_blocking)
        return made

    def to_copy(
        self,
        source: Tensor,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        """Return a copy of a tensor with another dtype, layout or device.

        Raises `RuntimeError` for a target that is neither this device nor the host.
        """
        del layout
        target = self._core.device if device is None and isinstance(source, SimTensor) else (device or CPU)
        with torch._C._InferenceMode(False):
            looks = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=META)
            looks = looks.to(dtype=dtype or source.dtype, memory_format=memory_format or torch.preserve_format, copy=True)
        if target.type == "meta":
            return looks
        sim = self._core.current
        if isinstance(source, SimTensor):
            if target.type == self._core.device.type:
                if target.index and target != source.device:
                    raise RuntimeError(f"a copy from {source.device} to {target} isn't possible: devices meet in collectives")
                made = self._core.allocate(sim, self._core.metas.meta_of(looks), sim.machine.stream)
                self.copy_(made, source)
                return made
            if target.type != "cpu":
                raise RuntimeError(f"a copy from {self._core.device} to {target} isn't possible")
            if pin_memory or non_blocking:
                # As torch does for accelerators: a result that is copied asynchronously is pinned.
                host: Tensor = sim.pinned(tuple(looks.shape), looks.dtype, guarded=True)
            else:
                host = torch.empty_strided(looks.shape, looks.stride(), dtype=looks.dtype)
            self.device_to_host(host, source, non_blocking)
            return host
        made = self._core.allocate(sim, self._core.metas.meta_of(looks), sim.machine.stream)
        self.host_to_device(made, source, non_blocking)
        return made


def _direct(source: PinnedTensor, meta: Meta) -> bool:
    return source.dtype == meta.dtype and source.shape == meta.shape and source.is_contiguous()
