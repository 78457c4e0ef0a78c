"""KernelSet: the computations that a backend may do faster than torch does, in four parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from inspect import isfunction
from pathlib import Path

from outrider.device.errors import CapabilityError
from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.collective_kernels import CollectiveKernels
from outrider.device.kernels.model_kernels import ModelKernels
from outrider.device.kernels.quantized import CACHE_FORMATS
from outrider.device.kernels.sampling_kernels import SamplingKernels
from outrider.device.kernels.tuning import DecoderShape, TuningProgress, TuningResult

_OVER_CACHES = frozenset(
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


class KernelSet(ModelKernels, SamplingKernels, BookkeepingKernels, CollectiveKernels):
    """Kernels as plain methods; the defaults are the torch references. A plugin overrides what it does better.

    Four parts, each in a file of its own: what a model computes with, how tokens are decided, the engine's bookkeeping, and
    what several ranks compute together.

    *Placement.* Every method enqueues on the stream whose scope the caller opened, and returns tensors of that stream.
    *Capture.* Every method may be captured; none reads a device value on the host.
    *Numerics.* A result may differ from the reference by rounding alone. Rows of a batch don't influence each other
    except through rounding.
    *Padding.* Token rows beyond a batch's real tokens hold valid indices (row and page 0) and may compute anything
    finite.
    *Errors.* A shape or dtype that a kernel can't do raises before anything is enqueued.

    *Subclasses.* A class that is defined with ``complete=True`` knows all that its kernels do at once. A subclass of it that
    overrides one of these things is asked wherever the default calls it: a kernel that does more at once then runs part by
    part, unless the subclass overrides that too.

    *Who computes.* An override computes a call, or leaves it to what it overrides by ``super()``: for a shape that it doesn't
    take, say. By that the two are told apart when the calls are counted (``outrider conform`` does).

    Letters: T new tokens, B sequences, Hq and Hkv heads, D head size, H hidden size, V vocabulary, K draft tokens,
    N nodes of a draft tree with its root, L the longest path from the root.
    """

    name = "torch"
    row_invariant = False
    """Whether a token's or request's results are bit for bit the same whatever else is in the batch."""

    cache_formats: frozenset[str] = frozenset(CACHE_FORMATS)
    """Formats of :data:`~outrider.device.CACHE_FORMATS` that the kernels take a cache in, beside that in the dtype of the
    queries: :meth:`rope_write_cache` and what ends with it rounds to the nearest and clamps to the format's range (a NaN
    stays one), :meth:`paged_attention` and :meth:`move_cache` read what is there. ``fp8`` is e4m3, -448 to 448. A model
    multiplies by the scales of its cache outside of these. The references do all formats. A class that overrides one of these
    methods has none unless it declares some: a cache that it doesn't know would be read wrongly. Asked before a model is
    loaded.
    """

    _complete = False

    def __init_subclass__(cls, *, complete: bool = False, **given: object) -> None:
        super().__init_subclass__(**given)
        if "cache_formats" not in vars(cls) and not _OVER_CACHES.isdisjoint(vars(cls)):
            cls.cache_formats = frozenset()
        cls._complete = complete
        if not complete:
            cls._ask_for_parts()

    @classmethod
    def _ask_for_parts(cls) -> None:
        """Below a ``complete`` class: kernels of which a part is overridden here run part by part, as by default."""
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
        """Kernels of this device that are ``row_invariant``, slower. The default wraps these, see
        :class:`~outrider.device.kernels.invariant.InvariantKernels`; a backend that has better ones returns them.
        """
        from outrider.device.kernels.invariant import InvariantKernels

        return InvariantKernels(self)

    def unused_overrides(self) -> Mapping[str, str]:
        """Methods that this set overrides, and that leave each call to what they override on this very device, or with these
        options: their names, and why. Every other override must compute something itself where the kit calls it.
        One that does nothing but pass calls on has no path of its own: there the reference runs, and a report says so.
        """
        return {}

    def every_variant(self) -> AbstractContextManager[None] | None:
        """A scope for kernels that are compiled when they're first used; None: none of these is.

        A call inside also runs each other variant that such operands could take with another number of tokens, requests or
        cached tokens, so that none is compiled later. What the call returns and writes is what it does outside. An engine
        runs requests of its own in the scope before it serves any. It enters and leaves the scope with its device being the
        current one, since what was compiled is loaded there.
        """
        return None

    tunes = False
    """Whether :meth:`tune` can measure, and :meth:`use_tuned` take over what it wrote."""

    def for_shape(self, shape: DecoderShape) -> KernelSet:
        """These kernels for the layers of a model of this shape: what was tuned for such layers goes before what was tuned
        for others. They share everything with these, also what :meth:`tune` and :meth:`use_tuned` add later.

        A decoder asks once, when it's made. The default is these kernels, which choose nothing by layers.
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
        """Measure candidates for these shapes on this device, choose, and write each choice to ``directory`` as it's made.

        What a vendor promises who implements it: no more than ``deadline_s`` seconds in all, and a second or two to finish a
        measurement; what matters most first, so that an early end is worth something; a file that another process reads
        meanwhile is whole (written beside and renamed); KeyboardInterrupt passes and leaves what was written. From then on
        these kernels use what was chosen, :meth:`for_shape` each shape its own: tuning a shape changes nothing of another's
        that was tuned before, also where both have the same product. The device is the caller's alone meanwhile: nothing is
        under way on it, and no graph that was captured before is replayed later. Memory that is taken for it is given back.

        Returns a result for each shape, in their order. Raises :class:`CapabilityError` where kernels don't tune
        (``tunes`` is False), as these don't.
        """
        del shapes, deadline_s, directory, progress
        raise CapabilityError(
            f"the kernels {self.name!r} don't tune: they declare tunes = False; choose kernels that do, or leave tuning out"
        )

    def use_tuned(self, directory: Path) -> int:
        """Take over what :meth:`tune` wrote to ``directory`` on such a device with this software; how many choices it has.

        What another device, release or dtype left there isn't taken, nor is a file that can't be read. Before any graph is
        captured. 0 for kernels that don't tune. What these kernels measure by themselves from then on may be kept there too.
        """
        del directory
        return 0

    def compiled(self) -> Mapping[str, int]:
        """How many variants of each kernel this process has compiled so far, or loaded from a cache of compiled ones."""
        return {}

    def chosen(self) -> Mapping[str, str]:
        """What was chosen by measurement so far, in words, by what it's for."""
        return {}


def kernel_names() -> tuple[str, ...]:
    """The methods of a KernelSet that are kernels: those of the three parts that one rank computes alone,
    in their order. Of the others, those of :class:`CollectiveKernels` need a group; those which :class:`KernelSet` adds
    itself choose, tune and tell.
    """
    return methods_of(ModelKernels, SamplingKernels, BookkeepingKernels)


def methods_of(*parts: type) -> tuple[str, ...]:
    """The public methods that these classes define themselves, in their order."""
    return tuple(name for part in parts for name, method in vars(part).items() if isfunction(method) and name[0] != "_")


def declared_below(kind: type, base: type) -> frozenset[str]:
    """What ``kind`` and the classes between it and ``base``, which it derives from, define themselves."""
    return frozenset(name for each in kind.__mro__[: kind.__mro__.index(base)] for name in vars(each))


@cache
def parts_of(name: str) -> frozenset[str]:
    """The kernels that the default of this one calls."""
    called = getattr(KernelSet, name).__code__.co_names
    return frozenset(called) & frozenset(_all_kernels()) - {name}


@cache
def _all_kernels() -> tuple[str, ...]:
    """Those of :func:`kernel_names`, and those that need a group."""
    return tuple(dict.fromkeys((*kernel_names(), *methods_of(CollectiveKernels))))  # one is of both
