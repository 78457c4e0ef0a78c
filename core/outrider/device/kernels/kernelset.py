"""KernelSet: the computations that a backend may implement faster than torch, in five parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from inspect import isfunction
from pathlib import Path

from outrider.device.errors import CapabilityError
from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.collective_kernels import CollectiveKernels
from outrider.device.kernels.formats import CACHE_FORMATS
from outrider.device.kernels.model_kernels import ModelKernels
from outrider.device.kernels.recurrent_kernels import RecurrentKernels
from outrider.device.kernels.sampling_kernels import SamplingKernels
from outrider.device.kernels.tuning import DecoderShape, TuningProgress, TuningResult

_CACHE_KERNELS = frozenset(
    {
        "rope_write_cache",
        "head_norm_rope_write_cache",
        "linear_rope_write_cache",
        "norm_linear_rope_write_cache",
        "linear_quantized_rope_write_cache",
        "norm_linear_quantized_rope_write_cache",
        "paged_attention",
        "attention_norm_linear_quantized",
        "attention_norm_linear_silu_mul_quantized",
        "plan_attention",
        "move_cache",
    }
)
"""Kernels that read or write the pages of a cache."""


class KernelSet(ModelKernels, RecurrentKernels, SamplingKernels, BookkeepingKernels, CollectiveKernels):
    """Kernels as plain methods. The defaults are the torch references; a plugin overrides the kernels that it does better.

    The set has five parts, each in its own file: kernels of the model, of its recurrent layers, of sampling, of the engine's
    bookkeeping, and of collectives.

    *Placement.* Every method enqueues on the stream whose scope the caller opened, and returns tensors of that stream.
    *Capture.* Every method may be captured; none reads a device value on the host. A backend that declares
    ``captures_in_part`` may refuse some of them with :class:`CaptureError`.
    *Numerics.* A result may differ from the reference by rounding alone. Rows of a batch don't influence each other
    except through rounding.
    *Padding.* Token rows beyond a batch's real tokens hold valid indices (row and page 0) and may compute anything
    finite.
    *Errors.* A shape or dtype that a kernel can't do raises before anything is enqueued.

    *Subclasses.* A class that is defined with ``complete=True`` may fuse several kernels into one. If a subclass of the class
    overrides one of the parts, the fused kernel runs part by part, so that the override is called. A subclass that also
    overrides the fused kernel keeps its own fused kernel.

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

    _complete = False

    def __init_subclass__(cls, *, complete: bool = False, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        if "cache_formats" not in vars(cls) and not _CACHE_KERNELS.isdisjoint(vars(cls)):
            cls.cache_formats = frozenset()
        cls._complete = complete
        if not complete:
            cls._unfuse_overridden_parts()

    @classmethod
    def _unfuse_overridden_parts(cls) -> None:
        """Restore the default of each fused kernel of a ``complete`` base class of which this class overrides a part."""
        base = next((kind for kind in cls.__mro__ if vars(kind).get("_complete")), None)
        if base is None:
            return
        own = set(declared_below(cls, base))
        names = [name for name in _all_kernels() if name not in own]
        while found := [name for name in names if name not in own and parts_of(name) & own]:
            for name in found:
                setattr(cls, name, getattr(KernelSet, name))
            own.update(found)

    def batch_invariant(self) -> KernelSet:
        """Return slower kernels of this device that are ``row_invariant``.

        The default wraps this kernel set in :class:`~outrider.device.kernels.invariant.InvariantKernels`. A backend with
        better invariant kernels overrides the method.
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


def kernel_names() -> tuple[str, ...]:
    """Return the names of the kernels that one rank computes alone, in the order of their four classes.

    Kernels of :class:`CollectiveKernels` need a group and aren't included. The further methods of :class:`KernelSet` select,
    tune and report, and are no kernels.
    """
    return methods_of(ModelKernels, RecurrentKernels, SamplingKernels, BookkeepingKernels)


def methods_of(*parts: type) -> tuple[str, ...]:
    """Return the public methods that these classes define themselves, in their order."""
    return tuple(name for part in parts for name, method in vars(part).items() if isfunction(method) and name[0] != "_")


def declared_below(kind: type, base: type) -> frozenset[str]:
    """Return the names that ``kind`` and the classes between it and its base class ``base`` define themselves."""
    return frozenset(name for each in kind.__mro__[: kind.__mro__.index(base)] for name in vars(each))


@cache
def parts_of(name: str) -> frozenset[str]:
    """Return the kernels that the default of the kernel ``name`` calls."""
    called = getattr(KernelSet, name).__code__.co_names
    return frozenset(called) & frozenset(_all_kernels()) - {name}


@cache
def _all_kernels() -> tuple[str, ...]:
    """Return the kernels of :func:`kernel_names`, and the kernels that need a group."""
    return tuple(dict.fromkeys((*kernel_names(), *methods_of(CollectiveKernels))))  # one name is in both
