"""`torch.distributed` between simulated devices: the backend `simccl`, for programs that use torch alone.

As with NCCL, a call runs on a stream of its group, after the work that the caller's stream holds. `wait()` on the work
object of an asynchronous call makes the caller's stream wait. Host tensors are copied through the rank's device, and the
host waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.device import CapabilityError, Reduction
from outrider_sim.torch_device.tensor import SimTensor

if TYPE_CHECKING:
    from outrider_sim.backend import SimBackend
    from outrider_sim.ranks.collectives import SimGroup
    from outrider_sim.streams import SimStream

NAME = "simccl"


class SimWork(dist.Work):
    """A collective call in flight. It references the call's tensors until the caller waits."""

    def __init__(self, event: Any, held: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._event = event
        self._held = held

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the collective call."""
        del timeout
        if self._event is not None:
            current(self._event.backend).wait(self._event)
        self._held = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective call has run."""
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        """Return None: failures are raised when the host waits."""
        return self.is_completed()

    def synchronize(self) -> None:
        """Make the current stream wait for the collective call, as `wait` does."""
        self.wait()

    def get_future(self) -> Any:
        """Return a complete future of the call's tensors. The values arrive in the order of the current stream."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future

    def result(self) -> list[Tensor]:
        """Return the tensors that the collective call references."""
        return list(self._held)


def current(backend: SimBackend) -> SimStream:
    """Return the calling thread's current stream on the backend's device."""
    queue = backend.sim.machine.stream
    return next((s for s in backend.streams if s.native is queue), backend.default_stream)  # type: ignore[return-value]  # ours are sim's


_ProcessGroup: Any = dist.ProcessGroup  # whose methods are overloads; torch gives these operands alone


class SimProcessGroup(_ProcessGroup):  # type: ignore[misc]  # torch's class has no stub: Any
    """One rank's membership in a torch.distributed group."""

    def __init__(self, backend: SimBackend, name: str, ranks: Sequence[int], store: Any) -> None:
        world = backend.sim.machine.rank
        super().__init__(list(ranks).index(world), len(ranks))
        self.backend = backend
        made = backend.create_group(f"torch {name}", ranks=ranks, rank=world, store=store)
        self.sim_group: SimGroup = made  # type: ignore[assignment]  # a simulated backend makes no other
        self._streams: dict[tuple[str, int], SimStream] = {}
        self._called = name
        self._index, self._count = self.sim_group.rank, self.sim_group.size

    # -- what torch asks -------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return the index of the calling rank in the group."""
        return self._index

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._count

    def name(self) -> str:
        """Return the name of the torch.distributed backend."""
        return NAME

    def getBackendName(self) -> str:  # noqa: N802  (torch calls it so)
        """Return the name of the torch.distributed backend, under the method name that torch's C++ code calls."""
        return NAME

    @property
    def group_name(self) -> str:
        """Return the name by which functional collectives find the group."""
        return self._called

    @property
    def pg_name(self) -> str:
        """Return the name that torch gave the group."""
        return self._called

    def _set_group_name(self, name: str) -> None:
        self._called = name

    def _set_group_desc(self, text: str) -> None:
        """Ignore the group's description, which has no effect."""

    def shutdown(self) -> None:
        """Leave the group and release its simulated members."""
        self.sim_group.close()

    def abort(self) -> None:
        """Leave the group and release its simulated members."""
        self.sim_group.close()

    # -- running a call --------------------------------------------------------------------------------------------

    def _stream(self, channel: str = "", peer: int = -1) -> SimStream:
        if (channel, peer) not in self._streams:
            name = f"{self.sim_group.name}{f' {channel} {peer}' if channel else ''}"
            self._streams[channel, peer] = self.backend.create_stream(name)  # type: ignore[assignment]  # sim's
        return self._streams[channel, peer]

    def _run(self, verb: Callable[[SimStream], None], held: Sequence[Tensor], channel: str = "", peer: int = -1) -> SimWork:
        """Call the collective `verb` on the group's stream, ordered after the caller's stream."""
        mine, theirs = current(self.backend), self._stream(channel, peer)
        if mine is not theirs:
            before = self.backend.create_event(f"{self.sim_group.name}: called")
            mine.record(before)
            theirs.wait(before)
        with self.backend.on(theirs):
            verb(theirs)
        event = self.backend.create_event(f"{self.sim_group.name}: done")
        theirs.record(event)
        work = SimWork(event, tuple(held))
        if any(not isinstance(tensor, SimTensor) for tensor in held):
            work.wait()
            current(self.backend).synchronize()
        return work

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if it is a contiguous device tensor, else a contiguous copy on the rank's device."""
        if isinstance(tensor, SimTensor) and tensor.is_contiguous():
            return tensor
        return tensor.detach().to(self.backend.device).contiguous()

    @staticmethod
    def _back(tensor: Tensor, made: Tensor) -> None:
        if made is not tensor:
            tensor.detach().copy_(made)

    # -- the calls -----------------------------------------------------------------------------------------------------

    def _in_place(
        self, tensors: Any, change: Callable[[Tensor, SimStream], None], channel: str = "", peer: int = -1
    ) -> SimWork:
        """Call `change` with each tensor, or with its copy on the rank's device, and copy the result back."""

        def verb(stream: SimStream) -> None:
            for tensor in _list(tensors):
                made = self._on_device(tensor)
                change(made, stream)
                self._back(tensor, made)

        return self._run(verb, _list(tensors), channel, peer)

    def _reduce(self, tensor: Tensor, stream: SimStream, opts: Any) -> None:
        """Replace a tensor on the rank's device by its reduction over all ranks."""
        reduction, average = _reduction(opts)
        self.sim_group.all_reduce(tensor, stream=stream, reduction=reduction)
        if average:
            tensor.div_(self._count)

    def allreduce(self, tensors: Any, opts: Any = None) -> SimWork:
        """Reduce each tensor in place over all ranks."""
        return self._in_place(tensors, lambda tensor, stream: self._reduce(tensor, stream, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SimWork:
        """Reduce several tensors in place over all ranks, each as `allreduce` does."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> SimWork:
        """Reduce the ranks' tensors into the root's tensor. The other ranks' tensors are unchanged."""

        def change(tensor: Tensor, stream: SimStream) -> None:
            reduced = tensor.clone()
            self._reduce(reduced, stream, opts)
            if opts.rootRank == self._index:
                tensor.detach().copy_(reduced)

        return self._in_place(tensors, change)

    def broadcast(self, tensors: Any, opts: Any) -> SimWork:
        """Copy the root's values to all ranks' tensors."""
        return self._in_place(
            tensors, lambda tensor, stream: self.sim_group.broadcast(tensor, root=opts.rootRank, stream=stream)
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        """Copy every rank's tensor to each rank's list of output tensors."""
        del opts

        def verb(stream: SimStream) -> None:
            for into, tensor in zip(outputs, _list(inputs), strict=True):
                made = self._on_device(tensor)
                gathered = made.new_empty((self._count, *made.shape))
                self.sim_group.all_gather(gathered, made, stream=stream)
                for part, one in zip(into, gathered.unbind(0), strict=True):
                    part.detach().copy_(one)

        return self._run(verb, [*(t for into in outputs for t in into), *_list(inputs)])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        """Copy several tensors of every rank to `outputs`, which is indexed by rank first, unlike in `allgather`."""
        return self.allgather([[per_rank[i] for per_rank in outputs] for i in range(len(inputs))], inputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SimWork:
        """Concatenate every rank's tensor in `output`, in rank order."""
        del opts

        def verb(stream: SimStream) -> None:
            made, into = self._on_device(tensor), self._on_device(output)
            self.sim_group.all_gather(into.view(self._count, *made.shape), made, stream=stream)
            self._back(output, into)

        return self._run(verb, (output, tensor))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        """Concatenate several tensors, each as `all_gather_single` does. Returns the last call's work."""
        works = [self.all_gather_single(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        return works[-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        """Reduce lists of tensors over all ranks and store this rank's element in its output tensor."""
        stacked = [torch.stack([self._on_device(tensor) for tensor in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, stacked, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SimWork:
        """Reduce `tensor` over all ranks and store this rank's part in `output`."""
        reduction, average = _reduction(opts)

        def verb(stream: SimStream) -> None:
            # The verb leaves its operand undefined, and torch's doesn't.
            made, into = self._on_device(tensor).clone(), self._on_device(output)
            self.sim_group.reduce_scatter(into, made.view(self._count, *into.shape), stream=stream, reduction=reduction)
            if average:
                into.div_(self._count)
            self._back(output, into)

        return self._run(verb, (output, tensor))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        """Reduce several tensors, each with `reduce_scatter_single`. Returns the last call's work."""
        works = [self.reduce_scatter_single(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        return works[-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> SimWork:
        """Exchange equal parts among all ranks. Raises `CapabilityError` for unequal parts."""
        del opts
        if len({*(output_splits or ()), *(input_splits or ())}) > 1:
            raise CapabilityError(f"{NAME}: all_to_all of unequal parts {input_splits} isn't there; pad them")

        def verb(stream: SimStream) -> None:
            made, into = self._on_device(tensor), self._on_device(output)
            parts = (self._count, made.shape[0] // self._count, *made.shape[1:])
            self.sim_group.all_to_all(into.view(parts), made.view(parts), stream=stream)
            self._back(output, into)

        return self._run(verb, (output, tensor))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        """Send one tensor to each rank and receive one of the same shape from each rank."""
        del opts

        def verb(stream: SimStream) -> None:
            made = torch.stack([self._on_device(tensor) for tensor in inputs])
            into = torch.empty_like(made)
            self.sim_group.all_to_all(into, made, stream=stream)
            for output, part in zip(outputs, into.unbind(0), strict=True):
                output.detach().copy_(part)

        return self._run(verb, (*outputs, *inputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SimWork:
        """Copy every rank's tensor to the root's output list."""
        is_root = opts.rootRank == self._index
        return self.allgather(outputs if is_root else [[torch.empty_like(inputs[0]) for _ in range(self._count)]], inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SimWork:
        """Copy element r of the root's list to the output tensor of rank r."""

        def verb(stream: SimStream) -> None:
            like = self._on_device(_list(outputs)[0])
            root = opts.rootRank == self._index
            made = (
                torch.stack([self._on_device(t) for t in inputs[0]]) if root else like.new_empty((self._count, *like.shape))
            )
            self.sim_group.broadcast(made, root=opts.rootRank, stream=stream)
            _list(outputs)[0].detach().copy_(made[self._index])

        return self._run(verb, [*_list(outputs), *(t for parts in inputs for t in parts)])

    def send(self, tensors: Any, to: int, tag: int = 0) -> SimWork:
        """Send one tensor to a rank of the group."""
        del tag
        tensor = _list(tensors)[0]
        return self._run(
            lambda stream: self.sim_group.send(self._on_device(tensor), to=to, stream=stream), (tensor,), "to", to
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> SimWork:
        """Receive one tensor from a rank of the group."""
        del tag
        return self._in_place(
            tensors, lambda tensor, stream: self.sim_group.receive(tensor, source=source, stream=stream), "from", source
        )

    def barrier(self, opts: Any = None) -> SimWork:
        """Block the host until all ranks have reached the barrier."""
        del opts
        work = self.allreduce([torch.zeros(1, device=self.backend.device)])
        work.wait()
        current(self.backend).synchronize()
        return work

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Block the host until all ranks have reached the barrier, as `barrier` does."""
        self.barrier()


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


_REDUCTIONS = {"SUM": Reduction.SUM, "AVG": Reduction.SUM, "MAX": Reduction.MAX, "MIN": Reduction.MIN}


def _reduction(opts: Any) -> tuple[Reduction, bool]:
    """Return the backend interface's reduction for a torch operation, and True if the sum must become a mean.

    Raises `CapabilityError` for other operations.
    """
    wanted = getattr(opts, "reduceOp", None)
    if wanted is None:
        return Reduction.SUM, False
    name = str(getattr(wanted, "op", wanted)).rpartition(".")[2]
    if name not in _REDUCTIONS:
        raise CapabilityError(f"{NAME}: there is no reduction {name}; known: {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[name], name == "AVG"


# -- functional collectives -------------------------------------------------------------------------------------------


def _options(reduce_op: str = "sum", root: int = 0) -> SimpleNamespace:
    """Return a substitute for torch's option objects, for calls that pass none."""
    return SimpleNamespace(reduceOp=reduce_op.upper(), rootRank=root)


def _group(name: Any) -> SimProcessGroup:
    if isinstance(name, dist.ProcessGroup):
        return name  # type: ignore[return-value]  # of a simulated backend: ours
    found: Any = torch._C._distributed_c10d._resolve_process_group(name)
    return found  # type: ignore[no-any-return]  # what this module registered


def functional_collectives() -> dict[str, Callable[..., Any]]:
    """Return `_c10d_functional`'s operators on simulated tensors, by name. `wait_tensor` waits for the collective whose
    result is the tensor.
    """
    under_way: dict[int, SimWork] = {}

    def track(tensor: Tensor, work: SimWork) -> Tensor:
        under_way[id(tensor)] = work
        return tensor

    def wait(tensor: Tensor) -> Tensor:
        work = under_way.pop(id(tensor), None)
        if work is not None:
            work.wait()
        return tensor

    def all_reduce(tensor: Tensor, op: str, group: Any) -> Tensor:
        return track(tensor, _group(group).allreduce([tensor], _options(op)))

    def all_gather(tensor: Tensor, size: int, group: Any) -> Tensor:
        into = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
        return track(into, _group(group).all_gather_single(into, tensor))

    def reduce_scatter(tensor: Tensor, op: str, size: int, group: Any) -> Tensor:
        into = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        return track(into, _group(group).reduce_scatter_single(into, tensor, _options(op)))

    def all_to_all(tensor: Tensor, outputs: Sequence[int], inputs: Sequence[int], group: Any) -> Tensor:
        into = torch.empty_like(tensor)
        return track(into, _group(group).all_to_all_single(into, tensor, outputs, inputs))

    def broadcast(tensor: Tensor, source: int, group: Any) -> Tensor:
        return track(tensor, _group(group).broadcast([tensor], _options(root=source)))

    operators: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda t, op, group: all_reduce(t.clone(), op, group),
        "all_reduce_": all_reduce,
        "all_reduce_coalesced": lambda ts, op, group: [all_reduce(t.clone(), op, group) for t in ts],
        "all_reduce_coalesced_": lambda ts, op, group: [all_reduce(t, op, group) for t in ts],
        "all_gather_into_tensor": all_gather,
        "all_gather_into_tensor_coalesced": lambda ts, n, group: [all_gather(t, n, group) for t in ts],
        "all_gather_into_tensor_out": all_gather,
        "reduce_scatter_tensor": reduce_scatter,
        "reduce_scatter_tensor_coalesced": lambda ts, op, n, group: [reduce_scatter(t, op, n, group) for t in ts],
        "all_to_all_single": all_to_all,
        "broadcast": lambda t, src, group: broadcast(t.clone(), src, group),
        "broadcast_": broadcast,
        "wait_tensor": wait,
        # torch would wait where the tensor is used first; here that is now.
        "_wrap_tensor_autograd": wait,
    }
    return {f"_c10d_functional::{name}": operator for name, operator in operators.items()}
