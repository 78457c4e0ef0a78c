"""The shape of the tree: one package for each backend, and a pyproject that knows each of them."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = sorted(path.name for path in (ROOT / "backends").iterdir() if path.is_dir())
OWN_DISTRIBUTIONS = {path.parent.name for path in (ROOT / "backends").glob("*/pyproject.toml")}
"""Backends that Outrider's wheel doesn't have: each is a distribution of its own."""
SHARED = sorted(f"{path.parent.parent.name}/{path.parent.name}" for path in ROOT.glob("[kt]*s/outrider_*/py.typed"))
"""Packages of kernels and tools, by folder and name."""
IGNORED = re.compile(r"__pycache__|\..*|.*\.egg-info")


def strangers(folder: Path) -> list[str]:
    """What lies beside the one package: it would become a top-level name for everybody."""
    return sorted(p.name for p in folder.iterdir() if p.name != f"outrider_{folder.name}" and not IGNORED.fullmatch(p.name))


def bare(root: Path) -> list[str]:
    """Folders of modules without an ``__init__.py``: the import contracts don't see what is in them."""
    return sorted({file.parent.name for file in root.rglob("*.py") if not (file.parent / "__init__.py").exists()})


def test_every_folder_of_modules_is_a_package():
    assert bare(ROOT / "core" / "outrider") == []
    for name in BACKENDS:
        assert bare(ROOT / "backends" / name) == []


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_folder_holds_one_package(name):
    folder = ROOT / "backends" / name
    assert strangers(folder) == (["README.md", "pyproject.toml"] if name in OWN_DISTRIBUTIONS else [])
    for needed in ("__init__.py", "py.typed", "plugin.py"):
        assert (folder / f"outrider_{name}" / needed).is_file()


@pytest.mark.parametrize("name", BACKENDS)
def test_pyproject_knows_each_backend(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tool = project["tool"]
    packages = tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (f"backends/{name}/outrider_{name}" in packages) is (name not in OWN_DISTRIBUTIONS)
    where = ROOT / "backends" / name / "pyproject.toml" if name in OWN_DISTRIBUTIONS else ROOT / "pyproject.toml"
    entries = tomllib.loads(where.read_text())["project"]["entry-points"]["outrider.backends"]
    assert entries[name] == f"outrider_{name}.plugin"
    if name in OWN_DISTRIBUTIONS:
        assert name not in project["project"]["entry-points"]["outrider.backends"]
        assert project["project"]["optional-dependencies"][name] == [f"outrider-{name}"]
    assert f"backends/{name}" in tool["hatch"]["build"]["dev-mode-dirs"]
    assert f"backends/{name}" in tool["ruff"]["src"]
    assert f"backends/{name}" in tool["mypy"]["mypy_path"].split(":")
    linter = tool["importlinter"]
    assert f"outrider_{name}" in linter["root_packages"]
    contracts = {contract["id"]: contract for contract in linter["contracts"]}
    assert f"outrider_{name}" in contracts["vendors"]["forbidden_modules"]
    if len(BACKENDS) > 1:
        assert f"outrider_{name}" in contracts["backends"]["modules"]


def test_every_package_of_kernels_and_tools_says_that_it_is_typed():
    packages = [path for folder in ("kernels", "tools") for path in (ROOT / folder).iterdir() if path.is_dir()]
    found = sorted(f"{path.parent.name}/{path.name}" for path in packages if not IGNORED.fullmatch(path.name))
    assert found == SHARED
    assert len(SHARED) >= 8
    assert [bare(ROOT / package) for package in SHARED] == [[]] * len(SHARED)


@pytest.mark.parametrize("package", SHARED)
def test_pyproject_knows_each_package_of_kernels_and_tools(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tool = project["tool"]
    folder, name = package.split("/")
    assert package in tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert folder in tool["ruff"]["src"]
    assert folder in tool["mypy"]["mypy_path"].split(":")
    linter = tool["importlinter"]
    assert name in linter["root_packages"]
    contracts = {contract["id"]: contract for contract in linter["contracts"]}
    assert name in contracts["vendors"]["forbidden_modules"]
    if folder == "tools":
        assert name in contracts["backend-interface"]["allowed_importers"]
        assert any(name in layer for layer in contracts["tools"]["layers"])
    else:
        assert name in contracts["kernels"]["source_modules"]


def test_commands_of_tools_are_offered_by_tools():
    """Each entry point of a command is a function of a tool or of the server, and each module of commands has one."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["outrider.commands"]
    modules = {value.partition(":")[0] for value in points.values()}
    files = [*ROOT.glob("tools/outrider_*/command.py"), *ROOT.glob("tools/outrider_*/commands/*.py")]
    own = {".".join(file.relative_to(ROOT / "tools").with_suffix("").parts) for file in files if file.stem != "__init__"}
    assert modules == own | {"outrider.serve.command"}


def test_catches(tmp_path):
    chip = tmp_path / "chip"
    for name in ("outrider_chip", "tests", "__pycache__"):
        (chip / name).mkdir(parents=True)
    assert strangers(chip) == ["tests"]
    (chip / "outrider_chip" / "stray").mkdir()
    (chip / "outrider_chip" / "__init__.py").touch()
    (chip / "outrider_chip" / "stray" / "module.py").touch()
    assert bare(chip) == ["stray"]
