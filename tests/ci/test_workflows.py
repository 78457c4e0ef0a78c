"""The workflows are valid, and keep the promises that no schema knows."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
yaml = pytest.importorskip("yaml", reason="not run: PyYAML comes with transformers")


def read(name):
    found = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    found["on"] = found.pop(True)  # YAML 1.1 reads `on` as a truth value
    return found


def schema_errors(*files):
    pytest.importorskip("check_jsonschema", reason="not run: set up again, check-jsonschema is in the group dev")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_workflow_fits_githubs_schema():
    assert [path.name for path in WORKFLOWS] == ["audit.yml", "ci.yml", "conformance.yml", "pr-gate.yml", "pr-test-extra.yml"]
    done = schema_errors(*WORKFLOWS)
    assert done.returncode == 0, done.stdout


def test_the_schema_catches(tmp_path):
    broken = tmp_path / "broken.yml"
    broken.write_text("on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    stepps: []\n")
    assert schema_errors(broken).returncode == 1


def test_actionlint():
    actionlint = shutil.which("actionlint") or shutil.which("actionlint", path=str(Path(sys.executable).parent))
    if actionlint is None:
        pytest.skip("not run: actionlint isn't installed; `make workflows` fetches one")
    done = subprocess.run([actionlint, *map(str, WORKFLOWS)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_the_extra_suite_leaves_labels_to_the_gate():
    extra = read("pr-test-extra.yml")
    gate = extra["jobs"]["gate"]
    assert gate["with"] == {"require-run-ci-extra": True}
    ours = 'contains(fromJSON(\'["run-ci", "run-ci-extra"]\'), github.event.label.name)'
    assert " ".join(gate["if"].split()) == f"github.event.action != 'labeled' || {ours}"
    for name, job in extra["jobs"].items():
        if name != "gate":
            assert "gate" in job["needs"]
            assert "if" not in job, "a condition of its own could let it run when the gate is shut"
    text = (ROOT / ".github" / "workflows" / "pr-test-extra.yml").read_text(encoding="utf-8")
    assert "pull_request.labels" not in text


def test_a_pull_request_cannot_change_its_gate():
    """Whoever calls the gate starts where GitHub takes workflow files from the base branch, and never on a push."""
    callers = [
        path.name
        for path in WORKFLOWS
        if "pr-gate.yml" in path.read_text(encoding="utf-8") and "uses: ./" in path.read_text()
    ]
    assert callers == ["pr-test-extra.yml"]
    events = read("pr-test-extra.yml")["on"]
    assert "pull_request" not in events
    assert events["pull_request_target"]["types"] == ["labeled"]


def test_what_the_gate_let_through_is_what_runs():
    """Behind the gate each checkout is of the commit that was looked at, without a token that could write."""
    extra = read("pr-test-extra.yml")
    assert extra["permissions"] == {"contents": "read"}
    for name, job in extra["jobs"].items():
        for step in job.get("steps", ()):
            if "checkout" in step.get("uses", ""):
                assert step["with"] == {"ref": "${{ needs.gate.outputs.sha }}", "persist-credentials": False}, name
        assert "secrets" not in job
        assert not any("cache" in str(step) for step in job.get("steps", ())), name
    assert extra["jobs"]["conformance"]["with"]["ref"] == "${{ needs.gate.outputs.sha }}"
    checkout = read("conformance.yml")["jobs"]["conform"]["steps"][0]
    assert checkout["with"] == {"ref": "${{ inputs.ref }}", "persist-credentials": False}


def test_a_pull_request_gets_no_machine_of_ours_outside_the_gate():
    ci = read("ci.yml")
    assert "pull_request_target" not in ci["on"]
    (step,) = [step for step in ci["jobs"]["matrix"]["steps"] if step.get("id") == "matrix"]
    assert step["env"]["RUNNERS"] == "${{ github.event_name != 'pull_request' && vars.OUTRIDER_RUNNERS || '' }}"
    hosted = [job["runs-on"] for job in ci["jobs"].values() if "runs-on" in job]
    assert set(hosted) == {"ubuntu-latest"}


def test_an_unrelated_label_stops_nothing_that_runs():
    group = read("pr-test-extra.yml")["concurrency"]["group"]
    assert '!contains(fromJSON(\'["run-ci", "run-ci-extra"]\'), github.event.label.name)' in group
    assert "format('-{0}', github.run_id)" in group


def test_the_gate_asks_at_run_time():
    text = (ROOT / ".github" / "workflows" / "pr-gate.yml").read_text(encoding="utf-8")
    assert "event.pull_request.labels" not in text
    gate = read("pr-gate.yml")
    assert gate["on"]["workflow_call"]["inputs"]["require-run-ci-extra"] == {
        "description": "Ask for the label run-ci-extra as well as run-ci.",
        "type": "boolean",
        "default": False,
    }
    labels = gate["jobs"]["labels"]
    assert labels["outputs"]["sha"] == "${{ github.event.pull_request.head.sha || github.sha }}"
    assert labels["steps"][0]["with"]["ref"] == "${{ github.sha }}"
    assert labels["steps"][-1]["run"] == "python3 .github/scripts/pr_gate.py"
    assert labels["steps"][-1]["env"]["REQUIRE_RUN_CI_EXTRA"] == "${{ inputs.require-run-ci-extra }}"


def test_a_row_of_the_matrix_fits_the_workflow_that_takes_it():
    """Each input comes from a key that a row has, and only a row that says "runs" takes a machine."""
    from outrider.registry import Registry
    from outrider_conformance.commands.ci_matrix import rows_of

    given = read("ci.yml")["jobs"]["conformance"]["with"]
    called = read("conformance.yml")
    assert set(given) == set(called["on"]["workflow_call"]["inputs"]) - {"ref"}
    assert read("pr-test-extra.yml")["jobs"]["conformance"]["with"] == {"ref": "${{ needs.gate.outputs.sha }}", **given}
    keys = {re.search(r"matrix\.(\w+)", text)[1] for text in given.values()}
    assert keys <= set(rows_of(Registry().backends.candidates()[0], [])[0])
    assert called["jobs"]["conform"]["if"] == "inputs.status == 'runs'"


def test_nothing_is_run_with_more_rights_than_it_needs():
    for path in WORKFLOWS:
        assert read(path.name)["permissions"]["contents"] == "read", path.name
        # what an event brings is data: put into a shell's text, it would be code
        for run in re.findall(r"run: (.*?)(?=\n\s+- |\Z)", path.read_text(encoding="utf-8"), re.DOTALL):
            assert "${{ github.event" not in run, path.name
            assert "${{ inputs." not in run, path.name


def test_the_audit_comes_by_itself_every_week():
    audit = read("audit.yml")
    assert re.fullmatch(r"\d+ \d+ \* \* \d", audit["on"]["schedule"][0]["cron"])
    assert "constraints.txt" in audit["on"]["pull_request"]["paths"]
    assert "pip-audit --requirement constraints.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_job_test_runs_the_test_command_of_the_readme():
    """`.ci/run` is `make test`, which fails above its limit of time."""
    assert commands(read("ci.yml")["jobs"]["test"]) == [".ci/run"]
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "exec make test"
    dry = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    (line,) = [line for line in dry.stdout.splitlines() if "timed_tests.py" in line]
    assert re.search(r"timed_tests\.py -- \S*make .*check -- .*pytest .*not slow and not soak.* --durations=20$", line)


def test_slow_tests_run_every_day():
    extra = read("pr-test-extra.yml")
    assert any(re.fullmatch(r"\d+ \d+ \* \* \*", each["cron"]) for each in extra["on"]["schedule"])
    assert commands(extra["jobs"]["slow"]) == ["make test-slow"]


def test_every_target_that_a_workflow_makes_is_there():
    made = {word for path in WORKFLOWS for line in re.findall(r"run: make (.*)", path.read_text()) for word in line.split()}
    assert made == {"lint", "imports", "unit", "test-tools", "docs", "workflows", "test-slow", "test-opencl", "audit"}
    for target in (*made, "test"):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
