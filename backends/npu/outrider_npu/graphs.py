"""Graphs with host parameters: task groups and their updates.

CANN captures host values into a graph. An operation with replaceable values is captured between
``graph_task_group_begin`` and ``graph_task_group_end``, one operation per group. The group has a handle. To replace the
values, the caller issues the operation again between ``graph_task_update_begin`` and ``graph_task_update_end`` on a
stream that isn't captured. The operation then doesn't run: its arguments replace those of the group, in stream order.
An update that runs concurrently with a replay of the group is a race. The caller therefore makes the update's stream
wait for the previous replay, and the next replay wait for the update. The host waits for neither.

torch_npu's ``NPUGraph.update`` isn't used. It updates every recorded operation with one list, on an unordered stream of
its own, and supports only the operators in its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from outrider.device import CapabilityError, Stream, TorchGraph

if TYPE_CHECKING:
    from outrider_npu.backend import NpuBackend

Issue = Callable[[tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """One captured operation: its handle and a function that reissues it. References the operation's tensors."""

    handle: Any
    issue: Issue


class NpuGraph(TorchGraph):
    """A captured ``NPUGraph``. The capture context's handles hold the task groups of each host parameter.

    An empty list means that a kernel used the parameter but reads its values from device memory.
    """

    def _update_params(self, params: Mapping[str, tuple[int, ...]], stream: Stream) -> None:
        handles = self.context.handles
        frozen = [name for name in params if name not in handles]
        if frozen:
            raise CapabilityError(
                f"graph {self.name!r}: no captured operation was issued under {frozen}, so their values stay as captured; a "
                "kernel must read a host parameter through Backend.reissue"
            )
        backend = cast("NpuBackend", self.backend)
        with backend.on(stream), backend.guard(f"rebinding parameters of graph {self.name!r}"):
            for name, values in params.items():
                for group in handles[name]:
                    backend.module.graph_task_update_begin(stream.native, group.handle)
                    try:
                        group.issue(values)
                    finally:
                        backend.module.graph_task_update_end(stream.native)
                self.context.params[name].value = values
