"""Programs for two ranks: misuse, failing peers, reports to observers, fused kernels, and memory that ranks share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from outrider.device import (
    CapabilityError,
    Collective,
    CollectiveError,
    ConfigError,
    Group,
    InterfaceError,
    KernelSet,
    Reduction,
    Stream,
)
from outrider_conformance.lab import expect, observed_calls
from outrider_conformance.ranks.programs import copy_to_device
from outrider_conformance.ranks.runner import RankHandle

_MAX_CLOSE_S = 10.0
"""Seconds after which a group that lost a peer must be closed."""
_MAX_OVERRUN_S = 20.0


# -- errors ------------------------------------------------------------------------------------------------------------


def misuse(rank: RankHandle) -> None:
    """Check that calls with wrong operands raise before they enqueue work. The other rank makes the same mistakes."""
    with closing(rank.group()) as group:
        stream = rank.stream()

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            with rank.backend.on(stream):
                return torch.zeros(shape, dtype=dtype, device=rank.backend.device)

        x, other = empty(4), empty(3)
        wrong: dict[str, Callable[[], None]] = {
            "gathered into another shape": lambda: group.all_gather(empty(3, 4), x, stream=stream),
            "scattered into another shape": lambda: group.reduce_scatter(other, empty(2, 4), stream=stream),
            "a count that isn't a multiple of the group size": lambda: group.all_to_all(other, other, stream=stream),
            "two dtypes": lambda: group.all_gather(empty(2, 4, dtype=torch.int32), x, stream=stream),
            "a sum of booleans": lambda: group.all_reduce(empty(4, dtype=torch.bool), stream=stream),
            "a strided tensor": lambda: group.all_reduce(empty(4, 4)[:, ::2], stream=stream),
            "no such root": lambda: group.broadcast(x, root=2, stream=stream),
            "a root before the first": lambda: group.broadcast(x, root=-1, stream=stream),
            "a message to itself": lambda: group.send(x, to=rank.index, stream=stream),
            "a message from a rank outside the group": lambda: group.receive(x, source=5, stream=stream),
            "a tensor without memory": lambda: group.all_reduce(torch.zeros(4, device="meta"), stream=stream),
        }
        if rank.backend.device.type != "cpu":
            wrong["a tensor of the host"] = lambda: group.all_reduce(torch.zeros(4), stream=stream)
        for what, call in wrong.items():
            _raises(InterfaceError, what, call)
        expect(group.last_call, None, "the calls that were counted")
        group.all_reduce(x, stream=stream)
        stream.synchronize()
    _raises(InterfaceError, "a closed group", lambda: group.all_reduce(x, stream=stream))
    group.close()


def bad_groups(rank: RankHandle) -> None:
    """Check that ``create_group`` raises at once for ranks that cannot form a group."""
    for what, ranks in (("ranks without this one", (7, 8)), ("one rank twice", (rank.index, rank.index)), ("no ranks", ())):
        _raises(
            ConfigError,
            what,
            lambda ranks=ranks: rank.backend.create_group(  # type: ignore[misc]
                "bad", ranks=ranks, rank=rank.index, store=rank.store, timeout_s=1.0
            ),
        )


def _raises(kind: type[Exception], what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{what}: nothing was raised, expected {kind.__name__}")


def peer_never_joins(rank: RankHandle) -> None:
    """Check that creating a group fails within the limit if one rank never joins."""
    if rank.index == 1:
        return
    began = time.monotonic()
    try:
        rank.group("never")
    except CollectiveError as error:
        expect((error.group, error.rank, error.kind, error.sequence), ("never", 0, "create_group", 0), "what the error says")
    else:
        raise AssertionError("a group was made without its second rank")
    assert time.monotonic() - began < rank.timeout_s + _MAX_OVERRUN_S, "the limit was far exceeded"


def peer_dies(rank: RankHandle, how: str) -> None:
    """Check rank 0's second call after rank 1 ``"closes"`` its group, ``"exits"`` its process, or ``"hangs"`` past the
    limit.
    """
    lab = rank.lab
    group = rank.group()
    stream = rank.stream()
    x = lab.full(stream, rank.index + 1)
    group.all_reduce(x, stream=stream)
    expect(lab.read_tensor(stream, x), 3.0, "the sum while both are there")
    if rank.index == 1:
        if how == "exits":
            os._exit(7)
        if how == "hangs":
            rank.wait_for_word("given up")
        group.close()
        return
    began = time.monotonic()
    try:
        group.all_reduce(x, stream=stream)
        done = lab.record(stream, "after the call").synchronize_within(rank.timeout_s)
    except CollectiveError as error:
        raised: CollectiveError | None = error
    else:
        raised = None
    finally:
        rank.release_waiters("given up")
    if raised is not None:
        found = (raised.group, raised.rank, raised.kind, raised.sequence)
        expect(found, (group.name, 0, "all_reduce", 2), "what the error says")
        assert not raised.device_lost, "the error of a failed peer says that this device is lost"
        _raises(CollectiveError, "a call after the failure", lambda: _waited(group, x, stream))
    else:
        assert rank.asynchronous, "the call came back without its peer, and nothing was raised"
        assert not done, "the stream went past a call that its peer never made"
        rank.lost_calls.append(str(group.last_call))
    assert time.monotonic() - began < 2 * rank.timeout_s + _MAX_OVERRUN_S, "the limit was far exceeded"
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < _MAX_CLOSE_S, "close() waited for a call that never ends"


def _waited(group: Group, x: Tensor, stream: Stream) -> None:
    group.all_reduce(x, stream=stream)
    stream.synchronize()


def peer_is_late(rank: RankHandle) -> None:
    """Check that a peer that is late within the limit causes no error."""
    lab = rank.lab
    with closing(rank.group()) as group:
        stream = rank.stream()
        x = lab.full(stream, rank.index + 1)
        if rank.index == 1:
            time.sleep(rank.timeout_s / 4)
        group.all_reduce(x, stream=stream)
        expect(lab.read_tensor(stream, x), 3.0, "the sum with a rank that was late")


# -- tools -------------------------------------------------------------------------------------------------------------


def calls_are_reported(rank: RankHandle) -> None:
    """Check that an observer receives each call and decision in order, before the call waits for a peer."""
    with closing(rank.group()) as group:
        stream = rank.stream()
        x, every = rank.lab.full(stream, 1), copy_to_device(rank, stream, torch.zeros(2, 64))
        with observed_calls(rank.backend) as observer:
            group.decide("bucket", 4)
            group.all_reduce(x, stream=stream, reduction=Reduction.MAX)
            group.decide("mode", "fused")
            group.all_gather(every, x, stream=stream)
            group.broadcast(x, root=0, stream=stream)
            if rank.index == 0:
                group.send(x, to=1, stream=stream)
            else:
                group.receive(x, source=0, stream=stream)
            stream.synchronize()
        plain = (None, None, None)
        reads, writes = ((1, 0), (0, 1))[rank.index]
        wanted = [
            ("all", "bucket", 4),
            ("all", "all_reduce", 1, 64, (Reduction.MAX, None, None), stream.name, 1, 1),
            ("all", "mode", "fused"),
            ("all", "all_gather", 2, 64, plain, stream.name, 1, 1),
            ("all", "broadcast", 3, 64, (None, 0, None), stream.name, reads, writes),
            ("all", ("send", "receive")[rank.index], 1, 64, (None, None, 1 - rank.index), stream.name, reads, writes),
        ]
        reports = [given for name, given, _ in observer.method_calls if name in ("collective", "decided")]
        for found, expected in zip(map(_shown, reports), wanted, strict=True):
            expect(found, expected, "a report to the observer")


def _shown(report: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a report to an observer with the names of its objects, and with the numbers of operands that a call accesses,
    without memory that other ranks write.
    """
    group, call, *rest = report
    if not isinstance(call, Collective):
        return group.name, call, *rest
    stream, reads, writes = rest
    writes = [each for each in writes if not any(each is buffer for buffer in group.peer_written)]
    peers = (call.reduction, call.root, call.peer)
    return group.name, call.kind, call.sequence, call.count, peers, stream.name, len(reads), len(writes)


# -- kernels, and memory of the peers ----------------------------------------------------------------------------------


def fused_norm(rank: RankHandle, dtype: str, shapes: list[list[int]]) -> list[float]:
    """Compare the fused all-reduce and norm with the reference, with all and with each of the implementations. Return the
    rank's own results.
    """
    kind = getattr(torch, dtype)
    backend, kernels, reference = rank.backend, rank.backend.kernels_in_use, KernelSet()
    found: list[float] = []
    with closing(rank.group()) as group, closing(rank.group("plain")) as plain:
        plain.restrict_implementations()
        turns = (group.implementations, *((each,) for each in group.implementations), group.implementations)
        stream = rank.stream()
        for rows, width in shapes:
            dice = torch.Generator().manual_seed(rows + width)
            parts = torch.randn(rank.size, rows, width, generator=dice).to(kind)
            start = torch.randn(rows, width, generator=dice).to(kind)
            weight = copy_to_device(rank, stream, torch.rand(width, generator=dice).add_(0.5).to(kind))
            residual, wanted = copy_to_device(rank, stream, start), copy_to_device(rank, stream, start)
            for turn, ways in enumerate(turns):
                group.restrict_implementations(*ways)
                x, y = (copy_to_device(rank, stream, parts[rank.index]) for _ in range(2))
                if turn % 2 == rank.index:
                    rank.lab.slow(stream)
                with backend.on(stream):
                    normed = kernels.all_reduce_rms_norm(x, residual, weight, 1e-6, group=group, stream=stream)
                plain.all_reduce(y, stream=stream)
                with backend.on(stream):
                    expected = reference.add_rms_norm(y, wanted, weight, 1e-6)
                stream.synchronize()
                where = f"{dtype} [{rows}, {width}], call {turn}, one of {ways}"
                _assert_close(residual, wanted, kind, f"the residual of {where}")
                _assert_close(normed, expected, kind, f"the norm of {where}")
                with backend.on(stream):
                    wanted.copy_(residual)
            found += normed.cpu().double().flatten().tolist()
        expect(group.last_call is not None and group.last_call.kind, "all_reduce", "what the group counted")
        expect(group.call_count, len(turns) * len(shapes), "how many calls the group counted")
    return found


def _assert_close(found: Tensor, wanted: Tensor, kind: torch.dtype, what: str) -> None:
    scale = 16 * torch.finfo(kind).eps
    torch.testing.assert_close(
        found.cpu().double(), wanted.cpu().double(), rtol=scale, atol=scale, msg=lambda text: f"{what}: {text}"
    )


def shared_memory(rank: RankHandle) -> bool:
    """Check that each rank finds the values that the others wrote into its buffers. False if the devices have no peer
    memory.
    """
    lab = rank.lab
    with closing(rank.group()) as group:
        if not group.has_peer_memory:
            _raises(CapabilityError, "peer_buffers without peer memory", lambda: group.peer_buffers("b", (4,), torch.int32))
            return False
        stream = rank.stream()
        first, second = (group.peer_buffers(name, (rank.size, 64), torch.float32) for name in ("first", "second"))
        for buffer in (*first, *second):
            expect(lab.read_tensor(stream, buffer), 0.0, "a buffer before the first write")
        gate = lab.full(stream, 0)
        group.all_reduce(gate, stream=stream)
        for index, buffer in enumerate(first):
            lab.fill(stream, buffer[rank.index], 10 * rank.index + index + 1)
        group.all_reduce(gate, stream=stream)
        stream.synchronize()
        own = [lab.current_values(first[rank.index][index]) for index in range(rank.size)]
        expect(
            own, [10.0 * index + rank.index + 1 for index in range(rank.size)], "what the ranks wrote into this one's memory"
        )
        expect(lab.current_values(second[rank.index]), 0.0, "another buffer")
    return True
