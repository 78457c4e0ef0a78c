"""Launches of compiled Triton kernels on a device, with the reads and writes derived from arguments and compiled code.

A kernel's intermediate representation shows which of its pointers it loads from and which it stores to. It does not show
which bytes of the tensor a kernel touches, so an access is the whole tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from outrider_sanitizer.observation.hostsync import replaced

_NAME = re.compile(r"%[A-Za-z0-9_$.\-]+(?:#\d+)?")
_PARAMETER = re.compile(r"(%[A-Za-z0-9_$.\-]+): (!tt\.(?:ptr|tensordesc))")
_CARRIED = re.compile(r"(%[A-Za-z0-9_$.\-]+) = (%[A-Za-z0-9_$.\-]+(?:#\d+)?)")
_LABEL = re.compile(r"\^\w+(?:\([^)]*\))?")
_POINTS = ("!tt.ptr", "!tt.tensordesc")
_ATOMIC = ("tt.atomic_", "tt.descriptor_reduce")
_STORES = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter", *_ATOMIC)
_LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather", *_ATOMIC)
_OPAQUE = ("tt.call", "tt.extern_elementwise", "tt.elementwise_inline_asm", "tt.int_to_ptr", "scf.while", "cf.switch")
"""Names of operations in the intermediate representation after which the origin of a pointer is unknown."""

_Held = dict[str, frozenset[int]]
_Block = tuple[str, list[str]]
"""A block that is open: the name of its result, and the names that it carries."""


class Pointers(NamedTuple):
    """The positions of a kernel's pointer arguments through which it loads, and through which it stores."""

    number: int
    read: frozenset[int]
    written: frozenset[int]


def pointers(ttir: str) -> Pointers | None:
    """Return the loads and stores of each pointer argument from the kernel's Triton IR, or None if they are unknown.

    A pointer computed from another pointer, or passed on by a loop or branch, stands for the same memory.
    """
    lines = [line.strip() for line in ttir.splitlines()]
    functions = [line for line in lines if line.startswith("tt.func")]
    if len(functions) != 1 or any(_operation(line).startswith(_OPAQUE) for line in lines):
        return None
    names = [name for name, _ in _PARAMETER.findall(functions[0])]
    lines = _told_apart(lines)
    held: _Held = {name: frozenset((at,)) for at, name in enumerate(names)}
    taken = {}  # what each block of a kernel that returns early takes
    for line in lines:
        if line.startswith("^"):
            block = _LABEL.findall(line)[0]
            taken[block.partition("(")[0]] = _NAME.findall(block)
    size = -1
    while size != sum(map(len, held.values())):  # a loop hands its values to its beginning
        size = sum(map(len, held.values()))
        read, written = _walk(lines, held, taken)
    return Pointers(len(names), read, written)


def _told_apart(lines: Sequence[str]) -> list[str]:
    """Return the lines of a kernel's IR with a unique name for each value: the text reuses names in sibling regions."""
    regions: list[tuple[int, dict[str, str]]] = []  # those of a function that are open
    renamed: list[str] = []
    count, within = 0, False

    def named(use: re.Match[str]) -> str:
        name, mark, part = use[0].partition("#")
        inner = next((names[name] for _, names in reversed(regions) if name in names), name)
        return inner + mark + part

    for line in lines:
        if line.startswith("}") and regions:
            regions.pop()
        left = line.partition(" = ")[0] if line.startswith("%") else line if line.startswith("^") else ""
        if regions:
            number, names = regions[-1]
            names |= {name: f"{name}$in{number}" for name in _NAME.findall(left)}
        if within and line.endswith("{"):
            count += 1
            operation = _operation(line)
            begun = _NAME.findall(operation)[:1] if operation.startswith("scf.for") else []
            begun += [name for name, _ in _CARRIED.findall(operation.partition("iter_args")[2])]
            regions.append((count, {name: f"{name}$in{count}" for name in begun}))
        within = within or line.startswith("tt.func")
        renamed.append(_NAME.sub(named, line))
    return renamed


def _results(defined: str, number: int) -> list[str]:
    """Return the names of the values that an IR operation defines."""
    return [defined] if number == 1 else [f"{defined}#{at}" for at in range(number)]


def _operation(line: str) -> str:
    return (line.partition(" = ")[2] if line.startswith("%") else line).lstrip('"')


def _walk(lines: Sequence[str], held: _Held, taken: dict[str, list[str]]) -> tuple[frozenset[int], frozenset[int]]:
    """Run one pass over the lines: return the loaded and stored pointers known from ``held``, and extend ``held``."""
    read: set[int] = set()
    written: set[int] = set()
    open_blocks: list[_Block] = []
    for line in lines:
        operation = _operation(line)
        operands = _NAME.findall(operation)
        defined = line.partition(" = ")[0].partition(":")[0] if line.startswith("%") else ""
        carried = _CARRIED.findall(operation.partition("iter_args")[2])
        if operation.startswith(_STORES):
            written |= held.get(operands[0], frozenset())
        if operation.startswith(_LOADS):
            read |= held.get(operands[0], frozenset())
        else:
            for target, source in _pointer_flows(operation, operands, defined, carried, open_blocks, taken):
                held[target] = held.get(target, frozenset()) | held.get(source, frozenset())
        closes = line.startswith("}")
        block = open_blocks.pop() if closes and open_blocks else ("", [])
        if line.endswith("{"):
            open_blocks.append(block if closes else (defined, [name for name, _ in carried]))
    return frozenset(read), frozenset(written)


def _pointer_flows(
    operation: str,
    operands: Sequence[str],
    defined: str,
    carried: Sequence[tuple[str, str]],
    open_blocks: Sequence[_Block],
    taken: dict[str, list[str]],
) -> Iterator[tuple[str, str]]:
    """Yield each name that an operation gives a value, with a name that the value may come from, in the order of the flow."""
    if operation.startswith("scf.yield") and open_blocks:
        result, names = open_blocks[-1]
        results = _results(result, len(operands))
        for at, name in enumerate(operands):
            yield results[at], name
            if at < len(names):
                yield names[at], name
    elif operation.startswith("cf."):
        for block in _LABEL.findall(operation):
            yield from zip(taken.get(block.partition("(")[0], ()), _NAME.findall(block), strict=False)
    elif operation.startswith("scf.for"):
        for (name, start), result in zip(carried, _results(defined, len(carried)), strict=True):
            yield name, start
            yield result, name
    elif defined and any(kind in operation for kind in _POINTS):
        sources = operands[:1] if operation.startswith("tt.addptr") else operands  # the other one is a distance
        for name in sources:
            yield defined, name


LaunchCallback = Callable[[str, Sequence[tuple[str, Any, bool, bool]]], None]
"""The function that is called with the name of a launched kernel and its tensors: name, tensor, True if it is read, True if
it is written.
"""


@contextmanager
def compiled_launches(report_launch: LaunchCallback) -> Generator[bool]:
    """Report each launch of a compiled kernel in this scope. Yields False if Triton is not installed: no launch is seen."""
    jit = _jit()
    if jit is None:
        yield False
        return
    known: WeakKeyDictionary[Any, Pointers | None] = WeakKeyDictionary()

    def wrap(original: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = original(self, *args, **kwargs)
            if compiled is not None and not kwargs.get("warmup"):
                report_launch(f"triton::{self.__name__}", _operands(known, compiled, _bound(self, args, kwargs)))
            return compiled

        return run

    with replaced([(jit, "run", wrap)]):
        yield True


def _jit() -> Any:
    # Only where torch or the program brings it: importing Triton starts its driver's discovery.
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return None
    from triton.runtime.jit import JITFunction

    return JITFunction


def _bound(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return a kernel's tensors by name, in the order of its parameters."""
    bound = dict(zip(function.arg_names, args, strict=False)) | kwargs
    found: list[tuple[str, Any]] = []
    for name in function.arg_names:
        _flat(name, bound.get(name), found)
    return found


def _flat(name: str, value: Any, into: list[tuple[str, Any]]) -> None:
    if isinstance(value, tuple | list):
        for item in value:
            _flat(name, item, into)
        return
    inner = getattr(value, "base", value) if type(value).__name__ in ("TensorWrapper", "TensorDescriptor") else value
    if hasattr(inner, "data_ptr"):
        into.append((name, inner))


def _operands(
    known: WeakKeyDictionary[Any, Pointers | None], compiled: Any, tensors: list[tuple[str, Any]]
) -> list[tuple[str, Any, bool, bool]]:
    if compiled not in known:
        text = getattr(compiled, "asm", {}).get("ttir")
        known[compiled] = pointers(str(text)) if text else None
    found = known[compiled]
    if found is None or found.number != len(tensors):
        return [(name, tensor, True, True) for name, tensor in tensors]
    return [(name, tensor, at in found.read, at in found.written) for at, (name, tensor) in enumerate(tensors)]
