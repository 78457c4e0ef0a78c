"""No part of the core is there for a benchmark, a proof or the kit alone: it would belong to that tool."""

import ast
from collections.abc import Iterable

import outrider
import outrider.device
from arch.parsing import nodes, parsed

PUBLIC = {*outrider.__all__, *outrider.device.__all__}
"""What users have; the hooks for tools are among the backend interface's names."""


def imported(modules: Iterable[str]) -> set[str]:
    """Names that ``from outrider.… import NAME`` brings in."""
    found: set[str] = set()
    for source in modules:
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "outrider":
                found.update(alias.name for alias in node.names)
    return found


def defined(source: str) -> set[str]:
    """Public names that a module makes."""
    names: set[str] = set()
    for node in parsed(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=targets):
                names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def loaded(source: str) -> set[str]:
    """Names and attributes that a module reads."""
    names = {node.id for node in nodes(source) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return names | {node.attr for node in nodes(source) if isinstance(node, ast.Attribute)}


def for_tools_alone(product: dict[str, str], tools: dict[str, str]) -> set[str]:
    """Names of the core that tools import, and that nothing else in the product uses; a package's list isn't a use."""
    users = [source for path, source in product.items() if not path.endswith("__init__.py")]
    used = imported(users).union(*map(loaded, users))
    core = [source for path, source in product.items() if path.startswith("core/")]
    return (set().union(*map(defined, core)) & imported(tools.values())) - used - PUBLIC


def test_nothing_of_the_core_is_for_tools_alone(source_files):
    def modules(*folders: str) -> dict[str, str]:
        return {path: text for path, text in source_files.items() if path.startswith(folders)}

    assert for_tools_alone(modules("core/", "backends/", "kernels/"), modules("tools/")) == set()


def test_catches():
    core = {"core/outrider/a.py": "def shape(): ...\ndef used(): ...\nused()"}
    tools = {"tools/t.py": "from outrider.a import shape, used, get_backend"}
    assert for_tools_alone(core, tools) == {"shape"}
