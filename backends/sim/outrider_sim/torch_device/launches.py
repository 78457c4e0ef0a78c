"""Launches of kernels outside torch's dispatcher, and device views of pinned host memory.

Both are for adapters of programs that launch kernels themselves, such as Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.device import Access, ConfigError
from outrider_sim.machine.device_state import PinnedTensor, alias
from outrider_sim.machine.memory import meta_of
from outrider_sim.machine.queue import Op, OperationKind
from outrider_sim.torch_device.opinfo import extent
from outrider_sim.torch_device.tensor import SimTensor, wrap
from outrider_sim.torch_device.torch_slot import registered


def launch(
    name: str,
    run: Callable[[], object],
    *,
    reads: Sequence[tuple[str, Tensor]] = (),
    writes: Sequence[tuple[str, Tensor]] = (),
    touched: Callable[[], tuple[Access, ...]] | None = None,
) -> None:
    """Queue one kernel `run` on the calling thread's current stream, and return before it runs.

    `run` works on host tensors from `host_view`. `reads` and `writes` name each device tensor that it accesses; an operand
    that it reads and writes is in both. `touched` is called after `run` and returns the bytes that were read and written;
    `reads` and `writes` are then upper bounds. Raises `ConfigError` for a tensor of another device.
    """
    found = registered()
    assert found is not None, "a tensor of the device exists before a launch"
    dispatcher = found.dispatcher
    machine = dispatcher.current.machine
    if machine.tells:
        machine.local.line = dispatcher.lines.now()
    op = Op(OperationKind.KERNEL, name, run, cost=machine.like.kernel_us)
    if machine.tracks:
        accesses: list[Access] = []
        for write, operands in ((False, reads), (True, writes)):
            for argument, tensor in operands:
                accesses.append(extent(_device_tensor(name, argument, tensor), write, argument))
        if touched is not None:
            accesses = [replace(access, by_rows=True) for access in accesses]
            op.rows, op.after = touched, True
        op.accesses = tuple(accesses)
        op.line = machine.local.line
    machine.enqueue(op, machine.stream)


def host_view(tensor: Tensor) -> Tensor:
    """Return the host tensor over the same simulated memory as a device tensor. Only a running operation may access it."""
    return _device_tensor("host_view", "tensor", tensor)._inner


def _device_tensor(name: str, argument: str, tensor: Tensor) -> SimTensor:
    if not isinstance(tensor, SimTensor):
        raise ConfigError(
            f"{name}: operand {argument!r} is a tensor on {tensor.device}; expected one of the simulated device"
        )
    return tensor


class ForeignAllocation:
    """Memory that this device's allocator doesn't own: pinned host memory, or memory of another rank's device.

    Observers see one allocation, and views of either side keep it alive.
    """

    __slots__ = ("address", "block", "id", "is_empty", "line", "machine_memory", "nbytes", "owner")

    def __init__(self, owner: Any, memory: Any) -> None:
        self.owner = owner
        self.block = getattr(owner, "block", None)
        self.id = owner.id
        self.address = owner.address
        self.nbytes = owner.nbytes
        self.line = owner.line
        self.is_empty = False
        self.machine_memory = memory

    def used_by(self, stream: object) -> None:
        """Do nothing: only the owner decides about reuse, and no release there waits for a stream of this device."""


def peer_view(tensor: Tensor, backend: Any) -> Tensor:
    """Return a tensor of the device of `backend` over memory of another rank of the same host (peer access).

    Operations of `backend` then read and write the owner's memory, and no event of one device orders the other's streams.
    """
    found = _device_tensor("peer_view", "tensor", tensor)
    sim = backend.sim
    allocation: Any = ForeignAllocation(found._alloc, sim.memory)
    return wrap(found._inner, found._meta, allocation, sim.device)


def copy_unordered(destination: Tensor, source: Tensor) -> None:
    """Copy host memory to the device at once: the host blocks for the copy alone, and no stream orders it.

    So does a driver's blocking copy next to streams that don't synchronise with its default stream.
    """
    target = _device_tensor("copy_unordered", "destination", destination)
    sim = target._alloc.machine_memory.sim
    sim.host_write(extent(target, True, "destination"), lambda: target._inner.copy_(source))


def remap(tensor: Tensor) -> None:
    """Map other pages under the addresses of a tensor's storage at once, as a paused and resumed pool does.

    The contents are lost. No stream orders the change, and work in flight isn't awaited.
    """
    allocation = _device_tensor("remap", "tensor", tensor)._alloc
    sim = allocation.machine_memory.sim
    sim.host_write(Access(allocation.id, 0, allocation.nbytes, True), allocation.block.fill_poison, remapped=allocation)


def mapped(pinned: Tensor) -> Tensor:
    """Return a device tensor over pinned host memory (unified addressing). Kernels access the memory when they run.

    Raises `ConfigError` if `pinned` isn't pinned memory of the simulated device.
    """
    if not isinstance(pinned, PinnedTensor):
        raise ConfigError("only pinned host memory of the simulated device can be mapped; make it with pin_memory=True")
    found = registered()
    assert found is not None, "pinned memory exists, so the device does"
    sim = found.dispatcher.current
    inner = alias(pinned)
    allocation: Any = ForeignAllocation(pinned._alloc, sim.memory)
    return wrap(inner, meta_of(inner), allocation, sim.device)
