"""Which implementation answers a kernel's calls: what a plugin overrides, or what it leaves them to by ``super()``."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import MappingProxyType
from typing import Any

from torch import Tensor

from outrider.device import AttentionMetadata, InterfaceError, KernelSet, WrappedKernels
from outrider.device.kernels import declared_below, kernel_names
from outrider_conformance.ways import Ways

KERNELS: tuple[str, ...] = kernel_names()
"""The methods of a KernelSet that compute, in the order of its parts."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """What calls have in common that are counted together.

    ``kernels``: name of the kernel set. ``own``: the plugin's method computed it; False: it was left to the method that is
    overridden, a reference or, of :class:`~outrider.device.WrappedKernels`, those inside. ``use``: what it was called for,
    see :meth:`KernelCalls.during`. ``shape``: dtypes and shapes of the operands.
    """

    kernels: str
    kernel: str
    own: bool
    use: str
    shape: str


class KernelCalls:
    """Counts of calls, filled by every thread that calls. ``overridden``: names of kernels, by name of the kernel set."""

    def __init__(self) -> None:
        self.overridden: Mapping[str, frozenset[str]] = MappingProxyType({})
        self._counts: Counter[KernelCall] = Counter()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._ways = Ways()
        self._computed: set[tuple[str, str]] = set()

    @property
    def counts(self) -> Counter[KernelCall]:
        """A copy of what was counted so far."""
        with self._lock:
            return Counter(self._counts)

    def count(self, kernel: str, *, own: bool, use: str = "") -> int:
        """Calls of ``kernel``, ``own`` or left to others; of one ``use`` where one is named."""
        return sum(
            count
            for call, count in self.counts.items()
            if call.kernel == kernel and call.own is own and use in ("", call.use)
        )

    def rows(self) -> list[dict[str, Any]]:
        """The counts as plain data: a row for each kernel, use and answer, with the calls of each shape."""
        found: dict[tuple[str, str, str, bool], dict[str, int]] = {}
        for call, count in sorted(self.counts.items(), key=lambda entry: str(entry[0])):
            found.setdefault((call.kernels, call.kernel, call.use, call.own), {})[call.shape] = count
        return [
            {"kernels": kernels, "kernel": kernel, "use": use, "own": own, "shapes": shapes}
            for (kernels, kernel, use, own), shapes in found.items()
        ]

    def other_way(self, kernels: str, kernel: str) -> str:
        """Where an override that left every call has a path of its own that never ran, as ``file.py:12``.

        Empty where it has none: it does nothing but pass calls on.
        """
        return self._ways.other((kernels, kernel))

    @contextmanager
    def during(self, use: str) -> Generator[None]:
        """What the calling thread calls inside is counted for ``use``. The innermost name counts."""
        before = self._use
        self._local.use = use
        try:
            yield
        finally:
            self._local.use = before

    @property
    def _use(self) -> str:
        return getattr(self._local, "use", "")

    @property
    def _open(self) -> list[_Open]:
        if not hasattr(self._local, "open"):
            self._local.open = []
        found: list[_Open] = self._local.open
        return found

    def _call(self, kernels: KernelSet, kernel: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call an override, and see whether it leaves the call to what it overrides."""
        opened = _Open(kernels, kernel)
        shape = _described((*args, *kwargs.values()))
        self._open.append(opened)
        seen = (kernels.name, kernel) in self._computed
        try:
            with nullcontext() if seen else self._ways.traced(_package(kernels)):
                result = method(*args, **kwargs)
        finally:
            self._open.pop()
        self._note(kernels.name, kernel, not opened.left, shape)
        return result

    def _left(self, kernels: KernelSet, kernel: str, args: tuple[Any, ...]) -> None:
        """An override came here by ``super()``; or nobody overrides it."""
        for opened in reversed(self._open):
            if opened.kernels is kernels and opened.kernel == kernel:
                opened.left = True
                key = kernels.name, kernel
                if key not in self._computed:
                    self._ways.left(key, sys._getframe(2), _package(kernels), KernelCalls._call.__code__)
                return
        self._note(kernels.name, kernel, False, _described(args))

    def _note(self, kernels: str, kernel: str, own: bool, shape: str) -> None:
        call = KernelCall(kernels, kernel, own, self._use, shape)
        with self._lock:
            self._counts[call] += 1
            if own:
                self._computed.add((kernels, kernel))


def merged(reports: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of several runs as those of one, in the order of kernels."""
    found: dict[tuple[Any, ...], Counter[str]] = {}
    for rows in reports:
        for row in rows:
            key = (row["kernels"], row["kernel"], row["use"], row["own"])
            found.setdefault(key, Counter()).update(row["shapes"])
    keys = ("kernels", "kernel", "use", "own")
    return [
        {**dict(zip(keys, key, strict=True)), "shapes": dict(sorted(shapes.items()))}
        for key, shapes in sorted(found.items(), key=lambda entry: tuple(map(str, entry[0])))
    ]


@dataclass(slots=True)
class _Open:
    """A call of an override that hasn't returned."""

    kernels: KernelSet
    kernel: str
    left: bool = False


@contextmanager
def counting(kernels: KernelSet) -> Generator[KernelCalls]:
    """Count the calls of ``kernels`` while it's open, from whoever has them; of wrapped ones, those inside too.

    The object becomes one of a subclass for as long: its own methods are reached through the ledger, and what they reach by
    ``super()`` is seen. Nothing else changes. An override that computes with another kernel set, or with an operator, has
    computed itself: a call is left to the reference by ``super()`` alone.

    Raises :class:`InterfaceError` where the calls of ``kernels`` are counted already.
    """
    calls = KernelCalls()
    layers = list(layers_of(kernels))
    if any(hasattr(type(layer), "_counted_by") for layer in layers):
        raise InterfaceError(f"the calls of the kernels {kernels.name!r} are counted already")
    kinds = [type(layer) for layer in layers]
    overridden = (frozenset(name for name in KERNELS if _overrides(kind, name)) for kind in kinds)
    calls.overridden = MappingProxyType(dict(zip((layer.name for layer in layers), overridden, strict=True)))
    try:
        for layer, kind in zip(layers, kinds, strict=True):
            object.__setattr__(layer, "__class__", _counted(kind, calls))
        yield calls
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            object.__setattr__(layer, "__class__", kind)


def calls_of(kernels: KernelSet) -> KernelCalls:
    """The ledger of :func:`counting`, while it's open for ``kernels``."""
    calls: KernelCalls = type(kernels)._counted_by  # type: ignore[attr-defined]
    return calls


def layers_of(kernels: KernelSet) -> Iterator[KernelSet]:
    """The kernels, and those inside, the outermost first."""
    yield kernels
    while isinstance(kernels, WrappedKernels):
        kernels = kernels.inner
        yield kernels


def _package(kernels: KernelSet) -> str:
    return type(kernels).__module__.partition(".")[0]


def _base(kind: type) -> type:
    """What the plugin's classes build on: the reference, or what passes calls on."""
    return WrappedKernels if issubclass(kind, WrappedKernels) else KernelSet


def _overrides(kind: type, name: str) -> bool:
    return name in declared_below(kind, _base(kind))


def _counted(kind: type, calls: KernelCalls) -> type:
    """``kind`` with the ledger in front of its overrides, and :func:`_behind` between them and what they build on."""
    members: dict[str, Any] = {"_counted_by": calls, "__module__": kind.__module__, "__slots__": ()}
    members |= {name: _in_front(getattr(kind, name), name) for name in KERNELS if _overrides(kind, name)}
    base = _base(kind)
    # Complete: these overrides pass on what they count, so that no kernel is to be done part by part for their sake.
    return type(kind.__name__, (_behind(base),) if kind is base else (kind, _behind(base)), members, complete=True)


def _in_front(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._counted_by._call(self, name, method.__get__(self), *args, **kwargs)

    return call


@lru_cache(maxsize=2)
def _behind(base: type) -> type:
    """A class that stands before ``base`` where methods are looked up, so that ``super()`` of a plugin's class finds it."""

    def noting(name: str) -> Callable[..., Any]:
        method = getattr(base, name)

        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._counted_by._left(self, name, (*args, *kwargs.values()))
            with self._counted_by._ways.paused():
                return method(self, *args, **kwargs)

        return call

    return type(f"_Behind{base.__name__}", (base,), {"__slots__": (), **{name: noting(name) for name in KERNELS}})


def _described(operands: tuple[Any, ...]) -> str:
    """Dtypes and shapes of tensors; of attention, what its metadata says of the batch."""
    words: list[str] = []
    for operand in operands:
        if isinstance(operand, AttentionMetadata):
            batch = operand.seq_lens.shape[0]
            words.append(f"{batch} sequences of {'' if operand.uniform else 'up to '}{operand.max_query} new tokens")
            if operand.tree_mask is not None:
                words.append("a tree")
        elif isinstance(operand, Tensor):
            words.append(f"{str(operand.dtype).removeprefix('torch.')}{list(operand.shape)}")
        elif isinstance(operand, tuple):
            words.append(f"({_described(operand)})")
    return ", ".join(words)
