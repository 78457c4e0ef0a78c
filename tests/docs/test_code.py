"""The code on the pages that says so is run.

A block is run when the line before it is `<!-- run -->`. The Python blocks of a page run one after the other in one
namespace; one that begins with `# name.py` is put into that file too, where later ones can import it, and after
`<!-- file -->` it's put there and not run. A shell block may hold `outrider` commands, which must end with 0, or with N
after `<!-- run: exit N -->`. Each page has a directory of its own.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^<!-- (file|run)(?:: exit (\d+))? -->\n```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted(page for page in DOCS.rglob("*.md") if "<!-- run" in page.read_text(encoding="utf-8"))


def blocks(text):
    """(what to do, language, expected exit code, source, line) of each block."""
    return [
        (match[1], match[3], int(match[2] or 0), match[4], text.count("\n", 0, match.start(4)) + 1)
        for match in BLOCK.finditer(text)
    ]


def run(text, name, command, namespace):
    for what, language, code, source, line in blocks(text):
        if language == "python":
            named = re.match(r"# ([\w/]+\.py)\n", source)
            if named:
                Path(named[1]).write_text(source, encoding="utf-8")
            if what == "run":
                exec(compile("\n" * (line - 1) + source, name, "exec"), namespace)
        elif language == "sh":
            for given in re.sub(r"\\\n\s*", "", source).splitlines():
                words = shlex.split(given, comments=True)
                if words:
                    assert words[0] == "outrider", f"{name}:{line}: {given} isn't an outrider command"
                    result = command(*words[1:])
                    assert result == code, f"{name}: {given} ended with {result}, expected {code}"
        else:
            raise AssertionError(f"{name}:{line}: {language} blocks can't be run")


@pytest.fixture
def command():
    from outrider.cli.main import main

    return lambda *arguments: main(arguments)


def page_cases():
    """Every page; those whose commands start processes of ranks, or measure, take seconds each and are slow."""
    slow = {"parallel.md", "ranks.md", "benchmarks.md", "conformance-report.md"}
    for page in PAGES:
        yield pytest.param(page, id=page.relative_to(DOCS).as_posix(), marks=[pytest.mark.slow] if page.name in slow else [])


@pytest.mark.parametrize("page", list(page_cases()))
def test_code_on_the_page_runs(page, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("outrider_bench.rates._HOST_BYTES", 1 << 20)  # for a page's figures any bandwidth will do
    before = set(sys.modules)
    run(page.read_text(encoding="utf-8"), str(page), command, {"__name__": "docs"})
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_every_marker_stands_before_a_block():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(blocks(text)) == len(re.findall(r"^<!-- (?:run|file)", text, re.MULTILINE)), page.name


def test_pages_have_code_that_runs():
    assert {"index.md", "plugins.md", "ci.md", "conformance-report.md", "simulator.md", "sanitizer.md", "own-queue.md"} <= {
        page.name for page in PAGES
    }


@pytest.mark.parametrize(
    "page",
    [
        "<!-- run -->\n```python\nraise ValueError\n```\n",
        "<!-- run -->\n```sh\nls\n```\n",
        "<!-- run -->\n```sh\noutrider generate --prompt x --speculate nobody\n```\n",
        "<!-- run: exit 1 -->\n```sh\noutrider backends\n```\n",
        "<!-- run -->\n```toml\na = 1\n```\n",
    ],
)
def test_catches(page, command):
    with pytest.raises((ValueError, AssertionError)):
        run(page, "page", command, {})
