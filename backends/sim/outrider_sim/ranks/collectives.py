"""Groups of simulated ranks. A collective is computed once all ranks' parts have started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.device import CollectiveError, DeadlockError, Group, Reduction
from outrider_sim.machine.queue import Op, OperationKind, python_line
from outrider_sim.ranks.exchange import STUCK, CollectivePart, CollectiveRendezvous, Exchange, IssuedCollective
from outrider_sim.torch_device.tensor import SimTensor

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

    from outrider_sim.backend import SimBackend
    from outrider_sim.ranks.exchange import Member


class RanksDeadlock(CollectiveError, DeadlockError):
    """Error for ranks that wait for each other or for an absent rank. The text is the wait-for graph."""


class CapturedCollective:
    """A collective call in a captured graph; each replay issues the call anew.

    The start operation issues this rank's part, and the end operation of the same replay refers to that part.
    """

    def __init__(self, member: Member, call: IssuedCollective) -> None:
        self._member = member
        self.call = call
        self._part: CollectivePart | None = None

    def again(self, op: Op) -> Op:
        """Return a copy of `op` for one more replay; the start operation issues a new part of the collective."""
        if op.kind == OperationKind.COLLECTIVE_START:
            self._part = self._member.issue(self.call)
            self._part.captured = self
        fresh = op.again()
        fresh.target = self._part
        return fresh


class SimGroup(Group):
    """One rank's membership in a group of simulated devices.

    `timeout_s` never expires, because there is no clock. An absent rank is detected once no operation can run.
    """

    backend: SimBackend

    def __init__(
        self, backend: SimBackend, name: str, ranks: Sequence[int], rank: int, member: Member, timeout_s: float
    ) -> None:
        super().__init__(backend, name, ranks, rank, timeout_s=timeout_s)
        self.member = member
        member.error = self._failure

    def _failure(self, reason: str, part: CollectivePart) -> CollectiveError:
        if reason.startswith(STUCK):
            text = f"{part.call.collective} never ends on rank {self.rank} of group {self.name!r}: {reason}"
            return RanksDeadlock(text, self.name, self.rank, part.number, part.call.collective.kind)
        told = self.failed(reason, part.call.collective)
        return CollectiveError(str(told), self.name, self.rank, part.number, part.call.collective.kind)

    def _all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        self._issue(lambda rendezvous: _reduce(rendezvous, reduction), tensor, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> None:
        self._issue(_gather, tensor, output)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        self._issue(lambda rendezvous: _reduce_scatter(rendezvous, reduction), tensor, output)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        mine = self.rank == root
        self._issue(lambda rendezvous: _copy(rendezvous, root), tensor if mine else None, None if mine else tensor)

    def _all_to_all(self, output: Tensor, tensor: Tensor) -> None:
        self._issue(_exchange, tensor, output)

    def _send(self, tensor: Tensor, to: int) -> None:
        self._issue(lambda rendezvous: _copy(rendezvous, rendezvous.members[0]), tensor, None, (self.rank, to))

    def _receive(self, tensor: Tensor, source: int) -> None:
        self._issue(lambda rendezvous: _copy(rendezvous, rendezvous.members[0]), None, tensor, (source, self.rank))

    def _issue(
        self,
        compute: Callable[[CollectiveRendezvous], None],
        read: Tensor | None,
        write: Tensor | None,
        channel: tuple[int, int] | None = None,
    ) -> None:
        machine = self.backend.sim.machine
        stream = machine.stream
        collective = self.last_call
        assert collective is not None
        machine.local.line = python_line()
        call = IssuedCollective(
            collective=collective,
            channel=channel,
            line=machine.local.line,
            compute=compute,
            read=_inner(read),
            write=_inner(write),
        )
        cost = machine.like.kernel_us
        target = CapturedCollective(self.member, call) if stream.capture is not None else self.member.issue(call)
        for kind, what in ((OperationKind.COLLECTIVE_START, "start of "), (OperationKind.COLLECTIVE, "")):
            op = Op(
                kind, f"{what}{collective.kind} of {self.name}", target=target, cost=cost * (kind == OperationKind.COLLECTIVE)
            )
            op.line = call.line
            if isinstance(target, CollectivePart):
                target.stream = stream
            machine.enqueue(op, stream)

    def _close(self) -> None:
        self.member.closed = True


def create_group(
    backend: SimBackend, name: str, ranks: tuple[int, ...], rank: int, store: Store, timeout_s: float
) -> SimGroup:
    """Create one rank's membership in a new group. The scheduler knows all ranks, so `store` isn't used.

    Raises `CollectiveError` if the ranks don't meet.
    """
    del store
    scheduler = backend.sim.machine.scheduler
    if scheduler.exchange is None:
        scheduler.exchange = Exchange(scheduler)
    index = ranks.index(rank)
    joined = scheduler.exchange.join(name, ranks, index, backend.sim.machine)
    if isinstance(joined, str):
        raise CollectiveError(f"group {name!r} (ranks {list(ranks)}): {joined}", name, index, 0, "create_group")
    return SimGroup(backend, name, ranks, rank, joined, timeout_s)


def _inner(tensor: Tensor | None) -> Tensor | None:
    return tensor._inner if isinstance(tensor, SimTensor) else tensor


# -- values: every operand is read before any is written --------------------------------------------------------------


def _read_operands(rendezvous: CollectiveRendezvous) -> list[Tensor]:
    return [rendezvous.parts[index].call.read for index in rendezvous.members]


def _writes(rendezvous: CollectiveRendezvous, results: Sequence[Tensor]) -> None:
    for index, result in zip(rendezvous.members, results, strict=True):
        rendezvous.parts[index].call.write.copy_(result)


def _reduced(values: Sequence[Tensor], reduction: Reduction) -> Tensor:
    """Reduce the ranks' tensors in rank order, so that every rank gets the same bits; 16-bit floats are summed in float32."""
    first = values[0]
    wide = torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else first.dtype
    total = first.to(wide, copy=True)
    for value in values[1:]:
        if reduction is Reduction.SUM:
            total += value.to(wide)
        else:
            total = (
                torch.maximum(total, value.to(wide)) if reduction is Reduction.MAX else torch.minimum(total, value.to(wide))
            )
    return total.to(first.dtype)


def _reduce(rendezvous: CollectiveRendezvous, reduction: Reduction) -> None:
    total = _reduced(_read_operands(rendezvous), reduction)
    _writes(rendezvous, [total] * len(rendezvous.members))


def _gather(rendezvous: CollectiveRendezvous) -> None:
    stacked = torch.stack(_read_operands(rendezvous))
    _writes(rendezvous, [stacked] * len(rendezvous.members))


def _reduce_scatter(rendezvous: CollectiveRendezvous, reduction: Reduction) -> None:
    total = _reduced(_read_operands(rendezvous), reduction)
    _writes(rendezvous, [total[i].clone() for i in range(len(rendezvous.members))])


def _exchange(rendezvous: CollectiveRendezvous) -> None:
    parts = _read_operands(rendezvous)
    _writes(rendezvous, [torch.stack([part[i] for part in parts]) for i in range(len(parts))])


def _copy(rendezvous: CollectiveRendezvous, source: int) -> None:
    value = rendezvous.parts[source].call.read.clone()
    for part in rendezvous.parts.values():
        if part.call.write is not None:
            part.call.write.copy_(value)
