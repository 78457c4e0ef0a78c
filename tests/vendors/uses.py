"""What a plugin uses of its vendor's package, collected from the plugin's own source."""

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from vendors.surface import Call, Mismatch, Surface, Unresolved

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Use:
    """One use of a name. ``call`` is None where the name isn't called there."""

    path: str
    call: Call | None
    where: str


@dataclass(frozen=True)
class Vocabulary:
    """How expressions of a plugin's source name things of the vendor.

    ``roots``: names that are modules of it. ``module``: what ``….module`` is. ``natives``: the class behind ``self.native``
    and ``self._native``, by the class whose method it is, and behind ``NAME.native`` by the name. ``made``: the class that
    a function returns.
    """

    roots: Mapping[str, str]
    module: str
    natives: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)


def collect(file: Path, words: Vocabulary, root: Path) -> list[Use]:
    """Every use in one file."""
    collector = _Collector(words, str(file.relative_to(root)))
    collector.visit(ast.parse(file.read_text(encoding="utf-8")))
    return collector.uses


def bind_uses(surface: Surface, uses: Iterable[Use]) -> tuple[list[tuple[Use, str]], list[str]]:
    """Hold every use against the package; returns each that is right with the kind of its name, and what is wrong.

    A class that its compiled base makes takes no argument of ours.
    """
    found, problems = [], []
    for use in uses:
        try:
            resolved = surface.resolve(use.path) if use.call is None else surface.bind(use.path, use.call)
            found.append((use, resolved.kind))
        except (Unresolved, Mismatch) as error:
            if "made by its base" in str(error) and use.call == Call():
                found.append((use, "made by its base"))
            else:
                problems.append(f"{use.where}: {error}")
    return found, problems


def check_changes(surface: Surface, use: Use) -> None:
    """Negative controls of a call: another name, one keyword more, each keyword another one, and too many arguments."""
    kind = surface.resolve(use.path).kind
    with pytest.raises(Unresolved):
        surface.resolve(f"{use.path}_v9")
    if kind == "extension" or bind_uses(surface, [use])[0][0][1] == "made by its base":
        return  # the arguments of what is compiled can't be seen
    assert use.call is not None
    keywords = [(*use.call.keywords, "no_such_argument")]
    keywords += [tuple(f"{each}_" if each == name else each for each in use.call.keywords) for name in use.call.keywords]
    for changed in keywords:
        with pytest.raises(Mismatch):
            surface.bind(use.path, replace(use.call, keywords=changed))
    if not surface.takes_any_arguments(use.path):
        with pytest.raises(Mismatch):
            surface.bind(use.path, replace(use.call, positional=use.call.positional + 30))


def check_record(name: str, figures: Mapping[str, int], record_property: Callable[[str, object], None]) -> None:
    """Record the figures; the record of evidence claims no more."""
    for figure, value in figures.items():
        record_property(figure, value)
    recorded = json.loads((_ROOT / "docs" / "evidence" / "support" / name).read_text())["figures"]
    assert recorded.keys() == figures.keys()
    over = {what: count for what, count in recorded.items() if count > figures[what]}
    assert over == {}, f"the record claims more than there is now: write {figures} into it"


class _Collector(ast.NodeVisitor):
    def __init__(self, words: Vocabulary, name: str) -> None:
        self._words = words
        self._name = name
        self._class = ""
        self._function: ast.FunctionDef | None = None
        self._locals: dict[str, str] = {}
        self._inner: set[int] = set()
        self.uses: list[Use] = []

    # -- scopes ----------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, known = self._function, dict(self._locals)
        self._function = node
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and len(inner.targets) == 1 and isinstance(inner.targets[0], ast.Name):
                path = self._path(inner.value)
                if path is not None:
                    self._locals[inner.targets[0].id] = path
        self.generic_visit(node)
        self._function, self._locals = outer, known

    # -- uses ------------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        path = self._path(node.func)
        if path is not None:
            self._inner.update(id(part) for part in ast.walk(node.func))
            self.uses.append(Use(path, self._shape(node), f"{self._name}:{node.lineno}"))
            for part in ast.walk(node.func):  # a call inside the chain is a use of its own
                if isinstance(part, ast.Call):
                    self.visit_Call(part)
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                self.visit(argument)
            return
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is not None and id(node) not in self._inner and path != self._words.module:
            self._inner.update(id(part) for part in ast.walk(node))
            self.uses.append(Use(path, None, f"{self._name}:{node.lineno}"))
        self.generic_visit(node)

    # -- expressions -----------------------------------------------------------------------------------------------

    def _path(self, node: ast.expr) -> str | None:
        """The vendor's dotted name for an expression; for an object of one of its classes, the class."""
        words = self._words
        match node:
            case ast.Name(id=name):
                return self._locals.get(name) or words.roots.get(name)
            case ast.Attribute(attr="module"):
                return words.module
            case ast.Attribute(value=ast.Name(id="self"), attr="native" | "_native"):
                return words.natives.get(self._class)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="cast"), args=[ast.Name(id=kind), _]), attr="native"):
                return words.natives.get(kind)
            case ast.Attribute(value=ast.Name(id=name), attr="native"):
                return words.natives.get(name)
            case ast.Attribute(value=value, attr=attr):
                inner = self._path(value)
                return None if inner is None else f"{inner}.{attr}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=method)) if method in words.made:
                return words.made[method]
            case ast.Call(func=func):
                inner = self._path(func)
                if inner is None:
                    return None
                last = inner.rpartition(".")[2]
                return words.made.get(last) or (inner if last[0].isupper() else None)  # an object of a class
        return None

    def _shape(self, node: ast.Call) -> Call:
        positional = 0
        for argument in node.args:
            positional += self._length(argument.value) if isinstance(argument, ast.Starred) else 1
        keywords: list[str] = []
        for keyword in node.keywords:
            keywords += [keyword.arg] if keyword.arg is not None else self._keys(keyword.value)
        return Call(positional, tuple(keywords))

    def _assigned(self, name: ast.expr) -> Iterator[ast.expr]:
        assert isinstance(name, ast.Name), f"{self._name}: what is unpacked into a call must be a local name"
        assert self._function is not None
        for node in ast.walk(self._function):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name.id for t in node.targets):
                yield node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name.id:
                assert node.value is not None
                yield node.value

    def _length(self, name: ast.expr) -> int:
        (value,) = self._assigned(name)
        assert isinstance(value, ast.Tuple), f"{self._name}:{name.lineno}: the length of what is unpacked isn't known"
        return len(value.elts)

    def _keys(self, name: ast.expr) -> list[str]:
        assert isinstance(name, ast.Name)
        assert self._function is not None
        keys = []
        for value in self._assigned(name):
            assert isinstance(value, ast.Dict), f"{self._name}:{name.lineno}: the keywords aren't known"
            keys += [key.value for key in value.keys if isinstance(key, ast.Constant)]
        for node in ast.walk(self._function):
            match node:
                case ast.Subscript(value=ast.Name(id=owner), slice=ast.Constant(value=key), ctx=ast.Store()) if (
                    owner == name.id
                ):
                    keys.append(key)
        return keys
