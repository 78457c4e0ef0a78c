"""Nothing that comes from outside is run: what would run it isn't called anywhere in what is installed."""

import ast

import pytest

from arch.parsing import nodes

PACKAGES = ("core", "backends", "kernels", "tools", "training", "examples")
MODULES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"})
BUILTINS = frozenset({"eval", "exec"})
YAML = frozenset({"load", "load_all", "unsafe_load", "full_load"})


def offences(source: str) -> list[str]:
    """``line: what`` for every way in that the source opens."""
    found = []
    for node in nodes(source):
        what = _imported(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
        if isinstance(node, ast.Call):
            what = _called(node)
        if what:
            found.append(f"{node.lineno}: {what}")
    return found


def _imported(node: ast.Import | ast.ImportFrom) -> str:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    banned = [name for name in names if name.split(".")[0] in MODULES]
    if isinstance(node, ast.ImportFrom) and node.module == "torch":
        banned += [alias.name for alias in node.names if alias.name == "load"]
    return f"import of {', '.join(banned)}" if banned else ""


def _called(node: ast.Call) -> str:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    match node.func:
        case ast.Name(id=name) if name in BUILTINS:
            return name
        case ast.Attribute(value=ast.Name(id="builtins"), attr=name) if name in BUILTINS:
            return name
        case ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"):
            first = node.args[0] if node.args else None
            return f"import of {first.value}" if isinstance(first, ast.Constant) and first.value in MODULES else ""
        case ast.Attribute(value=ast.Name(id="torch"), attr="load") if not _is(given.get("weights_only"), True):
            return "torch.load without weights_only=True"
        case ast.Attribute(value=ast.Name(id="yaml"), attr=name) if name in YAML:
            return f"yaml.{name}"
        case ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen"):
            return "a shell"
        case ast.Attribute(attr="from_pretrained") if "trust_remote_code" not in given:
            return "from_pretrained without trust_remote_code"
    return "a shell" if "shell" in given and not _is(given["shell"], False) else ""


def _is(value: ast.expr | None, wanted: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is wanted


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_from_outside_is_run(source_files, package):
    files = {path: text for path, text in source_files.items() if path.startswith(f"{package}/")}
    assert files
    assert [f"{path}:{each}" for path, text in files.items() for each in offences(text)] == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "def f(x):\n    import pickle\n    return pickle.loads(x)",
        "from pickle import loads",
        "import marshal, os",
        "import shelve",
        "importlib.import_module('pickle')",
        "__import__('marshal')",
        "eval(text)",
        "exec(text, {})",
        "builtins.exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "from torch import load",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(text)",
        "subprocess.run(command, shell=True)",
        "subprocess.Popen(command, shell=flag)",
        "os.system(command)",
        "AutoModel.from_pretrained(path)",
    ],
)
def test_catches(snippet):
    assert offences(snippet)


@pytest.mark.parametrize(
    "snippet",
    [
        "model.eval()",
        "import pickletools",
        "torch.load(path, weights_only=True)",
        "yaml.safe_load(text)",
        "json.loads(text)",
        "subprocess.run([command])",
        "subprocess.run([command], shell=False)",
        "AutoModel.from_pretrained(path, trust_remote_code=False)",
    ],
)
def test_passes(snippet):
    assert offences(snippet) == []
