"""WrappedKernels: a wrapper of a kernel set; subclasses override a few methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Any, Self

from outrider.device.kernels.collective_kernels import CollectiveKernels
from outrider.device.kernels.kernelset import KernelSet, declared_below, kernel_names, methods_of, parts_of
from outrider.device.kernels.tuning import DecoderShape

_INHERITED_ATTRIBUTES = ("name", "row_invariant", "plans_on_host", "tunes", "cache_formats", "state_interval")
_FUSED_WITH_ATTENTION = ("attention_norm_linear_quantized", "attention_norm_linear_silu_mul_quantized")
_FUSED_OF_PARTS = (
    "verify_checked",
    "embed_beside_linear_quantized",
    "linear_quantized_add",
    "linear_quantized_add_rms_norm",
    "linear_quantized_rope_write_cache",
)
_OVERRIDABLE_PARTS = dict.fromkeys(_FUSED_WITH_ATTENTION, frozenset({"paged_attention"})) | {
    name: parts_of(name) for name in _FUSED_OF_PARTS
}
"""Fused methods, each with the parts whose override makes the method run part by part."""


class WrappedKernels(KernelSet):
    """A kernel set that passes each call on to ``inner``. A subclass overrides methods, and calls ``inner`` by ``super()``.

    ``name``, ``row_invariant``, ``plans_on_host``, ``tunes``, ``cache_formats`` and ``state_interval`` are those of ``inner``
    unless the subclass declares its own. A subclass that overrides a kernel over caches must declare ``cache_formats``.

    *Calls within* ``inner`` don't reach the subclass: if ``inner.linear_add`` calls ``inner.linear``, an override of
    ``linear`` isn't called. There are two exceptions. The fused kernels with attention call an override of
    ``paged_attention``, because that attention may have been planned; ``inner`` computes the other parts.
    :meth:`verify_checked` and the products with quantised weights at the ends of a stack also call overrides of their
    parts.

    :meth:`batch_invariant` isn't passed on: the default wraps this kernel set with its overrides. :meth:`for_shape` returns
    a wrapper of ``inner.for_shape``.
    """

    def __init__(self, inner: KernelSet) -> None:
        self.inner = inner
        own = declared_below(type(self), WrappedKernels)
        for flag in _INHERITED_ATTRIBUTES:
            if flag not in own:
                setattr(self, flag, getattr(inner, flag))
        self._in_parts = frozenset(name for name, parts in _OVERRIDABLE_PARTS.items() if parts & own)

    def batch_invariant(self) -> KernelSet:
        """Return this kernel set if it is ``row_invariant``, else the default wrapper."""
        return self if self.row_invariant else super().batch_invariant()

    def for_shape(self, shape: DecoderShape) -> Self:
        """Return a wrapper of ``inner``'s kernels for this shape: a shallow copy, or this object if nothing changes."""
        inner = self.inner.for_shape(shape)
        if inner is self.inner:
            return self
        wrapper = copy(self)
        wrapper.inner = inner
        return wrapper

    def unused_overrides(self) -> Mapping[str, str]:
        """Return the overrides of this class that can't be used, by default none. The kernels in ``inner``
        report their own.
        """
        return {}


def _pass_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: WrappedKernels, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    @wraps(method)
    def call_parts(self: WrappedKernels, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if name in self._in_parts else call(self, *args, **kwargs)

    return call_parts if name in _OVERRIDABLE_PARTS else call


for _name in (*kernel_names(), *methods_of(KernelSet, CollectiveKernels)):
    if _name not in vars(WrappedKernels):
        setattr(WrappedKernels, _name, _pass_on(_name, getattr(KernelSet, _name)))
