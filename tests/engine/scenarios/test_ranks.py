"""Bugs that take several ranks, and those of one rank again on two. Numbers are those of docs/findings/scenarios.md."""

from contextlib import suppress
from dataclasses import replace

import pytest

from engine.scenarios.historical import Skipping, program, request
from outrider.device import CollectiveError
from outrider.engine.state.buffers import VerifyInputs
from outrider.registry import Registry
from outrider_proof.rank_engine import RankExplorer, RankSetup
from outrider_proof.rank_exploration import simulated_hosts
from outrider_sanitizer import FindingKind, RaceError, watch_ranks
from outrider_sanitizer.races import RANK_RACES, decision_named
from outrider_sim.exploration import run_once
from outrider_sim.strategies import make_strategy
from races.test_corpus import STALENESS

REGISTRY = Registry()
IDLE = RankSetup(tensor=1, data=2, proposer="mtp", mode="graphs", like="cuda")
SPLIT = RankSetup(tensor=2, data=1, proposer="mtp", mode="graphs", like="cuda")
TOGETHER = program(request(6, 10, moves=(3,)), *(request(3 + i, 4, start=9 * i) for i in range(4)), max_requests=4)
"""Two ranks share five requests: three run in the graph for four, one is handed over, and at the end a rank is idle."""


def once(explorer, setup, host_program=TOGETHER, strategy="program", inject=None):
    """One watched run; what it raised, or None."""
    device = explorer.devices(setup, inject)[0]
    return run_once(
        device, lambda _: explorer.run_program(setup, host_program, inject=inject), make_strategy(strategy, 1, {})
    )


@pytest.fixture(scope="module")
def explorer():
    made = RankExplorer(REGISTRY)
    yield made
    made.change = None


@pytest.fixture(autouse=True)
def accounted():
    """The explorer counts rows and pages of every rank itself, at the end of each run."""


@pytest.fixture(autouse=True)
def unchanged(explorer):
    yield
    explorer.change = explorer.wrap = None


def named(name):
    """The decision that is named first when this program of the corpus runs, and its report."""
    race = RANK_RACES[name]
    devices = simulated_hosts(REGISTRY)(race, 2)
    with watch_ranks(devices) as report, suppress(CollectiveError):
        race.run_race(devices, fixed=False)
    return decision_named(report), report


@pytest.mark.slow
def test_20_ranks_accept_different_counts(explorer):
    """A tie of logits goes the other way on one rank. Where each rank decides, they come apart; here the first one does."""
    decision, report = named("accepted-counts")
    assert decision == "accepted"
    assert {finding.kind for finding in report} == {FindingKind.DECISION, FindingKind.COLLECTIVE}
    assert once(explorer, SPLIT, inject="ulp") is None


@pytest.mark.slow
def test_padding_of_an_idle_rank_has_one_writer(explorer):
    """An idle rank decodes padding alone, all of it at page 0: several of its rows would write one slot of a history."""
    setup = replace(IDLE, proposer="suffix+eagle")
    assert once(explorer, setup) is None


DIVIDED = [
    replace(IDLE, proposer="mtp, experts", expert=True),
    *(
        pytest.param(
            replace(IDLE, proposer=f"{name}, experts", mode=mode, tensor=tensor, data=data, expert=True),
            marks=pytest.mark.slow,
        )
        for name, mode, tensor, data in (
            ("eagle", "fused", 2, 1),
            ("ngram", "staged", 1, 2),
            ("mtp-tree", "graphs", 2, 1),
            ("eagle", "staged", 2, 2),
            ("draft-model", "fused", 1, 2),
        )
    ),
]


@pytest.mark.parametrize("setup", DIVIDED, ids=str)
@pytest.mark.slow
def test_ranks_that_divide_experts_give_the_tokens_of_one(explorer, setup):
    """With fences alone: no finding on any rank, also with an idle rank."""
    assert once(explorer, setup, strategy="mixed") is None


@pytest.mark.parametrize(
    ("inject", "named"), [("length", "drafted"), pytest.param("bucket", "bucket", marks=pytest.mark.slow)]
)
def test_a_rank_that_differs_while_experts_are_divided_is_named(explorer, inject, named):
    one = program(request(6, 8), max_requests=4)
    error = once(explorer, replace(SPLIT, proposer="mtp, experts", expert=True), one, inject=inject)
    assert isinstance(error, RaceError)
    assert decision_named(explorer.report) == named


def test_20_a_rank_that_drafts_another_length_is_named(explorer):
    """Whoever follows drafts as it was told; told something else, it's named before it hangs."""
    error = once(explorer, SPLIT, inject="length")
    assert isinstance(error, RaceError)
    assert decision_named(error.report) == "drafted", str(error)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("inject", "named"), [("bucket", "bucket"), ("abort", "admitted")])
def test_20_a_rank_that_takes_another_bucket_or_misses_an_abort_is_named(explorer, inject, named):
    """The bucket is decided before anything is launched; what the first rank has aborted is admitted by the other alone."""
    rows = 1 if inject == "abort" else 3
    one = program(request(6, 8), request(9, 6, step=1, abort=1), request(7, 4, step=2), max_requests=rows)
    error = once(explorer, SPLIT, one, inject=inject)
    assert isinstance(error, RaceError), error
    assert decision_named(error.report) == named
    assert "no decision" not in str(error), "a rank failed before it decided, so it isn't the injection that was named"


def test_21_an_idle_rank_takes_another_branch(explorer):
    """An idle rank takes part in every layer, with the graph and the passes of the busy ones."""
    for name, wanted in (("idle-rank-drafts-less", "draft_passes"), ("idle-rank-takes-another-bucket", "bucket")):
        decision, report = named(name)
        assert decision == wanted
        assert FindingKind.COLLECTIVE in {finding.kind for finding in report}
    one = program(request(6, 8), max_requests=2)
    assert once(explorer, IDLE, one) is None


@pytest.mark.parametrize("strategy", ["program", pytest.param("random", marks=pytest.mark.slow)])
def test_idle_rank_drafts_graphs_padding_and_hand_over_together(explorer, strategy):
    error = once(explorer, IDLE, strategy=strategy)
    assert error is None, str(error)


def skipping(name, stream):
    """A wrapping of fences that leaves out the waits of one."""
    return lambda rank, fence: Skipping(fence, stream) if fence.name == name else fence


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fix", "fence", "stream"), [("draft-done", "draft_outputs_ready", "plan"), ("wait", "results_ready", "copy")]
)
def test_an_edge_that_another_engine_lacked_is_missed_on_two_ranks_too(explorer, fix, fence, stream):
    explorer.wrap = skipping(fence, stream)
    error = once(explorer, IDLE)
    assert isinstance(error, RaceError), error
    assert {FindingKind.READ_AFTER_WRITE, FindingKind.WRITE_AFTER_READ} & {finding.kind for finding in error.report}


@pytest.mark.slow
def test_padding_that_is_left_out_is_found_on_two_ranks_too(explorer):
    def change(_, engine):
        engine._parts.buffers.pad = lambda *arguments, **named: None

    explorer.change = change
    error = once(explorer, IDLE)
    assert isinstance(error, RaceError), error
    assert {finding.kind for finding in error.report} & STALENESS


@pytest.mark.slow
def test_positions_on_three_axes_that_no_graph_is_told_are_found_on_two_ranks_too(explorer, monkeypatch):
    """What the plan computes from where images are must come into the buffer that the graph reads (mrope)."""
    pictured = replace(IDLE, proposer="eagle, images")
    few = program(request(6, 8), request(4, 6, start=9), max_requests=2)
    assert once(explorer, pictured, few) is None

    monkeypatch.setattr(VerifyInputs, "copy_rope_positions_for_graph", lambda verify: None)
    error = once(explorer, pictured, few)
    assert isinstance(error, RaceError), error
    assert {finding.kind for finding in error.report} <= STALENESS


@pytest.mark.slow
def test_a_relay_on_another_stream_is_found_on_two_ranks_too(explorer):
    """What an iteration relays to the next is written beside forward, where the next one reads it."""

    def change(_, engine):
        future = engine._parts.future
        honest = future.stash

        def stash(*arguments):
            with engine.backend.on(engine._parts.streams.copy):
                honest(*arguments)

        future.stash = stash

    explorer.change = change
    error = once(explorer, IDLE)
    assert isinstance(error, RaceError), error
