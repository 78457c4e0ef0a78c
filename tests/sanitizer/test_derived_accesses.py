"""The sanitizer over a backend that reports no accesses: they are derived from torch's dispatcher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.distributed import HashStore
from torch.utils._python_dispatch import _disable_current_modes

from outrider.device import Capabilities, Graph
from outrider_cpu.backend import CpuBackend
from outrider_sanitizer import FindingKind, watch, watching
from outrider_sanitizer.races import RACES, Race

# What can't be seen without the device's help: rows (declared as owned there) and host parameters of captured graphs.
FOUND = [
    "read-after-write",
    "write-after-read",
    "write-after-write",
    "stale-generation",
    "optional-wait",
    "covers-a-subset",
    "cast-in-the-wrong-scope",
    "overlapping-views",
    "columns",
    "reuse-across-streams",
    "read-before-write",
    "input-overwritten",
    "fence-before-the-replay",
    "output-after-the-next-replay",
    "stale-padding",
    "marked-over",
    "host-read-early",
    "pinned-overwritten",
    "pinned-renewed",
    "stale-mirror",
    "beside-another-thread",
]


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


@pytest.mark.parametrize("name", FOUND)
def test_the_fault_is_named(name: str, backend: CpuBackend) -> None:
    race = RACES[name]
    with watch(backend) as report:
        run(race, backend)
    kinds = {finding.kind for finding in report}
    if name in OF_THREADS and kinds == {FindingKind.READ_AFTER_WRITE}:  # the other thread came first
        return
    assert kinds == {race.kind}, str(report)


OF_THREADS = {"beside-another-thread"}
"""Programs of two host threads, which the operating system runs as it likes."""


def run(race: Race, backend: CpuBackend) -> None:
    # On the host everything runs at once, so no value is ever wrong by its schedule, but by that of its threads.
    try:
        race.wrong(backend)
    except AssertionError:
        assert race.kind in (FindingKind.UNDEFINED, FindingKind.STALE_MIRROR) or race.name in OF_THREADS


@pytest.mark.parametrize("race", [pytest.param(r, id=n) for n, r in RACES.items() if not r.needs])
def test_the_corrected_program_is_clean(race: Race, backend: CpuBackend) -> None:
    if race.name == "pin-memory" and not torch.accelerator.is_available():
        pytest.skip("not run: torch pins memory only where it knows an accelerator")
    with watch(backend) as report:
        race.right(backend)
    assert report.clean, str(report)


def test_a_storage_is_known_by_its_object_and_not_by_its_address(backend: CpuBackend) -> None:
    stream = backend.create_stream("forward")
    with watch(backend) as report, backend.on(stream):
        for _ in range(200):
            torch.ones(1024) + 1.0
    assert report.clean
    assert report.operations == 400


def test_it_says_what_it_does_not_see(backend: CpuBackend) -> None:
    with watch(backend) as report:
        pass
    assert any("outside torch's dispatcher" in spot for spot in report.blind_spots)


def test_compiled_code_is_watched_and_the_sanitizer_is_not_compiled(backend: CpuBackend) -> None:
    program = torch.compile(lambda: RACES["read-after-write"].wrong(backend), backend="eager")
    compiled = torch._dynamo.utils.counters["frames"]
    before = dict(compiled)
    with watch(backend) as report:
        program()
    assert {finding.kind for finding in report} == {FindingKind.READ_AFTER_WRITE}
    assert compiled == before


def test_declared_rows_raise_no_alarm(backend: CpuBackend) -> None:
    """Two cache writes on two streams: the operator's rows are its own, by declaration."""
    forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
    with watch(backend) as report:
        cache = torch.zeros(2, 2, 4, 1, 8)
        q, k, v = torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)
        cos, sin = torch.zeros(2, 8), torch.zeros(2, 8)
        for stream, first in ((forward, 0), (plan, 2)):
            with backend.on(stream):
                slots = torch.tensor([first, first + 1])
                torch.ops.outrider.rope_write_cache(q.clone(), k.clone(), v, cos, sin, cache[0], cache[1], slots)
    assert report.clean, str(report)


@pytest.mark.parametrize("inside", [True, False])
def test_what_an_operator_of_the_host_reads_is_its_own_access(inside: bool) -> None:
    """The same value read by the host thread itself isn't ordered behind the stream that wrote it."""
    backend = CpuBackend()
    forward = backend.create_stream("forward")
    with watch(backend) as report, backend.on(forward):
        temperature = torch.zeros(1)
        if inside:
            where = torch.zeros(1, dtype=torch.int64)
            torch.ops.outrider.sample.host(torch.ones(1, 4), temperature, where, where, 0)
        else:
            temperature.tolist()
    assert report.clean == inside, str(report)


class Capturing(CpuBackend):
    """The reference backend with graphs of torch's usual kind: the callable runs once, and replays dispatch nothing."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, captures_graphs=True)

    def _capture(self, name: str, fn: Any, context: Any, stream: Any, pool: Any) -> Graph:
        del pool
        graph = Replayed(self, name, context)
        graph.fn = fn
        with self._on(stream), self.capturing(graph, stream):
            fn(context)
        return graph


class Replayed(Graph):
    fn: Any

    def _replay(self, stream: Any) -> None:
        del stream
        with _disable_current_modes():
            self.fn(self.context)


@pytest.mark.parametrize("name", ["input-overwritten", "fence-before-the-replay", "stale-padding"])
def test_captured_work_is_known_at_each_replay(name: str) -> None:
    race = RACES[name]
    backend = Capturing()
    with watch(backend) as report:
        race.right(backend)
    assert report.clean, str(report)
    backend = Capturing()
    with watch(backend) as report:
        race.wrong(backend)
    assert {finding.kind for finding in report} == {race.kind}, str(report)


@pytest.mark.parametrize("rows_apart", [True, False])
def test_rows_picked_by_data_may_be_taken_to_overlap(backend: CpuBackend, rows_apart: bool) -> None:
    """One stream writes rows, another reads some, unordered: only the device knows whether they're the same."""
    forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
    with backend.on(forward):
        lengths, rows = torch.zeros(8), torch.tensor([1, 2])
    backend.synchronize()
    with watch(backend, rows_apart=rows_apart) as report:
        with backend.on(forward):
            lengths[rows] = torch.ones(2)
        with backend.on(plan):
            lengths.index_select(0, rows)
    assert report.clean is rows_apart, str(report)
    if not rows_apart:
        (finding,) = report
        assert (finding.kind, finding.second.operation) == (FindingKind.READ_AFTER_WRITE, "aten::index_select")
    assert any("disjoint" in spot for spot in report.blind_spots) is rows_apart


def test_the_shape_of_memory_is_no_read(backend: CpuBackend) -> None:
    stream = backend.create_stream("s")
    with watch(backend) as report, backend.on(stream):
        torch.empty_like(torch.empty(4)).fill_(1.0)
    assert report.clean, str(report)


def test_a_stream_counts_operations_records_waits_and_replays() -> None:
    backend = Capturing()
    stream, other = backend.create_stream("s"), backend.create_stream("other")
    done = backend.create_event("done")
    with backend.on(stream):
        cell = torch.zeros(4)
    stream.synchronize()
    with watching(backend) as sanitizer:
        graph = backend.capture(
            "two", lambda context: context.inputs["cell"].add_(1).mul_(2), stream=stream, inputs={"cell": cell}, outputs={}
        )
        assert sanitizer.position(stream) == 0  # what is captured belongs to the graph
        with backend.on(stream):
            cell.add_(1)
        stream.record(done)
        assert sanitizer.position(stream) == 2
        graph.replay(stream)
        assert sanitizer.position(stream) == 2 + 1 + 2
        assert sanitizer.position(other) == 0
        other.wait(done)
        assert sanitizer.position(other) == 1
        with backend.on(other):
            cell.add_(1)
    (finding,) = sanitizer.report
    assert finding.first is not None
    # Launched at 2; of several accesses to the same bytes a graph's first one is told.
    assert (finding.first.operation, finding.first.position, finding.second.position) == ("aten::add_", 3, 1)


def test_threads_of_a_library_of_collectives_are_not_the_programs():
    """Gloo works on threads of its own, to which torch hands the dispatch mode on; the call is reported as a whole."""
    backend = CpuBackend()
    with watch(backend) as report:
        group = backend.create_group("alone", ranks=(0,), rank=0, store=HashStore())
        stream = backend.create_stream("main")
        with backend.on(stream):
            own, every = torch.ones(64), torch.empty(1, 64)
        for _ in range(3):
            group.all_gather(every, own, stream=stream)
            with backend.on(stream):
                own.copy_(every[0])
        group.close()
    assert not list(report)
    assert report.operations


@pytest.mark.parametrize("ordered", [True, False])
def test_a_call_writes_the_memory_that_other_ranks_write(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend()
    with watch(backend) as report:
        group = backend.create_group("alone", ranks=(0,), rank=0, store=HashStore())
        monkeypatch.setattr(type(group), "has_peer_memory", True)
        monkeypatch.setattr(group, "_peer_buffers", lambda name, shape, dtype: (torch.zeros(shape, dtype=dtype),))
        stream, other = backend.create_stream("main"), backend.create_stream("other")
        called = backend.create_event("called")
        with backend.on(stream):
            own = torch.ones(64)
            (buffer,) = group.peer_buffers("slots", (64,), torch.float32)
        stream.synchronize()
        group.all_reduce(own, stream=stream)
        stream.record(called)
        if ordered:
            other.wait(called)
        with backend.on(other):
            buffer.sum()
        assert [each is buffer for each in group.peer_written] == [True]
        group.close()
        assert not group.peer_written
    assert [finding.kind for finding in report] == ([] if ordered else [FindingKind.READ_AFTER_WRITE])
