"""Plans of calls: the results' metas and the host's implementation, determined once per kind of operands.

Torch's meta kernels return the results' shapes, strides and dtypes. They don't show whether the host has a kernel for
these dtypes, nor whether an `out=` overload writes to the passed tensors without a resize. The first call of a kind
therefore also runs on zeros. A call without a host kernel raises at once, and an overload that resizes is never used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider_sim.machine.device_state import PinnedTensor, exclude_ambient_dispatch
from outrider_sim.machine.memory import Meta, meta_of
from outrider_sim.torch_device.opinfo import CPU, META, PLAN_LIMIT, OpInfo, ResultPlan, is_strided, without_generator
from outrider_sim.torch_device.tensor import SimTensor

if TYPE_CHECKING:
    from outrider_sim.options import Personality

_PROBED = 1 << 22
"""Maximum bytes of operands and results for which a call with one result is tried on zeros. A larger call runs without its
`out=` overload. Calls with several results are always tried: torch's meta kernels give some of them other shapes.
"""

_Resized = tuple[tuple[str, Meta], ...]


def plan_call(
    info: OpInfo, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any], like: Personality
) -> ResultPlan:
    """Return the plan of a call: the results' metas and the implementation. ``like`` has the times and rates of the device.

    Raises `NotImplementedError` with the operator's name if the host can't compute the call.
    """
    result, operands, resized = _shapes(info, args, kwargs)
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
            fresh.extend(_operand_meta(info, item) for item in value)
        else:
            structure.append(None)
            fresh.append(_operand_meta(info, value) if isinstance(value, Tensor) else None)
    if "output_mask" in info.names:  # what isn't asked for is None
        asked = _argument(info, "output_mask", args, kwargs)
        fresh = [look if wanted else None for look, wanted in zip(fresh, asked, strict=True)]
    moved = sum(m.nbytes for m in operands) + sum(m.nbytes for m in fresh if m is not None)
    cost = max(like.kernel_us, moved / like.bytes_per_us)
    if info.matrix and fresh and operands:
        cost = max(cost, 2 * fresh[0].numel * operands[-1].shape[-1] / like.flops_per_us)
    if len(info.plans) > PLAN_LIMIT:
        info.plans.clear()
    out = False
    if not resized:
        by_host = info.by_host
        if moved <= _PROBED or len(fresh) > 1:
            out = _probe(info, key, args, kwargs, tuple(fresh))
        if info.by_host and not by_host:
            return plan_call(info, key, args, kwargs, like)
    plan = info.plans[key] = ResultPlan(tuple(fresh), tuple(structure), cost, out, resized)
    return plan


def _operand_meta(info: OpInfo, value: Tensor) -> Meta:
    _strided(info, value)
    return meta_of(value)


def _strided(info: OpInfo, value: Tensor) -> None:
    if not is_strided(value):
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
        raise NotImplementedError(
            f"{info.name}: the result would be {kind}, and the simulated device has strided tensors only; use the host"
        )


def _shapes(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Meta], _Resized]:
    """Return the results' metas, the operands' metas, and the operands to be resized before the call."""
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
            result = _on_zeros(info, sketch)
        except RuntimeError as error:
            if "meta tensors" not in str(error):
                raise
            raise NotImplementedError(
                f"{info.name}: what its results look like depends on values, and the simulated device doesn't wait for "
                "them here; run it on the host"
            ) from error
    resized: _Resized = ()
    for name, made, meta in sketch.written:
        if made.shape != meta.shape and made.dtype == meta.dtype and not meta.numel and name in info.outs:
            resized += ((name, meta_of(made)),)  # an empty `out=` takes the shape of the result
        elif made.shape != meta.shape or made.dtype != meta.dtype:
            raise RuntimeError(
                f"{info.name}: the result has shape {tuple(made.shape)}, but {name!r} has {tuple(meta.shape)}: a tensor "
                "of the simulated device can't be resized by an operation; pass one of the right shape"
            )
    return result, sketch.operands, resized


def _on_zeros(info: OpInfo, sketch: _Sketch) -> Any:
    try:
        with exclude_ambient_dispatch():
            return sketch.call(info.emulated or info.run, _zeros, CPU)
    except NotImplementedError as error:
        raise _missing(info, error) from error


def _probe(
    info: OpInfo, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any], fresh: tuple[Any, ...]
) -> bool:
    """Run the operator once on zeros; return True if the `out=` overload writes to the passed tensors
    without a resize.
    """
    if not _probed(info):
        return False
    kind = _kind(key)
    found = info.probed.get(kind)
    if found is None:
        if len(info.probed) > PLAN_LIMIT:
            info.probed.clear()
        found = info.probed[kind] = _try(info, args, kwargs, fresh)
    return found


def _try(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], fresh: tuple[Any, ...]) -> bool:
    sketch = _Sketch(info, args, kwargs)
    result = _run_on_zeros(info, sketch)
    if result is None:
        return False
    made = _fresh(info, result)
    for value in made:
        if value is not None:
            _strided(info, value)
    if not _shapes_match(info, made, fresh):
        return False
    if info.writes or None in fresh:
        return False
    return info.out is not None and bool(fresh) and _keeps_storage(info, sketch, fresh)


def _run_on_zeros(info: OpInfo, sketch: _Sketch) -> Any:
    """Return the host kernel's result on zeros, or None if zeros are invalid values for the operator.

    Raises `NotImplementedError` if the host has no kernel for the operands.
    """
    try:
        # What a call on zeros has to say (an index, a singular matrix) is of no interest; only what can't be done is.
        with warnings.catch_warnings(), torch.no_grad(), torch._C._InferenceMode(False), exclude_ambient_dispatch():
            warnings.simplefilter("ignore")
            return sketch.call(info.run, _zeros, CPU)
    except NotImplementedError as error:
        raise _missing(info, error) from error
    except Exception as error:
        if "not implemented for" in str(error) or "not supported on" in str(error):
            raise _missing(info, error) from error
        return None


def _keeps_storage(info: OpInfo, sketch: _Sketch, fresh: tuple[Any, ...]) -> bool:
    outs = [_zeros(meta) for meta in fresh]
    before = [(out.data_ptr(), out.shape, out.stride()) for out in outs]
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch._C._InferenceMode(False), exclude_ambient_dispatch():
            warnings.simplefilter("ignore")
            sketch.call(info.out, _zeros, CPU, dict(zip(info.out_names, outs, strict=True)))
    except Exception:
        return False
    return before == [(out.data_ptr(), out.shape, out.stride()) for out in outs]


class _Sketch:
    """An operator call with operands replaced by tensors of the same shapes and dtypes, on the host or on meta."""

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
        """Call ``fn`` on operands that ``make`` creates, and return its result. Raises `NotImplementedError` if ``fn`` is
        None.
        """
        if fn is None:
            raise NotImplementedError
        self.operands.clear()
        self.written.clear()
        names = self._info.names
        generated = [self._draw(make, device, name, value) for name, value in zip(names, self._args, strict=False)]
        named = {name: self._draw(make, device, name, value) for name, value in without_generator(self._kwargs).items()}
        return fn(*generated, **named, **(outs or {}))

    def _draw(self, make: Callable[[Meta], Tensor], device: torch.device, name: str, value: Any) -> Any:
        if isinstance(value, SimTensor):
            made = make(value._meta)
            if name.endswith("pivots"):  # LAPACK counts rows from 1, and swaps them without a check
                made.fill_(1)
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


def _probed(info: OpInfo) -> bool:
    return info.native and not info.random and info.emulated is None


def _kind(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((m.dtype, len(m.shape), m.numel == 0) if isinstance(m, Meta) else m for m in key)


def _shapes_match(info: OpInfo, made: Sequence[Any], looks: Sequence[Any]) -> bool:
    """Return True if the results ``made`` by the host have the expected shapes ``looks``. If a shape differs, also mark the
    operator, so that the host determines the result shapes of later calls.
    """
    if len(made) != len(looks):
        return False
    if any(v is not None and look is not None and v.shape != look.shape for v, look in zip(made, looks, strict=True)):
        info.by_host = True
        return False
    return True


def _fresh(info: OpInfo, result: Any) -> list[Tensor | None]:
    """Return the results of a call that aren't operands."""
    made: list[Tensor | None] = []
    for operand, value in zip(info.returns, result if isinstance(result, tuple) else (result,), strict=False):
        if operand is None:
            made.extend(value if isinstance(value, list | tuple) else [value if isinstance(value, Tensor) else None])
    return made


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
