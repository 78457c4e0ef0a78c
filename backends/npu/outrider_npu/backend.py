"""The backend of Ascend devices: torch_npu's streams, events, flags and graphs, and a classification of CANN's errors.

**Flags** are torch_npu's ``ExternalEvent``. A wait on an external event may be enqueued before its record. The event stays
set until it is reset, and a record while it is set is lost. It is the only event of this device that works the same inside a
graph and outside.

**Graphs** have host parameters. CANN captures host values into a graph. An operation with replaceable values is captured
between ``graph_task_group_begin`` and ``graph_task_group_end``, one operation per group. The group has a handle. To replace
the values, the caller issues the operation again between ``graph_task_update_begin`` and ``graph_task_update_end`` on a
stream that isn't captured. The operation then doesn't run: its arguments replace those of the group, in stream order. An
update that runs concurrently with a replay of the group is a race. The caller therefore makes the update's stream wait for
the previous replay, and the next replay wait for the update. The host waits for neither.

torch_npu's ``NPUGraph.update`` isn't used. It updates every recorded operation with one list, on an unordered stream of its
own, and supports only the operators in its table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
import torch_npu

from outrider.device import (
    Capabilities,
    CapabilityError,
    CaptureContext,
    DeviceError,
    DeviceLost,
    Flag,
    HostParam,
    OutOfDeviceMemory,
    Recompute,
    SpeculativeSync,
    StepMode,
    Stream,
    TorchDeviceBackend,
    TorchGraph,
    Waiter,
)
from outrider_npu.kernels import NpuKernels

Issue = Callable[[tuple[int, ...]], None]


class NpuGraph(TorchGraph):
    """A captured ``NPUGraph``. The capture context's handles hold the task groups of each host parameter: handle and reissue.

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
                for handle, issue in handles[name]:
                    backend.module.graph_task_update_begin(stream.native, handle)
                    try:
                        issue(values)
                    finally:
                        backend.module.graph_task_update_end(stream.native)
                self.context.params[name].value = values


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


class NpuSync(SpeculativeSync):
    """Synchronization policy of Ascend devices. Events have generations, so fences are events.

    Attention takes lengths as host lists. The plan needs exact lengths, so it follows the fence *lengths on host*. Each
    replay of a draft step or of verify is preceded by an update of the lengths, between *params free* and *params
    bound*. Each call copies the values, so no two iterations share a list.

    Three-axis positions are recomputed from their source after the plan stream has joined and copied to the verify
    graph's input again: a plan that ran concurrently with the draft was observed to leave wrong positions there.
    """

    step_modes = frozenset({StepMode.STAGED})
    published_waiter = Waiter.STREAM
    exact_host_lengths = True
    fused_host_wait = True  # one graph for the iteration would hold lengths that the host must know before it's launched
    recompute_after_join = frozenset({Recompute.MROPE_POSITIONS})
    refresh_before_replay = frozenset({"rope_positions"})
    rebind_params = True


CAPABILITIES = Capabilities(
    asynchronous=True,
    concurrent_streams=True,
    stream_priorities=True,
    event_timing=True,
    flags=True,
    captures_graphs=True,
    updates_graph_params=True,
    forks_in_capture=True,  # torch_npu itself forks to a stream of its own to save tensors in a capture
    collectives=True,
    perturbs_timing=True,
    memory_limit=True,
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    # The fused attention takes these, and pages of whole multiples of 128 where a sequence has more than one new token.
    preferred_dtypes=(torch.bfloat16, torch.float16),
    page_size=128,
)


STICKY_ERRORS: Mapping[int, str] = MappingProxyType(
    {
        507010: "ACL_ERROR_RT_LOST_HEARTBEAT",
        507014: "ACL_ERROR_RT_AICORE_TIMEOUT",
        507015: "ACL_ERROR_RT_AICORE_EXCEPTION",
        507016: "ACL_ERROR_RT_AICORE_TRAP_EXCEPTION",
        507017: "ACL_ERROR_RT_AICPU_TIMEOUT",
        507018: "ACL_ERROR_RT_AICPU_EXCEPTION",
        507034: "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT",
        507035: "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
        507036: "ACL_ERROR_RT_VECTOR_CORE_TRAP_EXCEPTION",
        507053: "ACL_ERROR_RT_DEVICE_MEM_ERROR",
        507054: "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR",
    }
)
"""Names of the errors of CANN's runtime after which the device must be restarted, by the number in the error message."""

_ERROR_CODE = re.compile(r"error code(?: is)?\s*:?\s*(\d{6})")


class NpuBackend(TorchDeviceBackend):
    """The backend of one NPU. Requires that torch_npu is loaded."""

    graph_type = NpuGraph

    def __init__(self, ordinal: int) -> None:
        super().__init__("npu", "npu", ordinal, capabilities=CAPABILITIES, kernels=NpuKernels, speculative_sync=NpuSync)

    def _create_flag(self, name: str) -> Flag:
        return NpuFlag(self, name, self.module.ExternalEvent())

    def _new_graph(self) -> Any:
        return self.module.NPUGraph()

    def _reissue(self, context: CaptureContext, param: HostParam, issue: Issue) -> None:
        stream = self.module.current_stream()
        self.module.graph_task_group_begin(stream)
        try:
            issue(param.value)
        finally:
            handle = self.module.graph_task_group_end(stream)
        context.handles.setdefault(param.name, []).append((handle, issue))

    def translate_error(self, error: Exception, doing: str) -> DeviceError | None:
        """Return the typed error for torch_npu's plain RuntimeErrors, or None for other errors: out of memory by the text,
        sticky faults by CANN's error number.
        """
        if isinstance(error, RuntimeError) and "NPU out of memory" in str(error):
            return OutOfDeviceMemory(
                f"out of memory on {self.device} while {doing}: {error}; use a smaller batch, cache or bucket"
            )
        if isinstance(error, RuntimeError):
            for number in _ERROR_CODE.findall(str(error)):
                name = STICKY_ERRORS.get(int(number))
                if name is not None:
                    return DeviceLost(f"{self.device} failed while {doing} ({name}): {error}; start a new process")
        return super().translate_error(error, doing)

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch, torch_npu and CANN, and the device name."""
        cann = str(torch_npu.npu.utils.get_cann_version())
        return {**super().versions(), "torch_npu": str(torch_npu.__version__), "cann": cann}
