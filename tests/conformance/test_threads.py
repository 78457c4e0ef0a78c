"""The out-of-tree plugin: installed from a wheel, apart from the repository, it passes up to L4; and it is what it says."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider_conformance.run import conform
from outrider_sanitizer import watch

EXAMPLE = Path(__file__).parents[2] / "examples" / "threads_backend"
SOURCES = sorted((EXAMPLE / "outrider_threads").glob("*.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where pip put the built plugin."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*command, str(target), str(EXAMPLE)], check=True, timeout=300)
    return target


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    yield
    for name in [name for name in sys.modules if name.startswith("outrider_threads")]:
        del sys.modules[name]


def failures(report):
    return [(test["id"], test["reason"]) for test in report["tests"] if test["outcome"] == "failed"]


def test_it_passes_and_deselected_tests_keep_a_level_from_passing(installed):
    report = conform("threads", level="L1", extra=["-k", "test_l0 or memory_figures"])
    assert failures(report) == []
    assert {level: found["result"] for level, found in report["levels"].items()} == {"L0": "passed", "L1": "not run"}
    assert report["reached"] == "L0"


@pytest.mark.slow
def test_passes_every_level_that_it_claims(installed):
    report = conform("threads", level="L4")
    assert failures(report) == []
    assert report["reached"] == "L4"
    assert report["capabilities"]["flags"]
    assert report["capabilities"]["captures_graphs"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_the_backend_interface_alone(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    ours = {module for module in modules if module.startswith("outrider") and not module.startswith("outrider_threads")}
    assert all(module == "outrider.device" or module.startswith("outrider.device.") for module in ours), ours


def test_can_be_read_at_a_sitting():
    assert sum(len(path.read_text().splitlines()) for path in SOURCES) < 500


def test_streams_really_run_beside_each_other_and_only_waits_order_them(installed):
    """The mistake is real here: without the wait the reader is early. The sanitizer names it."""
    from outrider.registry import get_backend

    for waits in (True, False):
        backend = get_backend("threads")
        a, b, event = backend.create_stream("a"), backend.create_stream("b"), backend.create_event("ready")
        with backend.on(a):
            x, y = torch.zeros(4), torch.zeros(4)
        backend.synchronize()
        with watch(backend) as report:
            backend.delay(a, 50_000_000)
            with backend.on(a):
                x.fill_(1)
            a.record(event)
            if waits:
                b.wait(event)
            with backend.on(b):
                y.copy_(x)
            backend.synchronize()
        assert y.tolist() == [float(waits)] * 4
        assert report.clean is waits, report.findings


def test_an_error_of_queued_work_is_typed_and_surfaces_at_a_synchronisation(installed):
    from outrider.device import DeviceFault
    from outrider.registry import get_backend

    backend = get_backend("threads")
    stream = backend.create_stream("s")
    with backend.on(stream):
        index = torch.tensor([7])
        torch.zeros(4).index_select(0, index)
    with pytest.raises(DeviceFault, match="stream 's'"):
        stream.synchronize()
    stream.synchronize()
