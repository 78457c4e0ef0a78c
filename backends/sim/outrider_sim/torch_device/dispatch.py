"""Dispatch of torch calls to queued operations.

`opinfo.OperatorKind` lists the ways in which an operator runs. The common one, COMPUTE: the dispatcher looks up the shapes
and dtypes of the results, allocates them in the order of the current stream, queues the host kernel and returns the tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.device import ROW_ACCESS, Access
from outrider.device.kernels.operators import reads_no_elements
from outrider_sim.machine.device_state import PinnedTensor, SimDeviceState
from outrider_sim.machine.memory import Meta
from outrider_sim.machine.queue import Op, OperationKind, SourceLines, StreamQueue
from outrider_sim.torch_device import row_accesses
from outrider_sim.torch_device.host_operators import HostOperators
from outrider_sim.torch_device.opinfo import (
    CPU,
    OperatorKind,
    OpInfo,
    ResultPlan,
    Seeded,
    copy_result,
    copy_results,
    creates_on_device,
    extent,
    has_boolean_index,
    is_strided,
    note_access,
    probability,
    repin,
    results_of,
)
from outrider_sim.torch_device.planning import plan_call
from outrider_sim.torch_device.replacements import composite_kernels, divergent_implementation
from outrider_sim.torch_device.tensor import SimTensor, wrap
from outrider_sim.torch_device.tensor_operators import TensorOperators

_IGNORE: Mapping[str, Any] = {}
_LIKE = frozenset({"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"})


class Dispatcher:
    """Runs torch operators on the current simulated device. The process has one dispatcher, like the device type."""

    def __init__(self, device: torch.device, current: SimDeviceState) -> None:
        self.device = device
        self.current = current
        self.thread_device = threading.local()  # `device`: the device of the calling thread's rank
        self.has_several_devices = False  # several devices exist, so the operands determine a call's device
        self.infos: dict[Any, OpInfo] = {}
        self.lines = SourceLines()
        self.tensor_operators = tensors = TensorOperators(self)
        self._host_operators = HostOperators(self)
        self._special: dict[str, Callable[..., Any]] = {
            "aten::copy_": tensors.copy_,
            "aten::_copy_from": lambda source, target, non_blocking=False: tensors.copy_(target, source, non_blocking),
            "aten::_to_copy": tensors.to_copy,
            "aten::empty.memory_format": tensors.empty,
            "aten::empty_strided": tensors.empty_strided,
            "aten::detach": tensors.detach,
            "aten::record_stream": SimTensor.record_stream,
            # Wrappers carry no lazy conjugate or negative bit, so these are computed: values agree, memory isn't shared.
            "aten::_conj": lambda tensor: self(torch.ops.aten.conj_physical.default, (tensor,), None),
            "aten::_neg_view": lambda tensor: self(torch.ops.aten.neg.default, (tensor,), None),
            "aten::is_pinned": lambda *_: False,
        }
        self._special.update(self._host_operators.kernels())
        self._special.update((f"aten::{name}", kernel) for name, kernel in composite_kernels())
        self._run_by_kind: dict[OperatorKind, Callable[..., Any]] = {
            OperatorKind.COMPUTE: self.compute,
            OperatorKind.VIEW: tensors.view,
            OperatorKind.METADATA: tensors.metadata,
            OperatorKind.READ: self._host_operators.read_result,
            OperatorKind.DECOMPOSE: self._decompose,
        }
        self._handlers: dict[Any, Callable[..., Any]] = {}
        self._declared_rows: dict[str, Any] = {}

    # -- entry ------------------------------------------------------------------------------------------------------

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """Run one operator call on the current device."""
        machine = self.current.machine
        if machine.tells:
            machine.local.line = self.lines.now()
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._create_handler(func)
        if self.has_several_devices:
            home = self._home(args, kwargs or _IGNORE)
            if home is not None and home is not self.current:
                with self.using(home):
                    return handler(args, kwargs or _IGNORE)
        return handler(args, kwargs or _IGNORE)

    @contextmanager
    def using(self, sim: SimDeviceState) -> Generator[None]:
        """Make `sim` the current device inside the block."""
        other, self.current = self.current, sim
        try:
            yield
        finally:
            self.current = other

    def _home(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SimDeviceState | None:
        """Return the device of this host that owns the first device operand, else the device that the argument `device`
        names.

        Returns None if neither exists or if the number is 0: torch also passes 0 for a device name without a number.
        """
        scheduler = self.current.machine.scheduler
        for value in args:
            first = value[0] if type(value) in (list, tuple) and value else value
            if isinstance(first, SimTensor):
                found: SimDeviceState = first._alloc.machine_memory.sim
                return found if found.machine.scheduler is scheduler else None
        device = kwargs.get("device")
        if device is not None and device.index and device.type == self.device.type:
            for machine in scheduler.machines:
                if machine.rank == device.index:
                    named: SimDeviceState = machine.sim
                    return named
            raise RuntimeError(f"there is no device {device}: this host has {len(scheduler.machines)}")
        return None

    def rank_device(self) -> SimDeviceState:
        """The device of the calling thread's rank, or the current device if the thread is no rank."""
        found: SimDeviceState = getattr(self.thread_device, "sim", self.current)
        return found

    def override_operators(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Register functions that run instead of the operators of the given names."""
        self._special.update(handlers)
        self._handlers.clear()

    def declare_rows(self, operator: str, operands: Mapping[str, Callable[[Mapping[str, Any]], Tensor]]) -> None:
        """Declare that calls of a custom operator read or write distinct rows of `operands`, given by each function.

        A function takes the call's arguments by schema name, as host tensors, and returns rows of the first dimension.
        """
        self._declared_rows[operator] = row_accesses.declared(operands)
        self.infos = {func: info for func, info in self.infos.items() if func._schema.name != operator}
        self._handlers.clear()

    def info(self, func: Any) -> OpInfo:
        """Return the cached description of an operator overload."""
        found = self.infos.get(func)
        if found is None:
            found = self.infos[func] = OpInfo(func)
            found.resolvers = self._declared_rows.get(func._schema.name) or ROW_ACCESS.get(func._schema.name)
            found.resolvers = found.resolvers or row_accesses.resolvers_of(func)
        return found

    def _create_handler(self, func: Any) -> Callable[..., Any]:
        info = self.info(func)
        special = self._special.get(info.name)
        if special is not None:
            handler: Callable[..., Any] = lambda args, kwargs: special(*args, **kwargs)  # noqa: E731
        elif info.name in _LIKE:
            handler = partial(self.tensor_operators.empty_like, info)
        elif info.kind is OperatorKind.COMPUTE and any(argument.name == "device" for argument in func._schema.arguments):
            handler = partial(self.tensor_operators.filled_like, info)
        else:
            handler = partial(self._run_by_kind[info.kind], info)
        self._handlers[func] = handler
        return handler

    # -- operands ---------------------------------------------------------------------------------------------------

    def convert(self, value: Any, key: list[Any], info: OpInfo) -> Any:
        """Return `value` as a host kernel takes it, and append to `key` the facts that determine the results' shapes and
        dtypes.
        """
        kind = type(value)
        if kind is SimTensor:
            key.append(value._meta)
            return value._inner
        if kind is float:
            key.append(float)  # no shape depends on a float
            return value
        if value is None or kind in _SCALARS:
            key.append(kind)
            key.append(value)
            return value
        if kind is list or kind is tuple:
            key.append(len(value))
            return [self.convert(item, key, info) for item in value]
        if isinstance(value, SimTensor):
            key.append(value._meta)
            return value._inner
        if isinstance(value, Tensor):
            return self._convert_host(value, key, info)
        if kind is torch.device:
            key.append(value)
            return CPU
        if isinstance(value, torch.Generator):
            return value
        key.append(kind)
        key.append(value)
        return value

    def _convert_host(self, value: Tensor, key: list[Any], info: OpInfo) -> Tensor:
        if not is_strided(value):
            raise NotImplementedError(
                f"{info.name}: an operand isn't strided, and the simulated device has strided tensors only"
            )
        if value.dim() == 0 and value.device.type == "cpu":
            # A scalar travels with the launch: its value is taken now.
            key.append(("host scalar", value.dtype))
            return (value.plain(write=False) if isinstance(value, PinnedTensor) else value).detach().clone()
        raise RuntimeError(
            f"{info.name}: expected all tensors to be on the same device, but found at least two devices, {self.device} and "
            f"{value.device}!"
        )

    def _index(self, index: Tensor | None) -> Tensor | None:
        """Return an index tensor on the device, copied if it is on the host, as torch does; None for None."""
        if index is None or isinstance(index, SimTensor):
            return index
        return self.tensor_operators.to_device(index, index.dtype, non_blocking=False)

    # -- the common way ---------------------------------------------------------------------------------------------

    def compute(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of kind COMPUTE: allocate the results, queue the kernel, return the result tensors."""
        if info.takes_host_indices:
            args = (args[0], [self._index(i) for i in args[1]], *args[2:])
        key: list[Any] = []
        inner: list[Any] = []
        memory = self.current.memory
        for value in args:
            if type(value) is SimTensor:
                if value._alloc.machine_memory is not memory:
                    raise RuntimeError(_other_device_message(info))
                key.append(value._meta)
                inner.append(value._inner)
            else:
                inner.append(self.convert(value, key, info))
        named: dict[str, Any] = {}
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                named[name] = self.convert(value, key, info)
        if info.indexing and has_boolean_index(args):
            return self._host_operators.read_result(info, args, kwargs)
        looked_up = tuple(key)
        plan = info.plans.get(looked_up)
        if plan is None:
            plan = plan_call(info, looked_up, args, kwargs, self.current.machine.like)
        if plan.resized:
            for name, meta in plan.resized:
                self.tensor_operators.renew(kwargs[name] if name in kwargs else args[info.names.index(name)], meta)
            return self.compute(info, args, kwargs)
        sim = self.current
        machine = sim.machine
        stream = machine.stream
        run = info.run
        if info.random and (not info.random_if or probability(info, args, kwargs)):
            run = Seeded(info, sim.next_seed(), named.pop("generator", None))
        outs = [None if meta is None else self.allocate(sim, meta, stream) for meta in plan.outs]
        run, post = self._with_results(sim, info, plan, run, named, outs)
        op = Op(OperationKind.KERNEL, info.name, run, tuple(inner), named, post, None, plan.cost)
        if type(run) is Seeded:
            op.seed = sim.next_seed
        if machine.tracks:
            self.describe(op, info, args, kwargs, outs)
        machine.enqueue(op, stream)
        if info.fresh:
            return outs[0]
        return results_of(info, plan, args, kwargs, outs)

    @staticmethod
    def _with_results(
        sim: SimDeviceState, info: OpInfo, plan: ResultPlan, run: Any, named: dict[str, Any], outs: list[SimTensor | None]
    ) -> tuple[Any, Any]:
        """Return the function that computes an operator, instead of ``run`` if it writes ``outs`` itself or the device
        diverges, and the function that copies its results to ``outs``. Update the keyword operands ``named``.
        """
        if not outs:
            return run, None
        other = divergent_implementation(sim.divergences, info.name, info.run) if sim.divergences else None
        if other is not None:
            run = other
            for name in info.out_names:
                named.pop(name, None)
        elif plan.out:
            for name, made in zip(info.out_names, outs, strict=True):
                named[name] = made._inner  # type: ignore[union-attr]  # such a plan has no result that is None
            return info.out, None
        elif len(outs) == 1 and info.fresh:
            return run, partial(copy_result, outs[0]._inner)  # type: ignore[union-attr]  # nor has one of a single result
        return run, partial(copy_results, [None if made is None else made._inner for made in outs], info.returns)

    def allocate(self, sim: SimDeviceState, meta: Meta, stream: StreamQueue) -> SimTensor:
        """Return an uninitialized tensor on device `sim`, allocated in the order of `stream`."""
        allocation = sim.memory.allocate(meta.extent, stream)
        return wrap(allocation.block.inner(meta), meta, allocation, sim.device)

    # -- what tools see ---------------------------------------------------------------------------------------------

    def describe(
        self, op: Op, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[SimTensor | None]
    ) -> None:
        """Attach to `op` its tensor accesses, the resolver of data-dependent rows and the source line, for observers."""
        accesses: list[Access] = []
        for name, value in (*zip(info.names, args, strict=False), *kwargs.items()):
            note_access(accesses, name, value, info)
        accesses += [extent(made, True, "out") for made in outs if made is not None]
        op.accesses = tuple(accesses)
        machine = self.current.machine
        op.line = machine.local.line
        if info.resolvers and machine.tap is not None:
            bound = dict(zip(info.names, args, strict=False)) | dict(kwargs)
            op.rows = row_accesses.RowResolver(info.resolvers, bound, op.accesses, info.native, info.name)
            # The whole operand is a promise that the rows are told later.
            op.accesses = tuple(replace(a, by_rows=True) if a.argument in info.resolvers else a for a in accesses)

    def enqueue(self, op: Op, stream: StreamQueue, *accesses: Access) -> None:
        """Enqueue an operation that no operator call describes, such as a copy, with its accesses and the source line."""
        machine = self.current.machine
        if machine.tracks:
            op.accesses = accesses
            op.line = machine.local.line
        machine.enqueue(op, stream)

    def _decompose(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = info.func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(f"{info.name} can't be taken apart for the simulated device")
        return result

    # -- pinned host tensors ----------------------------------------------------------------------------------------

    def pinned(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator on pinned tensors: note the host's accesses, compute on the plain host tensors, pin views again."""
        if any(issubclass(kind, SimTensor) for kind in types):
            return self(func, args, kwargs)
        info = self.info(func)
        if creates_on_device(kwargs, self.device):
            return self(func, args, kwargs)
        if info.name == "aten::is_pinned":
            return True
        if info.kind is OperatorKind.DECOMPOSE:
            return self._decompose(info, args, kwargs)
        owners: list[PinnedTensor] = []
        positional = [_plain(info, name, value, owners) for name, value in zip(info.names, args, strict=False)]
        named = {name: _plain(info, name, value, owners) for name, value in kwargs.items()}
        result = func(*positional, **named)
        if info.kind is OperatorKind.VIEW and owners:
            return repin(result, owners[0])
        given = {id(p): a for p, a in zip(positional, args, strict=False)} | {id(named[k]): kwargs[k] for k in named}
        return given.get(id(result), result) if isinstance(result, Tensor) else result


def _plain(info: OpInfo, name: str, value: Any, owners: list[PinnedTensor]) -> Any:
    # No closure: one that calls itself would keep the tensors until the next garbage collection.
    if isinstance(value, PinnedTensor):
        owners.append(value)
        untouched = info.kind in (OperatorKind.VIEW, OperatorKind.DECOMPOSE) or reads_no_elements(info.func)
        return value.plain(write=None if untouched else name in info.writes)
    if isinstance(value, list | tuple):
        return type(value)(_plain(info, name, item, owners) for item in value)
    return value


def _other_device_message(info: OpInfo) -> str:
    # Nothing would order its use: the queues of two backends know nothing of each other.
    return (
        f"{info.name}: an operand lives on another simulated device than the current one: each backend object is a device of "
        "its own, and what is made outside every scope belongs to the one made last; make it inside `backend.on(stream)`"
    )


_SCALARS = frozenset({int, bool, str, complex, torch.dtype, torch.layout, torch.memory_format, type(None)})
