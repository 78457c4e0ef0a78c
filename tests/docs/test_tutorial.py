"""The tutorial works as it stands: its blocks are applied and executed in order, and give the finished example."""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import write_distribution
from outrider_conformance.commands.new_backend import skeleton
from outrider_conformance.run import conform
from vendor import Workbench

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
FINISHED = ROOT / "examples" / "toy_backend"
LIMIT = 150  # lines that a vendor writes


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks():
    found = []
    pattern = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n', re.M)
    text = TUTORIAL.read_text(encoding="utf-8")
    place = 0
    while match := pattern.search(text, place):
        place = match.end()
        end = text.index("\n```", place - 1)
        found.append(Block(match["language"], match["title"] or "", text[place : end + 1]))
        place = end + len("\n```")
    return found


def patched(before, diff):
    """Each hunk's old lines are there exactly once. A last line that goes on in the file may be cut short."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-", ""))
        new = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+", ""))
        assert before.count("\n" + old) == 1, f"not there, or more than once:\n{old}"
        before = before.replace("\n" + old, "\n" + new)
    return before


def apply(block, home):
    path = home / block.title
    if block.language == "diff":
        path.write_text(patched(path.read_text(), block.text))
    else:
        path.write_text(block.text)


def follow(bench):
    """Do what the blocks say, in order; what the last commands said."""
    (bench.home / "examples").symlink_to(ROOT / "examples")
    output = ""
    for block in blocks():
        if block.title:
            apply(block, bench.home)
        elif block.language == "text":
            shown = [line.partition("…")[0] for line in block.text.splitlines()]
            missing = [line for line in shown if line not in flat(output)]
            assert not missing, f"the page shows {missing}, the commands said:\n{output}"
        elif block.language == "python":
            (bench.home / "block.py").write_text(block.text)
            bench.shell("python block.py")
        else:
            output = ""
            for line in block.text.splitlines():
                command, _, remark = line.partition("    # ")
                output += bench.shell(f"! {{ {command}; }}" if remark == "fails" else command)
    return output


def flat(text):
    """Lines joined, as a paragraph that was wrapped."""
    return " ".join(text.split())


def test_its_commands_need_only_what_it_installs():
    """pytest in the root of the clone loads the project's own conftest, which needs the packages of development."""
    commands = [line for block in blocks() if block.language == "sh" for line in block.text.splitlines()]
    assert {command.split()[0] for command in commands} == {"pip", "outrider", "rm"}
    assert "`make demo`,\n`source .venv/bin/activate`, then `pip install -e '.[conformance]'`" in TUTORIAL.read_text()


@pytest.mark.slow
def test_following_it_to_the_end(tmp_path):
    """Each command of the page, in order, says what the page says."""
    bench = Workbench(tmp_path)
    output = follow(bench)
    assert "captures_graphs" in (bench.home / "toy/src/outrider_toy/backend.py").read_text()
    assert "toy:0 passes up to L4" in output
    assert "holds: toy:0 reached L4" in output
    assert "tokens/s on toy" in output


@pytest.fixture
def put_together(tmp_path):
    """The package that the blocks make of the generated one."""
    home = tmp_path / "home"
    for path, text in skeleton("toy").items():
        (home / "toy" / path).parent.mkdir(parents=True, exist_ok=True)
        (home / "toy" / path).write_text(text)
    for block in blocks():
        if block.title:
            apply(block, home)
    (home / "toy/src/outrider_toy/stand_in.py").unlink()
    return home / "toy"


@pytest.mark.slow
def test_put_together_it_passes_level_2(put_together, tmp_path, monkeypatch):
    """Without the page's commands, which `make test-slow` runs, and with few random programs."""
    entry = ("outrider.backends", "toy", "outrider_toy.plugin")
    site = write_distribution(tmp_path, "outrider-toy", "nothing_more", "", *entry)
    search = [put_together / "src", site, ROOT / "examples" / "toy_driver", os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, search)))
    report = conform("toy", level="L2", programs=12)
    assert report["reached"] == "L2", [test for test in report["tests"] if test["outcome"] == "failed"]
    assert report["capabilities"]["captures_graphs"]


def test_put_together_it_is_the_finished_example(put_together):
    compared = 0
    for path in sorted(FINISHED.rglob("*")):
        name = path.relative_to(FINISHED)
        if path.is_dir() or "__pycache__" in name.parts or name.name == "README.md":
            continue
        compared += 1
        assert (put_together / name).read_text() == path.read_text(), f"{name} differs between the page and the example"
    assert compared == 6
    assert sorted(p.name for p in (put_together / "src").rglob("*.py")) == sorted(
        p.name for p in (FINISHED / "src").rglob("*.py")
    )


def written():
    """Lines of the finished package that aren't the generator's; empty ones don't count."""
    generated, lines = skeleton("toy"), []
    for path in sorted(FINISHED.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md":
            before = generated.get(str(path.relative_to(FINISHED)), "").splitlines()
            lines += [
                line[2:]
                for line in difflib.ndiff(before, path.read_text().splitlines())
                if line.startswith("+ ") and line[2:].strip()
            ]
    return lines


def test_a_vendor_writes_few_lines():
    lines = written()
    assert "class ToyStream(Stream):" in lines
    assert len(lines) <= LIMIT, len(lines)


def test_the_driver_knows_nothing_of_outrider():
    for path in (ROOT / "examples" / "toy_driver").rglob("*.py"):
        assert "outrider" not in path.read_text().lower(), path


def test_a_diff_that_does_not_fit_is_found():
    assert patched("a\nb\nc\n", " a\n-b\n+d\n".replace(" a\n", "")) == "a\nd\nc\n"
    with pytest.raises(AssertionError, match="not there"):
        patched("a\nb\n", "-x\n+y\n")
    with pytest.raises(AssertionError, match="more than once"):
        patched("a\nb\nb\n", "-b\n+y\n")
