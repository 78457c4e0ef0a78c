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
    """Kernels by their decorators; those whose name begins with an underscore, or that a kernel calls, are helpers."""
    helpers = {
        "begin",
        "begin_late",
        "allow_next_kernel",
        "wait_for_previous_kernel",
        "prefetch_rows",
        "prefetch_lines",
        "norm",
        "add_row",
        "swiglu",
        "own_pairs",
        "sum_of_products",
        "place_in_planes",
        "numbers_of_plane",
        "bytes_of_half",
        "store_in_planes",
        "grain_and_times",
        "lay_gated",
        "nearest_whole",
        "rows_and_tokens",
        "sum_of_tiles",
        "sums_of_gates",
        "load_squares",
        "inverse_rms",
        "program_share",
        "empty_sums",
        "store_rows",
        "store_sums",
        "sequence_of",
        "cache_positions",
        "keys_and_values",
        "visible_positions",
        "zero_padding",
        "load_queries",
        "attend",
        "chunk_start",
        "first_chunk",
        "prefetch_gates",
        "make_pipelines",
        "tile_sums",
        "store_tile",
        "load_angles",
        "write_rotated",
        "as_cached",
        "nearest_e4m3",
        "uniforms",
        "gumbel",
        "silu",
        "log_decay",
        "load_kept",
        "load_pending",
        "load_update",
        "apply_update",
        "load_token",
        "gated_norm",
        "sigmoid_product",
        "load_normalized",
        "between_tokens",
        "inverse_of_triangle",
    }
    rings = {
        "streamed.py",
        "nibble_planes_streamed.py",
        "nibble_planes_gated.py",
        "large_m_gates.py",
        "large_m.py",
        "paged_streamed.py",
        "scaled_blocks.py",
    }
    apart = {"tma_pipeline.py"} | (set() if streamed else rings)  # helpers alone, and what needs a copy engine
    files = [*PACKAGE.rglob("jit/*.py"), *PACKAGE.rglob("jit.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files if path.name not in apart]
    made = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    return {name for name in made if not name.startswith("_")} - helpers


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
    assert len(rows) == 5 * len(ARCHITECTURES) + 8  # products, three quantised, attention; multi-stage pipelines of sm_90


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_derived_configuration_compiles_within_its_shared_memory(architecture, pytestconfig):
    """Up to 1,500 configurations per architecture, about a second each."""
    assert len(derived("all", [architecture], pytestconfig.cache.mkdir("triton"), 7200)) > 50
