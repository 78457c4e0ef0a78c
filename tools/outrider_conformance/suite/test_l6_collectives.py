"""L6: collectives move or reduce the right values, in the order of a stream and in graphs, or raise errors."""

from __future__ import annotations

import pytest
import torch

from outrider_conformance.kit import Kit
from outrider_conformance.lab import expect
from outrider_conformance.promises import needs, promise
from outrider_conformance.ranks import faults, programs
from outrider_conformance.ranks.runner import RankRunner
from outrider_conformance.reporting.verdict import not_applicable

_SHAPES = [[1], [5], [0], [3, 0], [7, 3], [2, 1024], [3, 1333]]
_FLOATS = ("float32", "float64", "bfloat16", "float16")
_ANY = ("bool", "uint8", "int8", "int16", "float8_e4m3fn", "complex64", "bfloat16", "float32", "int64")


def _reduced(kit: Kit, dtype: str) -> None:
    kind = getattr(torch, dtype)
    if kind.is_floating_point and kind not in kit.open().capabilities.dtypes:
        not_applicable(f"{dtype} isn't declared")


@needs("collectives")
@promise("Group", "A reduced tensor has one of the capability's ``dtypes``, int32 or int64;")
@pytest.mark.parametrize("dtype", [*_FLOATS, "int32", "int64"])
@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_reductions(kit: Kit, ranks: RankRunner, dtype: str, reduction: str) -> None:
    """The results of all_reduce and reduce_scatter equal the expected sums for odd sizes, empty tensors and tensors larger
    than a block.
    """
    _reduced(kit, dtype)
    ranks.run_program(programs.computes, ["all_reduce", "reduce_scatter"], dtype, _SHAPES, reduction, schedules=1)


@needs("collectives")
@promise("Group", "a tensor that is only moved may have any dtype.")
@pytest.mark.parametrize("dtype", _ANY)
def test_moves(ranks: RankRunner, dtype: str) -> None:
    """all_gather, broadcast, all_to_all and messages transfer the bytes in the order of the group."""
    kinds = ["all_gather", "broadcast", "all_to_all", "send"]
    ranks.run_program(programs.computes, kinds, dtype, _SHAPES, schedules=1)


@needs("collectives")
@promise("Group", "A reduction gives each rank the same bits.")
@pytest.mark.parametrize("dtype", _FLOATS)
def test_every_rank_has_the_same_bits(kit: Kit, ranks: RankRunner, dtype: str) -> None:
    """Sums that round have the same bits on every rank."""
    _reduced(kit, dtype)
    first, *others = ranks.run_program(programs.sum_results, dtype, schedules=1)
    for number, other in enumerate(others, start=1):
        expect(other, first, f"the sums on rank {number}, against those on rank 0")


@needs("collectives")
@promise("Group.receive")
def test_messages_keep_their_order(ranks: RankRunner) -> None:
    """Several messages in each direction arrive in the order in which they were sent."""
    ranks.run_program(programs.messages)


@needs("collectives")
@promise("Backend.create_group", "``ranks`` are ranks of the world, in the group's order; ``rank`` is the calling rank.")
def test_groups_do_not_mix(kit: Kit, ranks: RankRunner) -> None:
    """Subsets of ranks, other orders, equal groups, a group of one rank, and a reused name do not mix."""
    count = kit.info.device_count
    if ranks.in_processes() and count is not None and count < 3:
        not_applicable(f"three ranks need three devices, and there are {count}")
    ranks.run_program(programs.groups, size=3, schedules=2)


@needs("collectives")
@promise("KernelSet.all_reduce_rms_norm", "Each rank gets the same bits.")
@pytest.mark.parametrize("dtype", _FLOATS)
def test_the_fused_norm_is_the_sum_and_its_norm(kit: Kit, ranks: RankRunner, dtype: str) -> None:
    """Repeated fused calls, with either rank late, equal the sum and its norm, and give the same bits on each rank."""
    _reduced(kit, dtype)
    shapes = [[1, 64], [3, 130], [5, 4096], [64, 1024], [2, 33]]
    first, second = ranks.run_program(faults.fused_norm, dtype, shapes, schedules=2)
    expect(second, first, "the norms on rank 1, against those on rank 0")


@needs("collectives", "peer_memory")
@promise("Group.peer_buffers")
def test_ranks_reach_each_others_memory(ranks: RankRunner) -> None:
    """A value that a rank writes into another rank's buffer is visible there."""
    reached = ranks.run_program(faults.shared_memory)
    if not any(reached):
        not_applicable("these devices don't reach each other's memory")


_KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "send")


@needs("collectives")
@promise("Group", "it reads and writes in the order of that stream, as a kernel does")
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("kind", _KINDS)
def test_a_call_runs_between_kernels(ranks: RankRunner, kind: str, slow: int) -> None:
    """A call runs after a late kernel of either rank and before the kernels that reuse its operands."""
    ranks.run_program(programs.in_order, slow, kind)


@needs("collectives")
@promise("Group", "Two calls of one group on different streams need an event between them")
def test_a_long_exchange(ranks: RankRunner) -> None:
    """Two groups alternate on one stream, and each call uses the result of the previous one."""
    ranks.run_program(programs.many_in_order)


@needs("collectives")
@promise(
    "Group",
    "it reads and writes in the order of that stream, as a kernel does, and returns before it has run if "
    "the backend declares ``asynchronous``.",
)
def test_the_host_does_not_wait_for_the_other_ranks(kit: Kit, ranks: RankRunner) -> None:
    """A call returns before the other rank has made its call."""
    if not kit.open().capabilities.asynchronous:
        not_applicable("each operation has finished when its call returns")
    ranks.run_program(programs.returns_at_once)


@needs("collectives")
@promise("Group", "Otherwise it has run when the call returns.")
def test_a_synchronous_call_has_run(kit: Kit, ranks: RankRunner) -> None:
    """The host reads the result as soon as the call returns."""
    if kit.open().capabilities.asynchronous:
        not_applicable("work may be pending when its call returns")
    ranks.run_program(programs.result_is_complete)


@needs("collectives", "captures_collectives")
@promise("Group", "each replay then makes it anew, on every rank.")
def test_captured_calls_are_made_by_each_replay(ranks: RankRunner) -> None:
    """One graph holds all verbs between kernels, and the same group makes calls around its replays."""
    ranks.run_program(programs.captured, schedules=4)


@needs("collectives", "captures_collectives")
@promise("Group.close", "a later replay raises :class:`InterfaceError`.")
def test_a_group_is_closed_before_the_graphs_that_hold_its_calls(ranks: RankRunner) -> None:
    """Closing a group does not wait for the end of graphs that hold its calls."""
    ranks.run_program(programs.closed_with_its_graphs)


@needs("collectives", "captures_collectives")
@promise("Graph.release", "Release a graph before the resources that it uses")
def test_graphs_are_released_before_their_group(ranks: RankRunner) -> None:
    """A group closes after its graphs were released or dropped, and a new group takes its name."""
    ranks.run_program(programs.released_before_its_group)


@needs("collectives")
@promise("Group", "Elsewhere it raises :class:`CapabilityError`.")
def test_calls_in_a_capture_that_is_not_declared(kit: Kit, ranks: RankRunner) -> None:
    """Without graphs, replays are eager and make the calls. With graphs alone, a captured call raises an error."""
    declared = kit.open().capabilities
    if declared.captures_collectives and declared.captures_graphs:
        not_applicable("captures_collectives is declared")
    ranks.run_program(programs.not_captured if declared.captures_graphs else programs.captured)


@needs("collectives")
@promise(
    "Backend.create_group",
    "Raises :class:`CapabilityError` if the backend has no collectives, :class:`ConfigError` if the ranks"
    " aren't distinct or don't include ``rank``, and :class:`CollectiveError` if a rank doesn't make the "
    "call.",
)
def test_a_group_that_a_rank_never_joins(ranks: RankRunner) -> None:
    """Creating a group that one rank never joins fails within the limit."""
    ranks.run_program(faults.peer_never_joins, timeout_s=0.5, schedules=1)


@needs("collectives")
@promise("Group", "is a :class:`CollectiveError` that names group, rank, sequence and kind")
@pytest.mark.parametrize("how", ["closes", "hangs", "exits"])
def test_a_peer_that_leaves(kit: Kit, ranks: RankRunner, how: str) -> None:
    """A peer closes its group, does nothing beyond the limit, or ends its process."""
    if how == "exits" and not ranks.in_processes():
        not_applicable("ranks are threads of one process here")
    if how == "hangs" and kit.open().control is not None:
        not_applicable("a simulated device has no clock: what never ends is known at once")
    ranks.run_program(faults.peer_dies, how, timeout_s=3.0, schedules=1, leaving=1 if how == "exits" else None)
    ranks.end_ranks()  # the state that such a group leaves on a device can't be used again


@needs("collectives")
@promise("Group", "or that didn't come within the group's ``timeout_s``")
def test_a_peer_that_is_late_is_waited_for(kit: Kit, ranks: RankRunner) -> None:
    """A peer that is late within the limit causes no error."""
    if kit.open().control is not None:
        not_applicable("a simulated device has no clock")
    ranks.run_program(faults.peer_is_late, timeout_s=2.0)
