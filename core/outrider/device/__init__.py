"""The seam: everything that a backend plugin imports from Outrider, and nothing else.

Version 1. Each member's docstring states its ordering, lifetime, threads, capture rules and errors; the conformance kit
checks them.

Errors and hooks come at once and need no torch, so that a plugin can be described, and a broken torch explained, where
``import torch`` itself fails. Everything else loads on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider._renamed import renamed_in
from outrider.device.errors import (
    AmbiguousBackend,
    BackendError,
    BackendLoadError,
    BackendNotFound,
    CapabilityError,
    CaptureError,
    CollectiveError,
    ConfigError,
    DeadlockError,
    DeviceError,
    DeviceFault,
    DeviceLost,
    DeviceStuck,
    EngineStopped,
    OutOfDeviceMemory,
    OutriderError,
    PluginContractError,
    SeamError,
    StaleBufferError,
    StreamOrderError,
    SynchronousCopyError,
)
from outrider.device.plugin import (
    ENTRY_POINT_GROUP,
    KERNELS_GROUP,
    SEAM_VERSION,
    BackendHooks,
    BackendInfo,
    CiDeclaration,
    KernelHooks,
    KernelInfo,
    PluginInfo,
    hookimpl,
    hookspec,
)

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.capabilities import Capabilities
    from outrider.device.collectives import Collective, Decision, Group, Reduction
    from outrider.device.graph import (
        ActiveCapture,
        CaptureContext,
        EagerGraph,
        Graph,
        GraphCallable,
        GraphPool,
        HostParam,
        Scalar,
    )
    from outrider.device.kernels import (
        CACHE_FORMATS,
        LANE_ACCEPT,
        LANE_DRAFT,
        LANE_RESIDUAL,
        LANE_SAMPLE,
        QUANTIZED_FORMATS,
        ROW_ACCESS,
        AttentionMetadata,
        AttentionShape,
        BookkeepingKernels,
        DecoderShape,
        HeadNorms,
        KernelSet,
        ModelKernels,
        Product,
        QuantizedProduct,
        QuantizedWeight,
        RequestInputs,
        RequestRows,
        RotaryArgs,
        RowResolver,
        SamplingKernels,
        TuningProgress,
        TuningResult,
        WrappedKernels,
    )
    from outrider.device.memory import KeepAlive, MemoryInfo, PinnedBuffer
    from outrider.device.stream import Event, Flag, Stream
    from outrider.device.sync import EventFence, Fence, JoinedPlan, Recompute, SpeculativeSync, StepMode, Waiter
    from outrider.device.tools import (
        Access,
        ControllableDevice,
        ExplorationResult,
        Observer,
        Operation,
        ProcessView,
        ScheduleFailure,
        TimedObserver,
    )
    from outrider.device.torch_backend import TorchDeviceBackend, TorchEvent, TorchGraph, TorchStream
    from outrider.device.torch_collectives import TorchGroup

# The same names as above, once more for the run time; tests/arch holds the two together.
_HOMES = {
    "backend": ("Backend",),
    "capabilities": ("Capabilities",),
    "collectives": ("Collective", "Decision", "Group", "Reduction"),
    "graph": (
        "ActiveCapture",
        "CaptureContext",
        "EagerGraph",
        "Graph",
        "GraphCallable",
        "GraphPool",
        "HostParam",
        "Scalar",
    ),
    "kernels": (
        "AttentionMetadata",
        "AttentionShape",
        "KernelSet",
        "LANE_ACCEPT",
        "LANE_DRAFT",
        "LANE_RESIDUAL",
        "LANE_SAMPLE",
        "Product",
        "CACHE_FORMATS",
        "QUANTIZED_FORMATS",
        "QuantizedProduct",
        "QuantizedWeight",
        "ROW_ACCESS",
        "BookkeepingKernels",
        "DecoderShape",
        "HeadNorms",
        "ModelKernels",
        "RequestInputs",
        "RequestRows",
        "RotaryArgs",
        "RowResolver",
        "SamplingKernels",
        "TuningProgress",
        "TuningResult",
        "WrappedKernels",
    ),
    "memory": (
        "KeepAlive",
        "MemoryInfo",
        "PinnedBuffer",
    ),
    "stream": (
        "Event",
        "Flag",
        "Stream",
    ),
    "sync": (
        "EventFence",
        "Fence",
        "JoinedPlan",
        "Recompute",
        "SpeculativeSync",
        "StepMode",
        "Waiter",
    ),
    "tools": (
        "Access",
        "ControllableDevice",
        "ProcessView",
        "ExplorationResult",
        "Observer",
        "Operation",
        "ProcessView",
        "ScheduleFailure",
        "TimedObserver",
    ),
    "torch_backend": (
        "TorchDeviceBackend",
        "TorchEvent",
        "TorchGraph",
        "TorchStream",
    ),
    "torch_collectives": ("TorchGroup",),
}

__all__ = [
    "CACHE_FORMATS",
    "ENTRY_POINT_GROUP",
    "KERNELS_GROUP",
    "LANE_ACCEPT",
    "LANE_DRAFT",
    "LANE_RESIDUAL",
    "LANE_SAMPLE",
    "QUANTIZED_FORMATS",
    "ROW_ACCESS",
    "SEAM_VERSION",
    "Access",
    "ActiveCapture",
    "AmbiguousBackend",
    "AttentionMetadata",
    "AttentionShape",
    "Backend",
    "BackendError",
    "BackendHooks",
    "BackendInfo",
    "BackendLoadError",
    "BackendNotFound",
    "BookkeepingKernels",
    "Capabilities",
    "CapabilityError",
    "CaptureContext",
    "CaptureError",
    "CiDeclaration",
    "Collective",
    "CollectiveError",
    "ConfigError",
    "ControllableDevice",
    "DeadlockError",
    "Decision",
    "DecoderShape",
    "DeviceError",
    "DeviceFault",
    "DeviceLost",
    "DeviceStuck",
    "EagerGraph",
    "EngineStopped",
    "Event",
    "EventFence",
    "ExplorationResult",
    "Fence",
    "Flag",
    "Graph",
    "GraphCallable",
    "GraphPool",
    "Group",
    "HeadNorms",
    "HostParam",
    "JoinedPlan",
    "KeepAlive",
    "KernelHooks",
    "KernelInfo",
    "KernelSet",
    "MemoryInfo",
    "ModelKernels",
    "Observer",
    "Operation",
    "OutOfDeviceMemory",
    "OutriderError",
    "PinnedBuffer",
    "PluginContractError",
    "PluginInfo",
    "ProcessView",
    "Product",
    "QuantizedProduct",
    "QuantizedWeight",
    "Recompute",
    "Reduction",
    "RequestInputs",
    "RequestRows",
    "RotaryArgs",
    "RowResolver",
    "SamplingKernels",
    "Scalar",
    "ScheduleFailure",
    "SeamError",
    "SpeculativeSync",
    "StaleBufferError",
    "StepMode",
    "Stream",
    "StreamOrderError",
    "SynchronousCopyError",
    "TimedObserver",
    "TorchDeviceBackend",
    "TorchEvent",
    "TorchGraph",
    "TorchGroup",
    "TorchStream",
    "TuningProgress",
    "TuningResult",
    "Waiter",
    "WrappedKernels",
    "hookimpl",
    "hookspec",
]


# Plugins that were written for the version before know these.
_renamed = renamed_in(
    __name__,
    {
        "CheckpointError": "outrider.errors.CheckpointError",
        "RequestError": "outrider.errors.RequestError",
        "Turn": "outrider.device.RotaryArgs",
    },
    stacklevel=3,  # through the function below
)

if not TYPE_CHECKING:  # a type checker must see a misspelt name as an error

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{home}"), name)
        return _renamed(name)

    def __dir__() -> list[str]:
        return __all__
