"""The gate asks for the labels of now, and lets nothing through that it doesn't know. `gh` is a made-up executable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".github" / "scripts" / "pr_gate.py"
FAKE = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
if (here / "fails").exists():
    sys.exit("gh: HTTP 403: Resource not accessible by integration")
print((here / "answer").read_text(), end="")
"""


@pytest.fixture
def gate(tmp_path):
    """Runs the script as a workflow does, with `gh` alone on the path; its labels may change between two runs."""
    binary = tmp_path / "gh"
    binary.write_text(FAKE.format(python=sys.executable))
    binary.chmod(0o755)

    def run(*labels, extra=False, event="pull_request_target", answer=None, **environment):
        (tmp_path / "answer").write_text(json.dumps({"labels": [{"name": n} for n in labels]}) if answer is None else answer)
        return subprocess.run(
            [sys.executable, SCRIPT],
            env={
                "PATH": str(tmp_path),
                "GITHUB_EVENT_NAME": event,
                "GITHUB_REPOSITORY": "owner/name",
                "PR_NUMBER": "7",
                "REQUIRE_RUN_CI_EXTRA": "true" if extra else "false",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    run.home = tmp_path
    return run


@pytest.mark.parametrize(
    ("labels", "extra", "code"),
    [
        (["run-ci"], False, 0),
        (["bug", "run-ci", "docs"], False, 0),
        (["run-ci", "run-ci-extra"], True, 0),
        ([], False, 1),
        (["run-ci"], True, 1),
        (["run-ci-extra"], True, 1),
        (["run-ci-extra"], False, 1),
        (["Run-CI", "run-cinema"], False, 1),
    ],
)
def test_what_labels_open(gate, labels, extra, code):
    assert gate(*labels, extra=extra).returncode == code


def test_names_what_is_missing(gate):
    out = gate(extra=True).stdout
    assert "lacks the labels run-ci and run-ci-extra" in out
    assert "re-run" in out
    assert "lacks the label run-ci-extra:" in gate("run-ci", extra=True).stdout


def test_a_rerun_sees_a_label_that_was_added_since(gate, tmp_path):
    """The event still says what was so when it happened; the gate doesn't look at it."""
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7, "labels": []}}))
    assert gate(GITHUB_EVENT_PATH=str(event)).returncode == 1
    assert gate("run-ci", GITHUB_EVENT_PATH=str(event)).returncode == 0
    # and one that was taken away no longer counts
    event.write_text(json.dumps({"pull_request": {"number": 7, "labels": [{"name": "run-ci"}]}}))
    assert gate(GITHUB_EVENT_PATH=str(event)).returncode == 1
    assert (gate.home / "calls").read_text().splitlines() == ["pr view 7 --repo owner/name --json labels"] * 3


@pytest.mark.parametrize("event", ["push", "schedule", "workflow_dispatch", "merge_group"])
def test_what_only_maintainers_start_needs_no_label(gate, event):
    assert gate(event=event, extra=True).returncode == 0
    assert not (gate.home / "calls").exists()


@pytest.mark.parametrize("event", ["pull_request", "issue_comment", ""])
def test_any_other_event_is_refused(gate, event):
    result = gate("run-ci", event=event)
    assert (result.returncode, "pull_request_target" in result.stdout) == (2, True)


def test_gh_that_fails_opens_nothing(gate):
    (gate.home / "fails").touch()
    result = gate("run-ci")
    assert result.returncode == 2
    assert "HTTP 403" in result.stdout


@pytest.mark.parametrize("answer", ["", "no json", "[]", '{"labels": null}', '{"labels": ["run-ci"]}', "{}"])
def test_an_answer_that_cannot_be_read_opens_nothing(gate, answer):
    result = gate(answer=answer)
    assert (result.returncode, "isn't a list of labels" in result.stdout) == (2, True)


def test_without_gh(gate):
    (gate.home / "gh").unlink()
    result = gate("run-ci")
    assert (result.returncode, "couldn't be run" in result.stdout) == (2, True)


@pytest.mark.parametrize(
    "wrong", [{"PR_NUMBER": ""}, {"PR_NUMBER": "7 --web"}, {"GITHUB_REPOSITORY": ""}, {"REQUIRE_RUN_CI_EXTRA": "yes"}]
)
def test_an_environment_that_cannot_be_meant(gate, wrong):
    result = gate("run-ci", **wrong)
    assert result.returncode == 2
    assert "expected" in result.stdout
    assert not (gate.home / "calls").exists()


def test_is_a_script_that_needs_nothing_installed():
    code = [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({str(SCRIPT)!r})"]
    assert subprocess.run(code, env={"PATH": os.environ["PATH"]}, check=False, timeout=60).returncode == 0
