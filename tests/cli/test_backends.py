"""``outrider backends`` and ``outrider doctor``."""

import sys
import textwrap
from pathlib import Path

import pytest

import outrider as outrider_package
from harmful import HARMFUL
from outrider.cli.terminal.torch_probe import explain, probe_torch
from outrider.model.quantization.writing import quantize_checkpoint
from outrider.registry.probing import PluginProbe

FAKE_EXTENSION = """
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
"""


def rows(result):
    return {row["name"]: row for row in result.json["backends"]}


def test_backends_lists(outrider, install):
    install("chip", usable=False, reason="no device found")
    install("broken", "import no_such_vendor_package")
    result = outrider("backends")
    assert result.code == 0
    for word in ("cpu", "chip", "broken", "usable", "unusable", "doctor"):
        assert word in result.out
    found = rows(outrider("backends", "--json"))
    assert found["cpu"]["can_run"] is True
    assert found["chip"]["reason"] == "no device found"
    assert "no_such_vendor_package" in found["broken"]["reason"]


def test_backends_open_shows_capabilities(outrider):
    assert rows(outrider("backends", "--open", "--json"))["cpu"]["capabilities"]["asynchronous"] is False
    assert "float32" in outrider("backends", "--open").out


def test_open_says_what_keeps_it_from_opening(outrider, install):
    install(
        "chip",
        """
        from outrider.device.plugin import BackendInfo, hookimpl
        @hookimpl
        def backend_info():
            return BackendInfo(name="chip", description="")
        @hookimpl
        def create_backend(ordinal, options):
            raise OSError("device is busy")
        """,
    )
    row = rows(outrider("doctor", "--open", "--json"))["chip"]
    assert row["can_run"] is False
    assert "device is busy" in row["reason"]


def test_doctor(outrider, install, monkeypatch):
    install("chip", usable=False, reason="no device found", advice="plug one in")
    result = outrider("doctor")
    assert result.code == 0
    assert "cpu: can run" in result.out
    assert "chip: can't run" in result.out
    assert "no device found" in result.out
    assert "plug one in" in result.out
    assert sys.version.split()[0] in result.out
    data = outrider("doctor", "--json").json
    assert data["chosen"] == "cpu:0"
    assert data["torch"]["ok"] is True
    monkeypatch.setenv("OUTRIDER_BACKEND", "chip")
    data = outrider("doctor", "--json").json
    assert (data["chosen"], data["chosen_because"]) == ("chip:0", "OUTRIDER_BACKEND=chip")


def test_doctor_with_equal_candidates(outrider, install):
    install("chip", priority=5)
    install("chop", priority=5)
    result = outrider("doctor")
    assert result.code == 0
    assert "chosen without --backend: none ('chip' (outrider-chip 1.0) and 'chop'" in result.out


@pytest.fixture
def extension_without_runtime(tmp_path):
    """A torch_npu that is installed without CANN: its import fails on a library."""
    site = tmp_path / "site"
    package = site / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(FAKE_EXTENSION))
    info = site / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return site


@pytest.mark.slow
def test_doctor_where_torch_does_not_import(child, extension_without_runtime):
    result = child("doctor", path=(extension_without_runtime,))
    assert result.code == 1
    for text in (
        "Failed to load the backend extension: torch_npu",
        "libhccl.so",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "source the CANN environment",
        "Tried: with TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch 2.",
        "cpu: can't run",
        "torch_npu (torch_npu 2.13.0)",
    ):
        assert text in result.out


@pytest.mark.slow
def test_doctor_where_torch_loads_no_extension(child, extension_without_runtime):
    """What doctor advises helps."""
    healed = child("doctor", path=(extension_without_runtime,), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert healed.code == 0
    assert "cpu: can run" in healed.out


def test_other_commands_say_that_torch_is_the_matter(child, extension_without_runtime):
    result = child("generate", "--prompt", "a", path=(extension_without_runtime,))
    assert result.code == 1
    assert "torch can't be imported" in result.err
    assert "outrider doctor" in result.err


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("import os; os.abort()", "ended the process with status -6"),
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "torch isn't installed"),
    ],
    ids=["crashes", "absent"],
)
def test_backends_and_doctor_say_the_same_of_a_torch_that_does_not_import(child, tmp_path, torch, said):
    (tmp_path / "torch.py").write_text(torch)
    listed = child("backends", "--json", path=(tmp_path,), XDG_CACHE_HOME=str(tmp_path))
    doctor = child("doctor", "--json", path=(tmp_path,))
    assert (listed.code, doctor.code) == (0, 1)
    assert rows(listed) == rows(doctor)
    assert not any(row["can_run"] for row in rows(listed).values())
    assert doctor.json["torch"]["ok"] is False
    assert said in " ".join((*doctor.json["torch"]["errors"], doctor.json["torch"]["explanation"]))


def test_harmful_plugins_are_listed_and_noted(outrider, install, monkeypatch):
    probe = PluginProbe(limit_s=1.0)  # one for all runs: its verdicts hold as long as it does
    monkeypatch.setattr("outrider.cli.commands.listings.plugin_probe", lambda: probe)
    for name, (source, _) in HARMFUL.items():
        install(name, source, probed=True)
    (next(install("bad", probed=True).glob("*.dist-info")) / "entry_points.txt").write_text("[outrider.backends]\nbad\n")
    for command in ("backends", "doctor"):
        found = outrider(command, "--json")
        assert {name: rows(found)[name]["status"] for name in (*HARMFUL, "cpu")} == {
            **dict.fromkeys(HARMFUL, "broken"),
            "cpu": "usable",
        }
        assert any("outrider-bad" in note for note in found.json["notes"])
    assert "note: distribution 'outrider-bad'" in outrider("backends").out


def test_an_unknown_failure_still_gets_advice():
    says, advice = explain("RuntimeError: something new")
    assert "can't be imported" in says
    assert advice


def test_probe_of_the_torch_that_is_here():
    state = probe_torch()
    assert state.ok
    assert state.version.startswith("2.")


def test_doctor_lists_what_computes_a_model(outrider):
    """For each layer and block, and for each primitive: as the model chose it when it was loaded."""
    bundled = Path(outrider_package.__file__).parent / "bundled" / "target"
    found = outrider("doctor", "--model", str(bundled), "--backend", "cpu", "--json").json
    assert found["blocks"] == [{"attention_block": "composed", "mlp_block": "composed"}] * 5
    assert (found["primitives"]["paged_attention"], found["primitives"]["move_cache"]) == ("native", "reference")
    shown = outrider("doctor", "--model", str(bundled), "--backend", "cpu").out
    assert "attention_block: composed in layers 0, 1, 2, 3, 4" in shown
    assert found["memory"]["weights"] > 0 == found["memory"]["states"]
    assert "memory, predicted from the headers" in shown
    assert "quantised" not in shown


def test_doctor_says_how_quantised_weights_are_stored(outrider, tmp_path):
    bundled = Path(outrider_package.__file__).parent / "bundled" / "target"
    quantize_checkpoint(bundled, tmp_path / "quantised", format="mxfp4")
    command = "doctor", "--model", str(tmp_path / "quantised"), "--backend", "cpu"
    found = outrider(*command, "--json").json
    assert (found["stored"], found["quantized"]) == ("compressed-tensors", {"fp4 group 32": 20})
    assert "quantised as compressed-tensors: fp4 group 32 in 20 weights" in outrider(*command).out
