"""The plugin ``npu``, its code unchanged, on the emulation: in processes of their own, where torch's slot is called npu."""

import ast
import sys
from pathlib import Path

import pytest

from proof.setups import PLUGINS
from vendors.child import child, conform
from vendors.surface import Mismatch, Surface, Unresolved
from vendors.test_npu_contract import USES
from vendors.wheel import Installed

HERE = Path(__file__).parent
CASES = sorted(path for path in HERE.glob("on_npu/case_*.py") if path.stem != "case_matrix")


# Each of these files has a process of its own. The others share one, since starting a process takes longer than most cases.
LONG = ("case_engine", "case_mrope", "case_fences", "case_operators")
MATRIX = HERE / "on_npu" / "case_matrix.py"


def cases(plugin, files):
    """Run case files through a plugin of Outrider on the emulation of its vendor's package."""
    command = ["-m", "pytest", "-p", PLUGINS[plugin], "-p", "no:cacheprovider", "-q", "--tb=short"]
    alone = {"PROVED_PLUGIN": plugin, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = child(*command, *map(str, files), **alone)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    print(summary)
    return int(summary.split(" passed")[0].split()[-1])


@pytest.mark.slow
def test_cases():
    """Under adversarial schedules, watched, where a case says so."""
    assert cases("outrider_npu", [path for path in CASES if path.stem not in LONG]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("file", [path for path in CASES if path.stem in LONG], ids=lambda path: path.stem)
def test_all_cases(file):
    assert cases("outrider_npu", [file])


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["outrider_npu", "outrider_rocm"])
def test_drawn_programs(plugin):
    """The plugins ``npu`` and ``rocm`` under adversarial schedules, watched."""
    assert cases(plugin, [MATRIX]) > 0


@pytest.mark.parametrize(
    ("level", "programs"), [pytest.param("L1", 5, marks=pytest.mark.slow), pytest.param("L4", None, marks=pytest.mark.slow)]
)
def test_the_conformance_suite(tmp_path, level, programs):
    """On the plugin as it's found by its entry point."""
    report = conform("npu", level, tmp_path, "emulation", programs=programs)
    assert report["reached"] == level, [test for test in report["tests"] if test["outcome"] == "failed"]
    assert report["tier"]["kind"] == "simulated"
    assert report["capabilities"]["updates_graph_params"]
    assert report["capabilities"]["flags"]
    page = (HERE.parents[1] / "docs" / "npu.md").read_text()
    for name, found in report["levels"].items():
        line = f"{name}  {found['result']}\n"
        assert line in page, f"docs/npu.md should say: {line}"


def own_attention(tmp_path, emulation):
    """Outcomes by use of the tests of the device's own attention, and (own, left) calls by use, from the report."""
    report = conform("npu", "L4", tmp_path, emulation, only="own_attention_serves")
    tests = {test["id"]: test for test in report["tests"] if "own_attention_serves" in test["id"]}
    calls = {}
    for row in report["kernel_calls"]:
        if row["kernel"] == "paged_attention":
            calls.setdefault(row["use"], {True: 0, False: 0})[row["own"]] += sum(row["shapes"].values())
    assert "paged_attention" in (tmp_path / "report.html").read_text()
    return tests, calls


@pytest.mark.slow
def test_own_attention_runs_for_every_use(tmp_path):
    """In the report's counts: in calls and in graphs, never left to the reference, with what the engine takes by itself."""
    tests, calls = own_attention(tmp_path, "emulation")
    assert {test["outcome"] for test in tests.values()} == {"passed"}
    assert len(tests) == 5
    for use in ("prefill", "draft", "decode", "verify", "extend"):
        for where in ("", *([", in a graph"] if use != "prefill" else [])):
            assert calls[use + where][True] > 0, (use, where)
            assert calls[use + where][False] == 0, (use, where)


@pytest.mark.slow
def test_a_device_whose_own_attention_never_runs_fails(tmp_path):
    tests, calls = own_attention(tmp_path, "without_attention")
    assert {test["outcome"] for test in tests.values()} == {"failed"}
    assert all("was left to the reference each of" in test["reason"] for test in tests.values())
    assert calls["verify"][True] == 0 < calls["verify"][False]


# -- the emulation against the wheel ---------------------------------------------------------------------------------

EMULATED = Surface(Installed(HERE / "emulated"))
OWN = {"machine", "sim", "as_npu", "Idle", "of"}  # the emulation's means, which aren't torch_npu's


def emulated_names():
    """Public functions, classes and methods that the emulation defines, by the names under which torch_npu offers them."""
    for file in ("__init__", "streams", "utils", "graphs"):
        tree = ast.parse((HERE / "emulated" / "torch_npu" / "npu" / f"{file}.py").read_text())
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name in OWN or node.name.startswith("_"):
                continue
            home = "torch_npu.npu.utils" if node.name == "get_cann_version" else "torch_npu.npu"
            yield f"{home}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and inner.name not in OWN:
                        yield f"{home}.{node.name}.{inner.name}", inner


def parameters(surface, path):
    return [(p.name, str(p.kind), p.default) for p in surface.signature(path).parameters.values()]


@pytest.mark.slow
def test_the_emulation_has_torch_npus_names_and_signatures(torch_npu_surface):
    compared = []
    for path, _ in emulated_names():
        torch_npu_surface.resolve(path)
        try:
            theirs = parameters(torch_npu_surface, path)
        except Mismatch:
            continue  # made by its compiled base: no signature to compare
        assert [p[:2] for p in parameters(EMULATED, path)] == [p[:2] for p in theirs], path
        assert [p[2] for p in parameters(EMULATED, path)] == [p[2] for p in theirs], path
        compared.append(path)
    print({"names of the emulation": len(list(emulated_names())), "signatures compared": len(compared)})
    assert len(compared) > 35


def test_the_emulation_has_all_that_the_plugin_uses():
    for use in USES:
        if use.path.startswith("torch_npu.npu."):
            EMULATED.resolve(use.path)
    with pytest.raises(Unresolved):
        EMULATED.resolve("torch_npu.npu.Stream.wait_for_godot")


def test_operators_of_the_emulation_have_registered_schemas(wheel):
    sys.path.insert(0, str(HERE / "emulated"))
    try:
        tree = ast.parse((HERE / "emulated" / "torch_npu" / "operators.py").read_text())
        body = [
            n for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id in ("_LENGTHS", "_ATTENTION", "SCHEMAS")
        ]
        names: dict[str, object] = {}
        exec(compile(ast.Module(body, []), "operators", "exec"), names)
    finally:
        sys.path.pop(0)
    schemas = names["SCHEMAS"]
    assert len(schemas) == 4
    for schema in schemas:
        assert schema in wheel.schemas(schema.partition("(")[0])
