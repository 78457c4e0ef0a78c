"""The check of commit subjects accepts imperatives of at most 72 characters, and nothing else."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".github" / "scripts" / "commit_message.py"
spec = importlib.util.spec_from_file_location("commit_message", SCRIPT)
commit_message = importlib.util.module_from_spec(spec)
spec.loader.exec_module(commit_message)


@pytest.mark.parametrize(
    "subject",
    [
        "Add a fence for masks",
        "Pass the batch to each stage",
        "Seed the sampler",
        "Merge branch 'x'",
        "Bring results to the host",
    ],
)
def test_an_imperative_passes(subject):
    assert commit_message.faults(subject) == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Added a fence", "imperative"),
        ("Adding a fence", "imperative"),
        ("Adds a fence", "imperative"),
        ("What an output head can't be is said first", "imperative"),
        ("add a fence", "capital"),
        ("Add a fence.", "full stop"),
        ("Add " + "x" * 70, "72"),
        ("", "capital"),
    ],
)
def test_another_subject_is_refused(subject, fault):
    assert any(fault in found for found in commit_message.faults(subject))


def test_the_hook_reads_the_first_line_that_is_no_comment(tmp_path):
    message = tmp_path / "message"
    message.write_text("# a comment\n\nAdds a fence\n")
    run = subprocess.run([sys.executable, SCRIPT, message], capture_output=True, text=True)
    assert run.returncode == 1
    assert "imperative" in run.stderr
    message.write_text("Add a fence\n\nBecause.\n")
    assert commit_message.main([str(message)]) == 0


def test_a_range_is_checked_commit_by_commit(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", *arguments],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    git("init", "-q")
    for subject in ("Add one", "Adds two"):
        git("commit", "--allow-empty", "-qm", subject)
    monkeypatch.chdir(tmp_path)
    assert commit_message.main(["--range", "HEAD~1..HEAD"]) == 1
    git("commit", "--allow-empty", "-qm", "Add three")
    assert commit_message.main(["--range", "HEAD~1..HEAD"]) == 0
