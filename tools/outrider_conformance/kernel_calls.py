"""Count which implementation answers the calls of a kernel: the plugin's override, or the method that it overrides."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import MappingProxyType
from typing import Any

from torch import Tensor

from outrider.device import AttentionMetadata, InterfaceError, KernelSet, WrappedKernels
from outrider.device.kernels.kernelset import kernel_names

KERNELS: tuple[str, ...] = kernel_names()
"""Names of the methods of a KernelSet that compute, in the order of its parts."""
IN_A_GRAPH = ", in a graph"
"""Suffix of the use of a call that is captured."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """The properties of calls that are counted together."""

    kernels: str
    """Name of the kernel set."""
    kernel: str
    """Name of the kernel method."""
    own: bool
    """True if the plugin's method computed the result. Otherwise the overridden method did: the reference, or the inner
    kernels of :class:`~outrider.device.WrappedKernels`.
    """
    use: str
    """Purpose of the call, see :meth:`KernelCalls.during`."""
    shape: str
    """Dtypes and shapes of the operands."""


class KernelCalls:
    """Counts of kernel calls from all threads."""

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels
        """The outermost kernel set."""
        layers = layers_of(kernels)
        self.overridden: Mapping[str, frozenset[str]] = MappingProxyType(
            {layer.name: frozenset(name for name in KERNELS if _overrides(type(layer), name)) for layer in layers}
        )
        """Names of the overridden kernels, by name of the kernel set, the outermost first."""
        self._counts: Counter[KernelCall] = Counter()
        self._lock = threading.Lock()
        self._local = threading.local()

    @property
    def counts(self) -> Counter[KernelCall]:
        """A copy of the counts so far."""
        with self._lock:
            return Counter(self._counts)

    def shapes(
        self, kernel: str, *, own: bool | None = None, kernels: str | None = None, use: str | None = None
    ) -> Counter[str]:
        """Return the number of calls of ``kernel`` by shape: calls that the plugin computed if ``own`` is set, calls that
        it left to the overridden method if ``own`` is False; of one kernel set and for one ``use``, if given.
        """
        found: Counter[str] = Counter()
        for call, count in self.counts.items():
            chosen = call.kernel == kernel and own in (None, call.own) and kernels in (None, call.kernels)
            if chosen and use in (None, call.use, call.use.removesuffix(IN_A_GRAPH)):
                found[call.shape] += count
        return found

    def count(self, kernel: str, *, own: bool | None = None, kernels: str | None = None, use: str | None = None) -> int:
        """Return the number of calls of ``kernel`` over all shapes, selected as in :meth:`shapes`."""
        return self.shapes(kernel, own=own, kernels=kernels, use=use).total()

    def shapes_left(self, kernel: str) -> str:
        """Return up to four shapes of calls that were left to the overridden method, for a message."""
        return "; ".join(sorted(self.shapes(kernel, own=False))[:4])

    def overriding_layer(self, kernel: str) -> tuple[str, str] | None:
        """Return the outermost kernel set that overrides ``kernel``, and why its override isn't used (empty if it is used).

        None means that no kernel set overrides the kernel.
        """
        for layer in layers_of(self.kernels):
            if kernel in self.overridden[layer.name]:
                return layer.name, layer.unused_overrides().get(kernel, "")
        return None

    def rows(self) -> list[dict[str, Any]]:
        """Return the counts as plain data: one row per kernel set, kernel, use and ``own``, with the calls of each shape."""
        found: dict[tuple[str, str, str, bool], dict[str, int]] = {}
        for call, count in sorted(self.counts.items(), key=lambda entry: str(entry[0])):
            found.setdefault((call.kernels, call.kernel, call.use, call.own), {})[call.shape] = count
        return [
            {"kernels": kernels, "kernel": kernel, "use": use, "own": own, "shapes": shapes}
            for (kernels, kernel, use, own), shapes in found.items()
        ]

    @contextmanager
    def during(self, use: str) -> Generator[None]:
        """Count this thread's calls inside the scope as calls for the use ``use``. If scopes are nested, the use of the
        innermost one counts.
        """
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
    def _open(self) -> list[_OpenCall]:
        if not hasattr(self._local, "open"):
            self._local.open = []
        found: list[_OpenCall] = self._local.open
        return found

    def _call(self, kernels: KernelSet, kernel: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the override ``method``, and count whether it computed the result or called the overridden method."""
        opened = _OpenCall(kernels, kernel)
        shape = _described((*args, *kwargs.values()))
        self._open.append(opened)
        try:
            result = method(*args, **kwargs)
        finally:
            self._open.pop()
        self._note(kernels.name, kernel, not opened.left, shape)
        return result

    def _count_base_call(self, kernels: KernelSet, kernel: str, args: tuple[Any, ...]) -> None:
        """Count a call that reached the base method: by ``super()`` of an override, or because no class
        overrides the method.
        """
        for opened in reversed(self._open):
            if opened.kernels is kernels and opened.kernel == kernel:
                opened.left = True
                return
        self._note(kernels.name, kernel, False, _described(args))

    def _note(self, kernels: str, kernel: str, own: bool, shape: str) -> None:
        call = KernelCall(kernels, kernel, own, self._use, shape)
        with self._lock:
            self._counts[call] += 1


def merged(reports: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Add up the rows of several runs, sorted by kernel set, kernel, use and ``own``."""
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
class _OpenCall:
    """A call of an override that hasn't returned yet."""

    kernels: KernelSet
    kernel: str
    left: bool = False


@contextmanager
def counting(kernels: KernelSet) -> Generator[KernelCalls]:
    """Count all calls of ``kernels``, and of the kernels that it wraps, while the scope is open.

    The scope replaces the class of each kernel set by a subclass that counts the calls of its methods and their calls of
    ``super()``. An override that computes with another kernel set, or with an operator, counts as ``own``. Only a call
    of ``super()`` counts as left to the overridden method.

    Raises :class:`InterfaceError` if the calls of ``kernels`` are counted already.
    """
    layers = list(layers_of(kernels))
    if any(hasattr(type(layer), "_counted_by") for layer in layers):
        raise InterfaceError(f"the calls of the kernels {kernels.name!r} are counted already")
    kinds = [type(layer) for layer in layers]
    calls = KernelCalls(kernels)
    try:
        for layer, kind in zip(layers, kinds, strict=True):
            object.__setattr__(layer, "__class__", _counted(kind, calls))
        yield calls
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            object.__setattr__(layer, "__class__", kind)


def counts_of(kernels: KernelSet) -> KernelCalls:
    """Return the counts of the scope of :func:`counting` that is open for ``kernels``."""
    calls: KernelCalls = type(kernels)._counted_by  # type: ignore[attr-defined]
    return calls


def layers_of(kernels: KernelSet) -> Iterator[KernelSet]:
    """Yield the kernels and the kernels that they wrap, the outermost first."""
    yield kernels
    while isinstance(kernels, WrappedKernels):
        kernels = kernels.inner
        yield kernels


def _base(kind: type) -> type:
    return WrappedKernels if issubclass(kind, WrappedKernels) else KernelSet


def _overrides(kind: type, name: str) -> bool:
    """Return True if class ``kind`` computes the kernel ``name`` by a method of its own. The composed default of a block is
    none.
    """
    return getattr(kind, name) not in (getattr(_base(kind), name), getattr(KernelSet, name))


def _counted(kind: type, calls: KernelCalls) -> type:
    """Return a subclass of ``kind`` that counts calls of overrides, and calls of base methods by :func:`_counting_base`."""
    members: dict[str, Any] = {"_counted_by": calls, "__module__": kind.__module__, "__slots__": ()}
    members |= {name: getattr(kind, name) for name in ("cache_formats", "optional_operands")}
    for name in KERNELS:
        count = _counted_override if _overrides(kind, name) else _counted_default
        members[name] = count(getattr(kind, name), name)
    base = _base(kind)
    return type(kind.__name__, (_counting_base(base),) if kind is base else (kind, _counting_base(base)), members)


def _counted_default(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._counted_by._count_base_call(self, name, (*args, *kwargs.values()))
        return method(self, *args, **kwargs)

    return call


def _counted_override(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._counted_by._call(self, name, method.__get__(self), *args, **kwargs)

    return call


@lru_cache(maxsize=2)
def _counting_base(base: type) -> type:
    """Return a subclass of ``base`` that counts its calls. ``super()`` of a plugin's class reaches it before ``base``."""
    counted = {name: _counted_default(getattr(base, name), name) for name in KERNELS}
    return type(f"_Counting{base.__name__}", (base,), {"__slots__": (), **counted})


def _described(operands: tuple[Any, ...]) -> str:
    """Return the dtypes and shapes of the tensors among ``operands`` as text, with the batch that attention metadata
    describes.
    """
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
