"""Programs for two ranks: failing peers, fused kernels, and memory that ranks share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from outrider.device import (
    CapabilityError,
    CollectiveError,
    Group,
    KernelSet,
    Stream,
)
from outrider_conformance.lab import expect
from outrider_conformance.ranks.programs import copy_to_device
from outrider_conformance.ranks.runner import RankHandle

_MAX_CLOSE_S = 10.0
"""Seconds after which a group that lost a peer must be closed."""
_MAX_OVERRUN_S = 20.0


# -- errors ------------------------------------------------------------------------------------------------------------


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
        assert lab.asynchronous, "the call came back without its peer, and nothing was raised"
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
