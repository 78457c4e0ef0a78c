"""WrappedKernels: another kernel set, of which a subclass changes a few methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Any, Self

from outrider.device.kernels.collective_kernels import CollectiveKernels
from outrider.device.kernels.kernelset import KernelSet, declared_below, kernel_names, methods_of, parts_of
from outrider.device.kernels.tuning import DecoderShape

_FLAGS = ("name", "row_invariant", "plans_on_host", "tunes", "cache_formats")
_ATTENDING = ("attention_norm_linear_quantized", "attention_norm_linear_silu_mul_quantized")
_TOGETHER = (
    "verify_checked",
    "embed_beside_linear_quantized",
    "linear_quantized_add",
    "linear_quantized_add_rms_norm",
    "linear_quantized_rope_write_cache",
)
_PARTS = dict.fromkeys(_ATTENDING, frozenset({"paged_attention"})) | {name: parts_of(name) for name in _TOGETHER}
"""Methods that a subclass which overrides one of the others is asked for part by part."""


class WrappedKernels(KernelSet):
    """Passes each call on to ``inner``. A subclass overrides what it does otherwise, and reaches ``inner`` by ``super()``.

    ``name``, ``row_invariant``, ``plans_on_host``, ``tunes`` and ``cache_formats`` are those of ``inner`` unless the subclass
    declares its own; one that overrides a kernel over caches declares their formats for itself.

    *Calls within* ``inner`` stay there: where its ``linear_add`` calls its ``linear``, an override of ``linear`` isn't asked.
    One of ``paged_attention`` is, also by what is one call with attention: such attention may have been planned, and may be
    why the subclass was chosen. There the subclass attends, and ``inner`` does the rest. So is one of what
    :meth:`verify_checked` and the products with quantised weights at the ends of a stack consist of.
    :meth:`batch_invariant` isn't passed on: the default wraps these kernels, with what the subclass does otherwise. Of
    :meth:`for_shape` the result is wrapped.
    """

    def __init__(self, inner: KernelSet) -> None:
        self.inner = inner
        own = declared_below(type(self), WrappedKernels)
        for flag in _FLAGS:
            if flag not in own:
                setattr(self, flag, getattr(inner, flag))
        self._in_parts = frozenset(name for name, parts in _PARTS.items() if parts & own)

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

    def unused_overrides(self) -> Mapping[str, str]:
        """The subclass's own: none, unless it says so. Those of ``inner`` are its own matter."""
        return {}


def _pass_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: WrappedKernels, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    @wraps(method)
    def call_parts(self: WrappedKernels, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if name in self._in_parts else call(self, *args, **kwargs)

    return call_parts if name in _PARTS else call


for _name in (*kernel_names(), *methods_of(KernelSet, CollectiveKernels)):
    if _name not in vars(WrappedKernels):
        setattr(WrappedKernels, _name, _pass_on(_name, getattr(KernelSet, _name)))
