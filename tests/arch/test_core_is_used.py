"""No part of the core is there for a benchmark, a proof or the kit alone: it would belong to that tool."""

import ast
from collections.abc import Iterable

import outrider
import outrider.device
from arch.parsing import parsed

PUBLIC = {*outrider.__all__, *outrider.device.__all__}
"""What users have; the hooks for tools are among the backend interface's names."""


def imported(trees: Iterable[ast.Module]) -> set[str]:
    """Names that ``from outrider.… import NAME`` brings in."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "outrider":
                found.update(alias.name for alias in node.names)
    return found


def defined(tree: ast.Module) -> set[str]:
    """Public names that a module makes."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=targets):
                names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def loaded(tree: ast.Module) -> set[str]:
    """Names and attributes that a module reads."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def for_tools_alone(product: dict[str, ast.Module], tools: dict[str, ast.Module]) -> set[str]:
    """Names of the core that tools import, and that nothing else in the product uses; a package's list isn't a use."""
    users = [tree for path, tree in product.items() if not path.endswith("__init__.py")]
    used = imported(users).union(*map(loaded, users))
    core = [tree for path, tree in product.items() if path.startswith("core/")]
    return (set().union(*map(defined, core)) & imported(tools.values())) - used - PUBLIC


def test_nothing_of_the_core_is_for_tools_alone(source_files):
    def trees(*folders: str) -> dict[str, ast.Module]:
        return {path: parsed(text) for path, text in source_files.items() if path.startswith(folders)}

    assert for_tools_alone(trees("core/", "backends/", "kernels/"), trees("tools/")) == set()


def test_catches():
    core = {"core/outrider/a.py": ast.parse("def shape(): ...\ndef used(): ...\nused()")}
    tools = {"tools/t.py": ast.parse("from outrider.a import shape, used, get_backend")}
    assert for_tools_alone(core, tools) == {"shape"}
