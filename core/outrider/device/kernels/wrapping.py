"""WrappedKernels: a wrapper of a kernel set; subclasses override a few methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Any, Self

from outrider.device.kernels.collective_kernels import CollectiveKernels
from outrider.device.kernels.kernelset import KernelSet, kernel_names, methods_of
from outrider.device.kernels.tuning import DecoderShape

_INHERITED_ATTRIBUTES = ("name", "row_invariant", "plans_on_host", "tunes", "cache_formats", "state_interval")


class WrappedKernels(KernelSet):
    """A kernel set that passes each call on to ``inner``. A subclass overrides methods, and calls ``inner`` by ``super()``.

    ``name``, ``row_invariant``, ``plans_on_host``, ``tunes``, ``cache_formats`` and ``state_interval`` are those of ``inner``
    unless the subclass declares its own. A subclass that overrides a kernel over caches must declare ``cache_formats``.

    *Blocks.* The kernels that ``inner`` calls within a block don't reach the subclass. A subclass that overrides a primitive
    therefore gets the composed default of every block that uses the primitive, unless it overrides the block, too. A
    subclass that only replaces attention passes its own attention to the block of ``inner``
    (``self.inner.attention_block(x, block, tokens, attend=self.paged_attention)``).

    :meth:`batch_invariant` isn't passed on: the default wraps this kernel set with its overrides. :meth:`for_shape` returns
    a wrapper of ``inner.for_shape``.
    """

    def __init__(self, inner: KernelSet) -> None:
        self.inner = inner
        kinds = type(self).__mro__
        declared = {name for kind in kinds[: kinds.index(WrappedKernels)] for name in vars(kind)}
        for flag in _INHERITED_ATTRIBUTES:
            if flag not in declared:
                setattr(self, flag, getattr(inner, flag))

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

    def is_native(self, name: str, block: object = None) -> bool:
        """Return True if this class overrides the kernel, or passes it on and ``inner`` computes it."""
        if getattr(type(self), name) is getattr(WrappedKernels, name):
            return self.inner.is_native(name, block)
        return super().is_native(name, block)


def _pass_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: WrappedKernels, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name in (*kernel_names(), *methods_of(KernelSet, CollectiveKernels)):
    if _name not in (*vars(WrappedKernels), "implementation", "resolve_block"):
        setattr(WrappedKernels, _name, _pass_on(_name, getattr(KernelSet, _name)))
