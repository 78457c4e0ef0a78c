"""The backend of Ascend devices: torch_npu's streams, events, flags and graphs, and a classification of CANN's errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch_npu

from outrider.device import (
    Capabilities,
    CaptureContext,
    DeviceError,
    DeviceLost,
    Flag,
    HostParam,
    OutOfDeviceMemory,
    TorchDeviceBackend,
)
from outrider_npu.graphs import Issue, NpuGraph, TaskGroup
from outrider_npu.kernels import NpuKernels
from outrider_npu.streams import NpuFlag
from outrider_npu.sync import NpuSync

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
        context.handles.setdefault(param.name, []).append(TaskGroup(handle, issue))

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
