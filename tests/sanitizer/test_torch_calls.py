"""Plain torch programs under the sanitizer: what torch tells of streams, events, graphs and memory is enough."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.device import DeviceError
from outrider_sanitizer import FindingKind, watch
from outrider_sanitizer.cuda_names import map_cuda_names
from outrider_sanitizer.races import RACES
from outrider_sim.backend import SimBackend
from sanitizer.over_sim import watched, watched_names

PROGRAMS = Path(__file__).parent / "torch_gaps"
GAPS = {
    "views": {FindingKind.WRITE_AFTER_WRITE},
    "reuse": {FindingKind.REUSE},
    "replay": {FindingKind.WRITE_AFTER_READ},
    "pinned": {FindingKind.READ_AFTER_WRITE},
    "threads": {FindingKind.READ_AFTER_WRITE},
    "kernel": {FindingKind.READ_AFTER_WRITE, FindingKind.WRITE_AFTER_WRITE},  # interpreted, it writes what it read back
    "flood": {FindingKind.WRITE_AFTER_READ},
    "accelerator": {FindingKind.READ_AFTER_WRITE},
}
NEEDS_MORE = ("scatters", "indexed-columns", "indexed-elements", "scatters-along-rows", "masks")
"""Rows by data: without the device's help they count as disjoint."""


@pytest.fixture
def argv(monkeypatch: Any) -> list[str]:
    given = ["script"]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return given


def run(name: str) -> None:
    runpy.run_path(os.fspath(PROGRAMS / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", GAPS)
def test_a_gap_is_found_on_the_simulated_device(name: str, argv: list[str]) -> None:
    for word, expected in (("wrong", GAPS[name]), ("right", set())):
        argv[1:] = [word]
        backend = SimBackend()
        with map_cuda_names(backend), watch(backend) as report:
            run(name)
        assert {finding.kind for finding in report} == expected, f"{word}: {report}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", GAPS)
def test_a_gap_is_found_by_what_torch_tells(name: str, argv: list[str], monkeypatch: Any) -> None:
    for word, expected in (("wrong", GAPS[name]), ("right", set())):
        argv[1:] = [word]
        backend = SimBackend()
        with map_cuda_names(backend), watched(backend, monkeypatch) as sanitizer:
            run(name)
        assert {finding.kind for finding in sanitizer.report} == expected, f"{word}: {sanitizer.report}"


CORPUS = [race for race in RACES.values() if not race.needs and race.name not in NEEDS_MORE]


@pytest.mark.parametrize("race", [pytest.param(race, id=race.name) for race in CORPUS])
def test_the_corpus_is_judged_as_the_device_judges_it(race: Any, monkeypatch: Any) -> None:
    for program, wrong in ((race.wrong, True), (race.right, False)):
        kinds = []
        for scope in (watch, lambda backend: watched(backend, monkeypatch)):
            backend = SimBackend()
            with scope(backend) as found:
                try:
                    program(backend)
                    backend.synchronize()
                except (AssertionError, DeviceError):
                    assert wrong
            kinds.append({finding.kind for finding in getattr(found, "report", found)})
        assert kinds[0] == kinds[1]


OF_GRAPHS = ("input-overwritten", "fence-before-the-replay", "output-after-the-next-replay", "graphs-that-share-a-pool")


@pytest.mark.parametrize(
    "name", [*OF_GRAPHS, "read-after-write", "reuse-across-streams", "host-read-early", "loop-over-query"]
)
def test_a_backend_that_makes_torchs_own_is_told_of_once(name: str, monkeypatch: Any) -> None:
    """The backend interface's graphs are known with their inputs and outputs; streams and events by what torch tells."""
    race = RACES[name]
    for program, expected in ((race.wrong, {race.kind}), (race.right, set())):
        with watched_names(monkeypatch) as (backend, sanitizer):
            try:
                program(backend)
                backend.synchronize()
            except (AssertionError, DeviceError):
                assert expected
        assert {finding.kind for finding in sanitizer.report} == expected, str(sanitizer.report)
        assert not sanitizer.report.advice or expected


QUERIES = """
import torch

x = torch.ones(1024, device="cuda")
host = torch.zeros(1024, pin_memory=True)
host.copy_(x, non_blocking=True)
done = torch.cuda.Event()
done.record()
while not done.query():
    pass
host.tolist()
"""


def test_a_query_that_says_yes_orders_the_host(monkeypatch: Any) -> None:
    for text, clean in ((QUERIES, True), (QUERIES.replace("while not done.query():\n    pass", ""), False)):
        backend = SimBackend()
        with map_cuda_names(backend), watched(backend, monkeypatch) as sanitizer:
            sanitizer.asked = True  # type: ignore[attr-defined]  # the trace has no queries
            exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
        assert sanitizer.report.clean is clean, str(sanitizer.report)
