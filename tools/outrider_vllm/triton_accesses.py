"""Which pointers a Triton kernel reads and writes, from its source.

A parameter is read where an address made from it reaches `tl.load`, written where one reaches `tl.store`, both where one
reaches an atomic, followed through assignments and through calls of other kernels. What was loaded is a value and no
address, but for addresses that a kernel loads from a table of pointers: those reach the tensors of that table.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_READS = frozenset({"load"})
_WRITES = frozenset({"store"})


@dataclass(frozen=True, kw_only=True)
class Directions:
    """Parameters by what the kernel does with their memory, and with the memory that their elements point to."""

    reads: frozenset[str]
    writes: frozenset[str]
    reads_through: frozenset[str] = field(default=frozenset())
    writes_through: frozenset[str] = field(default=frozenset())


class AccessTable:
    """Directions of kernels, each worked out once."""

    def __init__(self) -> None:
        self._known: dict[Callable[..., Any], Directions] = {}

    def of(self, function: Callable[..., Any]) -> Directions:
        """Directions of a kernel's Python function."""
        found = self._known.get(function)
        if found is None:
            # Recursion sees no accesses of itself; Triton has none.
            self._known[function] = Directions(reads=frozenset(), writes=frozenset())
            found = self._known[function] = _Walk(self, function).directions()
        return found


class _Walk(ast.NodeVisitor):
    """One pass over a kernel's body, repeated until nothing is added. It doesn't follow branches: a union of them."""

    def __init__(self, table: AccessTable, function: Callable[..., Any]) -> None:
        self.table = table
        self.function = function
        self.scope: Mapping[str, Any] = function.__globals__
        self.names = list(inspect.signature(function).parameters)
        # A variable's roots: parameters that it's an address of; with * in front, that it was loaded from.
        self.roots: dict[str, set[str]] = {name: {name} for name in self.names}
        self.found: dict[str, set[str]] = {"r": set(), "w": set()}
        self.returned: set[str] = set()

    def directions(self) -> Directions:
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        size = -1
        while size != self._size():
            size = self._size()
            self.visit(tree)
        reads, writes = self.found["r"], self.found["w"]
        return Directions(
            reads=frozenset(n for n in reads if n[0] != "*"),
            writes=frozenset(n for n in writes if n[0] != "*"),
            reads_through=frozenset(n[1:] for n in reads if n[0] == "*"),
            writes_through=frozenset(n[1:] for n in writes if n[0] == "*"),
        )

    def _size(self) -> int:
        return sum(map(len, self.roots.values())) + sum(map(len, self.found.values())) + len(self.returned)

    # -- statements ---------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        roots = self._of(node.value)
        for target in node.targets:
            self._bind(target, roots)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind(node.target, self._of(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, self._of(node.value))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.returned |= self._of(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._of(node.value)

    def visit_If(self, node: ast.If) -> None:
        self._of(node.test)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, self._of(node.iter))
        for part in (*node.body, *node.orelse):
            self.visit(part)

    def visit_While(self, node: ast.While) -> None:
        self._of(node.test)
        for part in (*node.body, *node.orelse):
            self.visit(part)

    def _bind(self, target: ast.expr, roots: set[str]) -> None:
        if isinstance(target, ast.Name):
            self.roots.setdefault(target.id, set()).update(roots)
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._bind(part, roots)

    # -- expressions --------------------------------------------------------------------------------------------------

    def _of(self, node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name):
            return set(self.roots.get(node.id, ()))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Compare):
            for part in ast.iter_child_nodes(node):
                self._of(part)
            return set()
        found: set[str] = set()
        for part in ast.iter_child_nodes(node):
            found |= self._of(part)
        return found

    def _call(self, node: ast.Call) -> set[str]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [self._of(a) for a in node.args]
        named = {k.arg or "": self._of(k.value) for k in node.keywords}
        owner = self._of(node.func.value) if isinstance(node.func, ast.Attribute) else set()
        address = given[0] if given else named.get("pointer", owner)
        if name in _READS:
            self.found["r"] |= address
            return {f"*{n}" for n in address if n[0] != "*"}
        if name in _WRITES:
            self.found["w"] |= address
            return set()
        if name.startswith("atomic_"):
            self.found["r"] |= address
            self.found["w"] |= address
            return set()
        callee = self._callee(node)
        if callee is not None:
            return self._through(callee, given, named)
        return owner.union(*given, *named.values())

    def _callee(self, node: ast.Call) -> Callable[..., Any] | None:
        if isinstance(node.func, ast.Name):
            value = self.scope.get(node.func.id)
            function = getattr(value, "fn", None)
            if inspect.isfunction(function):
                return function
        return None

    def _through(self, callee: Callable[..., Any], given: list[set[str]], named: dict[str, set[str]]) -> set[str]:
        names = list(inspect.signature(callee).parameters)
        bound = dict(zip(names, given, strict=False)) | {k: v for k, v in named.items() if k}
        inner = self.table.of(callee)
        for mark, direct, through in (("r", inner.reads, inner.reads_through), ("w", inner.writes, inner.writes_through)):
            for parameter, roots in bound.items():
                if parameter in direct:
                    self.found[mark] |= roots
                if parameter in through:
                    self.found[mark] |= {f"*{n}" for n in roots if n[0] != "*"}
        # What it returns may be an address of what went in, or loaded through it.
        result: set[str] = set().union(*bound.values()) if bound else set()
        return result | {f"*{n}" for n in result if n[0] != "*"}
