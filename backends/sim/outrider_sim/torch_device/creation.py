"""Tensor creation: uninitialized memory, and factories that fill new memory with a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider_sim.machine.memory import contiguous
from outrider_sim.machine.queue import Op, OperationKind
from outrider_sim.torch_device.operands import CPU, META, Seeded, extent, without_generator
from outrider_sim.torch_device.opinfo import OpInfo
from outrider_sim.torch_device.tensor import SimTensor

if TYPE_CHECKING:
    from outrider_sim.torch_device.dispatch import Dispatcher


class FactoryOperators:
    """Implementations of the operators that create tensors on the device."""

    def __init__(self, core: Dispatcher) -> None:
        self._core = core

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
        sim = self._core.current
        return self._core.allocate(
            sim, self._core.metas.get(shape, stride, dtype or torch.get_default_dtype()), sim.machine.stream
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
        sim = self._core.current
        meta = self._core.metas.get(torch.Size(size), tuple(stride), dtype or torch.get_default_dtype())
        return self._core.allocate(sim, meta, sim.machine.stream)

    def empty_like(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return a tensor with the shape and dtype of the operand and undefined contents, here or on another device.

        Raises `RuntimeError` for another simulated device.
        """
        elsewhere = kwargs.get("device")
        if elsewhere is not None and elsewhere.type != self._core.device.type:
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
            self._core.convert(value, key, info)
        for name, value in kwargs.items():
            key.append(name)
            self._core.convert(value, key, info)
        looked_up = tuple(key)
        plan = info.plans.get(looked_up) or self._core.plan(info, looked_up, args, {**kwargs, "device": META})
        sim = self._core.current
        return self._core.allocate(sim, plan.outs[0], sim.machine.stream)

    def filled_like(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a new tensor with values that the operator computes, here or on another device.

        The operator takes shape and dtype from an operand called `self` and reads the values of all other operands, such as
        the ends of a `linspace`.
        """
        elsewhere = kwargs.get("device")
        pattern = info.names[0] == "self" and isinstance(args[0], Tensor)
        read = args[1:] if pattern else args
        if elsewhere is not None and elsewhere.type != self._core.device.type:
            given = [value.cpu() if isinstance(value, SimTensor) else value for value in read]
            if pattern:
                given.insert(0, args[0]._inner if isinstance(args[0], SimTensor) else args[0])
            return info.run(*given, **kwargs)
        if pattern and not isinstance(args[0], SimTensor):
            look = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device=META)
            return self.factory(info, (look, *args[1:]), kwargs)
        return self._core.compute(info, args, kwargs)

    def factory(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SimTensor:
        """Return a new tensor that a queued kernel fills, for operators without tensor operands such as `arange`."""
        named = {**kwargs, "device": META}
        shape = info.func(*args, **without_generator(named))
        sim = self._core.current
        stream = sim.machine.stream
        made = self._core.allocate(sim, self._core.metas.meta_of(shape), stream)
        run: Callable[..., Any] = info.run
        named["device"] = CPU
        if info.random:
            run = Seeded(info, sim.next_seed(), named.pop("generator", None))
        op = Op(OperationKind.KERNEL, info.name, run, tuple(args), named, made._inner.copy_, None, sim.machine.like.kernel_us)
        self._core.note(op, extent(made, True, "out"))
        sim.machine.enqueue(op, stream)
        return made
