"""What the results of a call look like, and whether the host can compute it, found out once for each kind of operands.

Torch's meta kernels say what results look like. They don't say whether the host has a kernel for these dtypes, nor whether
an `out=` overload works in the tensors that it is given. So the first call of a kind also runs on zeros: what the host can't
do is refused at the call, and an overload that resizes is never used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider_sim.meta import Meta, Metas
from outrider_sim.operands import CPU, META, is_strided
from outrider_sim.opinfo import PLAN_LIMIT, OpInfo, Plan
from outrider_sim.pinned import PinnedTensor
from outrider_sim.sim import quiet
from outrider_sim.tensor import SimTensor

if TYPE_CHECKING:
    from outrider_sim.dispatch import Dispatcher

_PROBED = 1 << 22
"""Bytes of operands and results up to which a call is tried on zeros; larger ones run without their `out=` overload."""


_Resized = tuple[tuple[str, Meta], ...]


class Planner:
    """Makes the plans of calls."""

    def __init__(self, core: Dispatcher, metas: Metas) -> None:
        self._core = core
        self._metas = metas

    def plan(self, info: OpInfo, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
        """What the results look like, and how the call is run. Raises `NotImplementedError`, which names the operator, where
        it can't be.
        """
        result, operands, resized = self._shapes(info, args, kwargs)
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
                fresh.extend(self._look(info, item) for item in value)
            else:
                structure.append(None)
                fresh.append(self._look(info, value) if isinstance(value, Tensor) else None)
        if "output_mask" in info.names:  # what isn't asked for is None
            asked = _argument(info, "output_mask", args, kwargs)
            fresh = [look if wanted else None for look, wanted in zip(fresh, asked, strict=True)]
        moved = sum(m.nbytes for m in operands) + sum(m.nbytes for m in fresh if m is not None)
        like = self._core.current.machine.like
        cost = max(like.kernel_us, moved / like.bytes_per_us)
        if info.matrix and fresh and operands:
            cost = max(cost, 2 * fresh[0].numel * operands[-1].shape[-1] / like.flops_per_us)
        if len(info.plans) > PLAN_LIMIT:
            info.plans.clear()
        out = False
        if not resized and moved <= _PROBED:
            by_host = info.by_host
            out = self._probe(info, key, args, kwargs, tuple(fresh))
            if info.by_host and not by_host:
                return self.plan(info, key, args, kwargs)
        plan = info.plans[key] = Plan(tuple(fresh), tuple(structure), cost, out, resized)
        return plan

    def _look(self, info: OpInfo, value: Tensor) -> Meta:
        self._strided(info, value)
        return self._metas.of(value)

    @staticmethod
    def _strided(info: OpInfo, value: Tensor) -> None:
        if not is_strided(value):
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
            raise NotImplementedError(
                f"{info.name}: the result would be {kind}, and the simulated device has strided tensors only; use the host"
            )

    def _shapes(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Meta], _Resized]:
        """What the results look like, the operands, and which of these must get memory first."""
        sketch = _Sketch(info, args, kwargs)
        with torch.no_grad(), torch._C._InferenceMode(False):
            if not info.native and not info.returns and not _has_fake(info):
                return (), sketch.operands, ()
            try:
                asked = None if info.by_host else info.emulated or info.func
                with warnings.catch_warnings():  # of a resize, which is told below or happens
                    warnings.simplefilter("ignore")
                    result = sketch.call(asked, _meta_tensor, META)
            except NotImplementedError:
                result = self._on_zeros(info, sketch)
        resized: _Resized = ()
        for name, made, meta in sketch.written:
            if made.shape != meta.shape and made.dtype == meta.dtype and not meta.numel and name in info.outs:
                resized += ((name, self._metas.of(made)),)  # an empty `out=` takes the shape of the result
            elif made.shape != meta.shape or made.dtype != meta.dtype:
                raise RuntimeError(
                    f"{info.name}: the result has shape {tuple(made.shape)}, but {name!r} has {tuple(meta.shape)}: a tensor "
                    "of the simulated device can't be resized by an operation; pass one of the right shape"
                )
        return result, sketch.operands, resized

    def _on_zeros(self, info: OpInfo, sketch: _Sketch) -> Any:
        try:
            with quiet():
                return sketch.call(info.emulated or info.run, _zeros, CPU)
        except NotImplementedError as error:
            raise _missing(info, error) from error

    def _probe(
        self, info: OpInfo, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any], fresh: tuple[Any, ...]
    ) -> bool:
        """Run once on zeros; returns whether the `out=` overload leaves the given tensors where they are."""
        if not info.native or info.random or info.emulated is not None:
            return False
        kind = tuple((m.dtype, len(m.shape), m.numel == 0) if isinstance(m, Meta) else m for m in key)
        found = info.probed.get(kind)
        if found is None:
            if len(info.probed) > PLAN_LIMIT:
                info.probed.clear()
            found = info.probed[kind] = self._try(info, args, kwargs, fresh)
        return found

    def _try(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], fresh: tuple[Any, ...]) -> bool:
        sketch = _Sketch(info, args, kwargs)
        try:
            # What a call on zeros has to say (an index, a singular matrix) is of no interest; only what can't be done is.
            with warnings.catch_warnings(), torch.no_grad(), torch._C._InferenceMode(False), quiet():
                warnings.simplefilter("ignore")
                result = sketch.call(info.run, _zeros, CPU)
        except NotImplementedError as error:
            raise _missing(info, error) from error
        except Exception as error:
            if "not implemented for" in str(error) or "not supported on" in str(error):
                raise _missing(info, error) from error
            return False
        made = [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]
        for value in made:
            self._strided(info, value)
        if info.writes or None in fresh or len(made) != len(fresh):
            return False
        if any(value.shape != look.shape for value, look in zip(made, fresh, strict=True)):
            info.by_host = True  # where torch's two answers differ, the host's is what there will be
            return False
        return info.out is not None and bool(fresh) and self._stays(info, sketch, fresh)

    @staticmethod
    def _stays(info: OpInfo, sketch: _Sketch, fresh: tuple[Any, ...]) -> bool:
        outs = [_zeros(meta) for meta in fresh]
        before = [(out.data_ptr(), out.shape, out.stride()) for out in outs]
        try:
            with warnings.catch_warnings(), torch.no_grad(), torch._C._InferenceMode(False), quiet():
                warnings.simplefilter("ignore")
                sketch.call(info.out, _zeros, CPU, dict(zip(info.out_names, outs, strict=True)))
        except Exception:
            return False
        return before == [(out.data_ptr(), out.shape, out.stride()) for out in outs]


class _Sketch:
    """The operands of a call, drawn on another device."""

    def __init__(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._info, self._args, self._kwargs = info, args, kwargs
        self.operands: list[Meta] = []
        self.written: list[tuple[str, Tensor, Meta]] = []

    def call(
        self,
        fn: Callable[..., Any] | None,
        make: Callable[[Meta], Tensor],
        device: torch.device,
        outs: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """The call on operands that `make` makes. Raises `NotImplementedError` without a function."""
        if fn is None:
            raise NotImplementedError
        self.operands.clear()
        self.written.clear()
        names = self._info.names
        drawn = [self._draw(make, device, name, value) for name, value in zip(names, self._args, strict=False)]
        named = {name: self._draw(make, device, name, value) for name, value in self._kwargs.items() if name != "generator"}
        return fn(*drawn, **named, **(outs or {}))

    def _draw(self, make: Callable[[Meta], Tensor], device: torch.device, name: str, value: Any) -> Any:
        if isinstance(value, SimTensor):
            made = make(value._meta)
            self.operands.append(value._meta)
            if name in self._info.writes:
                self.written.append((name, made, value._meta))
            return made
        if isinstance(value, PinnedTensor):
            return value.plain(write=None)
        if isinstance(value, list | tuple):
            return [self._draw(make, device, name, item) for item in value]
        if isinstance(value, Tensor) and device is META and value.dim() == 0:
            return value
        return device if isinstance(value, torch.device) else value


def _argument(info: OpInfo, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    position = info.names.index(name)
    return args[position] if position < len(args) else kwargs[name]


def _missing(info: OpInfo, error: Exception) -> NotImplementedError:
    text = str(error).partition("\n")[0]
    return NotImplementedError(
        f"{info.name}: the simulated device computes as the host does, and the host can't do this: {text}; "
        "use other dtypes or another operator, or run it on the host"
    )


def _has_fake(info: OpInfo) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(info.func.name(), torch._C.DispatchKey.Meta)


def _meta_tensor(meta: Meta) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=META)


def _zeros(meta: Meta) -> Tensor:
    made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=CPU)
    return made.zero_()
