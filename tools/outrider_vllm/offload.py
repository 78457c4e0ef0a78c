"""Replacement of the driver call of vLLM's simple KV offload connector, a batched copy of blocks, by copies of the simulated
device.

The connector's worker, its copy thread and its scheduler side are vLLM's. The connector pins existing host memory, which the
simulated device doesn't support. So this module allocates the connector's host caches as pinned memory.

The copy thread hands the events of its copies to the worker through lists, whose methods are atomic. An observer sees the
hand-overs of queues and locks but not those of lists, so these lists report theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.simple_kv_offload import copy_backend, worker

from outrider.device import Backend


class ReportedEvents(list[Any]):
    """A list that one thread appends to and another reads. Reports each hand-over to the observer of a backend."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def append(self, item: Any) -> None:
        """Append an item, which carries the clock of the appending thread."""
        self._backend.listener.host_released(self)
        super().append(item)

    def __getitem__(self, index: Any) -> Any:
        """Return an item and acquire the clocks of the items so far."""
        item = super().__getitem__(index)
        self._backend.listener.host_acquired(self)
        return item

    def __iter__(self) -> Iterator[Any]:
        """Acquire the clocks of the items so far and iterate over the items."""
        self._backend.listener.host_acquired(self)
        return super().__iter__()


def install() -> None:
    """Replace the connector's driver call and its allocation of host caches in this process."""
    copy_module: Any = copy_backend
    copy_module.build_params = _build_params
    copy_module.copy_blocks = _copy_blocks
    connector: Any = worker
    connector.pin_tensor = _refuse_pinning
    connector.SimpleCPUOffloadWorker._init_cpu_mode = _init_cpu_mode


def _build_params(source: Any, destination: Any, stream: Any, src_access_order: int = 0) -> tuple[Any, Any, Any]:
    del src_access_order
    return source, destination, stream


def _copy_blocks(source_blocks: list[int], destination_blocks: list[int], params: tuple[Any, Any, Any]) -> None:
    source, destination, stream = params
    with torch.sim.stream(stream):  # type: ignore[attr-defined]
        for name, cache in source.items():
            for s, d in zip(source_blocks, destination_blocks, strict=True):
                destination[name][d].copy_(cache[s], non_blocking=True)


def _refuse_pinning(tensor: torch.Tensor) -> None:
    raise NotImplementedError(f"host memory of {tensor.nbytes} bytes can't become pinned afterwards on a simulated device")


def _init_cpu_mode(self: Any, caches: dict[str, torch.Tensor], total_bytes_per_block: int, device: torch.device) -> None:
    del total_bytes_per_block
    self.cpu_kv_caches = {
        name: torch.zeros((self.num_cpu_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=True)
        for name, cache in caches.items()
    }
    device_backend = self.load_stream.wrapped.backend
    self._load_events, self._store_events = ReportedEvents(device_backend), ReportedEvents(device_backend)
    self._backend = copy_backend.DmaCopyBackend()
    self._backend.init(caches, self.cpu_kv_caches, device, self.load_stream, self.store_stream)
