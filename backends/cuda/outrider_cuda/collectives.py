"""Groups of NVIDIA GPUs: NCCL, and peer memory for small tensors if the GPUs of one host can access it.

``cuda:peers=off`` selects NCCL alone. The bytes per rank select one of three implementations: kernels that write to peer
memory in one or two shots (:mod:`outrider_triton.peers`), and NCCL. `outrider bench collectives` measures them.
NVLink multicast isn't used, because some hosts lack it.
"""

from __future__ import annotations

import os
import platform
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed
from torch import Tensor

from outrider.device import Reduction, TorchGroup
from outrider_triton.peers import ONE_SHOT, TWO_SHOT, PeerExchange

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from outrider.device import Backend

dist: Any = torch.distributed  # much of it isn't exported as type checkers want it


class CudaGroup(TorchGroup):
    """A group of NVIDIA GPUs that communicate through NCCL or peer memory."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        store: Store,
        timeout_s: float,
        *,
        peers: bool = False,
    ) -> None:
        """Create the group. ``peers`` uses peer memory for small tensors if all ranks can access it; NCCL does the other
        calls.
        """
        super().__init__(backend, name, ranks, rank, store, timeout_s)
        self._reachable = False
        self._kept: list[Any] = []
        self._group_store: Any = dist.PrefixStore("peers", self._group_store)
        self._symmetric = ""
        self._registered: Any = None
        self._exchange: PeerExchange | None = None
        if hasattr(self._native, "eager_connect_single_device"):
            self._run(lambda: self._native.eager_connect_single_device(backend.device))
        if peers and self.size > 1 and self._exchange_peer_addresses():
            self._reachable = self._allocate_peer_memory()
        if self._reachable:
            pdl = torch.cuda.get_device_capability(backend.device)[0] >= 9
            self._exchange = PeerExchange(self, pdl=pdl)

    @property
    def implementations(self) -> tuple[str, ...]:
        """The implementations of collectives: NCCL's, and those over peer memory if all ranks can access it."""
        return ("nccl", ONE_SHOT, TWO_SHOT) if self._reachable else ("nccl",)

    # -- the verbs -------------------------------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        exchange = self._exchange if reduction is Reduction.SUM else None
        if exchange is None or not exchange.all_reduce(tensor):
            super()._all_reduce(tensor, reduction)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> None:
        if self._one_shot_exchange is None or not self._one_shot_exchange.all_gather(output, tensor):
            super()._all_gather(output, tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        if self._one_shot_exchange is None or not self._one_shot_exchange.broadcast(tensor, root):
            super()._broadcast(tensor, root)

    @property
    def _one_shot_exchange(self) -> PeerExchange | None:
        """The peer-memory exchange for collectives that move data without a sum; None if the one-shot implementation is not
        allowed.
        """
        return self._exchange if self.allows_implementation(ONE_SHOT) else None

    # -- memory of the peers ---------------------------------------------------------------------------------------

    @property
    def has_peer_memory(self) -> bool:
        """True if all ranks are processes of one host and their GPUs can access each other's memory."""
        return self._reachable

    def _exchange_peer_addresses(self) -> bool:
        """Exchange the addresses of all ranks, and return True if all can access each other's memory. All ranks get the same
        answer, so they select the same implementation.
        """
        host = f"{platform.node()} {_boot_id()}"
        self._group_store.set(f"where/{self.rank}", f"{host}|{self.backend.device.index}|{os.getpid()}")
        said = [self._group_store.get(f"where/{rank}").decode().split("|") for rank in range(self.size)]
        own = self.backend.device.index
        others = [int(index) for _, index, _ in said if index != str(own)]
        one_host = {each[0] for each in said} == {host} and len({each[2] for each in said}) == self.size
        reached = one_host and all(torch.cuda.can_device_access_peer(own, other) for other in others)
        return self._all_ranks_agree("reached", said=reached)

    def _all_ranks_agree(self, what: str, *, said: bool) -> bool:
        """Return on every rank whether all ranks passed ``said=True`` for the question ``what``."""
        self._group_store.set(f"{what}/{self.rank}", str(int(said)))
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        # A rank that waited for a failed rank arrives later by the time limit, possibly several times.
        patience = timedelta(seconds=3 * self.timeout_s + 5)
        self._run(lambda: self._group_store.wait(keys, patience))
        return all([self._group_store.get(f"{what}/{rank}") == b"1" for rank in range(self.size)])  # noqa: C419  (ask all)

    def _allocate_peer_memory(self) -> bool:
        """Allocate shared memory of the ranks and use it once, so that every rank learns now of a failure."""
        if self.rank == 0:
            self._group_store.set("name", str(uuid4()))
        self._symmetric = self._group_store.get("name").decode()
        reason = "another rank failed"
        try:
            self._register()
            buffers = self._peer_buffers("probe", (self.size,), torch.int32)
            with torch.cuda.device(self.backend.device):
                for buffer in buffers:
                    buffer[self.rank].fill_(self.rank + 1)
                torch.cuda.synchronize(self.backend.device)
            self._wait_for_all_ranks("written")
            worked = buffers[self.rank].tolist() == list(range(1, self.size + 1))
            reason = reason if worked else "what another GPU wrote isn't there"
        except Exception as error:  # whatever a driver, a container or another torch says: then it's NCCL
            worked, reason, self._broken = False, f"{type(error).__name__}: {str(error).splitlines()[0]}", None
        worked = self._all_ranks_agree("tried", said=worked)
        if not worked:
            warnings.warn(
                f"group {self.name!r} goes by NCCL alone, which takes longer for small tensors: memory that the GPUs share "
                f"can't be used on rank {self.rank} ({reason})",
                RuntimeWarning,
                stacklevel=2,
            )
        return worked

    def _register(self) -> None:
        """Register this group's name with torch's symmetric memory, which shared allocations need."""
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        meeting = dist.PrefixStore("symmetric", self._group_store)
        group = dist.ProcessGroup(meeting, self.rank, self.size)
        kind = dist.ProcessGroup.BackendType.NCCL
        group._register_backend(self.backend.device, kind, self._native)
        group._set_default_backend(kind)
        group._set_group_name(self._symmetric)
        register: Any = _register_process_group
        register(self._symmetric, group)
        self._registered = group
        if hasattr(_SymmetricMemory, "set_group_info"):
            _SymmetricMemory.set_group_info(self._symmetric, self.rank, self.size, meeting)

    def _peer_buffers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        from torch._C._distributed_c10d import _SymmetricMemory as symmetric

        del name  # the ranks make the same buffers in the same order
        device = self.backend.device
        strides = torch.empty(shape, device="meta").stride()

        def make() -> tuple[Any, Tensor]:
            # Not torch's `empty`: that takes a memory pool of whichever device is current when it's first called.
            memory = symmetric.empty_strided_p2p(shape, strides, dtype, device, None)
            return symmetric.rendezvous(memory, self._symmetric), memory

        with torch.cuda.device(device):
            handle, memory = self._run(make)
            self._kept.append((handle, memory))
            memory.zero_()
            torch.cuda.synchronize(device)
        self._wait_for_all_ranks(f"made {len(self._kept)}")
        return tuple(handle.get_buffer(rank, shape, dtype) for rank in range(self.size))

    def _close(self) -> None:
        self._exchange = None
        registered, self._registered = self._registered, None
        if registered is not None:
            from torch._C._distributed_c10d import _unregister_process_group

            unregister: Any = _unregister_process_group
            unregister(self._symmetric)
        del registered
        super()._close()

    def _end_native(self, how: str) -> None:
        """End NCCL and free the shared memory.

        torch frees the memory once the device is idle, and blocks all Python threads until then. A kernel that waits for a
        lost rank never ends, so this thread waits first.
        """
        try:
            super()._end_native(how)
        finally:
            torch.cuda.synchronize(self.backend.device)
            self._kept.clear()


def _boot_id() -> str:
    """Return the kernel's boot identifier, which distinguishes hosts of the same name, or an empty string."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
