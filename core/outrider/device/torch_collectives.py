"""Groups that use torch.distributed: gloo, NCCL, RCCL, HCCL and every other library that registers itself with torch.

The process group is created directly from the store. torch's own default group, its registry of groups and its
module-level functions are not used, so that several ranks may be threads of one process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed
from torch import Tensor

from outrider.device.collectives import Group, Reduction
from outrider.device.errors import CapabilityError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from outrider.device.backend import Backend

dist: Any = torch.distributed  # much of it isn't exported as type checkers want it

_STORE_PREFIX = "outrider/group"
_SHUTDOWN_TIMEOUT_S = 3.0


def make_process_group(
    device: torch.device, name: str, ranks: tuple[int, ...], index: int, joined: Store, timeout_s: float
) -> Any:
    """Return a process group of torch for ``device`` and ``ranks``; this rank has the number ``index``.

    The ranks find each other through the unused store ``joined``. Raises :class:`CapabilityError` if torch has no library
    for the device.
    """
    if not dist.is_available():
        raise CapabilityError(f"torch {torch.__version__} is built without torch.distributed, so {name!r} can't be made")
    kind = dist.Backend.default_device_backend_map.get(device.type)
    if kind is None:
        raise CapabilityError(
            f"torch {torch.__version__} knows no communication library for {device.type}, so {name!r} can't be made; "
            "the vendor's package registers one"
        )
    timeout = timedelta(seconds=timeout_s)
    plugin = dist.Backend._plugins.get(kind.upper())
    if plugin is not None:
        if not plugin.extended_api:
            return plugin.creator_fn(joined, index, len(ranks), timeout)
        described = dist.distributed_c10d._DistributedBackendOptions()
        described.store, described.group_rank, described.group_size = joined, index, len(ranks)
        described.timeout, described.group_id, described.global_ranks_in_group = timeout, name, list(ranks)
        return plugin.creator_fn(described, None)
    own = getattr(dist, f"ProcessGroup{kind.capitalize() if kind == 'gloo' else kind.upper()}", None)
    if own is None:
        raise CapabilityError(f"torch {torch.__version__} is built without {kind}, so {name!r} can't be made")
    if kind == "gloo":
        return own(joined, index, len(ranks), timeout)
    options = own.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    return own(joined, index, len(ranks), options)


def fresh_store(name: str, index: int, store: Store, timeout_s: float) -> Store:
    """Return an unused part of ``store``, with its own connection.

    A wait of up to ``timeout_s`` at this part doesn't delay waits at ``store``. Each rank counts the groups that it has
    created under this name.
    """
    own = cast("Any", store).clone()
    generation = dist.PrefixStore(f"{_STORE_PREFIX}/{name}/made", own).add(str(index), 1)
    joined: Store = dist.PrefixStore(f"{_STORE_PREFIX}/{name}/{generation}", own)
    joined.set_timeout(timedelta(seconds=timeout_s))
    return joined


class TorchGroup(Group):
    """A group whose verbs are those of one of torch's process groups.

    The verbs run on the ambient stream, which is ``stream`` of the call. If torch runs them on the host (gloo), each verb
    has finished when its call returns.
    """

    def __init__(
        self, backend: Backend, name: str, ranks: tuple[int, ...], rank: int, store: Store, timeout_s: float
    ) -> None:
        super().__init__(backend, name, ranks, rank, timeout_s=timeout_s)
        self._reductions: Mapping[Reduction, Any] = {
            Reduction.SUM: dist.ReduceOp.SUM,
            Reduction.MAX: dist.ReduceOp.MAX,
            Reduction.MIN: dist.ReduceOp.MIN,
        }
        self._broken: str | None = None
        self._group_store: Store = fresh_store(name, self.rank, store, timeout_s)
        """The part of the store that belongs to this group."""
        device, index, meeting = backend.device, self.rank, self._group_store
        if backend.capabilities.asynchronous:  # the library connects at the first call, and waits without a limit
            self._wait_for_all_ranks("joined")
        self._native: Any = self._run(lambda: make_process_group(device, name, self.ranks, index, meeting, timeout_s))

    @property
    def implementations(self) -> tuple[str, ...]:
        """Return the only implementation: torch's library."""
        return ("torch.distributed",)

    def _all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = self._reductions[reduction]
        options.asyncOp = False
        self._run(lambda: self._native.allreduce([tensor], options))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> None:
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        self._run(lambda: self._native._allgather_base(as_bytes(output), as_bytes(tensor), options))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = self._reductions[reduction]
        options.asyncOp = False
        self._run(lambda: self._native._reduce_scatter_base(output.view(-1), tensor.view(-1), options))

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.asyncOp = False
        self._run(lambda: self._native.broadcast([as_bytes(tensor)], options))

    def _all_to_all(self, output: Tensor, tensor: Tensor) -> None:
        options = dist.distributed_c10d.AllToAllOptions()
        options.asyncOp = False
        self._run(lambda: self._native.alltoall_base(as_bytes(output), as_bytes(tensor), [], [], options))

    def _send(self, tensor: Tensor, to: int) -> None:
        self._run(lambda: self._native.send([as_bytes(tensor)], to, 0))

    def _receive(self, tensor: Tensor, source: int) -> None:
        self._run(lambda: self._native.recv([as_bytes(tensor)], source, 0))

    def _wait_for_all_ranks(self, point: str) -> None:
        """Wait on the host until every rank has called this method."""
        self._group_store.set(f"met/{point}/{self.rank}", "1")
        self._run(lambda: self._group_store.wait([f"met/{point}/{rank}" for rank in range(self.size)]))

    def _run(self, start: Callable[[], Any]) -> Any:
        """Call ``start``, and let the stream (on the host: the thread) wait for the work that it returns."""
        if self._broken is not None:
            raise self.failed(f"the group failed before: {self._broken}")
        try:
            started = start()
            if isinstance(started, dist.Work):
                started.wait()
            return started
        except RuntimeError as error:
            if self.backend.translate_error(error, "communicating") is not None:
                raise  # the device's own failure; the guard around this types it
            self._broken = str(error).splitlines()[0]
            raise self.failed(self._broken) from error

    def _close(self) -> None:
        if self._native is not None and self.backend.capabilities.asynchronous:
            self._end_in_time("shutdown" if self._broken is None else "abort")
        self._native = None

    def _end_native(self, how: str) -> None:
        """End the library by its method ``how``. It waits for all ranks, so this runs in another thread."""
        getattr(self._native, how)()

    def _end_in_time(self, how: str) -> None:
        """Call :meth:`_end_native` in another thread, and abandon it after a time limit: a rank may be gone."""
        failed: list[Exception] = []

        def run() -> None:
            try:
                self._end_native(how)
            except Exception as error:  # raised below
                failed.append(error)

        thread = threading.Thread(target=run, name=f"outrider-{how}", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_TIMEOUT_S)
        if thread.is_alive():
            warnings.warn(
                f"group {self.name!r}: the library of {self.backend.label} hasn't ended its side on rank {self.rank} within "
                f"{_SHUTDOWN_TIMEOUT_S:g} s; it's left alone, since another rank may be gone",
                RuntimeWarning,
                stacklevel=4,
            )
        if failed:
            raise self.failed(f"ending the group: {failed[0]}") from failed[0]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as one row of bytes. A move then works for dtypes that a library lacks."""
    return tensor.view(-1).view(torch.uint8)
