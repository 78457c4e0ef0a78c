"""Child processes of benchmarks, and ``outrider bench startup``, which runs in them."""

import io
import os
import sys
from dataclasses import replace

import pytest
from safetensors import SafetensorError

from outrider.registry.plugins import Plugins
from outrider_bench.child import BenchFailed, how_it_ended, run_child
from processes import gone

SMALL = ("--shape", "tiny", "--dtype", "float32")


@pytest.mark.slow
def test_a_start_in_stages(outrider):
    result = outrider("bench", "startup", "--backend", "cpu", *SMALL, "--batch", "2", "--graphs", "--json").json
    (start,) = result["starts"].values()
    assert list(start["stages"]) == [
        "import",
        "open the device",
        "load",
        "allocate",
        "compile kernels",
        "capture graphs",
        "first token",
    ]
    assert start["stages"]["import"] > 0.2
    assert start["stages"]["first token"] > 0
    assert sum(start["stages"].values()) == pytest.approx(start["total"])
    assert start["compiled"] is None
    assert start["compiled_while_serving"] == 0
    assert result["checkpoint"]["bytes"] > 100_000
    assert "graphs captured" in start["captured"]


@pytest.mark.slow
def test_a_checkpoint_that_stays_is_used_again(outrider, tmp_path):
    arguments = ("bench", "startup", "--backend", "cpu", "--shape", "tiny", "--dtype", "float32", "--batch", "2")
    place = tmp_path / "new" / "checkpoint"
    first = outrider(*arguments, "--checkpoint", str(place), "--starts", "2", "--json")
    assert list(first.json["starts"]) == ["start", "start 2"]
    assert first.json["checkpoint"]["written_in_s"] > 0
    lines = [line for line in first.err.splitlines() if "compiled while serving 0" in line]
    assert [line.split(": ")[0] for line in lines] == ["start", "start 2"]
    times = {file: file.stat().st_mtime_ns for file in place.rglob("*.safetensors")}
    again = outrider(*arguments, "--checkpoint", str(place), "--json").json
    assert again["checkpoint"] == {"bytes": first.json["checkpoint"]["bytes"], "written_in_s": None}
    assert times == {file: file.stat().st_mtime_ns for file in place.rglob("*.safetensors")} != {}


def test_a_checkpoint_goes_where_nothing_else_lies(outrider, tmp_path):
    arguments = ("bench", "startup", "--backend", "cpu", "--checkpoint", str(tmp_path))
    assert "name a shape" in outrider(*arguments).err
    (tmp_path / "target").mkdir()
    assert "holds something else" in outrider(*arguments, "--shape", "tiny").err
    (tmp_path / "written.json").write_text('{"shape": "other", "bytes": 3}')
    assert "holds a checkpoint of other, not of tiny" in outrider(*arguments, "--shape", "tiny").err
    for text in ("", "{", "[]", '{"shape": "tiny"}', '{"shape": "tiny", "bytes": "many"}'):
        (tmp_path / "written.json").write_text(text)
        assert "written.json doesn't name the checkpoint next to it" in outrider(*arguments, "--shape", "tiny").err


@pytest.mark.parametrize("there", [False, True])
def test_half_a_checkpoint_is_removed(outrider, tmp_path, monkeypatch, there):
    place = tmp_path / "new" / "checkpoint"
    if there:
        place.mkdir(parents=True)

    def full(tensors, file, metadata):
        file.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    result = outrider("bench", "startup", "--backend", "cpu", "--shape", "tiny", "--checkpoint", str(place))
    assert result.code == 1
    assert f"in {place} can't be read or written: I/O error: No space left on device" in result.err
    assert [*tmp_path.rglob("*")] == ([place.parent, place] if there else [])


class Full(io.StringIO):
    """A stream to a full disk."""

    def write(self, _):
        raise OSError(28, "No space left on device")


def test_a_full_standard_error_takes_no_start_with_it(outrider, monkeypatch):
    found = {"stages": {"import": 1.0}, "total": 1.0, "compiled": {}, "captured": None, "compiled_while_serving": 0}
    found |= {"device": "x:0", "dtype": "bfloat16", "chosen": []}
    monkeypatch.setattr("outrider_bench.commands.startup.run_child", lambda *_, **__: dict(found))
    monkeypatch.setattr(sys, "stderr", Full())
    result = outrider("bench", "startup", "--backend", "cpu")
    assert result.code == 0
    assert "import" in result.out


def test_a_backend_that_compiles_starts_cold_and_warm(outrider, monkeypatch):
    calls = []

    def child(function, work, *, variables, limit_s):
        calls.append(variables)
        stages = {"import": 1.0, "compile kernels": 2.0 / len(calls)}
        total = sum(stages.values())
        chosen = {"dtype": "bfloat16", "chosen": [{"name": "mode", "value": "fused", "why": "it's there"}]}
        told = {"compiled": {"linear": 3}, "captured": None, "compiled_while_serving": 0, "device": "x:0"}
        return {"stages": stages, "total": total, **told, **chosen}

    info = Plugins.info
    monkeypatch.setattr(Plugins, "info", lambda self, name: replace(info(self, name), cache_variables=("SOME_CACHE",)))
    monkeypatch.setattr("outrider_bench.commands.startup.run_child", child)
    shown = outrider("bench", "startup", "--backend", "cpu", "--starts", "3")
    lines = {line.split("  ")[0]: line.split()[-4:] for line in shown.out.splitlines() if line}
    assert lines["stage"] == ["cold", "warm", "warm", "2"]
    assert lines["compile kernels"][1:] == ["2.00", "1.00", "0.67"]
    assert "compiled: linear 3" in shown.out
    assert "chosen: mode fused (it's there)" in shown.out
    assert "compiled while serving: 0, 0, 0" in shown.out
    assert calls[0] == calls[1] == calls[2]  # the cache that the cold one has left
    assert calls[0]["SOME_CACHE"].startswith("/")


def test_a_child_that_dies_says_how():
    with pytest.raises(BenchFailed, match=r"exit code 1.*No module named 'outrider\.cli\.nothing'|exit code 1.*nothing"):
        run_child("outrider.cli.nothing:measure", {}, limit_s=60)


def test_a_child_that_takes_too_long_is_ended():
    with pytest.raises(BenchFailed, match="within 0.01 s"):
        run_child("outrider_bench.engine_start:time_start", {}, limit_s=0.01)


@pytest.mark.slow
def test_what_a_child_has_started_ends_with_it(tmp_path):
    """An engine's own processes would hold the device, and the next engine would be measured beside them."""
    (tmp_path / "lingering.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "def measure(work):\n"
        "    more = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
        "    pathlib.Path(work['file']).write_text(str(more.pid))\n"
        "    time.sleep(work['seconds'])\n"
        "    return work\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for seconds, limit_s in ((60, 15), (0, 60)):
        work = {"file": str(tmp_path / "pid"), "seconds": seconds}
        if seconds:
            with pytest.raises(BenchFailed, match="its processes were ended"):
                run_child("lingering:measure", work, variables={"PYTHONPATH": path}, limit_s=limit_s)
        else:
            run_child("lingering:measure", work, variables={"PYTHONPATH": path}, limit_s=limit_s)
        pid = int((tmp_path / "pid").read_text())
        assert gone(pid, seconds=30), "a process of the child's still runs"


def test_the_first_error_of_a_child_is_said_besides_its_last_words():
    """An engine's process says that another one failed; why, only that one said."""
    last = ["Traceback", "  File a", "  File b", "  File c", "  raise", "RuntimeError: Engine failed. See root cause above."]
    told = ["loading", "(core pid=7) ERROR 11-25 torch.OutOfMemoryError: no room for 2 GiB", "ValueError: another", *last]
    said = how_it_ended("engine", 1, told)
    assert said.startswith("engine ended with exit code 1: torch.OutOfMemoryError: no room for 2 GiB | ... | Traceback")
    assert said.endswith("RuntimeError: Engine failed. See root cause above.")
    assert "another" not in said
    assert how_it_ended("engine", 1, last) == "engine ended with exit code 1: " + " | ".join(line.strip() for line in last)
    assert how_it_ended("engine", -9, []) == "engine ended with exit code -9: it said nothing"
