"""Programs for two or three ranks of a group, with the checks of their results. The suite's L6 tests run them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from outrider.device import CapabilityError, Graph, Group, InterfaceError, Reduction, Stream
from outrider_conformance.lab import check_not_overridden, expect
from outrider_conformance.ranks.runner import RankHandle

_MODULUS = 7  # values and their sums stay integers that every dtype represents


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a rank's input tensor: integers that differ by rank and by position."""
    count = 1
    for each in shape:
        count *= each
    numbers = torch.arange(count) % _MODULUS + rank + 1
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype).reshape(shape)


def check_equal(found: Tensor, wanted: Tensor, what: str) -> None:
    """Fail unless the tensors ``found`` and ``wanted`` are equal in every element."""
    if not torch.equal(found.cpu().to(torch.complex128), wanted.to(torch.complex128)):
        shown = [tensor.flatten()[:6].tolist() for tensor in (found.cpu(), wanted)]
        raise AssertionError(f"{what}: found {shown[0]} …, expected {shown[1]} …")


def copy_to_device(rank: RankHandle, stream: Stream, tensor: Tensor) -> Tensor:
    """Return a complete copy of the tensor on the rank's device."""
    with rank.backend.on(stream):
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=rank.backend.device)
        made.copy_(tensor)
    stream.synchronize()
    return made


def reduced(parts: list[Tensor], reduction: Reduction = Reduction.SUM) -> Tensor:
    """Return the reduction of the ranks' tensors. Their integers make it independent of the order."""
    stacked = torch.stack([part.to(torch.float64) for part in parts])
    found = {Reduction.SUM: stacked.sum(0), Reduction.MAX: stacked.amax(0), Reduction.MIN: stacked.amin(0)}[reduction]
    return found.to(parts[0].dtype)


def each_implementation(*groups: Group) -> Iterator[str]:
    """Yield each implementation of the first group's calls, after all groups are restricted to it."""
    for implementation in groups[0].implementations:
        for group in groups:
            group.restrict_implementations(implementation)
        yield implementation


# -- each verb ---------------------------------------------------------------------------------------------------------

WIDE_OPERANDS, WIDE_RESULTS = ("reduce_scatter", "all_to_all"), ("all_gather", "all_to_all")
"""The calls whose operand, and those whose result, has one part for each rank."""


def part_shape(kind: str, calls: tuple[str, ...], size: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape``, with a first dimension for the ranks if ``kind`` is one of ``calls``."""
    return (size, *shape) if kind in calls else tuple(shape)


def enqueue(
    group: Group, kind: str, x: Tensor, output: Tensor, stream: Stream, root: int, reduction: Reduction = Reduction.SUM
) -> Tensor:
    """Enqueue one call with the operand ``x``, and return the tensor of its result: ``output`` or ``x``.

    ``send`` is a message of rank ``root`` to the other one of two ranks.
    """
    if kind == "all_reduce":
        group.all_reduce(x, stream=stream, reduction=reduction)
    elif kind == "broadcast":
        group.broadcast(x, root=root, stream=stream)
    elif kind == "send" and group.rank == root:
        group.send(x, to=1 - root, stream=stream)
    elif kind == "send":
        group.receive(x, source=root, stream=stream)
    elif kind == "reduce_scatter":
        group.reduce_scatter(output, x, stream=stream, reduction=reduction)
    else:
        getattr(group, kind)(output, x, stream=stream)
    return output if kind in (*WIDE_OPERANDS, *WIDE_RESULTS) else x


def expected(kind: str, parts: list[Tensor], index: int, root: int, reduction: Reduction = Reduction.SUM) -> Tensor:
    """Return the result of a call on rank ``index``, if ``parts`` are the operands of the ranks."""
    if kind in ("broadcast", "send"):
        return parts[root]
    if kind in WIDE_RESULTS:
        return torch.stack([part[index] if kind in WIDE_OPERANDS else part for part in parts])
    return reduced(parts, reduction)[index] if kind in WIDE_OPERANDS else reduced(parts, reduction)


def computes(rank: RankHandle, kinds: list[str], dtype: str, shapes: list[list[int]], reduction: str = "sum") -> None:
    """Check the results of these calls, from each root, with each implementation of the group."""
    element, how = getattr(torch, dtype), Reduction(reduction)
    with closing(rank.group()) as group:
        stream = rank.stream()
        for implementation in each_implementation(group):
            for shape, kind, root in itertools.product(shapes, kinds, range(rank.size)):
                if root and kind not in ("broadcast", "send"):
                    continue
                where = f"{kind} ({reduction}, from {root}) of {dtype} {shape} by {implementation}"
                size = part_shape(kind, WIDE_OPERANDS, rank.size, shape)
                parts = [values(index, size, element) for index in range(rank.size)]
                tensor = copy_to_device(rank, stream, parts[rank.index])
                zeros = torch.zeros(part_shape(kind, WIDE_RESULTS, rank.size, shape), dtype=element)
                output = enqueue(group, kind, tensor, copy_to_device(rank, stream, zeros), stream, root, how)
                stream.synchronize()
                check_equal(output, expected(kind, parts, rank.index, root, how), where)
                if kind == "all_gather":
                    check_equal(tensor, parts[rank.index], f"the input of {where}")


def sum_results(rank: RankHandle, dtype: str) -> list[float]:
    """Return the rank's own result of a sum that rounds."""
    kind = getattr(torch, dtype)
    with closing(rank.group()) as group:
        stream = rank.stream()
        found: list[float] = []
        for _ in each_implementation(group):
            for width in (5, 1030):
                made = torch.randn(3, width, generator=torch.Generator().manual_seed(rank.index)).to(kind)
                tensor = copy_to_device(rank, stream, made)
                group.all_reduce(tensor, stream=stream)
                stream.synchronize()
                found += tensor.cpu().double().flatten().tolist()
    return found


def messages(rank: RankHandle) -> None:
    """Check that several messages in each direction arrive in the order in which they were sent."""
    with closing(rank.group()) as group:
        stream = rank.stream()
        made = [copy_to_device(rank, stream, values(number, (4,), torch.float32)) for number in range(4)]
        got = [copy_to_device(rank, stream, torch.zeros(4)) for _ in range(4)]
        for first in range(2):
            for number in range(4):
                if rank.index == first:
                    group.send(made[number], to=1 - first, stream=stream)
                else:
                    group.receive(got[number], source=first, stream=stream)
        stream.synchronize()
        for number in range(4):
            check_equal(got[number], values(number, (4,), torch.float32), f"message {number} to rank {rank.index}")


# -- groups ------------------------------------------------------------------------------------------------------------


def groups(rank: RankHandle) -> None:
    """Check that calls of different groups don't mix: subsets of three ranks, other orders, and two groups of the same
    ranks.
    """
    stream = rank.stream()
    with closing(rank.group("whole")) as whole, closing(rank.group("twin")) as twin:
        check_not_overridden(whole, Group)
        parts = [values(index, (5,), torch.float32) for index in range(rank.size)]
        if rank.index != 1:
            with closing(rank.group("outer", (2, 0))) as outer:
                expect((outer.rank, outer.size, outer.ranks), (int(rank.index == 0), 2, (2, 0)), "the place in group (2, 0)")
                tensor = copy_to_device(rank, stream, parts[rank.index])
                outer.broadcast(tensor, root=0, stream=stream)
                stream.synchronize()
                check_equal(tensor, parts[2], "broadcast from the first of group (2, 0)")
        first, second = copy_to_device(rank, stream, parts[rank.index]), copy_to_device(rank, stream, parts[rank.index] * 8)
        whole.all_reduce(first, stream=stream)
        twin.all_reduce(second, stream=stream)
        twin.broadcast(second, root=0, stream=stream)
        whole.broadcast(first, root=1, stream=stream)
        stream.synchronize()
        check_equal(first, reduced(parts), "a sum in one of two groups of the same ranks")
        check_equal(second, reduced(parts) * 8, "a sum in the other")
    with closing(rank.group("whole")) as again:
        tensor = copy_to_device(rank, stream, parts[rank.index])
        again.all_reduce(tensor, stream=stream)
        stream.synchronize()
        check_equal(tensor, reduced(parts), "a sum in a group with the name of one that was closed")
    with closing(rank.group("alone", (rank.index,))) as alone:
        tensor, output = copy_to_device(rank, stream, parts[0]), copy_to_device(rank, stream, torch.zeros(1, 5))
        alone.all_reduce(tensor, stream=stream)
        alone.all_gather(output, tensor, stream=stream)
        stream.synchronize()
        check_equal(output[0], parts[0], "a rank that is alone in its group")


# -- order -------------------------------------------------------------------------------------------------------------


def in_order(rank: RankHandle, slow: int, kind: str) -> None:
    """Check a call between two kernels of a stream. The first kernel is late on rank ``slow``, which is the root; another
    stream reads the result.
    """
    lab, backend = rank.lab, rank.backend
    size = part_shape(kind, WIDE_OPERANDS, rank.size, (64,))
    wanted = expected(kind, [torch.full(size, index + 1.0) for index in range(rank.size)], rank.index, slow)
    with closing(rank.group()) as group:
        for implementation in each_implementation(group):
            stream, other = rank.stream(), rank.stream("other")
            with backend.on(stream):
                x = torch.zeros(size, device=backend.device)
                output, after, seen = (torch.zeros_like(wanted, device=backend.device) for _ in range(3))
            stream.synchronize()
            if rank.index == slow:
                lab.slow(stream)
            lab.fill(stream, x, rank.index + 1)
            made = enqueue(group, kind, x, output, stream, slow)
            lab.copy(stream, after, made)
            for each in (made, x):  # overwrites the operands in stream order, after the copy above has read the result
                lab.fill(stream, each, -1)
            other.wait(lab.record(stream, "after the call"))
            lab.copy(other, seen, after)
            other.synchronize()
            where = f"{kind} by {implementation} between two kernels, on rank {rank.index}, with rank {slow} late"
            check_equal(seen, wanted, where)
            stream.synchronize()


def many_in_order(rank: RankHandle) -> None:
    """Check a long exchange on one stream: each sum uses the previous one, and operands are reused at once."""
    lab = rank.lab
    with closing(rank.group()) as group, closing(rank.group("second")) as second:
        for implementation in each_implementation(group, second):
            stream = rank.stream()
            x, every = lab.full(stream, 1), copy_to_device(rank, stream, torch.zeros(rank.size, 64))
            for turn in range(12):
                if turn % 4 == 2 * rank.index:
                    lab.slow(stream)
                with rank.backend.on(stream):
                    x.mul_(rank.index + 1).fmod_(5.0)
                (second if turn % 2 else group).all_reduce(x, stream=stream)
                group.all_gather(every, x, stream=stream)
                with rank.backend.on(stream):
                    x.copy_(every[1 - rank.index])
            value = 1.0
            for _ in range(12):
                value = value % 5.0 + (2 * value) % 5.0
            expect(lab.read_tensor(stream, x), value, f"a sum of sums by {implementation} on rank {rank.index}")


def returns_at_once(rank: RankHandle) -> None:
    """Check on an asynchronous device that a call returns, with its stream busy, before the other rank has called."""
    lab = rank.lab
    with closing(rank.group()) as group:
        stream = rank.stream()
        x = lab.full(stream, rank.index + 1)
        for _ in each_implementation(group):  # the first call of each implementation may initialise a library
            group.all_reduce(x, stream=stream)
        stream.synchronize()
        group.restrict_implementations(*group.implementations)
        lab.fill(stream, x, rank.index + 1)
        if rank.index == 0:
            group.all_reduce(x, stream=stream)
            done = stream.query()
            rank.release_waiters("called")
            assert not done, "the stream of a rank is empty though the other rank hasn't called yet"
        else:
            rank.wait_for_word("called")
            group.all_reduce(x, stream=stream)
        expect(lab.read_tensor(stream, x), 3.0, "the sum")


def result_is_complete(rank: RankHandle) -> None:
    """Check on a synchronous device that the result is complete when the call returns."""
    with closing(rank.group()) as group:
        stream = rank.stream()
        x = torch.full((64,), float(rank.index + 1), device=rank.backend.device)
        if rank.index == 1:
            time.sleep(0.05)
        group.all_reduce(x, stream=stream)
        expect(rank.lab.current_values(x), 3.0, "the sum when the call has returned")


# -- graphs ------------------------------------------------------------------------------------------------------------


def captured(rank: RankHandle) -> None:
    """Check a graph of kernels and all verbs, replayed between calls of the same group outside the graph.

    Replays are eager on a device without graphs.
    """
    lab = rank.lab
    with closing(rank.group()) as group:
        for implementation in each_implementation(group):
            stream = rank.stream()
            x, total = lab.full(stream, 0), lab.full(stream, 0)
            every, swapped = (copy_to_device(rank, stream, torch.zeros(rank.size, 64)) for _ in range(2))
            part, message = lab.full(stream, 0), lab.full(stream, 0)

            def work(context: Any, group: Group = group, stream: Stream = stream, part: Tensor = part) -> None:
                x, total, every = context.inputs["x"], context.outputs["total"], context.outputs["every"]
                swapped, message = context.outputs["swapped"], context.outputs["message"]
                total.copy_(x)
                group.all_reduce(total, stream=stream)
                group.all_gather(every, total, stream=stream)
                group.all_to_all(swapped, every, stream=stream)
                every.add_(1.0)
                group.reduce_scatter(part, every, stream=stream)
                total.copy_(part)
                group.broadcast(total, root=1, stream=stream)
                message.copy_(x)
                if rank.index == 0:
                    group.send(x, to=1, stream=stream)
                else:
                    group.receive(message, source=0, stream=stream)

            outputs = {"total": total, "every": every, "swapped": swapped, "message": message}
            graph = rank.backend.capture("calls", work, stream=stream, inputs={"x": x}, outputs=outputs)
            for turn in range(3):
                if turn == rank.index:
                    lab.slow(stream)
                lab.fill(stream, x, 10 * turn + rank.index)
                eager = lab.full(stream, rank.index) if turn == 1 else None
                if eager is not None:
                    group.all_reduce(eager, stream=stream)
                graph.replay(stream)
                added = 20.0 * turn + 1
                where = f"by {implementation} in replay {turn} on rank {rank.index}"
                expect(lab.read_tensor(stream, message), 10.0 * turn, f"the message {where}")
                expect(lab.current_values(swapped), added, f"all_to_all {where}")
                expect(lab.current_values(total), 2 * (added + 1), f"what was reduced, scattered and broadcast {where}")
                if eager is not None:
                    expect(lab.current_values(eager), 1.0, f"a call before the {where}")


def _sum_in_a_graph(rank: RankHandle, group: Group, stream: Stream) -> Graph:
    """Capture a sum of one tensor, and check its first replay."""
    x = rank.lab.full(stream, rank.index + 1)

    def work(context: Any) -> None:
        group.all_reduce(context.inputs["x"], stream=stream)

    graph = rank.backend.capture("calls", work, stream=stream, inputs={"x": x}, outputs={})
    rank.lab.fill(stream, x, rank.index + 1)
    graph.replay(stream)
    expect(rank.lab.read_tensor(stream, x), 3.0, "the sum of a replay while its group is open")
    return graph


def _check_sum(rank: RankHandle, group: Group, stream: Stream, what: str) -> None:
    x = rank.lab.full(stream, rank.index + 1)
    group.all_reduce(x, stream=stream)
    expect(rank.lab.read_tensor(stream, x), 3.0, what)


def closed_with_its_graphs(rank: RankHandle) -> None:
    """Close a group whose calls a graph holds: the close must return, and a further replay must raise."""
    stream, group = rank.stream(), rank.group()
    graph = _sum_in_a_graph(rank, group, stream)
    group.close()
    try:
        graph.replay(stream)
    except InterfaceError:
        return
    raise AssertionError("a replay raised nothing, though the group whose calls it holds is closed")


def released_before_its_group(rank: RankHandle) -> None:
    """Release one graph with calls of a group and drop another, close the group, and make a new group of its name."""
    stream, group = rank.stream(), rank.group()
    graphs = [_sum_in_a_graph(rank, group, stream) for _ in range(2)]
    graphs.pop().release("of the test")
    graphs.clear()
    try:
        group.close()
        made = rank.group()
    except Exception as error:
        raise AssertionError(f"after its graphs, the group can't be closed and made again: {error}") from None
    with closing(made) as again:
        _check_sum(rank, again, stream, "the sum in a new group with the name of the closed one")


def not_captured(rank: RankHandle) -> None:
    """Check that a captured call raises without ``captures_collectives``, and that the group still works."""
    with closing(rank.group()) as group:
        stream = rank.stream()
        try:
            _sum_in_a_graph(rank, group, stream)
        except CapabilityError:
            pass
        else:
            raise AssertionError("a captured call raised nothing, though captures_collectives isn't declared")
        _check_sum(rank, group, stream, "the sum after a refused capture")
