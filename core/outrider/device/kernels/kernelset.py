"""KernelSet: the computations that a backend may implement faster than torch: primitives, and blocks that compose them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import cache, partial, wraps
from inspect import isfunction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from outrider.device.errors import CapabilityError
from outrider.device.kernels.blocks import BlockKernels
from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.formats import CACHE_FORMATS
from outrider.device.kernels.latent_kernels import LatentKernels
from outrider.device.kernels.metadata import DecoderShape, TuningProgress, TuningResult, parts_of
from outrider.device.kernels.model_kernels import ModelKernels
from outrider.device.kernels.recurrent_kernels import RecurrentKernels
from outrider.device.kernels.sampling_kernels import SamplingKernels

BLOCKS = ("attention_block", "mlp_block", "experts_block", "recurrent_block", "verify_checked")
"""The blocks of a model: its layers' halves, and the selection of tokens after the output head."""
_CACHE_KERNELS = frozenset(
    {"rope_write_cache", "head_norm_rope_write_cache", "paged_attention", "attention_block", "plan_attention", "move_cache"}
    | {"latent_norm_rope_write_cache", "latent_attention"}
)
"""Kernels that read or write the pages of a cache."""
_KERNELS_BY_OPERAND: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "attention_sinks": frozenset({"paged_attention", "attention_block"}),
        "corrected_routing": frozenset({"route", "experts_block"}),
        "expert_biases": frozenset({"experts", "experts_quantized", "experts_block"}),
        "expert_gelu": frozenset({"experts", "experts_quantized", "experts_block"}),
        "joint_head_norms": frozenset({"head_norm_rope_write_cache", "attention_block"}),
    }
)
"""Operands that few models have, each with the kernels that take it."""


class KernelSet(BlockKernels, SamplingKernels):
    """Kernels as plain methods. The defaults are the torch references; a plugin overrides the kernels that it does better.

    *Primitives* compute one operation each. *Blocks* (:class:`~outrider.device.kernels.blocks.BlockKernels`) are the halves
    of a layer and the selection of tokens; their defaults compose primitives, and a plugin overrides a block to fuse them.

    *Placement.* Every method enqueues on the stream whose scope the caller opened, and returns tensors of that stream.
    *Capture.* Every method may be captured; none reads a device value on the host. A backend that declares
    ``captures_in_part`` may refuse some of them with :class:`CaptureError`.
    *Numerics.* A result may differ from the reference by rounding alone. Rows of a batch don't influence each other
    except through rounding.
    *Padding.* Token rows beyond a batch's real tokens hold valid indices (row and page 0) and may compute anything
    finite.
    *Errors.* A shape or dtype that a kernel can't do raises before anything is enqueued.

    *Subclasses.* A subclass that overrides a primitive gets the composed default of every block that uses the primitive, so
    that the primitive is called. A subclass that also overrides the block keeps its own block.

    *Delegation.* An override computes a call, or delegates the call by ``super()``, for example for an unsupported shape.
    ``outrider conform`` counts both kinds of calls.

    *Letters.* T new tokens, B sequences, Hq and Hkv heads, D head size, H hidden size. V vocabulary, K draft tokens,
    N nodes of a draft tree with its root, L the longest path from the root.
    """

    name = "torch"
    row_invariant = False
    """True if the bits of a token's or request's result don't depend on the other rows of the batch."""

    cache_formats: frozenset[str] = frozenset(CACHE_FORMATS)
    """Formats of :data:`~outrider.device.CACHE_FORMATS` in which the kernels support a cache, in addition to the queries'
    dtype. :meth:`rope_write_cache` and the kernels that end with it round to the nearest value and clamp to the format's
    range; NaN stays NaN. :meth:`paged_attention` and :meth:`move_cache` read the stored values. ``fp8`` is e4m3, -448 to 448.
    The model multiplies by the scales of its cache outside the kernels. The references support all formats. A class that
    overrides a cache kernel supports no format unless it declares some, since it would misread an unknown cache. The engine
    reads the attribute before it loads a model.
    """

    optional_operands: frozenset[str] = frozenset(_KERNELS_BY_OPERAND)
    """Operands that few models have, and that these kernels take: ``attention_sinks`` (:meth:`paged_attention`),
    ``corrected_routing`` (:meth:`route`), ``expert_biases`` and ``expert_gelu`` (:meth:`experts`,
    :meth:`experts_quantized`) and ``joint_head_norms`` (:meth:`head_norm_rope_write_cache`). The references take all. A class
    that overrides a kernel with such an operand takes it only if the class declares so. A model with an operand that the
    kernels don't take is refused before it is loaded.
    """

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        own = vars(cls)
        if "cache_formats" not in own and not _CACHE_KERNELS.isdisjoint(own):
            cls.cache_formats = frozenset()
        if "optional_operands" not in own:
            cls.optional_operands -= {name for name, kernels in _KERNELS_BY_OPERAND.items() if not kernels.isdisjoint(own)}
        for name, parts in composed_kernels().items():
            if name not in own and not parts.isdisjoint(own):
                setattr(cls, name, getattr(KernelSet, name))

    def is_native(self, name: str, block: object = None) -> bool:
        """Return True if this set computes the kernel ``name`` itself.

        ``block`` are the weights of a block, or the weight of a product. A model asks once per layer and product, when it is
        created, and calls the composed default of a block that isn't native with its weights. The default returns True for
        every override that is used.
        """
        del block
        return getattr(type(self), name) is not getattr(KernelSet, name) and name not in self.unused_overrides()

    def implementation(self, name: str, block: object = None) -> str:
        """Return ``native``, or what computes the kernel ``name`` instead: ``composed`` for a block, else ``reference``."""
        if self.is_native(name, block):
            return "native"
        return "composed" if name in BLOCKS else "reference"

    def resolve_block(self, name: str, block: object) -> Callable[..., Any]:
        """Return the method that computes the block ``name`` with these weights: this set's own one, or the composed one."""
        return getattr(self, name) if self.is_native(name, block) else partial(getattr(KernelSet, name), self)

    def batch_invariant(self) -> KernelSet:
        """Return slower kernels of this device that are ``row_invariant``: the order of a row's sums is fixed.

        The default wraps this kernel set in :class:`~outrider.device.kernels.invariant.InvariantKernels`. A backend with
        better invariant kernels overrides the method. Raises :class:`CapabilityError` if the kernels can't be invariant.
        """
        from outrider.device.kernels.invariant import InvariantKernels

        return InvariantKernels(self)

    def unused_overrides(self) -> Mapping[str, str]:
        """Return the overrides that delegate every call on this device or with these options, each with the reason.

        Every other override must compute calls itself when the kit calls it. For the returned overrides, the reference runs,
        and the report says so.
        """
        return {}

    def every_variant(self) -> AbstractContextManager[None] | None:
        """Return a scope in which calls compile all variants of a kernel; None if no kernel is compiled at first use.

        A call in the scope also runs the variants for other numbers of tokens, requests or cached tokens, so that no variant
        is compiled later. The call returns and writes the same values as outside the scope. An engine runs warm-up requests
        in the scope before it serves requests. It enters and leaves the scope while its device is the current device, since
        compiled kernels are loaded on the current device.
        """
        return None

    def compile_ahead(self) -> AbstractContextManager[None] | None:
        """Return a scope in which calls compile their kernels and don't run them; None if these kernels are run by each call.

        A call in the scope returns zeros. It may run operations of torch or of a library, which read and write its operands.
        Within :meth:`every_variant` the call doesn't wait for the compilation. An engine runs an iteration of padding in the
        scope, so that the iterations of its warm-up, which need results, find most kernels compiled.
        """
        return None

    tunes = False
    """True if :meth:`tune` can measure, and :meth:`use_tuned` can load its choices."""

    def for_shape(self, shape: DecoderShape) -> KernelSet:
        """Return these kernels for the layers of a model of this shape, which prefer the choices tuned for such layers.

        The returned kernels share all state with this set, including later choices of :meth:`tune` and :meth:`use_tuned`. A
        decoder calls the method once, when it is created. The default returns this kernel set.
        """
        del shape
        return self

    def tune(
        self,
        shapes: Sequence[DecoderShape],
        *,
        deadline_s: float,
        directory: Path,
        progress: TuningProgress | None = None,
    ) -> tuple[TuningResult, ...]:
        """Measure candidates for these shapes on this device, and write each choice to ``directory`` at once.

        An implementation has these duties:

        - It takes at most ``deadline_s`` seconds in all, plus a second or two to finish a measurement.
        - It measures the most important products first, so that an early end leaves useful choices.
        - A file that another process reads meanwhile is complete (written under another name and renamed).
        - KeyboardInterrupt propagates, and the written choices remain.
        - These kernels then use the choices; with :meth:`for_shape`, each shape uses its own. Tuning one shape changes no
          choice of another shape, even if both shapes share a product.
        - Memory that tuning allocates is released.

        The caller uses the device exclusively: no work is in flight, and no graph captured earlier is replayed later.

        Returns a result for each shape, in their order. Raises :class:`CapabilityError` if the kernels don't tune
        (``tunes`` is False), like the references.
        """
        del shapes, deadline_s, directory, progress
        raise CapabilityError(
            f"the kernels {self.name!r} don't tune: they declare tunes = False; choose kernels that do, or leave tuning out"
        )

    def use_tuned(self, directory: Path) -> int:
        """Load the choices that :meth:`tune` wrote to ``directory``, and return their number; 0 if the kernels don't tune.

        Choices of another device type, release or dtype are ignored, as are unreadable files. Call it before any graph is
        captured. The kernels may also store later measurements of their own in ``directory``.
        """
        del directory
        return 0

    def compiled(self) -> Mapping[str, int]:
        """Return the number of variants of each kernel that this process compiled, or loaded from a cache, so far."""
        return {}

    def chosen(self) -> Mapping[str, str]:
        """Return the choices made by measurement so far, in words, by their purpose."""
        return {}


_KERNEL_CLASSES = ModelKernels, LatentKernels, RecurrentKernels, BlockKernels, SamplingKernels, BookkeepingKernels
_COLLECTIVE_KERNELS = ("all_reduce_rms_norm",)
"""Kernels that compute together with the other ranks of a group."""


def kernel_names() -> tuple[str, ...]:
    """Return the names of the kernels that one rank computes alone: primitives and blocks, in the order of their classes.

    The further methods of :class:`KernelSet` select, tune and report, and are no kernels.
    """
    return tuple(name for name in methods_of(*_KERNEL_CLASSES) if name not in _COLLECTIVE_KERNELS)


def methods_of(*parts: type) -> tuple[str, ...]:
    """Return the public methods that these classes define themselves, in their order."""
    return tuple(name for part in parts for name, method in vars(part).items() if isfunction(method) and name[0] != "_")


@cache
def composed_kernels() -> Mapping[str, frozenset[str]]:
    """Return the kernels whose defaults compose others, each with those parts."""
    return {name: parts for name in methods_of(*_KERNEL_CLASSES) if (parts := parts_of(getattr(KernelSet, name)))}


# -- wrappers ----------------------------------------------------------------------------------------------------------


_INHERITED_ATTRIBUTES = ("name", "row_invariant", "plans_on_host", "tunes", "cache_formats", "state_interval")


class WrappedKernels(KernelSet):
    """A kernel set that passes each call on to ``inner``. A subclass overrides methods, and calls ``inner`` by ``super()``.

    ``name``, ``row_invariant``, ``plans_on_host``, ``tunes``, ``cache_formats`` and ``state_interval`` are those of ``inner``
    unless the subclass declares its own. A subclass that overrides a kernel over caches must declare ``cache_formats``. Of
    ``optional_operands``, the wrapper has those that both ``inner`` and the subclass take.

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
        self.optional_operands = type(self).optional_operands & inner.optional_operands

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


for _name in methods_of(*_KERNEL_CLASSES, KernelSet):
    if _name not in (*vars(WrappedKernels), "implementation", "resolve_block"):
        setattr(WrappedKernels, _name, _pass_on(_name, getattr(KernelSet, _name)))
