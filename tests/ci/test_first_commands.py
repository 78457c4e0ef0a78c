"""The first commands of the README, timed for the summary of CI."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "first_commands.py"))
main, first_commands = SCRIPT["main"], SCRIPT["first_commands"]


def test_the_commands_are_those_of_the_readme():
    assert first_commands((ROOT / "README.md").read_text(encoding="utf-8")) == [
        "make demo",
        '.venv/bin/outrider generate --prompt "def read("',
    ]


def test_each_command_is_timed_and_a_failure_is_shown(tmp_path, capfd):
    readme, summary = tmp_path / "README.md", tmp_path / "summary.md"
    readme.write_text("```sh\ntrue    # does nothing\nmake test\nexit 3\n```\n")
    assert main(["--readme", str(readme), "--summary", str(summary)]) == 1
    header, _, first, second = summary.read_text().splitlines()
    assert header == "| first commands of the README | seconds | exit code |"
    assert (first.split("|")[1], first.split("|")[3]) == (" `true` ", " 0 ")
    assert (second.split("|")[1], second.split("|")[3]) == (" `exit 3` ", " 3 ")
    assert summary.read_text() in capfd.readouterr().out


def test_a_readme_without_commands_fails(tmp_path, capfd):
    (tmp_path / "README.md").write_text("nothing")
    assert main(["--readme", str(tmp_path / "README.md")]) == 1
    assert "no shell block" in capfd.readouterr().err


def test_ci_runs_it_for_its_summary():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert 'python3 .ci/first_commands.py --summary "$GITHUB_STEP_SUMMARY"' in workflow
