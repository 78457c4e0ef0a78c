"""The sanitizer as tools offer it: the fixture, the commands, timelines, the advisor, threads and memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cli.main import main
from outrider.device import Backend
from outrider_cpu.backend import CpuBackend
from outrider_sanitizer import RaceError, Sanitizer, watch
from outrider_sanitizer.pytest_plugin import sanitized
from outrider_sanitizer.races import RACES
from outrider_sanitizer.races.race import filled, order
from outrider_sim.backend import SimBackend
from outrider_trace.picture import render_page, render_svg
from outrider_trace.timeline import record_timeline

__all__ = ["sanitized"]

SCRIPT = """
import sys
import torch
side = torch.sim.Stream()
x = torch.zeros(4, device="sim")
with torch.sim.stream(side):
    y = x + 1
if "wait" in sys.argv:
    torch.sim.synchronize()
"""
REPLAYED = """
x = torch.zeros(4, device="sim")
graph = torch.sim.CUDAGraph()
with torch.sim.graph(graph):
    y = x + 1
for _ in range(3):
    graph.replay()
"""
FIXED = SCRIPT.replace("with torch", "torch.sim.synchronize()\nwith torch")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_fixture_passes_a_clean_block_and_fails_another(sanitized: Any) -> None:
    with sanitized(SimBackend()) as report:
        pass
    assert report.clean
    backend = SimBackend()
    with pytest.raises(RaceError, match="make 'plan' wait"), sanitized(backend):
        RACES["read-after-write"].wrong(backend)


def test_sanitize_finds_the_race_of_a_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run(capsys, "sanitize", "--json", "--", str(script))  # on sim, which needs no hardware
    assert code == 1
    (finding,) = data["reports"][0]["findings"]
    assert finding["kind"] == "read_after_write"
    assert finding["second"]["location"] == f"{script}:7"
    assert finding["schedule"] == "default.0@s1.0"


def test_sanitize_passes_the_corrected_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(FIXED)
    assert main(["sanitize", "--backend", "sim", "--", str(script), "wait"]) == 0
    assert "clean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "watched", "missing"),
    [
        ("", (0, 0, 0), ["operations", "streams", "replays"]),
        ("x = torch.zeros(4, device='sim') + 1", (2, 1, 0), ["replays"]),
        (REPLAYED, (2, 2, 3), []),
    ],
)
def test_what_is_required_and_was_not_watched_fails(
    body: str, watched: tuple[int, ...], missing: list[str], script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(f"import torch\n{body}\n")
    wanted = [f"--require={name}" for name in ("operations", "streams", "replays", "replays")]
    code, data = run(capsys, "sanitize", "--backend", "sim", *wanted, "--json", "--", str(script))
    assert (code, data["clean"], data["not_watched"]) == (int(bool(missing)), bool(body), missing)
    assert tuple(data["watched"].values()) == watched
    assert main(["sanitize", "--backend", "sim", *wanted, "--", str(script)]) == code
    said = capsys.readouterr().out
    assert [f"no {name}, which --require asked for" in said for name in missing] == [True] * len(missing)
    assert f"{watched[0]} operations, {watched[1]} streams and {watched[2]} replays" in said
    assert main(["sanitize", "--backend", "sim", "--", str(script)]) == int(not body)


def test_sanitize_reports_a_script_that_fails(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("raise ValueError('no')")
    code, data = run(capsys, "sanitize", "--backend", "sim", "--json", "--", str(script))
    assert (code, data["script_error"]) == (1, f"{script}:1: ValueError: no")


def test_sanitize_watches_backends_that_the_script_makes(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(
        "from outrider import get_backend\n"
        "from outrider_sanitizer.races import RACES\n"
        "RACES['covers-a-subset'].wrong(get_backend('sim'))\n"
    )
    code, data = run(capsys, "sanitize", "--backend", "cpu", "--json", "--", str(script))
    assert code == 1
    assert [finding["kind"] for report in data["reports"] for finding in report["findings"]] == ["read_after_write"]


def test_explore_fails_with_a_schedule_that_replays(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run(capsys, "explore", "write-after-read", "--json")
    assert (code, data["failed"]) == (1, True)
    code, again = run(capsys, "explore", "write-after-read", "--replay", data["shrunk"], "--json")
    assert (code, again["schedule"], again["runs"]) == (1, data["shrunk"], 1)


def test_explore_runs_the_whole_corpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, data = run(capsys, "explore", "corpus", "--iterations", "2", "--json")
    assert code == 0, data
    assert {row["program"] for row in data["programs"]} == set(RACES)
    assert (data["runs"], data["alarms"]) == (2 * len(RACES), 0)

    races = {name: RACES[name] for name in ("write-after-read", "flag-set-twice")}
    wrong = {
        name: dataclasses.replace(race, body=lambda b, _, body=race.body: body(b, False)) for name, race in races.items()
    }
    monkeypatch.setattr("outrider_sanitizer.races.RACES", wrong)
    code, data = run(capsys, "explore", "corpus", "--iterations", "20", "--json")
    assert (code, data["alarms"]) == (1, 2)
    assert "schedule" in data["programs"][0]["alarm"]
    code, data = run(capsys, "explore", "corpus", "--backend", "sim:like=cuda", "--json")
    assert [row["program"] for row in data["programs"]] == ["write-after-read"]


def test_explore_passes_the_corrected_program(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run(capsys, "explore", "write-after-read", "--corrected", "--strategy", "exhaustive", "--json")
    assert (code, data["exhausted"]) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["explore", "no-such-race"], "the corpus has no program"),
        (["explore", "json:no_such"], "has no function"),
        (["explore", "flag-set-twice"], "needs a backend with flags"),
        (["explore", "read-after-write", "--backend", "cpu"], "decides its schedules itself"),
        (["sanitize", "--backend", "sim", "--", "missing.py"], "doesn't exist"),
    ],
)
def test_wrong_requests_say_what_is_wrong(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == (2 if text in ("doesn't exist", "the corpus has no program", "has no function") else 1)
    assert text in capsys.readouterr().err


def overlapped(backend: Backend) -> None:
    forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
    ready, taken = backend.create_event("ready"), backend.create_event("taken")
    x = filled(backend, forward, 1.0, 64, 64)
    order(forward, plan)
    for _ in range(3):
        with backend.on(forward):
            y = x @ x
        forward.record(ready)
        plan.wait(ready)
        with backend.on(plan):
            z = y + 1.0
        plan.record(taken)
        forward.wait(taken)
    backend.synchronize()
    del z


@pytest.mark.parametrize("make", [SimBackend, CpuBackend])
def test_a_timeline_has_streams_operations_and_fences(make: Any) -> None:
    backend = make()
    with record_timeline(backend) as timeline:
        overlapped(backend)
    assert {name: len(lane) for name, lane in timeline.spans.items()} == {"forward": 4, "plan": 3}
    events = timeline.to_perfetto()["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 7
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == 6
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    assert all(e["ts"] >= starts[e["id"]] for e in events if e["ph"] == "f")
    assert render_svg(timeline).count('<rect class="op ') == 7
    assert "forward" in render_page(timeline, "a <title>")
    assert "<title>a &lt;title&gt;" in render_page(timeline, "a <title>")


def test_a_timeline_says_which_wait_is_on_the_critical_path() -> None:
    backend = SimBackend()
    with record_timeline(backend) as timeline:
        overlapped(backend)
    costs = {cost.event: cost for cost in timeline.costs()}
    assert costs["ready"].critical_us > 0
    assert costs["ready"].count == 3


def test_trace_writes_a_timeline_and_a_picture(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.json"
    code, data = run(capsys, "trace", "--backend", "sim", "--out", str(out), "--json", "--", str(script), "wait")
    assert code == 0
    assert data["streams"] == ["default", "s1"]
    assert json.loads(out.read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "t.html").read_text()
    image = tmp_path / "t.svg"
    script.write_text(SCRIPT.replace("sim", "cuda"))
    assert main(["trace", "--out", str(out), "--picture", str(image), "--", str(script)]) == 0
    assert image.read_text().startswith("<svg")


def test_the_advisor_names_a_wait_that_orders_nothing_new() -> None:
    backend = SimBackend()
    forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
    ready = backend.create_event("ready")
    with watch(backend) as report:
        x = filled(backend, forward, 1.0)
        forward.record(ready)
        plan.wait(ready)
        plan.wait(ready)
        with backend.on(plan):
            x + 1.0
    assert report.clean
    (advice,) = report.advice
    assert (advice.stream, advice.event, advice.count) == ("plan", "ready", 1)
    assert "test_tools.py" in advice.location


def test_memory_stays_bounded() -> None:
    backend = SimBackend()
    forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
    ready, taken = backend.create_event("ready"), backend.create_event("taken")
    sanitizer = Sanitizer(backend)
    backend.attach(sanitizer)
    sizes = []
    pool = filled(backend, forward, 0.0, 512, 8)
    for step in range(600):
        with backend.on(forward):
            x = torch.ones(8, device=backend.device)
            pool.index_copy_(0, torch.tensor([step % 512], device=backend.device), x.unsqueeze(0))
        forward.record(ready)
        plan.wait(ready)
        with backend.on(plan):
            y = x + pool[: step % 512 + 1].sum()
        plan.record(taken)
        forward.wait(taken)
        taken.synchronize()
        memory = sanitizer._ordering.memory
        sizes.append(
            len(memory.shadows)
            + sum(len(shadow.records()) for shadow in memory.shadows.values())
            + sum(len(shadow.intervals) for shadow in memory.shadows.values())
            + len(sanitizer._ordering._awaited)
        )
    backend.detach()
    assert sanitizer.report.clean, str(sanitizer.report)
    assert max(sizes[300:]) <= max(sizes[:300]) + 5
    assert max(sizes) < 120
    del y


TESTS = """
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "nothing")  # as test modules choose it when imported

@pytest.fixture
def x():
    return torch.zeros(1000, device=DEVICE)

def test_race(x):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x + 1

def test_clean(x):
    torch.sim.synchronize()
    assert (x + 1).sum().item() == 1000
"""


def test_the_option_of_pytest_fails_a_test_with_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_streams_of_mine.py").write_text(TESTS)
    plugin = ("-p", "outrider_sanitizer.pytest_plugin", "--outrider-sanitize", "-p", "no:cacheprovider", "-p", "no:randomly")
    code = pytest.main([str(tmp_path), "--rootdir", str(tmp_path), "-q", *plugin])
    said = capsys.readouterr().out
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed" in said
    assert "read after write" in said
    assert "make 's1' wait" in said
    assert "2 tests and 6 operations watched" in said
    assert not torch.cuda.is_available() or not isinstance(torch.cuda.Stream(), torch.sim.Stream)  # type: ignore[attr-defined]


def test_a_backward_carries_the_lines_of_the_forward() -> None:
    backend = SimBackend()
    lines: list[tuple[str, str]] = []

    class Lines(Sanitizer):
        def launched(self, operation: Any) -> None:
            lines.append((operation.name, operation.location))

    backend.attach(Lines(backend))
    x = torch.ones(3, device=backend.device, requires_grad=True)
    y = x.exp()
    z = y.sin()
    loss = z.sum()
    backend.synchronize()
    forward = dict(lines)
    lines.clear()
    loss.backward()
    backend.detach()
    names = {location: name for name, location in lines if name.startswith(("aten::mul", "aten::cos"))}
    assert forward["aten::exp"] in names  # its backward is a product
    assert forward["aten::sin"] in names
    assert forward["aten::exp"] != forward["aten::sin"]


def test_a_hint_says_never_only_where_nothing_was_learnt() -> None:
    for learnt in ("event", "host", "nothing"):
        backend = SimBackend()
        forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
        with watch(backend) as report:
            x = filled(backend, forward, 1.0)
            if learnt == "event":
                order(forward, plan)
            elif learnt == "host":
                forward.synchronize()
            with backend.on(forward):
                x.fill_(2.0)
            with backend.on(plan):
                y = x * 1.0
        del y
        hints = " ".join(finding.hint for finding in report)
        assert ("has never waited" in hints) == (learnt == "nothing"), hints
        assert ("by waiting for generation" in hints) == (learnt == "event"), hints
        assert ("came through the host" in hints) == (learnt == "host"), hints
