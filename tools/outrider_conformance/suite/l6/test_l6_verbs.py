"""L6: each collective moves or reduces the right values, between two and three ranks."""

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
@promise(
    "Group.receive",
    "Fill ``tensor`` with the next tensor that rank ``source`` sends to this rank, of the same shape and dtype.",
)
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
@promise(
    "Group.peer_buffers",
    "Return one zero-filled buffer per rank, which every rank can access: element i is memory of rank i's device.",
)
def test_ranks_reach_each_others_memory(ranks: RankRunner) -> None:
    """A value that a rank writes into another rank's buffer is visible there."""
    reached = ranks.run_program(faults.shared_memory)
    if not any(reached):
        not_applicable("these devices don't reach each other's memory")
