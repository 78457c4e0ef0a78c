"""The picture names stages and fences: by hand-made timelines, and by a real one of the engine."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from outrider.engine.fences import FENCES
from outrider_proof import tiny
from outrider_sim.plugin import create_backend
from outrider_trace.picture import PAGE_WIDTHS, STAGES, WIDTH, render_page, render_svg, sort_lanes, stage_spans
from outrider_trace.timeline import FenceMark, OperationSpan, Timeline, WaitArrow, record_timeline
from tiny_programs import program


def timeline(*marks, spans=6, stream="forward"):
    """Spans of 2 us, one after the other, and marks (fence, before which span, whether it's a wait)."""
    lane = [OperationSpan(stream, f"op{i}", 2.0 * i, 2.0 * i + 2.0) for i in range(spans)]
    return Timeline({stream: lane}, [], [FenceMark(fence, stream, at, waited) for fence, at, waited in marks])


def named(timeline):
    return [(band.name, band.start, band.end) for band in stage_spans(timeline)]


DECODE = (
    ("inputs_ready", 0, True),
    ("shared_reads_done", 1, False),
    ("draft_outputs_ready", 3, False),
    ("plan_ready", 3, True),
    ("published", 5, False),
    ("extend_plan_ready", 5, True),
    ("results_ready", 6, False),
)


def test_stages_lie_between_fences():
    expected = [("gather", 0.0, 2.0), ("draft", 2.0, 6.0), ("verify", 6.0, 10.0), ("extend", 10.0, 12.0)]
    assert sorted(named(timeline(*DECODE)), key=lambda each: each[1]) == expected


def test_a_stage_without_operations_is_left_out():
    nothing_drafted = [(fence, 1 if fence == "draft_outputs_ready" else at, waited) for fence, at, waited in DECODE]
    assert "draft" not in [name for name, _, _ in named(timeline(*nothing_drafted))]


def test_one_graph_is_an_iteration():
    fused = [("inputs_ready", 0, True), ("shared_reads_done", 6, False), ("results_ready", 6, False)]
    assert named(timeline(*fused, ("inputs_ready", 6, True))) == [("iteration", 0.0, 12.0)]


def test_a_part_keeps_what_lies_in_it():
    """A stage that begins before the part is shown from the part's beginning."""
    part = timeline(*DECODE).part_between(4.5, 8.5)
    assert sorted(named(part), key=lambda each: each[1]) == [("draft", 0.0, 1.5), ("verify", 1.5, 4.0)]


def test_stages_are_told_by_fences_that_the_engine_has():
    fences = {fence.name for fence in FENCES}
    assert {fence for _, _, *edges in STAGES for fence, _ in edges} <= fences


def test_lanes_that_fences_join_lie_side_by_side():
    lanes = {name: [OperationSpan(name, "op", 0.0, 1.0)] for name in ("a", "b", "c", "d")}
    waits = [WaitArrow("e", 1, "a", 1, other, 0, "") for other in ("c", "d")]
    placed = sort_lanes(Timeline(lanes, waits))
    assert [abs(placed.index("a") - placed.index(other)) for other in ("c", "d")] == [1, 1]


@pytest.fixture(scope="module")
def recorded():
    tiny.plain((3,), 10)
    backend = create_backend(0, {})
    with record_timeline(backend) as found:
        program("eagle")(backend)
    return found


def test_the_engines_iteration_has_all_its_stages(recorded):
    expected = {name for name, *_ in STAGES} - {"copy lengths"} | {"iteration"}  # these lengths stay on the device
    assert {band.name for band in stage_spans(recorded)} == expected


def test_every_stage_and_fence_is_named(recorded):
    start = next(band for band in stage_spans(recorded) if band.name == "draft").start
    part = recorded.part_between(start - 20.0, start + 300.0)
    picture = render_svg(part)
    ElementTree.fromstring(picture)
    texts = re.findall(r'<text class="(name|text of) over"[^>]*>([^<]*)<', picture)
    assert {text for kind, text in texts if kind == "text of"} == {band.name for band in stage_spans(part)}
    drawn = {wait.event.partition("[")[0] for wait in part.waits if part.wait_times(wait) is not None}
    assert {text for kind, text in texts if kind == "name"} == drawn >= {"plan_ready", "draft_outputs_ready"}


@pytest.mark.parametrize("width", [WIDTH, *PAGE_WIDTHS.values()])
def test_names_lie_beside_each_other(recorded, width):
    """No two names on one line of the picture overlap, whatever their width is taken for, and none leaves the picture."""
    start = next(band for band in stage_spans(recorded) if band.name == "draft").start
    picture = render_svg(recorded.part_between(start, start + 900.0), width)
    found = re.findall(r'<text class="(?:name|text of|faint|text)[^>]* x="([\d.]+)" y="([\d.]+)"([^>]*)>([^<]*)<', picture)
    boxes = []
    for x, y, attributes, text in found:
        anchor = re.search(r'text-anchor="(\w+)"', attributes)
        long = 6.0 * len(text)
        left = float(x) - {"start": 0.0, "middle": long / 2, "end": long}[anchor[1] if anchor else "start"]
        boxes.append((left, left + long, float(y)))
    assert len(boxes) > 20
    assert min(left for left, _, _ in boxes) >= 0
    assert max(right for _, right, _ in boxes) <= width
    for number, (left, right, y) in enumerate(boxes):
        assert not any(left < r and a < right and abs(y - at) < 10 for a, r, at in boxes[:number])


def test_a_long_name_of_a_stream_stays_off_the_bars():
    """The margin grows with the name. If it would take a third of the picture, the name is shortened and is a tooltip."""
    name = "a stream with a long <name>"
    lanes = Timeline({name: [OperationSpan(name, "op", 0.0, 0.5)]})
    wide, narrow = (render_svg(lanes, width) for width in PAGE_WIDTHS.values())
    assert '"600">a stream with a long &lt;name&gt;</text>' in wide
    first = re.search(r'class="op l0" x="([\d.]+)"', wide)[1]
    assert float(first) > 8 + 6.0 * len(name)
    assert "a stream with…<title>a stream with a long &lt;name&gt;</title>" in narrow
    assert ">0.25 µs<" in wide
    page = render_page(lanes, "a page")
    assert [f'class="{kind}"' in page for kind in PAGE_WIDTHS] == [True, True]
    assert 'name="viewport"' in page
