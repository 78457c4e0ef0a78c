"""Views, and operators that change a tensor's shape or strides. Both run at once, on the tensor's own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider_sim.machine.memory import Meta, contiguous
from outrider_sim.torch_device.opinfo import PLAN_LIMIT, OpInfo
from outrider_sim.torch_device.tensor import HostStorage, SimStorage, SimTensor, bytes_of, to_device, wrap

if TYPE_CHECKING:
    from outrider_sim.torch_device.dispatch import Dispatcher

# as_strided names an offset from the storage's start, so its plan would depend on where the base lies.
_EXPLICIT_OFFSET = frozenset({"aten::as_strided", "aten::_reshape_alias"})


class ViewOperators:
    """Implementations of operators of the kinds VIEW and METADATA."""

    def __init__(self, core: Dispatcher) -> None:
        self._core = core

    def view(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a view operator and return its result over the first operand's memory."""
        base = args[0]
        if not isinstance(base, SimTensor):
            return info.run(*args, **kwargs)
        inner = base._inner
        key: list[Any] = [base._meta]
        rest = [self._core.convert(value, key, info) for value in args[1:]]
        for name, value in kwargs.items():
            key.append(name)
            self._core.convert(value, key, info)
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
                plan = (self._core.metas.meta_of(result), result.storage_offset() - start)
            else:
                plan = [(self._core.metas.meta_of(item), item.storage_offset() - start) for item in result]
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
            return wrap(result, self._core.metas.meta_of(result), base._alloc, base.device)
        return [wrap(item, self._core.metas.meta_of(item), base._alloc, base.device) for item in result]

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
        to_device = torch.as_strided(target._inner, target._meta.shape, target._meta.stride, target._inner.storage_offset())
        info.run(to_device, *args[1:], **kwargs)
        self._become(target, to_device)
        return target

    def _become(self, target: SimTensor, inner: Tensor) -> None:
        target._inner, target._meta, target._seen = inner, self._core.metas.meta_of(inner), None
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
        made = wrap(inner, self._core.metas.meta_of(inner), owner._alloc, owner.device)
        with torch._C._DisableTorchDispatch():
            Tensor.data.__set__(target, made)  # type: ignore[attr-defined]
        target._inner, target._alloc, target._meta, target._seen = made._inner, made._alloc, made._meta, None
        return target

    def renew(self, target: SimTensor, meta: Meta) -> SimTensor:
        """Allocate new memory for an empty tensor and give it the shape `meta`."""
        sim = self._core.current
        made = self._core.allocate(sim, meta, sim.machine.stream)
        return self._take_over(target, made._inner, made)

    def _resize(self, target: SimTensor, shape: tuple[int, ...]) -> SimTensor:
        if target._meta.shape == torch.Size(shape):
            return target
        meta = self._core.metas.get(torch.Size(shape), contiguous(shape), target._meta.dtype)
        if not target._meta.numel and meta.extent > target._alloc.nbytes:
            return self.renew(target, meta)
        if meta.extent > target._alloc.nbytes:
            raise RuntimeError(
                f"resize_ to {shape} needs {meta.extent} bytes, the storage has {target._alloc.nbytes}: memory of the "
                "simulated device can't grow; allocate a tensor of that shape"
            )
        self._become(target, torch.as_strided(target._inner, meta.shape, meta.stride, target._inner.storage_offset()))
        return target


def _odd_view(result: Any, inner: Tensor) -> bool:
    """Return whether a view changes the dtype, or is a lazy conjugate or negation."""
    for item in (result,) if isinstance(result, Tensor) else result:
        if item.dtype != inner.dtype or item.is_conj() or item.is_neg() or inner.is_conj() or inner.is_neg():
            return True
    return False
