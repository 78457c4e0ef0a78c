"""Mutation sites: every small change that the source of a function allows, derived from its syntax tree.

The rules negate a condition, remove an operand of ``and`` or ``or``, and shift or invert a comparison. They exchange ``+``
and ``-``, ``min`` and ``max``, and True and False as arguments. They add one to an integer. They remove a call for its
effect, an assignment to an attribute or element, and an ``x += …``.

A condition that guards only a ``raise`` is not mutated: unit tests check the rejected inputs.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, ModuleType

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_NOT_FOR_EFFECT = ("assert_never",)


@dataclass(frozen=True, slots=True)
class MutationSite:
    """One change: ``function`` of ``module`` by its qualified name, the ``rule``, and what the source says before and after.

    ``number``: its place among the changes of the module. ``turn``: its place among those of the function that read the same.
    ``span``: the first and the last line of the statement that it is in; of an ``if`` or a loop, of its head.
    """

    module: str
    function: str
    """Qualified name of the function in the module."""
    line: int
    rule: str
    before: str
    """Source of the changed node before the change."""
    after: str
    """Source of the changed node after the change."""
    number: int
    """Index among the changes of the module."""
    turn: int = 1
    """Index, from 1, among the changes of the function with the same text."""
    span: tuple[int, int] = (0, 0)
    """First and last line of the statement, or of the head of an ``if`` or loop."""

    @property
    def name(self) -> str:
        """A unique name for reports, which stays the same when other functions change."""
        turn = f" ({self.turn})" if self.turn > 1 else ""
        return f"{self.module}.{self.function}: {self.rule}: {self.before} → {self.after}{turn}"


@dataclass(frozen=True, slots=True)
class _Change:
    """The replacement of ``node`` by ``into``; None removes the statement."""

    node: ast.AST
    into: Callable[[ast.AST], ast.AST]
    rule: str
    span: tuple[int, int] = (0, 0)


def sites(module: ModuleType) -> list[MutationSite]:
    """Every change of the functions of a module, in the order of the source."""
    tree = ast.parse(inspect.getsource(module))
    found = []
    turns: Counter[tuple[str, ...]] = Counter()
    for number, (function, change) in enumerate(_changes(tree)):
        before, after = _short(change.node), _short(change.into(copy.deepcopy(change.node)))
        text = (function, change.rule, before, after)
        turns[text] += 1
        line = getattr(change.node, "lineno", 0)
        found.append(
            MutationSite(module.__name__, function, line, change.rule, before, after, number, turns[text], change.span)
        )
    return found


def apply(module: ModuleType, site: MutationSite) -> None:
    """Change the module's function, in this process and for good: everybody who holds it gets the change."""
    tree = ast.parse(inspect.getsource(module))
    _, change = next(item for number, item in enumerate(_changes(tree)) if number == site.number)
    changed = ast.fix_missing_locations(_Replace(change).visit(tree))
    assert isinstance(changed, ast.Module)
    code = compile(changed, inspect.getsourcefile(module) or module.__name__, "exec", dont_inherit=True)
    _function(module, site.function).__code__ = _code(code, site.function)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else text[:87] + "…"


# -- finding changes -----------------------------------------------------------------------------------------------


def _changes(tree: ast.Module) -> Iterator[tuple[str, _Change]]:
    for function, node in _functions(tree, ""):
        for statement in node.body:
            for each, span in _walk(statement, (0, 0)):
                for change in _of(each):
                    yield function, replace(change, span=span)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and of its classes; nested functions belong to the outer function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield f"{prefix}{child.name}", child


def _walk(node: ast.AST, span: tuple[int, int]) -> Iterator[tuple[ast.AST, tuple[int, int]]]:
    """Yield executed nodes and the lines of their statement, without annotations, raised errors and assertions."""
    if isinstance(node, ast.Raise | ast.Assert):
        return
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
        span = node.lineno, last
    yield node, span
    refuses = isinstance(node, ast.If) and all(isinstance(each, ast.Raise) for each in node.body)
    for name, value in ast.iter_fields(node):
        if (refuses and name == "test") or name in ("annotation", "returns", "decorator_list", "type_comment", "format_spec"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, span)


def _of(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.If(body=body) if not all(isinstance(each, ast.Raise) for each in body):
            yield _Change(node.test, _negated, "negate")
        case ast.While() | ast.IfExp():
            yield _Change(node.test, _negated, "negate")
        case ast.comprehension(ifs=ifs):
            for test in ifs:
                yield _Change(test, _negated, "negate")
        case ast.BoolOp(values=values):
            for index in range(len(values)):
                yield _Change(node, _without(index), "leave an operand out")
        case ast.Compare(ops=[op]) if type(op) in _TURNED:
            yield _Change(node, _turned, "turn a comparison")
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left) if not _is_text(left):
            yield _Change(node, _other_sign, "change a sign")
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield _Change(node, _grown, "one more")
        case ast.Call(func=ast.Name(id="min" | "max")):
            yield _Change(node, _other_extreme, "min and max")
        case ast.keyword(value=ast.Constant(value=bool())):
            yield _Change(node.value, lambda value: ast.Constant(value=not value.value), "change a flag")  # type: ignore[attr-defined]
        case ast.Expr(value=ast.Call(func=func)) if not (isinstance(func, ast.Name) and func.id in _NOT_FOR_EFFECT):
            yield _Change(node, _left_out, "leave out")
        case ast.AugAssign():
            yield _Change(node, _left_out, "leave out")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield _Change(node, _left_out, "leave out")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _negated(test: ast.AST) -> ast.AST:
    assert isinstance(test, ast.expr)
    return ast.UnaryOp(op=ast.Not(), operand=test)


def _without(index: int) -> Callable[[ast.AST], ast.AST]:
    def into(node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.BoolOp)
        kept = [value for i, value in enumerate(node.values) if i != index]
        return kept[0] if len(kept) == 1 else ast.BoolOp(op=node.op, values=kept)

    return into


def _turned(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Compare)
    return ast.Compare(left=node.left, ops=[_TURNED[type(node.ops[0])]()], comparators=node.comparators)


def _other_sign(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BinOp)
    return ast.BinOp(left=node.left, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), right=node.right)


def _grown(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return ast.Constant(value=node.value + 1)


def _other_extreme(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return ast.Call(
        func=ast.Name(id="max" if node.func.id == "min" else "min", ctx=ast.Load()), args=node.args, keywords=node.keywords
    )


def _left_out(node: ast.AST) -> ast.AST:
    del node
    return ast.Pass()


class _Replace(ast.NodeTransformer):
    def __init__(self, change: _Change) -> None:
        self._change = change

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the node, or its replacement."""
        if node is self._change.node:
            return ast.copy_location(self._change.into(node), node)
        return self.generic_visit(node)


# -- putting a change in -------------------------------------------------------------------------------------------


def _code(code: CodeType, qualified: str) -> CodeType:
    """Return the code object of a function by its qualified name."""
    for part in qualified.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part)
    return code


def _function(module: ModuleType, qualified: str) -> FunctionType:
    *owners, last = qualified.split(".")
    owner: object = module
    for part in owners:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, last)
    while not isinstance(found, FunctionType):
        found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found.__wrapped__
    return found
