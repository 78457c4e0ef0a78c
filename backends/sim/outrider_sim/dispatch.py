"""From a torch call to queued operations.

Each operator is done in one of a few ways (`opinfo.Way`). The common one: look up what the results will look like,
allocate them in the order of the current stream, queue the host kernel on the tensors' memory, hand back wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.device import ROW_ACCESS, Access, CaptureError
from outrider_sim import rows
from outrider_sim.meta import Meta, Metas
from outrider_sim.opinfo import OpInfo, Plan, Way
from outrider_sim.pinned import PinnedTensor, alias
from outrider_sim.queue import Kind, Op, StreamQueue
from outrider_sim.sim import Sim, host_extent
from outrider_sim.source import python_line
from outrider_sim.tensor import SimTensor, wrap

_PLAN_LIMIT = 4096
_IGNORE: Mapping[str, Any] = {}


class Dispatcher:
    """Carries out torch operators on the simulated device that is current. One for the process, as the device type is."""

    def __init__(self, device: torch.device, current: Sim) -> None:
        self.device = device
        self.current = current
        self.metas = Metas()
        self.infos: dict[Any, OpInfo] = {}
        self._special: dict[str, Callable[..., Any]] = {
            "aten::copy_": self._copy_,
            "aten::_copy_from": self._copy_from,
            "aten::_to_copy": self._to_copy,
            "aten::empty.memory_format": self._empty,
            "aten::empty_strided": self._empty_strided,
            "aten::empty_like": self._empty_like,
            "aten::new_empty": self._empty_like,
            "aten::new_empty_strided": self._empty_like,
            "aten::detach": self._detach,
            "aten::record_stream": self._record_stream,
            "aten::is_pinned": lambda *_: False,
            "aten::repeat_interleave.Tensor": self._repeat_interleave,
        }
        self._ways: dict[Way, Callable[..., Any]] = {
            Way.COMPUTE: self._compute,
            Way.VIEW: self._view,
            Way.METADATA: self._metadata,
            Way.READ: self._read,
            Way.DECOMPOSE: self._decompose,
        }
        self._handlers: dict[Any, Callable[..., Any]] = {}

    # -- entry ------------------------------------------------------------------------------------------------------

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """Carry out one operator call."""
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._learn(func)
        return handler(args, kwargs or _IGNORE)

    def _learn(self, func: Any) -> Callable[..., Any]:
        info = self.infos[func] = OpInfo(func)
        special = self._special.get(info.name)
        if special is not None:
            handler: Callable[..., Any] = lambda args, kwargs: special(*args, **kwargs)  # noqa: E731
            if info.name in ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided"):
                handler = partial(self._empty_like, info)
        else:
            handler = partial(self._ways[info.way], info)
        self._handlers[func] = handler
        return handler

    # -- operands ---------------------------------------------------------------------------------------------------

    def _convert(self, value: Any, key: list[Any], info: OpInfo) -> Any:
        """The operand as a host kernel takes it; what decides the results' looks goes into `key`."""
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
            return [self._convert(item, key, info) for item in value]
        if isinstance(value, SimTensor):
            key.append(value._meta)
            return value._inner
        if isinstance(value, Tensor):
            return self._convert_host(value, key, info)
        if kind is torch.device:
            key.append(value)
            return _CPU
        if isinstance(value, torch.Generator):
            return value
        key.append(kind)
        key.append(value)
        return value

    def _convert_host(self, value: Tensor, key: list[Any], info: OpInfo) -> Tensor:
        if value.dim() == 0 and value.device.type == "cpu":
            # A scalar travels with the launch: its value is taken now.
            key.append(("host scalar", value.dtype))
            return (value.plain(write=False) if isinstance(value, PinnedTensor) else value).detach().clone()
        raise RuntimeError(
            f"{info.name}: expected all tensors to be on the same device, but found at least two devices, {self.device} and "
            f"{value.device}!"
        )

    def _index(self, index: Tensor | None) -> Tensor | None:
        """Torch moves index tensors from the host to the device by itself."""
        if index is None or isinstance(index, SimTensor):
            return index
        return self.to_device(index, index.dtype, non_blocking=False)

    # -- the common way ---------------------------------------------------------------------------------------------

    def _compute(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if info.takes_host_indices:
            args = (args[0], [self._index(i) for i in args[1]], *args[2:])
        key: list[Any] = []
        inner: list[Any] = []
        for value in args:
            if type(value) is SimTensor:
                key.append(value._meta)
                inner.append(value._inner)
            else:
                inner.append(self._convert(value, key, info))
        named: dict[str, Any] = {}
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                named[name] = self._convert(value, key, info)
        if info.indexing and _boolean_index(args):
            return self._read(info, args, kwargs)
        looked_up = tuple(key)
        plan = info.plans.get(looked_up)
        if plan is None:
            plan = self._plan(info, looked_up, args, kwargs)
        sim = self.current
        machine = sim.machine
        stream = machine.stream
        run, post = info.run, None
        if info.random and (not info.random_if or _probability(info, args, kwargs)):
            run = _Seeded(info, sim.next_seed(), named.pop("generator", None))
        outs: list[SimTensor | None] = []
        for meta in plan.outs:
            outs.append(None if meta is None else self.allocate(sim, meta, stream))
        if outs:
            if info.out is not None:
                run = info.out
                for name, made in zip(info.out_names, outs, strict=True):
                    named[name] = made._inner  # type: ignore[union-attr]
            elif len(outs) == 1 and info.fresh:
                post = outs[0]._inner.copy_  # type: ignore[union-attr]
            else:
                post = partial(_scatter, [None if made is None else made._inner for made in outs], info.returns)
        op = Op(Kind.KERNEL, info.name, run, tuple(inner), named, post, None, plan.cost)
        if info.random:
            op.seed = sim.next_seed
        if machine.tracks:
            self._describe(op, info, args, kwargs, outs)
        machine.enqueue(op, stream)
        if info.fresh:
            return outs[0]
        return _results(info, plan, args, kwargs, outs)

    def allocate(self, sim: Sim, meta: Meta, stream: StreamQueue) -> SimTensor:
        """A tensor of new memory in the order of `stream`."""
        allocation = sim.memory.allocate(meta.extent, stream)
        return wrap(allocation.block.inner(meta), meta, allocation, self.device)

    def _plan(self, info: OpInfo, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
        """Ask torch's meta kernels what the results look like; where there is none, run on zeros."""
        result, operands = self._shapes(info, args, kwargs)
        fresh: list[Any] = []
        structure: list[Any] = []
        results = result if isinstance(result, tuple) else (result,)
        if not info.returns:
            results = ()
        for operand, value in zip(info.returns, results, strict=False):
            if operand is not None:
                structure.append(operand)
            elif isinstance(value, list | tuple):
                structure.append(len(value))
                fresh.extend(self.metas.of(item) for item in value)
            else:
                structure.append(None)
                fresh.append(self.metas.of(value) if isinstance(value, Tensor) else None)
        moved = sum(m.nbytes for m in operands) + sum(m.nbytes for m in fresh if m is not None)
        like = self.current.machine.like
        cost = max(like.kernel_us, moved / like.bytes_per_us)
        if info.matrix and fresh and operands:
            cost = max(cost, 2 * fresh[0].numel * operands[-1].shape[-1] / like.flops_per_us)
        if len(info.plans) > _PLAN_LIMIT:
            info.plans.clear()
        plan = info.plans[key] = Plan(tuple(fresh), tuple(structure), cost)
        return plan

    def _shapes(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Meta]]:
        operands: list[Meta] = []
        written: list[tuple[str, Tensor, Meta]] = []

        def sketch(make: Callable[[Meta], Tensor], device: torch.device, name: str, value: Any) -> Any:
            if isinstance(value, SimTensor):
                made = make(value._meta)
                operands.append(value._meta)
                if name in info.writes:
                    written.append((name, made, value._meta))
                return made
            if isinstance(value, PinnedTensor):
                return value.plain(write=None)
            if isinstance(value, list | tuple):
                return [sketch(make, device, name, item) for item in value]
            return device if isinstance(value, torch.device) else value

        def attempt(make: Callable[[Meta], Tensor], device: torch.device) -> Any:
            operands.clear()
            written.clear()
            drawn = [sketch(make, device, name, value) for name, value in zip(info.names, args, strict=False)]
            named = {name: sketch(make, device, name, value) for name, value in kwargs.items() if name != "generator"}
            return info.func(*drawn, **named)

        with torch.no_grad(), torch._C._InferenceMode(False):
            if not info.native and not info.returns and not _has_fake(info):
                return (), operands
            try:
                result = attempt(_meta_tensor, _META)
            except NotImplementedError:
                result = attempt(_zeros, _CPU)
        for name, made, meta in written:
            if made.shape != meta.shape or made.dtype != meta.dtype:
                raise RuntimeError(
                    f"{info.name}: the result has shape {tuple(made.shape)}, but {name!r} has {tuple(meta.shape)}: a tensor "
                    "of the simulated device can't be resized by an operation; pass one of the right shape"
                )
        return result, operands

    # -- what tools see ---------------------------------------------------------------------------------------------

    def _describe(
        self, op: Op, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[SimTensor | None]
    ) -> None:
        accesses: list[Access] = []
        for name, value in zip(info.names, args, strict=False):
            _note_access(accesses, name, value, info)
        for name, value in kwargs.items():
            _note_access(accesses, name, value, info)
        accesses.extend(extent(made, True, "out") for made in outs if made is not None)
        op.accesses = tuple(accesses)
        machine = self.current.machine
        if machine.tap is not None or machine.names is not None:
            op.line = python_line()
        if machine.tap is not None:
            resolvers = ROW_ACCESS.get(info.name.partition(".")[0]) or rows.ATEN.get(info.name)
            if resolvers is not None:
                bound = dict(zip(info.names, args, strict=False)) | dict(kwargs)
                op.rows = rows.Resolver(resolvers, bound, tuple(accesses), info.native)
                op.accesses = tuple(replace(a, by_rows=True) if a.argument in resolvers else a for a in accesses)

    def note(self, op: Op, *accesses: Access) -> None:
        """Attach accesses and line to an operation that isn't a plain operator call."""
        machine = self.current.machine
        if machine.tracks:
            op.accesses = accesses
            if machine.tap is not None or machine.names is not None:
                op.line = python_line()

    # -- views ------------------------------------------------------------------------------------------------------

    def _view(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        base = args[0]
        if not isinstance(base, SimTensor):
            return info.run(*args, **kwargs)
        inner = base._inner
        key: list[Any] = [base._meta]
        rest = [self._convert(value, key, info) for value in args[1:]]
        for name, value in kwargs.items():
            key.append(name)
            self._convert(value, key, info)
        looked_up = tuple(key)
        plan = info.plans.get(looked_up)
        if plan is None:
            result = info.run(inner, *rest, **kwargs)
            if info.name in _EXPLICIT_OFFSET or _odd_view(result, inner):
                return self._wrap_views(result, base)
            if len(info.plans) > _PLAN_LIMIT:
                info.plans.clear()
            start = inner.storage_offset()
            if isinstance(result, Tensor):
                plan = (self.metas.of(result), result.storage_offset() - start)
            else:
                plan = [(self.metas.of(item), item.storage_offset() - start) for item in result]
            info.plans[looked_up] = plan
        start = inner.storage_offset()
        if type(plan) is tuple:
            meta, offset = plan
            return wrap(torch.as_strided(inner, meta.shape, meta.stride, start + offset), meta, base._alloc, self.device)
        return [
            wrap(torch.as_strided(inner, meta.shape, meta.stride, start + offset), meta, base._alloc, self.device)
            for meta, offset in plan
        ]

    def _wrap_views(self, result: Any, base: SimTensor) -> Any:
        if isinstance(result, Tensor):
            return wrap(result, self.metas.of(result), base._alloc, self.device)
        return [wrap(item, self.metas.of(item), base._alloc, self.device) for item in result]

    def _detach(self, base: SimTensor) -> SimTensor:
        inner = base._inner
        return wrap(inner, base._meta, base._alloc, self.device)

    def _metadata(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        target = args[0]
        if info.name.startswith("aten::set_"):
            return self._set(target, args[1:])
        if info.name.startswith("aten::resize_"):
            return self._resize(target, tuple(args[1]))
        moved = torch.as_strided(target._inner, target._meta.shape, target._meta.stride, target._inner.storage_offset())
        info.run(moved, *args[1:], **kwargs)
        self._become(target, moved)
        return target

    def _become(self, target: SimTensor, inner: Tensor) -> None:
        target._inner, target._meta, target._seen = inner, self.metas.of(inner), None
        with torch._C._DisableTorchDispatch():
            torch.ops.aten.as_strided_.default(target, inner.shape, inner.stride(), inner.storage_offset())

    def _set(self, target: SimTensor, operands: Sequence[Any]) -> SimTensor:
        if len(operands) != 1 or not isinstance(operands[0], SimTensor):
            raise RuntimeError("set_: a tensor of the simulated device can only become another one of it")
        target._alloc = operands[0]._alloc
        self._become(target, operands[0]._inner)
        return target

    def _resize(self, target: SimTensor, shape: tuple[int, ...]) -> SimTensor:
        if target._meta.shape == torch.Size(shape):
            return target
        meta = self.metas.get(torch.Size(shape), _contiguous(shape), target._meta.dtype)
        if meta.extent > target._alloc.nbytes:
            raise RuntimeError(
                f"resize_ to {shape} needs {meta.extent} bytes, the storage has {target._alloc.nbytes}: memory of the "
                "simulated device can't grow; allocate a tensor of that shape"
            )
        self._become(target, torch.as_strided(target._inner, meta.shape, meta.stride, target._inner.storage_offset()))
        return target

    # -- reads ------------------------------------------------------------------------------------------------------

    def _read(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Queue the computation, wait for it, then make results of the shape that it has."""
        sim = self.current
        machine = sim.machine
        stream = machine.stream
        if stream.capture is not None:
            raise CaptureError(f"{info.name} reads device values on the host: nothing runs in a capture")
        key: list[Any] = []
        inner = tuple(self._convert(value, key, info) for value in args)
        named = {name: self._convert(value, key, info) for name, value in kwargs.items()}
        box: list[Any] = []
        op = Op(Kind.KERNEL, info.name, info.run, inner, named, box.append, None, machine.like.kernel_us)
        if machine.tracks:
            self._describe(op, info, args, kwargs, ())
        machine.enqueue(op, stream)
        sim.synchronize(stream, info.name)
        if not box:
            raise RuntimeError(f"{info.name} didn't run: the device failed before it")
        return self._place(box[0], sim, stream)

    def _place(self, value: Any, sim: Sim, stream: StreamQueue) -> Any:
        if isinstance(value, Tensor):
            made = self.allocate(sim, self.metas.of(value), stream)
            op = Op(Kind.KERNEL, "results", made._inner.copy_, (value,), cost=sim.machine.like.kernel_us)
            self.note(op, extent(made, True, "out"))
            sim.machine.enqueue(op, stream)
            return made
        if isinstance(value, list | tuple):
            return type(value)(self._place(item, sim, stream) for item in value)
        return value

    def _repeat_interleave(self, repeats: SimTensor, output_size: int | None = None) -> Any:
        info = self.infos[torch.ops.aten.repeat_interleave.Tensor]
        if output_size is None:
            return self._read(info, (repeats,), {})
        # With the size known nothing needs to be waited for.
        sim = self.current
        stream = sim.machine.stream
        made = self.allocate(sim, self.metas.get(torch.Size((output_size,)), (1,), repeats.dtype), stream)
        op = Op(
            Kind.KERNEL, info.name, info.run, (repeats._inner,), {"output_size": output_size}, made._inner.copy_,
            cost=sim.machine.like.kernel_us,
        )  # fmt: skip
        self.note(op, extent(repeats, False, "repeats"), extent(made, True, "out"))
        sim.machine.enqueue(op, stream)
        return made

    def _decompose(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = info.func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(f"{info.name} can't be taken apart for the simulated device")
        return result

    # -- new tensors ------------------------------------------------------------------------------------------------

    def _empty(
        self,
        size: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> SimTensor:
        del layout, device, pin_memory
        shape = torch.Size(size)
        if memory_format in (None, torch.contiguous_format):
            stride = _contiguous(shape)
        else:
            stride = torch.empty(shape, device=_META, memory_format=memory_format).stride()
        sim = self.current
        return self.allocate(sim, self.metas.get(shape, stride, dtype or torch.get_default_dtype()), sim.machine.stream)

    def _empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> SimTensor:
        del layout, device, pin_memory
        sim = self.current
        meta = self.metas.get(torch.Size(size), tuple(stride), dtype or torch.get_default_dtype())
        return self.allocate(sim, meta, sim.machine.stream)

    def _empty_like(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        elsewhere = kwargs.get("device")
        if elsewhere is not None and elsewhere.type != self.device.type:
            result: Tensor = info.run(args[0]._inner, *args[1:], **kwargs)
            return result
        key: list[Any] = []
        for value in args:
            self._convert(value, key, info)
        for name, value in kwargs.items():
            key.append(name)
            self._convert(value, key, info)
        looked_up = tuple(key)
        plan = info.plans.get(looked_up) or self._plan(info, looked_up, args, {**kwargs, "device": _META})
        sim = self.current
        return self.allocate(sim, plan.outs[0], sim.machine.stream)

    def factory(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SimTensor:
        """`arange` and its like: no tensor operand, values made by a kernel on the device."""
        named = {**kwargs, "device": _META}
        shape = info.func(*args, **{k: v for k, v in named.items() if k != "generator"})
        sim = self.current
        stream = sim.machine.stream
        made = self.allocate(sim, self.metas.of(shape), stream)
        run: Callable[..., Any] = info.run
        named["device"] = _CPU
        if info.random:
            run = _Seeded(info, sim.next_seed(), named.pop("generator", None))
        op = Op(Kind.KERNEL, info.name, run, tuple(args), named, made._inner.copy_, None, sim.machine.like.kernel_us)
        self.note(op, extent(made, True, "out"))
        sim.machine.enqueue(op, stream)
        return made

    # -- copies -----------------------------------------------------------------------------------------------------

    def _copy_(self, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(destination, SimTensor):
            if isinstance(source, SimTensor):
                info = self.infos.get(_COPY) or self.infos.setdefault(_COPY, OpInfo(_COPY))
                self._compute(info, (destination, source), _IGNORE)
            else:
                self.host_to_device(destination, source, non_blocking)
        elif isinstance(source, SimTensor):
            self.device_to_host(destination, source, non_blocking)
        else:
            destination.copy_(source)
        return destination

    def _copy_from(self, source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
        return self._copy_(destination, source, non_blocking)

    def host_to_device(self, destination: SimTensor, source: Tensor, non_blocking: bool) -> None:
        """Asynchronous from contiguous pinned memory of the same dtype; anything else goes through pageable memory, and
        the host waits until the stream is empty before it starts.
        """
        sim = self.current
        machine = sim.machine
        stream = machine.stream
        meta = destination._meta
        if source.device.type != "cpu":
            raise RuntimeError(f"a copy to {self.device} from {source.device} isn't possible")
        cost = meta.nbytes / machine.like.link_bytes_per_us + machine.like.kernel_us
        written = extent(destination, True, "self")
        if isinstance(source, PinnedTensor) and _direct(source, meta):
            op = Op(Kind.COPY, "copy to device", destination._inner.copy_, (alias(source),), cost=cost)
            self.note(op, host_extent(source, False, "src"), written)
            machine.enqueue(op, stream)
        else:
            plain = source.plain(write=False) if isinstance(source, PinnedTensor) else source.detach()
            if stream.capture is not None:
                raise CaptureError(
                    "a copy from pageable host memory can't be captured: it waits for the stream; copy from contiguous "
                    "pinned memory of the same dtype"
                )
            sim.synchronize(stream, "a copy from pageable host memory")
            staged = torch.empty(plain.shape, dtype=meta.dtype)
            staged.copy_(plain)  # always a copy: the caller may change or exchange its tensor's contents
            op = Op(Kind.COPY, "copy to device, staged", destination._inner.copy_, (staged,), cost=cost)
            self.note(op, written)
            machine.enqueue(op, stream)
        if not non_blocking:
            sim.synchronize(stream, "a blocking copy to the device")

    def device_to_host(self, destination: Tensor, source: SimTensor, non_blocking: bool) -> None:
        """Asynchronous into contiguous pinned memory; into anything else the host waits."""
        sim = self.current
        machine = sim.machine
        stream = machine.stream
        if destination.device.type != "cpu":
            raise RuntimeError(f"a copy from {self.device} to {destination.device} isn't possible")
        cost = source._meta.nbytes / machine.like.link_bytes_per_us + machine.like.kernel_us
        read = extent(source, False, "src")
        if isinstance(destination, PinnedTensor) and destination.is_contiguous():
            op = Op(Kind.COPY, "copy to host", alias(destination).copy_, (source._inner,), cost=cost)
            self.note(op, read, host_extent(destination, True, "self"))
            machine.enqueue(op, stream)
            if not non_blocking:
                sim.synchronize(stream, "a blocking copy to the host")
            return
        if stream.capture is not None:
            raise CaptureError(
                "a copy to pageable host memory can't be captured: it waits for the stream; copy to contiguous pinned memory"
            )
        staged = torch.empty(source.shape, dtype=destination.dtype)
        op = Op(Kind.COPY, "copy to host, staged", staged.copy_, (source._inner,), cost=cost)
        self.note(op, read)
        machine.enqueue(op, stream)
        sim.synchronize(stream, "a copy to pageable host memory")
        destination.copy_(staged)

    def to_device(self, source: Tensor, dtype: torch.dtype, *, non_blocking: bool) -> SimTensor:
        """A host tensor's values in new device memory."""
        sim = self.current
        meta = self.metas.get(source.shape, _contiguous(tuple(source.shape)), dtype)
        made = self.allocate(sim, meta, sim.machine.stream)
        self.host_to_device(made, source, non_blocking)
        return made

    def _to_copy(
        self,
        source: Tensor,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        del layout
        target = self.device if device is None and isinstance(source, SimTensor) else (device or _CPU)
        with torch._C._InferenceMode(False):
            looks = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=_META)
            looks = looks.to(dtype=dtype or source.dtype, memory_format=memory_format or torch.preserve_format, copy=True)
        sim = self.current
        if isinstance(source, SimTensor):
            if target.type == self.device.type:
                made = self.allocate(sim, self.metas.of(looks), sim.machine.stream)
                self._copy_(made, source)
                return made
            if target.type != "cpu":
                raise RuntimeError(f"a copy from {self.device} to {target} isn't possible")
            if pin_memory or non_blocking:
                # As torch does for accelerators: a result that is copied asynchronously is pinned.
                host: Tensor = sim.pinned(tuple(looks.shape), looks.dtype)
            else:
                host = torch.empty_strided(looks.shape, looks.stride(), dtype=looks.dtype)
            self.device_to_host(host, source, non_blocking)
            return host
        made = self.allocate(sim, self.metas.of(looks), sim.machine.stream)
        self.host_to_device(made, source, non_blocking)
        return made

    def _record_stream(self, tensor: SimTensor, stream: Any) -> None:
        tensor.record_stream(stream)

    # -- pinned host tensors ----------------------------------------------------------------------------------------

    def pinned(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator on pinned host memory, or (`func` is "host") one host access of a whole tensor."""
        if func == "host":
            tensor, write = args
            self.current.host_access(tensor, write)
            return None
        if any(issubclass(kind, SimTensor) for kind in types):
            return self(func, args, kwargs)
        info = self.infos.get(func)
        if info is None:
            info = self.infos[func] = OpInfo(func)
        if _leaves_host(kwargs, self.device):
            return self(func, args, kwargs)
        if info.name == "aten::is_pinned":
            return True
        owner: PinnedTensor | None = None

        def plain(name: str, value: Any) -> Any:
            nonlocal owner
            if isinstance(value, PinnedTensor):
                owner = owner or value
                return value.plain(write=None if info.way in (Way.VIEW, Way.DECOMPOSE) else name in info.writes)
            if isinstance(value, list | tuple):
                return type(value)(plain(name, item) for item in value)
            return value

        if info.way is Way.DECOMPOSE:
            return self._decompose(info, args, kwargs)
        positional = [plain(name, value) for name, value in zip(info.names, args, strict=False)]
        named = {name: plain(name, value) for name, value in kwargs.items()}
        result = func(*positional, **named)
        if info.way is Way.VIEW and owner is not None:
            return _repin(result, owner)
        given = {id(p): a for p, a in zip(positional, args, strict=False)} | {id(named[k]): kwargs[k] for k in named}
        return given.get(id(result), result) if isinstance(result, Tensor) else result


def extent(tensor: SimTensor, write: bool, argument: str) -> Access:
    """The bytes of a device tensor; kept with the tensor, whose place never changes."""
    seen = tensor._seen
    if seen is None:
        seen = tensor._seen = {}
    found = seen.get((write, argument))
    if found is None:
        meta = tensor._meta
        low = tensor._inner.storage_offset() * meta.itemsize
        shape, stride = (None, None) if meta.dense else (meta.shape, meta.byte_stride)
        found = Access(tensor._alloc.id, low, low + meta.extent, write, shape, stride, argument, False, tensor._born)
        seen[write, argument] = found
    return found


class _Seeded:
    """A random operator with the seed that was drawn when it was enqueued."""

    __slots__ = ("_generator", "_info", "seed")

    def __init__(self, info: OpInfo, seed: int, generator: torch.Generator | None) -> None:
        self._info = info
        self._generator = generator
        if generator is not None:
            seed = int(torch.randint(0, 1 << 62, (), generator=generator))
        self.seed = seed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._info.takes_generator:
            return self._info.run(*args, generator=torch.Generator().manual_seed(self.seed), **kwargs)
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self.seed)
        try:
            return self._info.run(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)

    def again(self, seed: int) -> _Seeded:
        """The same operator with another seed: each replay of a graph draws anew."""
        return _Seeded(self._info, seed, None)


def _scatter(outs: Sequence[Tensor | None], returns: tuple[str | None, ...], result: Any) -> None:
    """Put a host kernel's results into the memory that was allocated for them."""
    values: list[Any] = []
    results = result if isinstance(result, tuple) else (result,)
    if len(returns) == 1 and isinstance(result, list | tuple):
        results = (result,)
    for operand, value in zip(returns, results, strict=True):
        if operand is None:
            values.extend(value if isinstance(value, list | tuple) else (value,))
    for made, value in zip(outs, values, strict=True):
        if made is not None:
            made.copy_(value)


def _results(
    info: OpInfo, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[SimTensor | None]
) -> Any:
    """What the call returns: operands, and new tensors in order."""
    results: list[Any] = []
    remaining = iter(outs)
    for entry in plan.structure:
        if entry is None:
            results.append(next(remaining))
        elif isinstance(entry, int):
            results.append([next(remaining) for _ in range(entry)])
        else:
            position = info.names.index(entry)
            results.append(args[position] if position < len(args) else kwargs[entry])
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _note_access(accesses: list[Access], name: str, value: Any, info: OpInfo) -> None:
    if isinstance(value, SimTensor):
        accesses.append(extent(value, name in info.writes, name))
    elif type(value) is list or type(value) is tuple:
        for item in value:
            _note_access(accesses, name, item, info)


def _boolean_index(args: Sequence[Any]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _probability(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    position = info.names.index(info.random_if)
    return float(args[position] if position < len(args) else kwargs.get(info.random_if, 0.0))


def _odd_view(result: Any, inner: Tensor) -> bool:
    """A view that isn't a plain window: another dtype, or a lazy conjugate or negation."""
    for item in (result,) if isinstance(result, Tensor) else result:
        if item.dtype != inner.dtype or item.is_conj() or item.is_neg() or inner.is_conj() or inner.is_neg():
            return True
    return False


def _direct(source: PinnedTensor, meta: Meta) -> bool:
    return source.dtype == meta.dtype and source.shape == meta.shape and source.is_contiguous()


def _repin(result: Any, owner: PinnedTensor) -> Any:
    from outrider_sim.pinned import pin

    if isinstance(result, Tensor):
        return pin(result, owner._alloc)
    if isinstance(result, list | tuple):
        return type(result)(_repin(item, owner) for item in result)
    return result


def _leaves_host(kwargs: Mapping[str, Any], device: torch.device) -> bool:
    target = kwargs.get("device")
    return target is not None and target.type == device.type


def _has_fake(info: OpInfo) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(info.func.name(), torch._C.DispatchKey.Meta)


def _meta_tensor(meta: Meta) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=_META)


def _zeros(meta: Meta) -> Tensor:
    made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    return made.zero_()


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(1, shape[i + 1])
    return tuple(strides)


_CPU = torch.device("cpu")
_META = torch.device("meta")
_COPY = torch.ops.aten.copy_.default
_SCALARS = frozenset({int, bool, str, complex, torch.dtype, torch.layout, torch.memory_format, type(None)})
# as_strided names an offset from the storage's start, so its plan would depend on where the base lies.
_EXPLICIT_OFFSET = frozenset({"aten::as_strided", "aten::_reshape_alias"})
