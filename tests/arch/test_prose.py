"""The writing and naming rules hold in the product and on the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from arch import prose
from arch.parsing import parsed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def product(core_files) -> dict[str, str]:
    """Modules that are shipped. A template with placeholders is no module."""
    trees = ("kernels", "backends", "tools")
    files = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for tree in trees for path in (ROOT / tree).rglob("*.py")
    }
    return {path: text for path, text in (core_files | files).items() if _parses(text)}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Pages for readers. A record is quoted as it was written, and the change log is history."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths if "evidence" not in path.parts}


def _parses(text: str) -> bool:
    try:
        parsed(text)
    except SyntaxError:
        return False
    return True


def test_prose_follows_the_rules(product, pages):
    assert [finding for path, text in (product | pages).items() for finding in prose.findings(path, text)] == []


def test_a_class_name_is_used_once(product):
    twice = prose.duplicate_classes(product)
    assert not twice, "\n".join(f"{name}: {', '.join(places)}" for name, places in twice.items())


def test_a_method_name_says_what_it_acts_on(product):
    found = prose.bare_verbs(product)
    assert not found, "\n".join(found)


def test_functions_and_files_are_short(source_files):
    found = [place for path, text in source_files.items() if _parses(text) for place in prose.long_functions(path, text)]
    found += [path for path, text in source_files.items() if text.count("\n") > prose.MAX_FILE_LINES]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("opening", 'def f():\n    """Whether the page is free."""\n'),
        ("opening", 'class _Hidden:\n    """What a plan is for."""\n'),
        ("empty docstring", 'def f():\n    """As before."""\n'),
        ("word", 'def f():\n    """Return the token behind the draft."""\n'),
        ("word", "x = 1  # nobody reads this value again\n"),
        ("long sentence", '"""Return ' + "one more word " * 12 + '."""\n'),
    ],
)
def test_each_rule_finds_its_violation(rule, text):
    assert rule in [finding.rule for finding in prose.findings("module.py", text)]


def test_literal_uses_are_no_violation():
    assert prose.findings("page.md", "Run the server behind a reverse proxy.") == []
    assert prose.findings("module.py", '"""Return the number of free KV pages; raise if ``behind`` is negative."""\n') == []


def test_names_and_lengths_are_found():
    twice = {"a.py": "class Plan: ...", "b.py": "class Plan: ..."}
    assert prose.duplicate_classes(twice) == {"Plan": ["a.py:1", "b.py:1"]}
    assert prose.bare_verbs({"a.py": "class Queue:\n    def take(self): ..."}) == ["a.py:2: Queue.take"]
    assert prose.bare_verbs({"a.py": "class Queue(Base):\n    def take(self): ..."}) == []
    assert prose.bare_verbs({"a.py": "class Base:\n    def take(self): ...\nclass Queue(Base): ..."}) == []
    assert prose.long_functions("a.py", "def f():\n" + "    pass\n" * 80) == ["a.py:1: f has 81 lines"]
    assert prose.long_functions("a.py", "@triton.jit\ndef f():\n" + "    pass\n" * 80) == []
