"""What stands in the way of an Ascend device, as errors that say what to do: before torch_npu is imported, and after."""

import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.cli.terminal.torch_probe import explain as explain_torch
from outrider.device import BackendLoadError, ConfigError
from outrider.registry import get_backend
from outrider_npu import plugin
from vendors.child import child
from vendors.wheel import NotRun, fetch

# What torch_npu 2.13.0 says, as it was seen or as it stands in its source.
NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"
TWO = (
    "Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can install the cpu version of PyTorch "
    "to use your npu device, or use the cuda device with 'export TORCH_DEVICE_BACKEND_AUTOLOAD=0'."
)
MISFIT = "/site-packages/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN3c1012SmallVectorIlLj5EE4growEv"


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """``installed(torch, torch_npu, devices)``: a machine with these versions and device files."""

    def make(torch="2.13.0+cpu", torch_npu="2.13.0", devices=2):
        for number in range(devices):
            (tmp_path / f"davinci{number}").touch()
        (tmp_path / "davinci_manager").touch()
        found = {"torch": torch, "torch_npu": torch_npu}
        monkeypatch.setattr(plugin, "_version", found.get)
        return plugin.find_obstacle(tmp_path)

    return make


def test_nothing_is_in_the_way(installed, tmp_path):
    assert installed() is None
    assert plugin.device_count(tmp_path) == 2
    assert installed(torch_npu="2.13.0.post1") is None


def test_torch_npu_is_missing(installed):
    reason, advice = installed(torch_npu=None)
    assert reason == "torch_npu isn't installed"
    assert "outrider[npu]" in advice


def test_versions_that_do_not_belong_together(installed):
    reason, advice = installed(torch="2.12.1+cpu")
    assert reason == "torch_npu 2.13.0 was built for torch 2.13, and this is torch 2.12.1+cpu"
    assert "pip install torch==2.13.*" in advice


def test_no_device(installed):
    reason, advice = installed(devices=0)
    assert "the driver shows no NPU" in reason
    assert "npu-smi info" in advice


def test_the_plugin_says_so_and_never_imports_torch_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # an import would raise
    info = plugin.backend_info()
    assert not info.usable
    assert info.reason
    with pytest.raises(BackendLoadError, match="'npu' is installed but can't run here: torch_npu isn't"):
        get_backend("npu")
    with pytest.raises(ConfigError, match="has no option 'fused'"):
        plugin.create_backend(0, {"fused": "off"})


@pytest.mark.parametrize(
    ("error", "says", "advice"),
    [
        (ImportError(NO_CANN), "the CANN runtime isn't loaded", "source set_env.sh"),
        (RuntimeError(TWO), "torch was built for another accelerator", "CPU build of torch"),
        (ImportError(MISFIT), "don't belong together", "of this torch's version"),
        (ImportError("No module named 'yaml'"), "can't be imported", "outrider doctor"),
    ],
    ids=["no CANN", "two accelerators", "versions", "anything else"],
)
def test_a_failed_import_is_explained(monkeypatch, error, says, advice):
    def fail(name):
        raise error

    monkeypatch.setattr(plugin.importlib, "import_module", fail)
    with pytest.raises(BackendLoadError, match=says) as caught:
        plugin.load_torch_npu()
    assert advice in str(caught.value)
    assert str(error) in str(caught.value)


def test_a_missing_operator_is_named(monkeypatch):
    names = dict.fromkeys(plugin.OPERATORS)
    whole = SimpleNamespace(__version__="2.13.0", **names)
    monkeypatch.setattr(plugin.importlib, "import_module", lambda name: whole)
    assert plugin.load_torch_npu() is whole
    for lacking in plugin.OPERATORS:
        partial = SimpleNamespace(__version__="2.9.0", **{name: None for name in names if name != lacking})
        monkeypatch.setattr(plugin.importlib, "import_module", lambda name, found=partial: found)
        with pytest.raises(BackendLoadError, match=rf"torch_npu 2\.9\.0 has no operator {lacking}; .*install that"):
            plugin.load_torch_npu()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"RuntimeError: Failed to load the backend extension: torch_npu\nImportError: {NO_CANN}", "CANN runtime"),
        (f"RuntimeError: Failed to load the backend extension: torch_npu\nRuntimeError: {TWO}", "room for one"),
        (f"RuntimeError: Failed to load the backend extension: torch_npu\nImportError: {MISFIT}", "belong together"),
    ],
    ids=["no CANN", "two accelerators", "versions"],
)
def test_doctor_tells_the_ways_to_break_torch_apart(text, says):
    explanation, advice = explain_torch(text)
    assert says in explanation
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD=0" in item for item in advice)


@pytest.mark.slow
def test_doctor_with_the_real_torch_npu_and_no_cann(pytestconfig, tmp_path):
    """The wheel's files on the path: ``import torch`` itself breaks, and doctor says why and what to do."""
    try:
        path = fetch(Path(pytestconfig.cache.mkdir("torch_npu")))
    except NotRun as error:
        pytest.skip(f"not run: {error}")
    if sys.version_info[:2] != (3, 11) or sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("not run: the wheel is for Python 3.11 on Linux, x86-64")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = child("-c", "import sys; from outrider.cli.main import main; sys.exit(main(['doctor']))", **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "torch    can't be imported" in done.stdout
    assert "libhccl.so" in done.stdout
    assert "source the CANN environment" in done.stdout
    assert "Tried: with TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch 2.13" in done.stdout
    assert "npu: can't run" in done.stdout
    healed = child(
        "-c",
        "import sys; from outrider.cli.main import main; sys.exit(main(['doctor']))",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        **environment,
    )
    assert healed.returncode == 0, healed.stdout + healed.stderr
    assert "the driver shows no NPU" in healed.stdout
