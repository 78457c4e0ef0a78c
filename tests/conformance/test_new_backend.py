"""`outrider new-backend`: what it writes installs and passes L0; what it refuses leaves nothing behind."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outrider_conformance.commands.new_backend as command
from vendor import Workbench

ROOT = Path(__file__).resolve().parents[2]


def tree(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_package_installs_passes_level_0_and_fails_the_next(tmp_path):
    bench = Workbench(tmp_path)
    assert "next:" in bench.shell("outrider new-backend acme ./acme")
    bench.shell("pip install -e ./acme")
    # The stand-in isn't a device, and the kit says so.
    report = json.loads(bench.shell("outrider conform --backend acme --level L1 --programs 12 --json 2>/dev/null || true"))
    assert report["reached"] == "L0"
    assert report["levels"]["L1"]["result"] == "failed"
    assert report["backend"]["distribution"] == "outrider-acme 0.1.0"
    bench.shell("cd acme && pytest -q")
    missing = bench.shell("outrider new-backend acme ./again || echo refused")
    assert "installed already" in missing
    assert "refused" in missing


@pytest.mark.slow
def test_a_device_without_a_torch_module_passes_level_2(tmp_path):
    """As written, with its few programs drawn from another seed than a vendor's first run."""
    bench = Workbench(tmp_path)
    assert "--level L2" in bench.shell("outrider new-backend acme ./acme --kind own-queue")
    bench.shell("pip install -e ./acme")
    report = json.loads(bench.shell("outrider conform --backend acme --level L2 --programs 12 --seed 1 --json 2>/dev/null"))
    assert report["reached"] == "L2", [test for test in report["tests"] if test["outcome"] == "failed"]
    ran = {test["id"].partition("[")[0] for test in report["tests"] if test["outcome"] == "passed"}
    assert "test_l1_errors::test_every_way_to_wait_raises_what_failed" in ran, "provoke_fault wasn't tested"
    assert report["capabilities"]["captures_graphs"]


def test_what_is_to_fill_in_is_marked(outrider, tmp_path):
    """The driver is the vendor's; how torch calls are queued isn't."""
    assert outrider("new-backend", "acme", str(tmp_path / "acme"), "--kind", "own-queue").code == 0
    source = tmp_path / "acme/src/outrider_acme"
    gaps = {path.name: path.read_text().count("GAP") for path in source.glob("*.py")}
    assert gaps["driver.py"] > 8
    assert gaps["backend.py"] > 3
    assert gaps["queueing.py"] == 0
    assert not (source / "stand_in.py").exists()


def test_it_is_complete(outrider, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = outrider("new-backend", "acme_x2", "--json")
    assert result.code == 0
    place = tmp_path / "outrider-acme-x2"
    assert result.json["directory"] == place.name
    assert sorted(result.json["files"]) == tree(place)
    for wanted in ("pyproject.toml", "README.md", "tests/test_conformance.py", ".github/workflows/conformance.yml"):
        assert wanted in tree(place)
    for wanted in ("plugin.py", "backend.py", "py.typed"):
        assert f"src/outrider_acme_x2/{wanted}" in tree(place)
    left = [
        path
        for path in tree(place)
        if re.search(r"@(name|package|distribution|Class|interface_version|level|adapted)@", (place / path).read_text())
    ]
    assert "a clone: Outrider isn't on PyPI" in (place / "README.md").read_text()
    assert "Outrider isn't on PyPI: before this step" in (place / ".github/workflows/conformance.yml").read_text()
    assert left == [], "a placeholder wasn't filled in"
    assert sum(line.startswith("    check(") for line in (place / "tests/test_conformance.py").read_text().splitlines()) == 1


RUFF = ("ruff", "check", "--no-cache", "--isolated", "--line-length", "126", "--select", "E,F,I,UP,B")
MYPY = ("mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", "../../mypy-cache")


@pytest.mark.parametrize("kind", ["torch", "own-queue"])
@pytest.mark.parametrize("check", [RUFF, pytest.param(MYPY, marks=pytest.mark.slow)], ids=["ruff", "mypy"])
def test_it_is_clean(outrider, tmp_path, check, kind):
    """As the vendor would run them."""
    assert outrider("new-backend", "acme", str(tmp_path / "acme"), "--kind", kind).code == 0
    done = subprocess.run(
        [sys.executable, "-m", *check, "src/outrider_acme"],
        cwd=tmp_path / "acme",
        env={"PATH": "", "MYPYPATH": str(ROOT / "core"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["", "9acme", "acme-x", "Acme", "acme.x", "../acme", "acme_", "_acme", "class", "a" * 41])
def test_a_bad_name_is_refused(outrider, tmp_path, name):
    result = outrider("new-backend", "--json", "--", name, str(tmp_path / "new"))
    assert result.code == 2
    assert result.json["error"]["type"] == "UsageError"
    assert "identifier" in result.json["error"]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_name_that_is_taken_is_refused(outrider, tmp_path, name):
    result = outrider("new-backend", name, str(tmp_path / "new"))
    assert result.code == 2
    assert "choose another name" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(outrider, tmp_path):
    (tmp_path / "mine").write_text("precious")
    result = outrider("new-backend", "acme", str(tmp_path))
    assert result.code == 1
    assert "isn't empty" in result.err
    assert tree(tmp_path) == ["mine"]
    result = outrider("new-backend", "acme", str(tmp_path / "mine"))
    assert result.code == 1
    assert "is a file" in result.err
    assert (tmp_path / "mine").read_text() == "precious"


def test_an_empty_directory_is_used(outrider, tmp_path):
    (tmp_path / "empty").mkdir()
    assert outrider("new-backend", "acme", str(tmp_path / "empty")).code == 0
    assert "pyproject.toml" in tree(tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_nothing_is_left_half_written(outrider, tmp_path, monkeypatch):
    write, written = Path.write_text, []

    def fails(path, *arguments, **options):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        return write(path, *arguments, **options)

    monkeypatch.setattr(command.Path, "write_text", fails)
    result = outrider("new-backend", "acme", str(tmp_path / "deep" / "acme"))
    assert result.code == 1
    assert f"writing {tmp_path / 'deep' / 'acme'} failed: no space left" in result.err
    assert written
    assert list(tmp_path.iterdir()) == []


def test_conform_says_at_once_that_a_backend_is_not_there(outrider):
    result = outrider("conform", "--backend", "acme", "--json")
    assert result.code == 2
    assert "'acme'; expected one of auto, cpu" in result.json["error"]["message"]
