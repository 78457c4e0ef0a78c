"""No state hides in modules of the core: no mutable value that changes, no ``global``, no environment variables."""

import ast
from pathlib import Path

import pytest

from arch.parsing import nodes, parsed

MAKERS = frozenset(
    [
        "list",
        "dict",
        "set",
        "bytearray",
        "defaultdict",
        "deque",
        "OrderedDict",
        "Counter",
        "WeakKeyDictionary",
        "WeakValueDictionary",
    ]
)
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTATORS = frozenset(
    [
        "append",
        "extend",
        "insert",
        "add",
        "update",
        "setdefault",
        "pop",
        "popitem",
        "remove",
        "discard",
        "clear",
        "appendleft",
        "sort",
    ]
)
ENVIRONMENT = Path("outrider/cli/terminal/environment.py")


def mutable_state(source: str) -> list[str]:
    """Constants are tables in capitals that nothing changes; everything else that could change is an offence."""
    tree = parsed(source)
    found = [f"{n.lineno}: global {', '.join(n.names)}" for n in nodes(source) if isinstance(n, ast.Global)]
    tables: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for name in (t.id for t in targets if isinstance(t, ast.Name)):
            if not _mutable(node.value):
                continue
            tables.add(name)
            if not name.isupper() and not (name.startswith("__") and name.endswith("__")):
                found.append(f"{node.lineno}: {name} is a mutable module-level value")
    changed = [(node.lineno, _mutated(node)) for node in nodes(source) if isinstance(node, ast.expr | ast.stmt)]
    return found + [f"{line}: {name} is changed" for line, name in changed if name in tables]


def _mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        function = value.func
        return getattr(function, "id", getattr(function, "attr", "")) in MAKERS
    return isinstance(value, DISPLAYS)


def _mutated(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in MUTATORS:
            return name
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return name
        case ast.AugAssign(target=ast.Name(id=name)):
            return name
    return ""


def environment_reads(source: str) -> list[str]:
    found = []
    for node in nodes(source):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "environb" | "getenv" | "putenv" | "unsetenv"):
                found.append(f"{node.lineno}: os.{node.attr}")
            case ast.ImportFrom(module="os", names=names) if any(n.name in ("environ", "getenv") for n in names):
                found.append(f"{node.lineno}: from os import …")
    return found


def test_no_mutable_module_state(core_files):
    assert {name: found for name, text in core_files.items() if (found := mutable_state(text))} == {}


def test_environment_is_read_at_the_edge_alone(core_files):
    reading = [name for name, text in core_files.items() if environment_reads(text)]
    assert [name for name in reading if not name.endswith(ENVIRONMENT.as_posix())] == []


@pytest.mark.parametrize(
    "snippet",
    [
        "cache = {}",
        "registry: dict[str, int] = dict()",
        "seen = set()",
        "from collections import deque\nqueue = deque()",
        "TABLE = {}\ndef f(x):\n    TABLE[x] = 1",
        "TABLE = []\ndef f(x):\n    TABLE.append(x)",
        "TABLE = [1]\nTABLE += [2]",
        "TABLE = {1: 2}\ndef f():\n    del TABLE[1]",
        "current = None\ndef f():\n    global current\n    current = 1",
    ],
)
def test_catches_state(snippet):
    assert mutable_state(snippet)


@pytest.mark.parametrize(
    "snippet", ["NAMES = ['a']", "__all__ = ['a']", "x = (1, 2)", "def f():\n    x = []\n    x.append(1)"]
)
def test_passes_constants(snippet):
    assert mutable_state(snippet) == []


@pytest.mark.parametrize("snippet", ["os.environ['A']", "os.getenv('A')", "from os import environ", "os.environ.get('A')"])
def test_catches_environment(snippet):
    assert environment_reads(f"import os\n{snippet}")
