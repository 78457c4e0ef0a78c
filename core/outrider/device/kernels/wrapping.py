"""WrappedKernels: another kernel set, of which a subclass changes a few methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from inspect import isfunction
from typing import Any, Self

from torch import Tensor

from outrider.device.kernels.collective_kernels import CollectiveKernels
from outrider.device.kernels.kernelset import KernelSet, kernel_names
from outrider.device.kernels.quantized import QuantizedProduct
from outrider.device.kernels.tuning import DecoderShape

_PARTS_OF_CHECKED = frozenset({"find_nan", "sample", "verify_chain"})
_FLAGS = ("name", "row_invariant", "plans_on_host", "tunes", "cache_formats")


class WrappedKernels(KernelSet):
    """Passes each call on to ``inner``. A subclass overrides what it does otherwise, and reaches ``inner`` by ``super()``.

    ``name``, ``row_invariant``, ``plans_on_host``, ``tunes`` and ``cache_formats`` are those of ``inner`` unless the subclass
    declares its own; one that overrides a kernel over caches declares their formats for itself.

    *Calls within* ``inner`` stay there: where its ``linear_add`` calls its ``linear``, an override of ``linear`` isn't asked.
    One of ``paged_attention`` is, also by what is one call with attention: there the subclass attends, and ``inner`` does the
    rest. So are those that :meth:`verify_checked` consists of.
    :meth:`batch_invariant` isn't passed on: the default wraps these kernels, with what the subclass does otherwise. Of
    :meth:`for_shape` the result is wrapped.
    """

    def __init__(self, inner: KernelSet) -> None:
        self.inner = inner
        own = type(self).__mro__[: type(self).__mro__.index(WrappedKernels)]
        for flag in _FLAGS:
            if not any(flag in vars(kind) for kind in own):
                setattr(self, flag, getattr(inner, flag))
        self._attends = any("paged_attention" in vars(kind) for kind in own)
        self._decides = any(not _PARTS_OF_CHECKED.isdisjoint(vars(kind)) for kind in own)

    def batch_invariant(self) -> KernelSet:
        """These where they are ``row_invariant`` already, else the default."""
        return self if self.row_invariant else super().batch_invariant()

    def for_shape(self, shape: DecoderShape) -> Self:
        """These, around ``inner``'s kernels for this shape: a copy that shares everything else, or this very object."""
        inner = self.inner.for_shape(shape)
        if inner is self.inner:
            return self
        made = copy(self)
        made.inner = inner
        return made

    def attention_norm_linear_quantized(self, *operands: Any, **options: Any) -> Tensor:
        """``inner``'s, or, of a subclass with attention of its own, that and what follows it: such attention may have been
        planned, and may be why the subclass was chosen.
        """
        if self._attends:
            return super().attention_norm_linear_quantized(*operands, **options)
        return self.inner.attention_norm_linear_quantized(*operands, **options)

    def attention_norm_linear_silu_mul_quantized(self, *operands: Any, **options: Any) -> QuantizedProduct:
        """As :meth:`attention_norm_linear_quantized`."""
        if self._attends:
            return super().attention_norm_linear_silu_mul_quantized(*operands, **options)
        return self.inner.attention_norm_linear_silu_mul_quantized(*operands, **options)

    def verify_checked(self, *operands: Any) -> tuple[Tensor, Tensor]:
        """``inner``'s, or, of a subclass that finds or decides by itself, its own way of both, one behind the other."""
        return super().verify_checked(*operands) if self._decides else self.inner.verify_checked(*operands)

    def unused_overrides(self) -> Mapping[str, str]:
        """The subclass's own: none, unless it says so. Those of ``inner`` are its own matter."""
        return {}


def _pass_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: WrappedKernels, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


_OTHERS = (
    name
    for part in (KernelSet, CollectiveKernels)
    for name, member in vars(part).items()
    if isfunction(member) and not name.startswith("_")
)
for _name in (*kernel_names(), *_OTHERS):
    if _name not in vars(WrappedKernels):
        setattr(WrappedKernels, _name, _pass_on(_name, getattr(KernelSet, _name)))
