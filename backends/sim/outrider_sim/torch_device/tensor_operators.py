"""Operators that create, view, resize and copy tensors.

Views and changes of shape run at once, on the tensor's own memory. Factories fill new memory with a queued kernel. Copies on
the device are queued; copies between host and device are asynchronous only with pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import CaptureError
from outrider_sim.machine.device_state import PinnedTensor, alias, host_extent
from outrider_sim.machine.memory import Meta, contiguous, intern_meta, meta_of
from outrider_sim.machine.queue import Op, OperationKind
from outrider_sim.torch_device.opinfo import CPU, META, PLAN_LIMIT, OpInfo, Seeded, extent, without_generator
from outrider_sim.torch_device.planning import plan_call
from outrider_sim.torch_device.tensor import HostStorage, SimStorage, SimTensor, bytes_of, to_device, wrap

if TYPE_CHECKING:
    from outrider_sim.torch_device.dispatch import Dispatcher

_COPY_OP = torch.ops.aten.copy_.default
# as_strided names an offset from the storage's start, so its plan would depend on where the base lies.
_EXPLICIT_OFFSET = frozenset({"aten::as_strided", "aten::_reshape_alias"})


class TensorOperators:
    """Implementations of the operators that create, view, resize and copy tensors."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    # -- creation --------------------------------------------------------------------------------------------------------

    def empty(
        self,
        size: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> SimTensor:
        """Return a contiguous or channels-last device tensor of the given size with undefined contents."""
        del layout, device, pin_memory
        shape = torch.Size(size)
        if memory_format in (None, torch.contiguous_format):
            stride = contiguous(shape)
        else:
            stride = torch.empty(shape, device=META, memory_format=memory_format).stride()
        sim = self._dispatcher.current
        return self._dispatcher.allocate(
            sim, intern_meta(shape, stride, dtype or torch.get_default_dtype()), sim.machine.stream
        )

    def empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> SimTensor:
        """Return a device tensor of the given size and strides with undefined contents."""
        del layout, device, pin_memory
        sim = self._dispatcher.current
        meta = intern_meta(torch.Size(size), tuple(stride), dtype or torch.get_default_dtype())
        return self._dispatcher.allocate(sim, meta, sim.machine.stream)

    def empty_like(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return a tensor with the shape and dtype of the operand and undefined contents, here or on another device.

        Raises `RuntimeError` for another simulated device.
        """
        elsewhere = kwargs.get("device")
        if elsewhere is not None and elsewhere.type != self._dispatcher.device.type:
            result: Tensor = info.run(args[0]._inner, *args[1:], **kwargs)
            return result
        if not isinstance(args[0], SimTensor):
            look = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device=META)
            look = torch.empty_like(look, **{k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")})
            return self.empty_strided(look.shape, look.stride(), look.dtype)
        if elsewhere is not None and elsewhere.index and elsewhere != args[0].device:
            raise RuntimeError(f"{info.name}: an operand is on {args[0].device} and the result would be on {elsewhere}")
        key: list[Any] = []
        for value in args:
            self._dispatcher.convert(value, key, info)
        for name, value in kwargs.items():
            key.append(name)
            self._dispatcher.convert(value, key, info)
        looked_up = tuple(key)
        like = self._dispatcher.current.machine.like
        plan = info.plans.get(looked_up) or plan_call(info, looked_up, args, {**kwargs, "device": META}, like)
        sim = self._dispatcher.current
        return self._dispatcher.allocate(sim, plan.outs[0], sim.machine.stream)

    def filled_like(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a new tensor with values that the operator computes, here or on another device.

        The operator takes shape and dtype from an operand called `self` and reads the values of all other operands, such as
        the ends of a `linspace`.
        """
        elsewhere = kwargs.get("device")
        pattern = info.names[0] == "self" and isinstance(args[0], Tensor)
        read = args[1:] if pattern else args
        if elsewhere is not None and elsewhere.type != self._dispatcher.device.type:
            given = [value.cpu() if isinstance(value, SimTensor) else value for value in read]
            if pattern:
                given.insert(0, args[0]._inner if isinstance(args[0], SimTensor) else args[0])
            return info.run(*given, **kwargs)
        if pattern and not isinstance(args[0], SimTensor):
            look = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device=META)
            return self.factory(info, (look, *args[1:]), kwargs)
        return self._dispatcher.compute(info, args, kwargs)

    def factory(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SimTensor:
        """Return a new tensor that a queued kernel fills, for operators without tensor operands such as `arange`."""
        named = {**kwargs, "device": META}
        shape = info.func(*args, **without_generator(named))
        sim = self._dispatcher.current
        stream = sim.machine.stream
        made = self._dispatcher.allocate(sim, meta_of(shape), stream)
        run: Callable[..., Any] = info.run
        named["device"] = CPU
        if info.random:
            run = Seeded(info, sim.next_seed(), named.pop("generator", None))
        op = Op(OperationKind.KERNEL, info.name, run, tuple(args), named, made._inner.copy_, None, sim.machine.like.kernel_us)
        self._dispatcher.enqueue(op, stream, extent(made, True, "out"))
        return made

    # -- views -----------------------------------------------------------------------------------------------------------

    def view(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a view operator and return its result over the first operand's memory."""
        base = args[0]
        if not isinstance(base, SimTensor):
            return info.run(*args, **kwargs)
        inner = base._inner
        key: list[Any] = [base._meta]
        rest = [self._dispatcher.convert(value, key, info) for value in args[1:]]
        for name, value in kwargs.items():
            key.append(name)
            self._dispatcher.convert(value, key, info)
        looked_up = tuple(key)
        plan: Any = info.plans.get(looked_up)
        if plan is None:
            result = info.run(inner, *rest, **kwargs)
            if info.name in _EXPLICIT_OFFSET or _odd_view(result, inner):
                return self._wrap_views(result, base)
            if len(info.plans) > PLAN_LIMIT:
                info.plans.clear()
            start = inner.storage_offset()
            if isinstance(result, Tensor):
                plan = (meta_of(result), result.storage_offset() - start)
            else:
                plan = [(meta_of(item), item.storage_offset() - start) for item in result]
            info.plans[looked_up] = plan
        start = inner.storage_offset()
        if type(plan) is tuple:
            meta, offset = plan
            return wrap(torch.as_strided(inner, meta.shape, meta.stride, start + offset), meta, base._alloc, base.device)
        return [
            wrap(torch.as_strided(inner, meta.shape, meta.stride, start + offset), meta, base._alloc, base.device)
            for meta, offset in plan
        ]

    def _wrap_views(self, result: Any, base: SimTensor) -> Any:
        if isinstance(result, Tensor):
            return wrap(result, meta_of(result), base._alloc, base.device)
        return [wrap(item, meta_of(item), base._alloc, base.device) for item in result]

    def detach(self, base: SimTensor) -> SimTensor:
        """Return a view of the same memory, outside autograd."""
        inner = base._inner
        return wrap(inner, base._meta, base._alloc, base.device)

    def metadata(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Change shape and strides of the first operand in place. Raises RuntimeError if its memory would have to grow."""
        target = args[0]
        if info.name.startswith("aten::set_"):
            return self._set(target, args[1:])
        if info.name.startswith("aten::resize_"):
            shape = args[1].shape if isinstance(args[1], Tensor) else args[1]
            return self._resize(target, tuple(shape))
        changed = torch.as_strided(target._inner, target._meta.shape, target._meta.stride, target._inner.storage_offset())
        info.run(changed, *args[1:], **kwargs)
        self._replace_storage(target, changed)
        return target

    def _replace_storage(self, target: SimTensor, inner: Tensor) -> None:
        target._inner, target._meta, target._seen = inner, meta_of(inner), None
        with torch._C._DisableTorchDispatch():
            torch.ops.aten.as_strided_.default(target, inner.shape, inner.stride(), inner.storage_offset())

    def _set(self, target: SimTensor, operands: Sequence[Any]) -> SimTensor:
        if operands and isinstance(operands[0], HostStorage | SimStorage):
            stored = operands[0]
            whole = to_device(stored) if isinstance(stored, HostStorage) else bytes_of(stored._allocation, target.device)
            # Torch leaves an argument out that is its default: the strides of a scalar.
            whole_of_it = (0, (operands[0].nbytes() // target._meta.itemsize,))
            offset, shape, *rest = operands[1:] if len(operands) > 2 else whole_of_it
            stride = rest[0] if rest else contiguous(tuple(shape))
            typed = whole._inner
            if target._meta.dtype is not torch.uint8:
                size = target._meta.itemsize
                typed = typed[: typed.numel() // size * size].view(target._meta.dtype)
            return self._take_over(target, torch.as_strided(typed, shape, stride, offset), whole)
        if len(operands) != 1 or not isinstance(operands[0], SimTensor):
            raise RuntimeError("set_: a tensor of the simulated device can only become another one of it")
        return self._take_over(target, operands[0]._inner, operands[0])

    def _take_over(self, target: SimTensor, inner: Tensor, owner: SimTensor) -> SimTensor:
        made = wrap(inner, meta_of(inner), owner._alloc, owner.device)
        with torch._C._DisableTorchDispatch():
            Tensor.data.__set__(target, made)  # type: ignore[attr-defined]
        target._inner, target._alloc, target._meta, target._seen = made._inner, made._alloc, made._meta, None
        return target

    def renew(self, target: SimTensor, meta: Meta) -> SimTensor:
        """Allocate new memory for an empty tensor and give it the shape `meta`."""
        sim = self._dispatcher.current
        made = self._dispatcher.allocate(sim, meta, sim.machine.stream)
        return self._take_over(target, made._inner, made)

    def _resize(self, target: SimTensor, shape: tuple[int, ...]) -> SimTensor:
        if target._meta.shape == torch.Size(shape):
            return target
        meta = intern_meta(torch.Size(shape), contiguous(shape), target._meta.dtype)
        if not target._meta.numel and meta.extent > target._alloc.nbytes:
            return self.renew(target, meta)
        if meta.extent > target._alloc.nbytes:
            raise RuntimeError(
                f"resize_ to {shape} needs {meta.extent} bytes, the storage has {target._alloc.nbytes}: memory of the "
                "simulated device can't grow; allocate a tensor of that shape"
            )
        self._replace_storage(
            target, torch.as_strided(target._inner, meta.shape, meta.stride, target._inner.storage_offset())
        )
        return target

    # -- copies ----------------------------------------------------------------------------------------------------------

    def copy_(self, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy one tensor to another, each in device, pinned or pageable memory; the device converts the dtype."""
        if isinstance(destination, SimTensor):
            if isinstance(source, SimTensor):
                self._dispatcher.compute(self._dispatcher.info(_COPY_OP), (destination, source), {})
            else:
                self.host_to_device(destination, source, non_blocking)
        elif isinstance(source, SimTensor):
            self.device_to_host(destination, source, non_blocking)
        else:
            destination.copy_(source)
        return destination

    def host_to_device(self, destination: SimTensor, source: Tensor, non_blocking: bool) -> None:
        """Copy a host tensor to the device, asynchronously only from contiguous pinned memory of the same dtype.

        From other memory the host waits until the stream is empty, then copies the values and continues.
        """
        sim = self._dispatcher.current
        machine = sim.machine
        stream = machine.stream
        meta = destination._meta
        if source.device.type != "cpu":
            raise RuntimeError(f"a copy to {self._dispatcher.device} from {source.device} isn't possible")
        cost = meta.nbytes / machine.like.link_bytes_per_us + machine.like.kernel_us
        written = extent(destination, True, "self")
        if isinstance(source, PinnedTensor) and _direct(source, meta):
            op = Op(OperationKind.COPY, "copy to device", destination._inner.copy_, (alias(source),), cost=cost)
            self._dispatcher.enqueue(op, stream, host_extent(source, False, "src"), written)
            sim.used_by_copy(source, stream)
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
            op = Op(OperationKind.COPY, "copy to device, staged", destination._inner.copy_, (staged,), cost=cost)
            self._dispatcher.enqueue(op, stream, written)
        if not non_blocking:
            sim.synchronize(stream, "a blocking copy to the device")

    def device_to_host(self, destination: Tensor, source: SimTensor, non_blocking: bool) -> None:
        """Copy to the host: asynchronously to contiguous pinned memory, synchronously to other memory.

        Raises `CaptureError` for other memory in a capture, and `RuntimeError` if the destination isn't on the host.
        """
        sim = self._dispatcher.current
        machine = sim.machine
        stream = machine.stream
        if destination.device.type != "cpu":
            raise RuntimeError(f"a copy from {self._dispatcher.device} to {destination.device} isn't possible")
        cost = source._meta.nbytes / machine.like.link_bytes_per_us + machine.like.kernel_us
        read = extent(source, False, "src")
        if isinstance(destination, PinnedTensor) and destination.is_contiguous():
            op = Op(OperationKind.COPY, "copy to host", alias(destination).copy_, (source._inner,), cost=cost)
            self._dispatcher.enqueue(op, stream, read, host_extent(destination, True, "self"))
            sim.used_by_copy(destination, stream)
            if not non_blocking:
                sim.synchronize(stream, "a blocking copy to the host")
            return
        if stream.capture is not None:
            raise CaptureError(
                "a copy to pageable host memory can't be captured: it waits for the stream; copy to contiguous pinned memory"
            )
        staged = torch.empty(source.shape, dtype=destination.dtype)
        op = Op(OperationKind.COPY, "copy to host, staged", staged.copy_, (source._inner,), cost=cost)
        self._dispatcher.enqueue(op, stream, read)
        sim.synchronize(stream, "a copy to pageable host memory")
        destination.copy_(staged)

    def to_device(self, source: Tensor, dtype: torch.dtype, *, non_blocking: bool) -> SimTensor:
        """Return a copy of a host tensor in new device memory."""
        sim = self._dispatcher.current
        meta = intern_meta(source.shape, contiguous(tuple(source.shape)), dtype)
        made = self._dispatcher.allocate(sim, meta, sim.machine.stream)
        self.host_to_device(made, source, non_blocking)
        return made

    def to_copy(
        self,
        source: Tensor,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        """Return a copy of a tensor with another dtype, layout or device.

        Raises `RuntimeError` for a target that is neither this device nor the host.
        """
        del layout
        target = self._dispatcher.device if device is None and isinstance(source, SimTensor) else (device or CPU)
        with torch._C._InferenceMode(False):
            looks = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=META)
            looks = looks.to(dtype=dtype or source.dtype, memory_format=memory_format or torch.preserve_format, copy=True)
        if target.type == "meta":
            return looks
        sim = self._dispatcher.current
        if isinstance(source, SimTensor):
            if target.type == self._dispatcher.device.type:
                if target.index and target != source.device:
                    raise RuntimeError(f"a copy from {source.device} to {target} isn't possible: devices meet in collectives")
                made = self._dispatcher.allocate(sim, meta_of(looks), sim.machine.stream)
                self.copy_(made, source)
                return made
            if target.type != "cpu":
                raise RuntimeError(f"a copy from {self._dispatcher.device} to {target} isn't possible")
            if pin_memory or non_blocking:
                # As torch does for accelerators: a result that is copied asynchronously is pinned.
                host: Tensor = sim.pinned(tuple(looks.shape), looks.dtype, guarded=True)
            else:
                host = torch.empty_strided(looks.shape, looks.stride(), dtype=looks.dtype)
            self.device_to_host(host, source, non_blocking)
            return host
        made = self._dispatcher.allocate(sim, meta_of(looks), sim.machine.stream)
        self.host_to_device(made, source, non_blocking)
        return made


def _odd_view(result: Any, inner: Tensor) -> bool:
    """Return whether a view changes the dtype, or is a lazy conjugate or negation."""
    for item in (result,) if isinstance(result, Tensor) else result:
        if item.dtype != inner.dtype or item.is_conj() or item.is_neg() or inner.is_conj() or inner.is_neg():
            return True
    return False


def _direct(source: PinnedTensor, meta: Meta) -> bool:
    return source.dtype == meta.dtype and source.shape == meta.shape and source.is_contiguous()
