"""The backend interface: everything that a backend plugin imports from Outrider, and nothing else.

Version 1. Each member's docstring states its ordering, lifetime, threads, capture rules and errors; the conformance kit
checks them.

Errors and hooks come at once and need no torch, so that a plugin can be described, and a broken torch explained, where
``import torch`` itself fails. Everything else loads on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    InterfaceError,
    OutOfDeviceMemory,
    OutriderError,
    PluginContractError,
    StaleBufferError,
    StreamOrderError,
    SynchronousCopyError,
)
from outrider.device.plugin import (
    ENTRY_POINT_GROUP,
    INTERFACE_DATES,
    INTERFACE_VERSION,
    KERNELS_GROUP,
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
    from outrider.device.kernels.blocks import (
        AttentionBlock,
        AttentionTokens,
        BlockKernels,
        ExpertsBlock,
        LayerRows,
        MlpBlock,
        RecurrentBlock,
        RecurrentTokens,
        RecurrentWindow,
    )
    from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
    from outrider.device.kernels.formats import CACHE_FORMATS, QUANTIZED_FORMATS
    from outrider.device.kernels.kernelset import KernelSet, WrappedKernels
    from outrider.device.kernels.latent_kernels import LatentKernels
    from outrider.device.kernels.metadata import (
        AttentionMetadata,
        AttentionShape,
        ClampedActivation,
        CorrectedRouting,
        DecoderShape,
        ExpertActivation,
        ExpertBiases,
        HeadNorms,
        RequestInputs,
        RequestRows,
        RotaryArgs,
        TuningProgress,
        TuningResult,
    )
    from outrider.device.kernels.model_kernels import ModelKernels
    from outrider.device.kernels.recurrent_kernels import DeltaRuleWeights, RecurrentBatch, RecurrentKernels
    from outrider.device.kernels.reference.model import LANE_ACCEPT, LANE_DRAFT, LANE_RESIDUAL, LANE_SAMPLE
    from outrider.device.kernels.reference.ops import ROW_ACCESS, RowResolver
    from outrider.device.kernels.residual import Contribution, RankBoundary, ResidualStream, SeparateInput
    from outrider.device.kernels.sampling_kernels import SamplingKernels
    from outrider.device.kernels.weights import QuantizedWeight, SplitWeight, Weight
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

_LAZY_MODULES = (
    *("tools", "stream", "sync"),
    *("capabilities", "collectives", "graph", "memory", "backend", "torch_backend", "torch_collectives"),
    *("kernels.metadata", "kernels.formats", "kernels.weights", "kernels.residual", "kernels.blocks", "kernels.kernelset"),
    *("kernels.bookkeeping_kernels", "kernels.model_kernels", "kernels.latent_kernels", "kernels.recurrent_kernels"),
    *("kernels.sampling_kernels", "kernels.reference.model", "kernels.reference.ops"),
)
"""The modules that define the names above. A lookup imports them in this order; the first three don't import torch."""

__all__ = [
    "CACHE_FORMATS",
    "ENTRY_POINT_GROUP",
    "INTERFACE_DATES",
    "INTERFACE_VERSION",
    "KERNELS_GROUP",
    "LANE_ACCEPT",
    "LANE_DRAFT",
    "LANE_RESIDUAL",
    "LANE_SAMPLE",
    "QUANTIZED_FORMATS",
    "ROW_ACCESS",
    "Access",
    "ActiveCapture",
    "AmbiguousBackend",
    "AttentionBlock",
    "AttentionMetadata",
    "AttentionShape",
    "AttentionTokens",
    "Backend",
    "BackendError",
    "BackendHooks",
    "BackendInfo",
    "BackendLoadError",
    "BackendNotFound",
    "BlockKernels",
    "BookkeepingKernels",
    "Capabilities",
    "CapabilityError",
    "CaptureContext",
    "CaptureError",
    "CiDeclaration",
    "ClampedActivation",
    "Collective",
    "CollectiveError",
    "ConfigError",
    "Contribution",
    "ControllableDevice",
    "CorrectedRouting",
    "DeadlockError",
    "Decision",
    "DecoderShape",
    "DeltaRuleWeights",
    "DeviceError",
    "DeviceFault",
    "DeviceLost",
    "DeviceStuck",
    "EagerGraph",
    "EngineStopped",
    "Event",
    "EventFence",
    "ExpertActivation",
    "ExpertBiases",
    "ExpertsBlock",
    "ExplorationResult",
    "Fence",
    "Flag",
    "Graph",
    "GraphCallable",
    "GraphPool",
    "Group",
    "HeadNorms",
    "HostParam",
    "InterfaceError",
    "JoinedPlan",
    "KeepAlive",
    "KernelHooks",
    "KernelInfo",
    "KernelSet",
    "LatentKernels",
    "LayerRows",
    "MemoryInfo",
    "MlpBlock",
    "ModelKernels",
    "Observer",
    "Operation",
    "OutOfDeviceMemory",
    "OutriderError",
    "PinnedBuffer",
    "PluginContractError",
    "PluginInfo",
    "ProcessView",
    "QuantizedWeight",
    "RankBoundary",
    "Recompute",
    "RecurrentBatch",
    "RecurrentBlock",
    "RecurrentKernels",
    "RecurrentTokens",
    "RecurrentWindow",
    "Reduction",
    "RequestInputs",
    "RequestRows",
    "ResidualStream",
    "RotaryArgs",
    "RowResolver",
    "SamplingKernels",
    "Scalar",
    "ScheduleFailure",
    "SeparateInput",
    "SpeculativeSync",
    "SplitWeight",
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
    "Weight",
    "WrappedKernels",
    "hookimpl",
    "hookspec",
]


if not TYPE_CHECKING:  # a type checker must see a misspelt name as an error

    def __getattr__(name: str) -> Any:
        for module in _LAZY_MODULES if name in __all__ else ():
            names = vars(import_module(f"{__name__}.{module}"))
            if name in names:
                return names[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
