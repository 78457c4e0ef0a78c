"""L6: collectives in the order of a stream, in graphs, and what becomes of calls that can't be carried out."""

from __future__ import annotations

import pytest

from outrider_conformance import rank_faults as faults
from outrider_conformance import rank_programs as programs
from outrider_conformance.kit import Kit
from outrider_conformance.promises import needs, promise
from outrider_conformance.ranks import RankRunner
from outrider_conformance.verdict import not_applicable

_KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "send")


@needs("collectives")
@promise("Group", "it reads and writes in the order of that stream, as a kernel does")
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("kind", _KINDS)
def test_a_call_runs_between_kernels(ranks: RankRunner, kind: str, slow: int) -> None:
    """Behind a late kernel of either rank, before the kernels behind it, which use its operands again."""
    ranks.run(programs.in_order, slow, kind)


@needs("collectives")
@promise("Group", "Two calls of one group on different streams need an event between them")
def test_a_long_exchange(ranks: RankRunner) -> None:
    """Two groups in turn on one stream, each call with the result of the one before."""
    ranks.run(programs.many_in_order)


@needs("collectives")
@promise(
    "Group",
    "it reads and writes in the order of that stream, as a kernel does, and returns before it has run if "
    "the backend declares ``asynchronous``.",
)
def test_the_host_does_not_wait_for_the_other_ranks(kit: Kit, ranks: RankRunner) -> None:
    """The other rank calls only when this one's host has gone on."""
    if not kit.open().capabilities.asynchronous:
        not_applicable("each operation has finished when its call returns")
    ranks.run(programs.returns_at_once)


@needs("collectives")
@promise("Group", "Otherwise it has run when the call returns.")
def test_a_synchronous_call_has_run(kit: Kit, ranks: RankRunner) -> None:
    """The host reads its result at once."""
    if kit.open().capabilities.asynchronous:
        not_applicable("work may be pending when its call returns")
    ranks.run(programs.has_run)


@needs("collectives", "captures_collectives")
@promise("Group", "each replay then makes it anew, on every rank.")
def test_captured_calls_are_made_by_each_replay(ranks: RankRunner) -> None:
    """All verbs in one graph, between its kernels, and calls of the same group around it."""
    ranks.run(programs.captured, schedules=4)


@needs("collectives", "captures_collectives")
@promise("Group.close", "a later replay raises :class:`InterfaceError`.")
def test_a_group_is_closed_before_the_graphs_that_hold_its_calls(ranks: RankRunner) -> None:
    """A library that waits for the end of those graphs isn't waited for."""
    ranks.run(programs.closed_with_its_graphs)


@needs("collectives")
@promise("Group", "Elsewhere it raises :class:`CapabilityError`.")
def test_calls_in_a_capture_that_is_not_declared(kit: Kit, ranks: RankRunner) -> None:
    """Without graphs replays are eager and make the calls; with graphs alone a call raises."""
    declared = kit.open().capabilities
    if declared.captures_collectives and declared.captures_graphs:
        not_applicable("captures_collectives is declared")
    ranks.run(programs.not_captured if declared.captures_graphs else programs.captured)


@needs("collectives")
@promise("Group", "Wrong operands, another backend's stream and a closed group raise :class:`InterfaceError`")
def test_misuse_raises_before_anything_is_sent(ranks: RankRunner) -> None:
    """Shapes, dtypes, strides, devices, roots and peers; a closed group closes again."""
    ranks.run(faults.misuse, schedules=1)


@needs("collectives")
@promise(
    "Backend.create_group",
    "Raises :class:`CapabilityError` if the backend has no collectives, :class:`ConfigError` if the ranks"
    " aren't distinct or don't include ``rank``, and :class:`CollectiveError` if a rank doesn't make the "
    "call.",
)
def test_ranks_that_are_no_group(ranks: RankRunner) -> None:
    """Strangers, one twice, and nobody."""
    ranks.run(faults.bad_groups, schedules=1)


@needs("collectives")
@promise(
    "Backend.create_group",
    "Raises :class:`CapabilityError` if the backend has no collectives, :class:`ConfigError` if the ranks"
    " aren't distinct or don't include ``rank``, and :class:`CollectiveError` if a rank doesn't make the "
    "call.",
)
def test_a_group_that_a_rank_never_joins(ranks: RankRunner) -> None:
    """Within the limit, where there is a clock."""
    ranks.run(faults.nobody_comes, timeout_s=0.5, schedules=1)


@needs("collectives")
@promise("Group", "is a :class:`CollectiveError` that names group, rank, sequence and kind")
@pytest.mark.parametrize("how", ["closes", "hangs", "exits"])
def test_a_peer_that_leaves(kit: Kit, ranks: RankRunner, how: str) -> None:
    """By closing its group, by doing nothing past the limit, or with its process."""
    if how == "exits" and not ranks.in_processes():
        not_applicable("ranks are threads of one process here")
    if how == "hangs" and kit.open().control is not None:
        not_applicable("a simulated device has no clock: what never ends is known at once")
    if how == "exits":
        ranks.run_leaving(faults.peer_dies, how, leaving=1, timeout_s=1.0)
    else:
        ranks.run(faults.peer_dies, how, timeout_s=1.0, schedules=1)
    ranks.end()  # what such a group leaves behind on a device is nobody's to use


@needs("collectives")
@promise("Group", "or that didn't come within the group's ``timeout_s``")
def test_a_peer_that_is_late_is_waited_for(kit: Kit, ranks: RankRunner) -> None:
    """Within the limit."""
    if kit.open().control is not None:
        not_applicable("a simulated device has no clock")
    ranks.run(faults.peer_is_late, timeout_s=2.0)


@needs("collectives")
@promise("Observer.collective", "Reported before the call is enqueued")
def test_tools_are_told(ranks: RankRunner) -> None:
    """Of calls and decisions, in their order."""
    ranks.run(faults.reported, schedules=1)
