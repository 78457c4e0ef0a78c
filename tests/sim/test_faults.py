"""Faults on demand, by the option and counted from a moment."""

import pytest
import torch

from outrider.device import CapabilityError, ConfigError, DeadlockError, DeviceFault, DeviceLost, OutOfDeviceMemory


def three(backend):
    x = torch.zeros(4, device="sim")
    for _ in range(2):
        x.add_(1.0)
    backend.synchronize()
    return x.tolist()


@pytest.mark.parametrize("strategy", ["program", "lazy", "random"])
def test_an_operation_that_never_ends_is_named(sim, strategy):
    backend = sim(fault="stuck@2", strategy=strategy)
    with pytest.raises(DeadlockError, match=r"'default' is held at operation 1.*its own end.*fault=stuck@2"):
        three(backend)
    backend.control.reset()
    with pytest.raises(DeadlockError):  # the option counts anew after a reset
        three(backend)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("oom", OutOfDeviceMemory), ("error", DeviceFault), ("lost", DeviceLost), ("stuck", DeadlockError)],
)
def test_injected_faults_count_from_the_call_and_end_with_a_reset(sim, kind, error):
    backend = sim()
    assert three(backend) == [2.0] * 4
    backend.control.inject(kind, 1)
    with pytest.raises(error):
        three(backend)
    backend.control.reset()
    assert three(backend) == [2.0] * 4
    backend.control.inject(kind, 1)
    backend.control.reset()
    assert three(backend) == [2.0] * 4


def test_a_fault_that_does_not_exist(sim):
    with pytest.raises(ConfigError, match="there is no fault 'fire'"):
        sim().control.inject("fire", 1)


def test_an_operator_that_is_missing_is_named_and_the_device_lives_on(sim):
    backend = sim()
    with pytest.raises(CapabilityError, match=r"aten::bincount.*no such operator.*not implemented for 'Half'"):
        torch.bincount(torch.zeros(4, dtype=torch.float16, device="sim"))
    assert three(backend) == [2.0] * 4


def test_a_missing_operator_in_a_guard_is_named(sim):
    says = "has no operator that is needed, while testing: Could not run 'aten::odd'"
    with pytest.raises(CapabilityError, match=says), sim().guard("testing"):
        raise NotImplementedError("Could not run 'aten::odd'")
