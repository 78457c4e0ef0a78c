"""The package is a distribution of its own on the public interface alone, and says what is missing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from outrider.device import BackendLoadError, ConfigError
from outrider_opencl import plugin

PACKAGE = Path(__file__).parents[2] / "backends" / "opencl"
SOURCES = sorted((PACKAGE / "outrider_opencl").glob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_the_backend_interface_alone(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    ours = {module for module in modules if module.startswith("outrider") and not module.startswith("outrider_opencl")}
    assert ours <= {"outrider.device", "outrider.device.backend", "outrider.device.errors", "outrider.device.plugin"}


def test_without_pyopencl_the_plugin_says_what_to_install(monkeypatch):
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    info = plugin.backend_info()
    assert not info.usable
    assert "outrider-opencl[pocl]" in info.advice
    assert info.reason == "pyopencl isn't installed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": "on"}, "no option 'graph'; known: queues, graphs"),
        ({"queues": "both"}, "option queues='both': expected one of in-order, out-of-order"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        plugin.create_backend(0, options)


def test_without_a_platform_or_a_device_the_error_says_what_to_install(opencl, monkeypatch):
    import pyopencl as cl

    def no_platform():
        raise cl.LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")

    with pytest.raises(BackendLoadError, match="device 99 was asked for, usable are"):
        plugin.create_backend(99, {})
    monkeypatch.setattr(cl, "get_platforms", list)
    with pytest.raises(BackendLoadError, match=r"no OpenCL device can be used \(no platform has a device\); install PoCL"):
        plugin.create_backend(0, {})
    monkeypatch.setattr(cl, "get_platforms", no_platform)
    with pytest.raises(BackendLoadError, match="no OpenCL platform was found .*apt install pocl-opencl-icd"):
        plugin.create_backend(0, {})
