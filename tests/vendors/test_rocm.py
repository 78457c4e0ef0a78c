"""The plugin ``rocm``: architectures, options, and the conformance suite on a HIP-like personality."""

import sys
from types import SimpleNamespace

import pytest
import torch

from outrider.device import BackendLoadError, ConfigError, Waiter
from outrider.registry import get_backend
from outrider_rocm import backend, plugin
from outrider_triton import plugin as triton_plugin
from vendors.child import child, conform


@pytest.mark.parametrize(("name", "waiter"), [("gfx942", Waiter.STREAM), ("gfx950", Waiter.HOST), ("gfx1100", Waiter.STREAM)])
def test_architectures(name, waiter):
    sync = backend.RocmSync(SimpleNamespace(architecture=name), "auto", "forward")
    assert sync.published_waiter is waiter


def test_options():
    assert set(plugin.backend_info().options) == set(plugin.OPTIONS)
    for wrong, says in (({"wave": "32"}, "no option 'wave'"), ({"published": "both"}, "one of auto, stream, host")):
        with pytest.raises(ConfigError, match=says):
            plugin.create_backend(0, wrong)


def test_kernels_of_triton_need_triton(monkeypatch):
    """They're shared with other devices; torch's CPU build has no Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendLoadError, match="kernels of rocm are in Triton, .*choose kernels=torch"):
        triton_plugin.default_kernels(SimpleNamespace(label="rocm"))


def test_it_is_not_usable_without_hip():
    """The build is told by torch.version.hip alone: a CUDA build answers under the same names."""
    info = plugin.backend_info()
    assert not info.usable
    assert "isn't built for HIP" in info.reason
    with pytest.raises(BackendLoadError, match="isn't built for HIP"):
        get_backend("rocm")


def test_a_hip_build_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    info = plugin.backend_info()
    assert not info.usable
    assert "sees no AMD device" in info.reason
    assert "HIP_VISIBLE_DEVICES" in info.advice


@pytest.mark.parametrize(
    ("level", "programs"), [pytest.param("L1", 5, marks=pytest.mark.slow), pytest.param("L4", None, marks=pytest.mark.slow)]
)
def test_the_conformance_suite_on_a_hip_like_personality(tmp_path, level, programs):
    report = conform("rocm", level, tmp_path, "emulation_hip", programs=programs)
    assert report["reached"] == level, [test for test in report["tests"] if test["outcome"] == "failed"]
    assert report["tier"]["kind"] == "simulated"
    assert not report["capabilities"]["waits_inside_graphs"]


POLICY = """
import emulation_hip
for emulation_hip.ARCHITECTURE in ("gfx942", "gfx950:sramecc+"):
    for options in ({}, {"published": "stream"}, {"published": "host", "results": "copy"}):
        sync = emulation_hip.make(**options).speculative_sync
        print(emulation_hip.ARCHITECTURE, sync.published_waiter.value, sync.results_on_forward)
"""


@pytest.mark.slow
def test_the_policy_by_architecture_and_option():
    """Both in one process, which takes longer to start than to answer."""
    done = child("-c", POLICY)
    assert done.stdout.splitlines() == [
        *("gfx942 stream True", "gfx942 stream True", "gfx942 host False"),
        *("gfx950:sramecc+ host True", "gfx950:sramecc+ stream True", "gfx950:sramecc+ host False"),
    ], done.stderr
