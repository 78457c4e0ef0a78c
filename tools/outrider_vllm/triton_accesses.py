"""Static analysis of a Triton kernel's source: the pointer parameters that the kernel reads and writes.

The kernel reads a parameter if an address computed from it reaches `tl.load`, and writes it if one reaches `tl.store`. An
atomic does both. The analysis follows addresses through assignments and through calls of other kernels. A loaded value is an
address only if the kernel loads it from a table of pointers. It then reaches the tensors of the table.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_LOADS = frozenset({"load"})
_STORES = frozenset({"store"})


@dataclass(frozen=True, kw_only=True)
class KernelDirections:
    """The names of a kernel's parameters whose memory the kernel reads or writes."""

    reads: frozenset[str]
    writes: frozenset[str]
    reads_through: frozenset[str] = field(default=frozenset())
    """Tables of pointers: the kernel reads the memory to which their elements point."""
    writes_through: frozenset[str] = field(default=frozenset())
    """Tables of pointers: the kernel writes the memory to which their elements point."""


class KernelAccessTable:
    """A cache of the directions of kernels. Each kernel is analysed once."""

    def __init__(self) -> None:
        self._directions: dict[Callable[..., Any], KernelDirections] = {}

    def directions_of(self, function: Callable[..., Any]) -> KernelDirections:
        """Return the directions of a kernel's Python function."""
        directions = self._directions.get(function)
        if directions is None:
            # During its own analysis a kernel has no accesses. Triton doesn't support recursion.
            self._directions[function] = KernelDirections(reads=frozenset(), writes=frozenset())
            directions = self._directions[function] = _KernelAnalysis(self, function).directions()
        return directions


class _KernelAnalysis(ast.NodeVisitor):
    """The analysis of one kernel. It visits the body until a visit adds nothing, and takes the union of all branches."""

    def __init__(self, table: KernelAccessTable, function: Callable[..., Any]) -> None:
        self.table = table
        self.function = function
        self.scope: Mapping[str, Any] = function.__globals__
        self.names = list(inspect.signature(function).parameters)
        # Roots of a variable: the parameters from which its address was computed, or, with a prefix *, from which its value
        # was loaded.
        self.roots: dict[str, set[str]] = {name: {name} for name in self.names}
        self.accessed: dict[str, set[str]] = {"r": set(), "w": set()}  # roots by direction

    def directions(self) -> KernelDirections:
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        size = -1
        while size != self._size():
            size = self._size()
            self.visit(tree)
        reads, writes = self.accessed["r"], self.accessed["w"]
        return KernelDirections(
            reads=frozenset(n for n in reads if n[0] != "*"),
            writes=frozenset(n for n in writes if n[0] != "*"),
            reads_through=frozenset(n[1:] for n in reads if n[0] == "*"),
            writes_through=frozenset(n[1:] for n in writes if n[0] == "*"),
        )

    def _size(self) -> int:
        return sum(map(len, self.roots.values())) + sum(map(len, self.accessed.values()))

    # -- statements ---------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        roots = self._roots_of(node.value)
        for target in node.targets:
            self._bind(target, roots)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind(node.target, self._roots_of(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, self._roots_of(node.value))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._roots_of(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._roots_of(node.value)

    def visit_If(self, node: ast.If) -> None:
        self._roots_of(node.test)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, self._roots_of(node.iter))
        for part in (*node.body, *node.orelse):
            self.visit(part)

    def visit_While(self, node: ast.While) -> None:
        self._roots_of(node.test)
        for part in (*node.body, *node.orelse):
            self.visit(part)

    def _bind(self, target: ast.expr, roots: set[str]) -> None:
        if isinstance(target, ast.Name):
            self.roots.setdefault(target.id, set()).update(roots)
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._bind(part, roots)

    # -- expressions --------------------------------------------------------------------------------------------------

    def _roots_of(self, node: ast.AST) -> set[str]:
        """Return the roots of an expression, and add the accesses that it makes."""
        if isinstance(node, ast.Name):
            return set(self.roots.get(node.id, ()))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Compare):
            for part in ast.iter_child_nodes(node):
                self._roots_of(part)
            return set()
        roots: set[str] = set()
        for part in ast.iter_child_nodes(node):
            roots |= self._roots_of(part)
        return roots

    def _call(self, node: ast.Call) -> set[str]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        positional = [self._roots_of(argument) for argument in node.args]
        named = {keyword.arg or "": self._roots_of(keyword.value) for keyword in node.keywords}
        owner = self._roots_of(node.func.value) if isinstance(node.func, ast.Attribute) else set()
        address = positional[0] if positional else named.get("pointer", owner)
        if name in _LOADS:
            self.accessed["r"] |= address
            return _loaded_from(address)
        if name in _STORES:
            self.accessed["w"] |= address
            return set()
        if name.startswith("atomic_"):
            self.accessed["r"] |= address
            self.accessed["w"] |= address
            return set()
        callee = self._callee(node)
        if callee is not None:
            return self._kernel_call(callee, positional, named)
        return owner.union(*positional, *named.values())

    def _callee(self, node: ast.Call) -> Callable[..., Any] | None:
        if isinstance(node.func, ast.Name):
            value = self.scope.get(node.func.id)
            function = getattr(value, "fn", None)
            if inspect.isfunction(function):
                return function
        return None

    def _kernel_call(self, callee: Callable[..., Any], positional: list[set[str]], named: dict[str, set[str]]) -> set[str]:
        """Add the accesses of a called kernel to the roots of its arguments, and return the roots of its result."""
        names = list(inspect.signature(callee).parameters)
        bound = dict(zip(names, positional, strict=False)) | {name: roots for name, roots in named.items() if name}
        inner = self.table.directions_of(callee)
        for mode, direct, through in (("r", inner.reads, inner.reads_through), ("w", inner.writes, inner.writes_through)):
            for parameter, roots in bound.items():
                if parameter in direct:
                    self.accessed[mode] |= roots
                if parameter in through:
                    self.accessed[mode] |= _loaded_from(roots)
        # The result may be an address computed from an argument, or a value loaded through one.
        arguments: set[str] = set().union(*bound.values()) if bound else set()
        return arguments | _loaded_from(arguments)


def _loaded_from(roots: set[str]) -> set[str]:
    """Return the roots of values that are loaded from addresses with ``roots``."""
    return {f"*{root}" for root in roots if root[0] != "*"}
