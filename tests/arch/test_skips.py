"""A test that is skipped says "not run:" and why, so that nobody takes it for passed."""

import ast

import pytest

from arch.parsing import nodes

_SKIPS = {"pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"}


def _beginning(reason: ast.expr | None) -> str:
    """Return the text that a reason begins with; empty if it begins with a value."""
    match reason:
        case ast.Constant(value=str(text)) | ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
        case _:
            return ""


def unexplained(source: str) -> list[int]:
    """Return the lines that skip a test without a reason that begins with "not run:"."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in _SKIPS:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            positional = node.args[0] if called == "pytest.skip" and node.args else None
            if not _beginning(given.get("reason", positional)).startswith("not run: "):
                found.append(node.lineno)
    return sorted(found)


def test_every_skip_has_a_reason(source_files):
    tests = {name: source for name, source in source_files.items() if name.startswith("tests/")}
    assert {name: lines for name, source in tests.items() if (lines := unexplained(source))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "pytest.skip()",
        "pytest.skip('no device')",
        "pytest.skip(str(error))",
        "pytest.skip(f'{error}')",
        "pytest.importorskip('triton')",
        "pytest.mark.skipif(True, reason='no device')",
        "pytest.mark.skip(reason='')",
    ],
)
def test_a_skip_without_one_is_found(line):
    assert unexplained(f"import pytest\n{line}\n") == [2]


@pytest.mark.parametrize("line", ["pytest.skip('not run: no device')", "pytest.skip(f'not run: {error}')"])
def test_a_skip_with_one_is_let_through(line):
    assert unexplained(line) == []
