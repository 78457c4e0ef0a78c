"""Bugs of waits and records that were absent, conditional, early or late. Numbers are those of docs/findings/scenarios.md."""

import pytest

from engine.scenarios.historical import MANY, TWO, Elsewhere, Historical, Skipping, after, before, program, request
from outrider.registry import get_backend
from outrider_proof.decode_program import WrongTokens
from outrider_sanitizer.report import FindingKind
from outrider_sim.plugin import create_backend

RACES = {FindingKind.READ_AFTER_WRITE, FindingKind.WRITE_AFTER_READ, FindingKind.WRITE_AFTER_WRITE}


@pytest.fixture(scope="module")
def sim():
    return get_backend("sim")


def locations(findings):
    return {site.location for finding in findings for site in (finding.first, finding.second) if site is not None}


def somewhere(findings, file):
    """Whether a finding names a line of this file."""
    return any(file in location for location in locations(findings))


ALL_SCHEDULES = ("program", "random", "pct")


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 3])
def test_with_nothing_changed_the_programs_pass(sim, topk):
    """The quick tests run ``TWO`` and others unchanged, next to the change that they are for."""
    for each in (TWO, MANY):
        Historical(sim, draft_topk=topk).passes(each, *ALL_SCHEDULES)


def test_1_the_plan_reads_a_tree_that_is_being_written(sim):
    """No edge from the draft to the plan: tokens, positions and the mask are read in the middle of their making."""
    explorer = Historical(sim, draft_topk=3, drop="draft_outputs_ready")
    findings = explorer.races(TWO, *RACES)
    assert explorer.implied() == ("draft_outputs_ready",)
    assert somewhere(findings, "engine/stages.py")


@pytest.mark.sample(1)
@pytest.mark.parametrize("consumer", ["plan", "schedule"])
def test_2_shared_rows_have_both_hazards(sim, consumer):
    """The plan must not read the copies before they're made, nor the next schedule write the rows before they're read."""
    explorer = Historical(sim, drop="shared_reads_done", consumer=consumer)
    kinds = {finding.kind for finding in explorer.races(TWO, *RACES)}
    assert (FindingKind.READ_AFTER_WRITE if consumer == "plan" else FindingKind.WRITE_AFTER_READ) in kinds
    assert explorer.implied() == ("shared_reads_done",)


@pytest.mark.parametrize("topk", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_3_a_wait_that_hangs_on_an_optional_tensor(sim, topk):
    """The draft-extend plan waits only where there is a path to move along: a chain has none, and reads all the same."""
    explorer = Historical(sim, draft_topk=topk)
    explorer.wrapping = lambda fence: (
        Skipping(fence, "plan", when=lambda: topk == 1) if fence.name == "accept_ready" else fence
    )
    if topk > 1:
        explorer.passes(TWO)
        return
    findings = explorer.races(TWO, *RACES)
    assert somewhere(findings, "engine/stages.py")


def test_4_a_cast_runs_on_the_stream_of_its_scope(sim):
    """Positions are cast in the plan's first part, before it has waited for the draft that makes them."""

    def change(engine):
        cast = engine.model.dtype
        before(engine._step._stages.plan_positions, "run", lambda batch, frame: frame.draft.tokens.to(dtype=cast))

    (finding,) = Historical(sim, change=change).races(TWO, FindingKind.READ_AFTER_WRITE)
    assert (finding.first.actor, finding.second.actor) == ("forward", "plan")
    assert __name__.split(".")[-1] in finding.second.location  # the cast, and nothing that was meant to read


def test_6_a_row_is_written_for_its_next_owner_while_an_iteration_reads_it(sim):
    """A row is free as soon as its request is over, and the next owner's table is written while the last iteration of the
    one before still reads the old one.
    """
    ended = program(request(6, 5), request(5, 9, step=1, start=30), request(3, 6, step=3, start=60))
    explorer = Historical(sim)
    used, reused = set(), []

    def change(engine):
        def retire():
            for over in [each for each in engine._scheduler.running if each.finished]:
                engine._scheduler._release(over)

        def launch(batch):
            rows = {each.row for each in batch.admitted}
            reused.append(bool(rows & used))
            used.update(rows)

        engine._scheduler.retire = retire
        before(engine._step, "launch", launch)

    explorer.change = change
    explorer.wrapping = lambda fence: (
        Skipping(fence, "schedule", when=lambda: reused[-1]) if fence.name == "shared_reads_done" else fence
    )
    findings = explorer.races(ended, *RACES)
    assert any("index_fill_" in finding.second.operation for finding in findings), findings
    Historical(sim).passes(ended)


def test_7_a_table_grows_while_an_iteration_reads_it(sim):
    """No request comes or goes: a running one gets a page, and the schedule stream writes its entry too early."""
    alone = program(request(6, 14), max_requests=1)
    findings = Historical(sim, drop="shared_reads_done", consumer="schedule").races(alone, *RACES)
    assert any("index_put" in finding.second.operation and "rows.py" in finding.second.location for finding in findings)


def test_8_a_barrier_over_everything_costs_what_overlap_gains(sim):
    """Waiting for the whole device in place of one fence is right, and slow: the plan is hidden no more."""

    def time(change):
        explorer = Historical(sim, change=change, graphs=True)
        explorer.checks_overlap = change is None
        explorer.passes(TWO)
        return sim.control.virtual_time()

    def synchronizes(engine):
        before(engine._step.runner, "run", lambda *_: engine.backend.synchronize())

    assert time(synchronizes) > 1.1 * time(None)


def test_9_results_are_handled_before_the_barrier(sim):
    """What the schedule stream writes is enqueued first, and the wait that should come before it after."""
    explorer = Historical(sim)
    fences = {}

    def wrapping(fence):
        fences[fence.name] = Skipping(fence, "schedule") if fence.name == "shared_reads_done" else fence
        return fences[fence.name]

    def change(engine):
        late = fences["shared_reads_done"].inner
        after(engine._parts.rows, "update", lambda *_: late.wait(engine._parts.streams.schedule))

    explorer.wrapping, explorer.change = wrapping, change
    findings = explorer.races(TWO, FindingKind.WRITE_AFTER_READ)
    assert somewhere(findings, "rows.py")


@pytest.mark.parametrize("mode", ["staged", pytest.param("fused", marks=pytest.mark.slow)])
def test_10_reads_are_declared_done_before_they_are(sim, mode):
    """The record comes before the gather. A fused iteration hangs on no such record: forward writes what it read itself."""
    explorer = Historical(sim, mode=mode)
    fences = {}

    def wrapping(fence):
        fences[fence.name] = Elsewhere(fence) if fence.name == "shared_reads_done" else fence
        return fences[fence.name]

    def change(engine):
        early, forward = fences["shared_reads_done"], engine._parts.streams.forward
        stage = engine._step._stages.gather if mode == "staged" else engine._step.runner
        before(stage, "run", lambda *_: early.record(forward))

    explorer.wrapping, explorer.change = wrapping, change
    if mode == "fused":
        explorer.passes(TWO, *ALL_SCHEDULES)
        return
    kinds = {finding.kind for finding in explorer.races(TWO, *RACES)}
    assert FindingKind.WRITE_AFTER_READ in kinds


@pytest.mark.slow
def test_11_a_hand_over_on_another_stream_than_the_stash(sim):
    """The state of a request that arrives is written on schedule, where *published* covers the lengths alone."""
    moving = program(request(6, 12, moves=(2,)), request(3, 14, start=40))
    Historical(sim).passes(moving)

    def change(engine):
        engine._step._transfer._forward = engine._parts.streams.schedule

    findings = Historical(sim, change=change).races(moving, *RACES, FindingKind.REUSE)
    found = " ".join(locations(findings))
    assert "transfer.py" in found  # the arriving state
    assert "rows.py" in found  # the stash


def test_24_a_device_whose_events_are_recycled():
    """A wait is satisfied by an older record of its event, as where the host records it again too early."""
    naive = create_backend(0, {"events": "recycled"})
    explorer = Historical(naive)
    assert isinstance(explorer.fails(TWO, "lazy", "random", "pct"), WrongTokens)
