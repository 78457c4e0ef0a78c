"""Importing costs nothing: no torch at the top, no vendor package anywhere before a backend is created.

In a child process, since this one has imported much; with torch's own loading of device extensions turned off.
"""

import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from outrider.cli.commands.table import OWN

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = sorted(f"{path.parent.name}.plugin" for path in (ROOT / "backends").glob("*/outrider_*/plugin.py"))
VENDOR = ["torch_npu", "torch_xla", "triton", "flashinfer", "flash_attn", "cupy", "acl"]  # not pynvml: torch tries it itself

BLOCKER = """
    import sys
    BLOCKED = {blocked!r}

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in BLOCKED:
                raise AssertionError(f"{{name}} was imported")

    sys.meta_path.insert(0, Blocker())
"""


def run(blocked, code):
    script = textwrap.dedent(BLOCKER.format(blocked=set(blocked))) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_clean(result):
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", ["outrider", "outrider.device", "outrider.registry", "outrider.cli.main", *PLUGINS])
def test_imports_neither_torch_nor_a_vendor_package(module):
    assert_clean(run([*VENDOR, "torch"], f"import {module}"))


def test_plugins_and_the_whole_backend_interface_import_no_vendor_package_and_start_no_device():
    code = [f"import {name}; assert {name}.backend_info().name" for name in PLUGINS]
    code += ["from outrider.device import *", "import torch", "assert not torch.cuda.is_initialized()"]
    assert_clean(run(VENDOR, "\n".join(code)))


def test_no_command_needs_torch_for_its_help():
    """``outrider --help`` imports every command."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["outrider.commands"]
    modules = sorted({target.partition(":")[0] for target in [*points.values(), *OWN.values()]})
    assert len(modules) > 15
    assert_clean(run([*VENDOR, "torch"], "\n".join(f"import {module}" for module in modules)))


CHECKPOINTS = ["transformers", "tokenizers", "safetensors", "PIL"]
INTERFACE_ALONE = ["outrider.device", "outrider_sanitizer", "outrider_trace", "outrider_sim", "outrider_conformance"]
ENGINE = [
    "engines",
    "suite.test_l4_engine",
    "suite.test_l5_figures",
]  # of the kit: levels above L3 run the engine

EVERY_MODULE = """
    import json, pathlib, pkgutil
    from importlib import import_module

    import pytest
    for package in {packages!r}:
        for module in pkgutil.walk_packages(import_module(package).__path__, package + "."):
            if module.name not in {left_out!r} and not module.name.endswith("__main__"):
                import_module(module.name)

    # In this process, where the blocker is.
    plugins = ["-p", "hypothesispytest", "-p", "outrider_conformance.plugin", "-p", "no:cacheprovider"]
    place = ["--rootdir", {report!r}, "-c", "/dev/null", "--report", {report!r}]
    chosen = ["--backend", "cpu", "--level", "L1", "-k", "test_l1_streams or test_l0", "--pyargs", "outrider_conformance"]
    assert pytest.main(["-q", *plugins, *place, *chosen]) == 0
    report = json.loads(pathlib.Path({report!r}, "report.json").read_text())
    outcomes = {{test["outcome"] for test in report["tests"]}}
    assert "passed" in outcomes and "failed" not in outcomes, outcomes
"""


def test_what_needs_the_interface_alone_imports_no_package_for_checkpoints(tmp_path, monkeypatch):
    """Every module of the sanitizer, the trace and the simulated device, and the kit up to L3, which also runs there."""
    left_out = [f"outrider_conformance.{name}" for name in ENGINE]
    code = textwrap.dedent(EVERY_MODULE).format(packages=INTERFACE_ALONE, left_out=left_out, report=str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert_clean(run(CHECKPOINTS, code))


@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        (VENDOR, "import triton"),
        (VENDOR, "import torch_npu.npu"),
        (["torch"], "from outrider.device import Backend"),
    ],
)
def test_the_blocker_catches(blocked, code):
    result = run(blocked, code)
    assert result.returncode == 1
    assert "was imported" in result.stderr


WITHOUT_MODELS = """
    import sys
    sys.modules.update(dict.fromkeys({missing!r}))
    from outrider.cli.main import main
    for command in ({help!r}, ["sanitize", "--backend", "sim", "--", {program!r}, "right"]):
        assert main([*command]) == 0, command
    for command in (["generate", "--prompt", "x"], ["serve"], ["bench", "decode", "--backend", "cpu"]):
        assert main([*command]) == 1, command
"""


def test_commands_without_the_extra_for_models():
    """What needs no model works; the rest says in one line what to install."""
    program = ROOT / "tests" / "sanitizer" / "torch_gaps" / "views.py"
    code = textwrap.dedent(WITHOUT_MODELS).format(missing=CHECKPOINTS, help=["doctor"], program=str(program))
    result = run([], code)
    assert_clean(result)
    expected = "pip install 'outrider[models]'"
    assert [expected in line for line in result.stderr.strip().splitlines()] == [True] * 3, result.stderr
