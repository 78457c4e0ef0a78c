"""Collectives: operations by which the ranks of a group move and reduce tensors between their devices.

A rank is one device with one host thread (or process). Ranks that communicate form a :class:`Group`; each holds its own
side of it, made by ``Backend.create_group``. The verbs are optional: a backend that doesn't declare ``collectives`` runs on
one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from outrider.device.errors import CapabilityError, CollectiveError, InterfaceError

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.graph import Graph
    from outrider.device.stream import Stream

Decision: TypeAlias = int | str | tuple[int, ...] | None
"""A value of a decision that all ranks share: small, and comparable between processes."""

_INTEGERS = (torch.int32, torch.int64)


class Reduction(StrEnum):
    """The operation that combines the elements of all ranks."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's call of a verb, as reported to an observer and named in errors.

    Calls of different ranks match if their group and ``sequence`` are equal. All other fields of matching calls must be
    equal too, except ``peer`` and ``captured``.
    """

    kind: str
    """Name of the verb."""
    sequence: int
    """Number of the call, from 1, among the calls that all ranks of the group make. ``send`` and ``receive`` are counted
    for each pair of ranks and direction."""
    dtype: torch.dtype
    count: int
    """Number of elements that one rank contributes."""
    reduction: Reduction | None = None
    root: int | None = None
    """Index in the group of the rank that broadcasts."""
    peer: int | None = None
    """Index in the group of the rank that receives or sends."""
    captured: bool = False
    """The call was recorded into a graph and did not run."""

    def __str__(self) -> str:
        about = [f"{self.count} of {str(self.dtype).removeprefix('torch.')}"]
        about += [] if self.reduction is None else [str(self.reduction)]
        about += [] if self.root is None else [f"root {self.root}"]
        about += [] if self.peer is None else [f"with rank {self.peer}"]
        return f"{self.kind} #{self.sequence} ({', '.join(about)})"

    @property
    def verb(self) -> str:
        """The verb that matching calls share: a send and its receive are one message."""
        return "message" if self.kind in ("send", "receive") else self.kind

    def difference(self, other: Collective) -> str:
        """Return the first field in which two calls differ that should match, with both values, or an empty string."""
        mine, theirs = self._shared_fields(), other._shared_fields()
        return next((f"{name} {mine[name]} and {theirs[name]}" for name in mine if mine[name] != theirs[name]), "")

    def _shared_fields(self) -> dict[str, object]:
        return {
            "kind": self.verb,
            "reduction": self.reduction or "none",
            "dtype": str(self.dtype).removeprefix("torch."),
            "count": self.count,
            "root": "none" if self.root is None else self.root,
            "issued": "in a graph" if self.captured else "eagerly",
        }


class Group(ABC):
    """Ranks that communicate, as one of them sees it. A vendor subclasses it and implements the underscored verbs.

    ``ranks`` are ranks of the world, in the group's order. ``rank`` is this rank's index in the group; ``size`` is the
    number of ranks.
    Every ``root``, ``to`` and ``source`` is an index in the group too.

    *Matching.* Every rank of the group makes the same calls in the same order, with the same shapes, dtype, reduction and
    root, all of them captured or none. The exception is ``send``, which the other rank matches with ``receive``. A rank
    that omits a call, or makes one more, stops the others: only a tool or a time limit reports that.

    *Ordering.* A verb is work of ``stream``: it reads and writes in the order of that stream, as a kernel does, and returns
    before it has run if the backend declares ``asynchronous``. Otherwise it has run when the call returns. A call orders
    this rank's stream after the contributions of the other ranks, and after no other work of theirs. Two calls of one group
    on different streams need an event between them, in the same order on every rank. So do calls of two groups that share
    two ranks or more.

    *Lifetime.* Operands must live, unchanged, until the stream has passed the call; the group keeps nothing alive. An output
    must not overlap another operand.

    *Results.* A reduction gives each rank the same bits. Its order of summation may depend on the shape.

    *Operands.* Contiguous tensors of the backend's device. A reduced tensor has one of the capability's ``dtypes``, int32
    or int64; a tensor that is only moved may have any dtype. A call with an empty tensor counts like any other call.

    *Capture.* In a capture a call becomes part of the graph where the backend declares ``captures_collectives``; each
    replay then makes it anew, on every rank. Elsewhere it raises :class:`CapabilityError`.

    *Threads.* One thread of a rank at a time. Ranks may be threads of one process where the backend allows it.

    *Errors.* Wrong operands, another backend's stream and a closed group raise :class:`InterfaceError` before anything is
    enqueued. A peer that died, or that didn't come within the group's ``timeout_s``, is a :class:`CollectiveError` that
    names group, rank, sequence and kind. The call raises it if the backend isn't ``asynchronous``; otherwise the host's next
    wait for the stream raises it, within its time limit. The group can't be used after that; close it.
    """

    def __init__(self, backend: Backend, name: str, ranks: Sequence[int], rank: int, *, timeout_s: float) -> None:
        """Create one rank's membership. ``rank`` is the world rank of this process, one of ``ranks``."""
        self.backend = backend
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self.last_call: Collective | None = None
        self.last_decision: tuple[str, Decision] | None = None
        self.closed = False
        self._allowed_implementations: frozenset[str] | None = None
        self._capturing_graphs: WeakSet[Graph] = WeakSet()
        self._sequence = 0
        self._peer_written: list[Tensor] = []
        self._point_to_point_calls: dict[tuple[int, int], int] = {}

    # -- the verbs -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, stream: Stream, reduction: Reduction = Reduction.SUM) -> None:
        """Replace ``tensor`` by the reduction of all ranks' tensors, in place."""
        call = self.announce(tensor, stream=stream, reduction=reduction)
        self._carry_out(call, stream, self._all_reduce, tensor, reduction)

    def all_gather(self, output: Tensor, tensor: Tensor, *, stream: Stream) -> None:
        """Copy the ``tensor`` of each rank i to ``output[i]``; ``output`` is [size, …], ``tensor`` is […]."""
        self._check_stacked(output, tensor, "all_gather", "output", "tensor")
        call = self._call("all_gather", stream, output, tensor, reads=(tensor,), writes=(output,))
        self._carry_out(call, stream, self._all_gather, output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, *, stream: Stream, reduction: Reduction = Reduction.SUM) -> None:
        """Write this rank's part of the reduction of all ranks' ``tensor`` to ``output``.

        ``tensor`` is [size, …] and ``output`` […]. The contents of ``tensor`` are undefined afterwards.
        """
        self._check_reduced(tensor, "reduce_scatter")
        self._check_stacked(tensor, output, "reduce_scatter", "tensor", "output")
        call = self._call(
            "reduce_scatter", stream, output, tensor, reads=(tensor,), writes=(output, tensor), reduction=reduction
        )
        self._carry_out(call, stream, self._reduce_scatter, output, tensor, reduction)

    def broadcast(self, tensor: Tensor, *, root: int, stream: Stream) -> None:
        """Replace ``tensor`` by the tensor of rank ``root``, in place."""
        self._check_member("broadcast", "root", root)
        reads, writes = ((tensor,), ()) if self.rank == root else ((), (tensor,))
        call = self._call("broadcast", stream, tensor, tensor, reads=reads, writes=writes, root=root)
        self._carry_out(call, stream, self._broadcast, tensor, root)

    def all_to_all(self, output: Tensor, tensor: Tensor, *, stream: Stream) -> None:
        """Copy ``tensor[rank]`` of each rank i to ``output[i]``, where ``rank`` is this rank. Both tensors are [size, …].

        Raises :class:`InterfaceError` for other shapes.
        """
        if output.shape != tensor.shape or not tensor.dim() or tensor.shape[0] != self.size:
            raise self._interface_error(
                "all_to_all", f"output {list(output.shape)} and tensor {list(tensor.shape)}, expected both [{self.size}, …]"
            )
        call = self._call("all_to_all", stream, output, tensor, reads=(tensor,), writes=(output,))
        self._carry_out(call, stream, self._all_to_all, output, tensor)

    def send(self, tensor: Tensor, *, to: int, stream: Stream) -> None:
        """Send ``tensor`` to rank ``to``, which calls ``receive``.

        If the backend isn't ``asynchronous``, the call may wait for the receiver.
        """
        self._check_member("send", "to", to, other=True)
        call = self._call("send", stream, tensor, tensor, reads=(tensor,), writes=(), peer=to)
        self._carry_out(call, stream, self._send, tensor, to)

    def receive(self, tensor: Tensor, *, source: int, stream: Stream) -> None:
        """Fill ``tensor`` with the next tensor that rank ``source`` sends to this rank, of the same shape and dtype."""
        self._check_member("receive", "source", source, other=True)
        call = self._call("receive", stream, tensor, tensor, reads=(), writes=(tensor,), peer=source)
        self._carry_out(call, stream, self._receive, tensor, source)

    # -- memory that the ranks share -------------------------------------------------------------------------------

    @property
    def has_peer_memory(self) -> bool:
        """Return True if :meth:`peer_buffers` works between these ranks. All ranks return the same value."""
        return False

    def peer_buffers(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return one zero-filled buffer per rank, which every rank can access: element i is memory of rank i's device.

        Every rank calls this with the same arguments in the same order, and blocks until all have. Only the
        kernels that write to the buffers order their writes. The buffers live as long as the group is open. An observer hears
        that each later call of the group writes the buffer of this rank.

        Raises :class:`CapabilityError` if the ranks can't access each other's memory, :class:`InterfaceError` in a capture,
        and :class:`CollectiveError` if a rank doesn't make the call.
        """
        if not self.has_peer_memory:
            raise CapabilityError(
                f"the ranks of group {self.name!r} of {self.backend.label} don't reach each other's memory, so {name!r} "
                "can't be made; use the group's verbs"
            )
        if self.closed:
            raise self._interface_error("peer_buffers", "the group is closed; create another")
        capture = self.backend.active_capture
        if capture is not None and not capture.rehearsal:
            raise self._interface_error("peer_buffers", f"{name!r} in a capture; make it before")
        with self.backend.guard(f"making {name!r} for the ranks of group {self.name!r}"):
            buffers = self._peer_buffers(name, tuple(shape), dtype)
        self._peer_written.append(buffers[self.rank])
        return buffers

    @property
    def peer_written(self) -> tuple[Tensor, ...]:
        """Return the memory of this rank's device that other ranks write (:meth:`peer_buffers`)."""
        return tuple(self._peer_written)

    # -- implementations of a call ---------------------------------------------------------------------------------

    @property
    def implementations(self) -> tuple[str, ...]:
        """Return the names of this group's implementations of a call. Verb and size decide which one a call uses.

        The first implementation supports every call. All ranks return the same names.
        """
        return ("library",)

    def restrict_implementations(self, *ways: str) -> None:
        """Restrict calls to these implementations and the first, to measure each. Call on every rank, not in a capture.

        Raises :class:`InterfaceError` for a name that isn't in ``implementations``.
        """
        unknown = set(ways) - set(self.implementations)
        if unknown:
            raise self._interface_error(
                "take", f"there is no way {', '.join(sorted(unknown))}, expected some of {list(self.implementations)}"
            )
        self._allowed_implementations = frozenset(ways)

    def allows_implementation(self, way: str) -> bool:
        """Return True if a call may use the implementation ``way``."""
        return self._allowed_implementations is None or way in self._allowed_implementations

    # -- decisions, reports and the end of a group -----------------------------------------------------------------

    def decide(self, name: str, value: Decision) -> None:
        """Report to an attached tool a decision of the host that every rank must make equally, in the same order.

        Nothing is sent. Report each branch of the host on which later calls depend. If ranks differ, a tool then names the
        first differing decision and not the call that hung.
        """
        self.last_decision = (name, value)
        self.backend.listener.decided(self, name, value)

    def announce(
        self,
        tensor: Tensor,
        *,
        stream: Stream,
        reduction: Reduction = Reduction.SUM,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> Collective:
        """Check, count and report an ``all_reduce`` of ``tensor`` that the caller executes itself, as fused kernels do.

        ``reads`` and ``writes`` are the caller's further operands; ``tensor`` itself counts as read and written.
        """
        self._check_reduced(tensor, "all_reduce")
        return self._call("all_reduce", stream, tensor, reads=(tensor, *reads), writes=(tensor, *writes), reduction=reduction)

    @property
    def call_count(self) -> int:
        """Return how many calls this rank has made that all ranks of the group make."""
        return self._sequence

    @property
    def progress(self) -> str:
        """Return the progress of this rank, for errors: its index in the group, last decision and last call."""
        decision = "no decision" if self.last_decision is None else "{} = {!r}".format(*self.last_decision)
        return (
            f"rank {self.rank} of {self.size} in group {self.name!r}: last decided {decision}, last called {self.last_call}"
        )

    def close(self) -> None:
        """Release the connections and buffers of the group. Allowed twice; no call of the group may be in flight.

        The exception is a call whose peer has left, which never ends: then the method gives up what it can within seconds.
        Graphs that hold calls of the group are released too: a later replay raises :class:`InterfaceError`.
        """
        if not self.closed:
            self.closed = True
            self._peer_written.clear()
            try:
                for graph in tuple(self._capturing_graphs):
                    graph.release(f"group {self.name!r}, whose calls it holds, is closed")
            finally:
                self._close()

    # -- checks ----------------------------------------------------------------------------------------------------

    def _call(
        self,
        kind: str,
        stream: Stream,
        *operands: Tensor,
        reads: tuple[Tensor, ...],
        writes: tuple[Tensor, ...],
        reduction: Reduction | None = None,
        root: int | None = None,
        peer: int | None = None,
    ) -> Collective:
        """Check the rules that all verbs share, count the call and report it."""
        if self.closed:
            raise self._interface_error(kind, "the group is closed; create another")
        for tensor in operands:
            if tensor.device != self.backend.device:
                raise self._interface_error(kind, f"a tensor is on {tensor.device}, expected {self.backend.device}")
            if not tensor.is_contiguous():
                raise self._interface_error(
                    kind, f"strides {tuple(tensor.stride())} aren't contiguous; pass a contiguous tensor"
                )
            if tensor.dtype != operands[0].dtype:
                raise self._interface_error(kind, f"operands are {operands[0].dtype} and {tensor.dtype}, expected one dtype")
        capture = self.backend.active_capture
        if capture is not None and not self.backend.capabilities.captures_collectives:
            raise CapabilityError(
                f"{kind} of group {self.name!r} in a capture: {self.backend.label} doesn't declare captures_collectives; "
                "call it between graphs"
            )
        if peer is None:
            self._sequence = sequence = self._sequence + 1
        else:
            pair = (self.rank, peer) if kind == "send" else (peer, self.rank)
            self._point_to_point_calls[pair] = sequence = self._point_to_point_calls.get(pair, 0) + 1
        call = Collective(
            kind=kind,
            sequence=sequence,
            dtype=operands[-1].dtype,
            count=operands[-1].numel(),
            reduction=reduction,
            root=root,
            peer=peer,
            captured=capture is not None and not capture.rehearsal,
        )
        self.last_call = call
        if call.captured and capture is not None and capture.graph is not None:
            self._capturing_graphs.add(capture.graph)
        self.backend.listener.collective(self, call, stream, reads, (*writes, *self._peer_written))
        return call

    def _carry_out(self, call: Collective, stream: Stream, verb: Callable[..., None], *arguments: object) -> None:
        """Carry out a vendor's verb in the scope of ``stream``, unless the call's tensor is empty."""
        if call.count:
            doing = f"calling {call} as rank {self.rank} of group {self.name!r}"
            with self.backend.on(stream), self.backend.guard(doing):
                verb(*arguments)

    def _check_reduced(self, tensor: Tensor, kind: str) -> None:
        floats = self.backend.capabilities.dtypes
        if tensor.dtype not in floats and tensor.dtype not in _INTEGERS:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in (*floats, *_INTEGERS)))
            raise self._interface_error(kind, f"{tensor.dtype} isn't reduced here, only {known}")

    def _check_stacked(self, stacked: Tensor, part: Tensor, kind: str, stacked_name: str, part_name: str) -> None:
        if tuple(stacked.shape) != (self.size, *part.shape):
            raise self._interface_error(
                kind,
                f"{stacked_name} {list(stacked.shape)} and {part_name} {list(part.shape)}, expected {stacked_name} "
                f"{[self.size, *part.shape]}",
            )

    def _check_member(self, kind: str, what: str, index: int, *, other: bool = False) -> None:
        if not 0 <= index < self.size:
            raise self._interface_error(kind, f"{what} is {index}, expected an index in the group, 0 to {self.size - 1}")
        if other and index == self.rank:
            raise self._interface_error(kind, f"{what} is {index}, this rank itself; copy on the stream instead")

    def _interface_error(self, kind: str, what: str) -> InterfaceError:
        return InterfaceError(f"{kind} of rank {self.rank} in group {self.name!r} of {self.backend.label}: {what}")

    def failed(self, reason: object, call: Collective | None = None) -> CollectiveError:
        """Return the error of a failed call, by default of the last call; for vendors to raise."""
        call = call or self.last_call
        kind, sequence = ("create_group", 0) if call is None else (call.kind, call.sequence)
        where = f"rank {self.rank} of group {self.name!r} (ranks {list(self.ranks)}, {self.backend.label})"
        return CollectiveError(
            f"{call or kind} failed on {where}: {reason}; a rank died, came too late (limit {self.timeout_s:g} s), or didn't "
            "make the same call",
            self.name,
            self.rank,
            sequence,
            kind,
        )

    # -- verbs that a vendor implements; each runs in the scope of the stream, with checked operands --------------------

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Carry out :meth:`all_reduce` on the vendor's device."""

    @abstractmethod
    def _all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Carry out :meth:`all_gather` on the vendor's device."""

    @abstractmethod
    def _reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        """Carry out :meth:`reduce_scatter` on the vendor's device."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Carry out :meth:`broadcast` on the vendor's device."""

    @abstractmethod
    def _all_to_all(self, output: Tensor, tensor: Tensor) -> None:
        """Carry out :meth:`all_to_all` on the vendor's device."""

    @abstractmethod
    def _send(self, tensor: Tensor, to: int) -> None:
        """Carry out :meth:`send` on the vendor's device."""

    @abstractmethod
    def _receive(self, tensor: Tensor, source: int) -> None:
        """Carry out :meth:`receive` on the vendor's device."""

    def _peer_buffers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Carry out :meth:`peer_buffers` on the vendor's device, if ``has_peer_memory``."""
        del shape, dtype
        raise CapabilityError(f"{self.backend.label} says that ranks reach each other's memory but gives none ({name!r})")

    def _close(self) -> None:  # noqa: B027  (nothing to give up is right)
        """Carry out :meth:`close` on the vendor's device, called once."""

    def __repr__(self) -> str:
        return f"<Group {self.name!r}, rank {self.rank} of {self.size}, of {self.backend.label}>"
