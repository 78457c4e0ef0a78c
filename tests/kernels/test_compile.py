"""Every kernel compiles for devices that aren't here: what the interpreter lets pass, a compiler may not."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

CHILD = Path(__file__).with_name("compile_child.py")
PACKAGE = Path(__file__).resolve().parents[2] / "kernels" / "outrider_triton"


def kernels(streamed):
    """Kernels by their decorators; those whose name begins with an underscore, or that another one calls, are helpers.

    Without ``streamed``, only those of files that need no copy engine.
    """
    made, used = set(), set()
    for path in PACKAGE.rglob("jit/*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                made |= {node.name} if streamed or "import gluon" not in source else set()
                used |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return {name for name in made if not name.startswith("_")} - used


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(("cuda", "90", "32", "True"), marks=pytest.mark.slow),
        pytest.param(("hip", "gfx942", "64", "False"), marks=pytest.mark.slow),
        pytest.param(("cuda", "80", "32", "False"), marks=pytest.mark.slow),
        pytest.param(("hip", "gfx1100", "32", "False"), marks=pytest.mark.slow),
    ],
    ids=lambda target: f"{target[0]}-{target[1]}",
)
def test_every_kernel_compiles(target, pytestconfig):
    """Triton keeps what it has compiled by the kernel's source, its own version and the options; so does this."""
    names = compiled(target, cache=pytestconfig.cache.mkdir("triton"))
    assert names == kernels(streamed=target[:2] == ("cuda", "90"))


def test_a_kernel_of_each_kind_compiles_and_no_kernel_is_left_out(pytestconfig):
    """The rest of them, and other devices: the slow run."""
    names = compiled(("cuda", "90", "32", "True"), "some", cache=pytestconfig.cache.mkdir("triton"))
    assert len({name for name in names if not name.startswith("(")}) == 3
    assert {name.strip("()") for name in names} == kernels(streamed=True)


def compiled(target, *some, cache):
    """Names that the child prints."""
    result = subprocess.run(
        [sys.executable, str(CHILD), *target, *some],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return set(result.stdout.split())


ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


def derived(which, architectures, cache, timeout):
    result = subprocess.run(
        [sys.executable, str(CHILD.with_name("derived_child.py")), which, *architectures],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert {row["architecture"] for row in rows} == set(architectures)
    for row in rows:
        assert row["taken"] <= row["expected"] <= row["there"], row
    return rows


@pytest.mark.slow
def test_the_largest_derived_configurations_compile_within_their_shared_memory(pytestconfig):
    rows = derived("few", ARCHITECTURES, pytestconfig.cache.mkdir("triton"), 1800)
    assert len(rows) == 5 * len(ARCHITECTURES) + 9  # products, three quantised, attention; multi-stage pipelines of sm_90


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_derived_configuration_compiles_within_its_shared_memory(architecture, pytestconfig):
    """Up to 1,500 configurations per architecture, about a second each."""
    assert len(derived("all", [architecture], pytestconfig.cache.mkdir("triton"), 7200)) > 50
