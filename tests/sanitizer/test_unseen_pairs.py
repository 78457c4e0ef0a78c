"""Each racy program of the pairs is reported with the lines of its two accesses; each twin is silent."""

from __future__ import annotations

import pytest

from outrider_sanitizer import Report, watch
from outrider_sanitizer.cuda_names import map_cuda_names
from outrider_sim.backend import SimBackend
from sanitizer.unseen_pairs import START, Pair, pairs

PAIRS = [pytest.param(pair, id=name) for name, pair in pairs().items()]


def lines_of(pair: Pair, racy: bool) -> list[str]:
    left_out = "#right" if racy else "#racy"
    return [line for line in (START + pair.text).splitlines() if left_out not in line]


def report_of(lines: list[str]) -> Report:
    backend = SimBackend()
    with watch(backend) as report, map_cuda_names(backend):
        exec(compile("\n".join(lines), "script.py", "exec"), {"__name__": "__main__"})
    return report


@pytest.mark.parametrize("pair", PAIRS)
def test_the_racy_program_is_reported_and_its_twin_is_not(pair: Pair) -> None:
    if pair.kind is not None:
        lines = lines_of(pair, racy=True)
        report = report_of(lines)
        places = {mark: f"script.py:{n}" for n, line in enumerate(lines, 1) for mark in ("#first", "#second") if mark in line}
        assert {finding.kind for finding in report} == {pair.kind}, str(report)
        seen = [(f.first.location if f.first else "", f.second.location) for f in report]
        assert any(all(place in pair_ for place in places.values()) for pair_ in seen), f"{places}\n{report}"
    if pair.kind is None or "#right" in pair.text or "#racy" in pair.text:
        report = report_of(lines_of(pair, racy=False))
        assert report.clean, str(report)
