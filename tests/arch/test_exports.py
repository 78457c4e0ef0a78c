"""The public names are pinned: adding or losing one is a decision, made here in the same change."""

import ast

import pytest

import outrider
import outrider.device
import outrider.device.errors

TOP = {
    "AsyncEngine",
    "DecodeClient",
    "Engine",
    "EngineConfig",
    "OutriderError",
    "SamplingParams",
    "StepOutput",
    "get_backend",
}
INTERFACE_NAMES = """
Access ActiveCapture AmbiguousBackend AttentionMetadata AttentionShape Backend BackendError BackendHooks BackendInfo
BackendLoadError BackendNotFound BookkeepingKernels Capabilities CapabilityError CaptureContext CaptureError
CiDeclaration CACHE_FORMATS ClampedActivation Collective CollectiveError ConfigError ControllableDevice
DeadlockError Decision DecoderShape
DeltaRuleWeights DeviceError DeviceFault DeviceLost DeviceStuck ENTRY_POINT_GROUP EagerGraph EngineStopped Event EventFence
ExplorationResult Fence Flag Graph GraphCallable GraphPool Group HeadNorms HostParam JoinedPlan KERNELS_GROUP KeepAlive
KernelHooks KernelInfo KernelSet LANE_ACCEPT LANE_DRAFT LANE_RESIDUAL LANE_SAMPLE LatentKernels MemoryInfo ModelKernels
Observer
Operation OutOfDeviceMemory OutriderError PinnedBuffer PluginContractError PluginInfo ProcessView
QUANTIZED_FORMATS QuantizedWeight ROW_ACCESS Recompute
RecurrentBatch RecurrentKernels
Reduction RequestInputs RequestRows RotaryArgs RowResolver INTERFACE_DATES INTERFACE_VERSION
SamplingKernels Scalar ScheduleFailure
InterfaceError SpeculativeSync StaleBufferError StepMode Stream StreamOrderError SynchronousCopyError TimedObserver
TorchDeviceBackend TorchEvent TorchGraph TorchGroup TorchStream TuningProgress TuningResult Waiter WrappedKernels
hookimpl hookspec AttentionBlock AttentionTokens BlockKernels Contribution CorrectedRouting ExpertActivation ExpertBiases
ExpertsBlock LayerRows MlpBlock RankBoundary
RecurrentBlock RecurrentTokens RecurrentWindow ResidualStream SeparateInput SplitWeight Weight
"""


def test_top_level_names():
    assert set(outrider.__all__) == TOP
    assert dir(outrider) == outrider.__all__


def test_names_of_the_backend_interface():
    assert sorted(outrider.device.__all__) == sorted(INTERFACE_NAMES.split())


@pytest.mark.parametrize("name", INTERFACE_NAMES.split())
def test_each_name_of_the_backend_interface_loads(name):
    assert getattr(outrider.device, name) is not None


@pytest.mark.parametrize("module", [outrider, outrider.device])
def test_lazy_names_are_the_ones_that_type_checkers_see(module):
    """The names under TYPE_CHECKING and in ``__all__`` are the same."""
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outrider.")
        for alias in node.names
    }
    assert imported == set(module.__all__)


@pytest.mark.parametrize("module", [outrider, outrider.device])
def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="'Bakend'"):
        _ = module.Bakend
