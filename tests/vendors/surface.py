"""What a package offers, read from its source: names, signatures, and whether a call binds to them."""

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


class Unresolved(Exception):
    """The package has no such name."""


class Mismatch(Exception):
    """The call doesn't bind to the signature."""


@dataclass(frozen=True)
class Call:
    """How something is called: positional arguments by number, keywords by name."""

    positional: int = 0
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """One name: ``kind`` is python (``node`` is its definition), extension (a name of the compiled library) or operator."""

    kind: str
    where: str
    node: ast.AST | None = None
    module: str = ""


class Surface:
    """Resolves dotted names against the files of one package.

    ``library`` (the wheel, if it has one) answers for what is compiled; ``operators_of`` is the module that offers the
    package's operators as its own names.
    """

    def __init__(self, files: Any, *, operators_of: str = "", extensions: tuple[str, ...] = ()) -> None:
        self._files = files
        self._operators_of = operators_of
        self._extensions = extensions
        self.parse = cache(self._parse)

    # -- names -----------------------------------------------------------------------------------------------------

    def resolve(self, path: str) -> Found:
        """Raises :class:`Unresolved`."""
        parts = path.split(".")
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            if self._files.module_file(module) is not None:
                return self._inside(module, parts[cut:], path)
        raise Unresolved(f"{path}: there is no such module")

    def _inside(self, module: str, rest: list[str], path: str) -> Found:
        if not rest:
            return Found("python", module, self.parse(module), module)
        found = self._in_module(module, rest[0], path, frozenset())
        for name in rest[1:]:
            found = self._member(found, name, path)
        return found

    def _in_module(self, module: str, name: str, path: str, seen: frozenset[str]) -> Found:
        if module in seen:
            raise Unresolved(f"{path}: {module} imports itself in a circle")
        tree = self.parse(module)
        stars = []
        hit: Found | None = None
        for node in _statements(tree):
            match node:
                case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined) if defined == name:
                    hit = Found("python", f"{module}:{node.lineno}", node, module)
                case ast.Assign(targets=targets) if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    hit = Found("python", f"{module}:{node.lineno}", node, module)
                case ast.AnnAssign(target=ast.Name(id=defined)) if defined == name:
                    hit = Found("python", f"{module}:{node.lineno}", node, module)
                case ast.ImportFrom(names=names):
                    source = self._source(module, node)
                    for alias in names:
                        if alias.name == "*":
                            stars.append(source)
                        elif (alias.asname or alias.name) == name:
                            hit = self._imported(source, alias.name, path, seen | {module})
        if hit is not None:
            return hit
        for source in stars:
            try:
                return self._in_module(source, name, path, seen | {module})
            except Unresolved:
                continue
        if self._files.module_file(f"{module}.{name}") is not None:
            return Found("python", f"{module}.{name}", self.parse(f"{module}.{name}"), f"{module}.{name}")
        if module == self._operators_of and self._files.schemas(name):
            return Found("operator", name)
        raise Unresolved(f"{path}: {module} has no {name}")

    def _imported(self, source: str, name: str, path: str, seen: frozenset[str]) -> Found:
        if source in self._extensions:
            if not self._files.has_symbol(name):
                raise Unresolved(f"{path}: the compiled library has no {name}")
            return Found("extension", f"{source}.{name}")
        if self._files.module_file(source) is None:
            raise Unresolved(f"{path}: {source} isn't a module of this package")
        if self._files.module_file(f"{source}.{name}") is not None:
            return Found("python", f"{source}.{name}", self.parse(f"{source}.{name}"), f"{source}.{name}")
        return self._in_module(source, name, path, seen)

    def _member(self, found: Found, name: str, path: str) -> Found:
        if found.kind == "operator":
            overload = f"{found.where}.{name}"
            if not self._files.schemas(overload):
                raise Unresolved(f"{path}: no schema {overload} is registered")
            return Found("operator", overload)
        if isinstance(found.node, ast.Module):
            return self._in_module(found.module, name, path, frozenset())
        if not isinstance(found.node, ast.ClassDef):
            raise Unresolved(f"{path}: {found.where} isn't a class, so {name} can't be looked up")
        for node in found.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Found("python", f"{found.module}:{node.lineno}", node, found.module)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return Found("python", f"{found.module}:{node.lineno}", node, found.module)
        for base in found.node.bases:
            dotted = ast.unparse(base)
            if any(dotted.startswith(f"{extension}.") for extension in self._extensions):
                if self._files.has_symbol(name):
                    return Found("extension", f"{dotted}.{name}")
                continue
            try:
                return self._member(self._inside(found.module, dotted.split("."), path), name, path)
            except Unresolved:
                continue
        raise Unresolved(f"{path}: {found.where} has no {name}")

    # -- calls -----------------------------------------------------------------------------------------------------

    def bind(self, path: str, call: Call) -> Found:
        """Resolve ``path`` and hold ``call`` against it. Raises :class:`Unresolved` and :class:`Mismatch`."""
        found = self.resolve(path)
        if found.kind == "operator":
            _bind_schema(found.where, self._files.schemas(found.where), call)
        elif found.kind == "python":
            _bind_signature(path, self.signature(path), call)
        return found

    def takes_any_arguments(self, path: str) -> bool:
        """Return True for a function of the package's source with a catch-all for positional arguments."""
        if self.resolve(path).kind != "python":
            return False
        return any(each.kind is each.VAR_POSITIONAL for each in self.signature(path).parameters.values())

    def signature(self, path: str) -> inspect.Signature:
        """The signature of a function, of a method without its self, or of a class's construction."""
        node = self.resolve(path).node
        method = "." in path and self._is_method(path)
        if isinstance(node, ast.ClassDef):
            made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in ("__new__", "__init__")]
            if not made:
                bases = [ast.unparse(base) for base in node.bases]
                raise Mismatch(
                    f"{path}: made by its base ({', '.join(bases) or 'object'}), whose signature isn't in the source"
                )
            # Where both are there, __new__ may take anything; the one that names its arguments counts.
            chosen = max(made, key=lambda n: (len(n.args.args), n.name == "__init__"))
            return _signature(chosen, drop_first=True)
        if isinstance(node, ast.FunctionDef):
            return _signature(node, drop_first=method)
        raise Mismatch(f"{path}: a {type(node).__name__} has no signature")

    def _is_method(self, path: str) -> bool:
        try:
            return isinstance(self.resolve(path.rpartition(".")[0]).node, ast.ClassDef)
        except Unresolved:
            return False

    # -- files -----------------------------------------------------------------------------------------------------

    def _parse(self, module: str) -> ast.Module:
        return ast.parse(self._files.text(self._files.module_file(module)))

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module if (self._files.module_file(module) or "").endswith("__init__.py") else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """Top-level statements, those in if, try and with included; the last definition of a name wins."""
    found: list[ast.stmt] = []
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        found.append(node)
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                pending.extend(getattr(node, field, []))
    return found


def _signature(node: ast.FunctionDef, *, drop_first: bool) -> inspect.Signature:
    kinds = inspect.Parameter
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults: list[Any] = [kinds.empty] * (len(plain) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    made = []
    for number, (arg, default) in enumerate(zip(plain, defaults, strict=True)):
        if number == 0 and drop_first and not static:
            continue
        kind = kinds.POSITIONAL_ONLY if number < len(args.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        made.append(kinds(arg.arg, kind, default=default))
    if args.vararg:
        made.append(kinds(args.vararg.arg, kinds.VAR_POSITIONAL))
    for arg, given in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        made.append(kinds(arg.arg, kinds.KEYWORD_ONLY, default=kinds.empty if given is None else ast.unparse(given)))
    if args.kwarg:
        made.append(kinds(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)


def _bind_signature(path: str, signature: inspect.Signature, call: Call) -> None:
    # A catch-all takes any keyword and says nothing about which are right: those named must be named in the source.
    named = {p.name for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    stray = [name for name in call.keywords if name not in named]
    if stray:
        raise Mismatch(f"{path}{signature} has no argument {stray[0]!r}")
    try:
        signature.bind(*[object()] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        raise Mismatch(f"{path}{signature}: {error}") from error


def _bind_schema(name: str, schemas: list[str], call: Call) -> None:
    problems = []
    for text in schemas:
        problem = _schema_problem(text, call)
        if problem is None:
            return
        problems.append(problem)
    raise Mismatch(f"{name}: {'; '.join(problems)}")


def _schema_problem(text: str, call: Call) -> str | None:
    schema = torch._C.parse_schema(text)
    arguments = list(schema.arguments)
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if call.positional > len(positional):
        return f"{call.positional} positional arguments, the schema takes {len(positional)}"
    known = {argument.name for argument in arguments}
    stray = [keyword for keyword in call.keywords if keyword not in known]
    if stray:
        return f"no argument {stray[0]!r}"
    given = {argument.name for argument in positional[: call.positional]}
    twice = given & set(call.keywords)
    if twice:
        return f"{sorted(twice)[0]!r} is given twice"
    given |= set(call.keywords)
    lacking = [a.name for a in arguments if a.name not in given and not _optional(a)]
    return f"{lacking[0]!r} isn't given" if lacking else None


def _optional(argument: Any) -> bool:
    return bool(argument.has_default_value()) or bool(re.match(r"Optional\[|.*\?$", str(argument.type)))
