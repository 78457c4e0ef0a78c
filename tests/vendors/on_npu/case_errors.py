"""What torch_npu says when it fails becomes errors of the backend interface; what fails leaves the device as it was."""

import emulation
import pytest
import torch

from outrider.device import CaptureError, DeviceLost, OutOfDeviceMemory
from outrider_npu.backend import STICKY_ERRORS


@pytest.fixture
def backend():
    made = emulation.make()
    made.control.reset()
    yield made
    made.control.reset()


def test_out_of_memory_by_class_and_by_text(backend):
    with pytest.raises(OutOfDeviceMemory), backend.guard("asking"):
        torch.empty(2 * backend.memory_info().total, dtype=torch.uint8, device=backend.device)
    plain = RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.96 GiB total capacity)")
    found = backend.translate_error(plain, "loading")
    assert isinstance(found, OutOfDeviceMemory)
    assert not found.device_lost


@pytest.mark.parametrize(
    "text",
    [
        "ACL stream synchronize failed, error code:507018",
        "NPU function error: call aclnnAdd failed, error code is 507015 [Error]: The aicore execution is abnormal.",
        "synchronize: NPU error, NPU error code is:507035",
    ],
)
def test_sticky_faults_by_their_number(backend, text):
    found = backend.translate_error(RuntimeError(text), "waiting")
    assert isinstance(found, DeviceLost)
    assert any(name in str(found) for name in STICKY_ERRORS.values())


def test_other_errors_pass_unchanged(backend):
    for text in ("The size of tensor a (3) must match", "call failed, error code is 161002", "507018 tokens"):
        assert backend.translate_error(RuntimeError(text), "adding") is None


def test_a_fault_of_a_kernel_surfaces_where_the_host_waits(backend):
    stream = backend.create_stream("s")
    with backend.on(stream):
        x = torch.zeros(4, device=backend.device)
        x[torch.full((1,), 9, dtype=torch.int64, device=backend.device)] = 1.0
    with pytest.raises(DeviceLost, match="ACL_ERROR_RT_AICORE_EXCEPTION"):
        stream.synchronize()


def test_a_failed_capture_leaves_no_trace(backend):
    stream = backend.create_stream("s")
    with backend.on(stream):
        x = torch.ones(4, device=backend.device)
    stream.synchronize()

    def fn(context):
        x.add_(1)
        if backend.active_capture is not None and not backend.active_capture.rehearsal:
            raise ValueError("in the middle")

    with pytest.raises(CaptureError, match="in the middle"):
        backend.capture("bad", fn, stream=stream, inputs={}, outputs={"x": x})
    assert not backend.module.is_current_stream_capturing()

    def good(context):
        x.mul_(2)

    graph = backend.capture("good", good, stream=stream, inputs={}, outputs={"x": x})
    graph.replay(stream)
    stream.synchronize()
    assert x.cpu().tolist() == [8.0] * 4  # one plus the rehearsal that failed, times the rehearsal and the replay


def test_versions_for_a_report(backend):
    assert {"torch", "torch_npu", "cann", "device"} <= set(backend.versions())
