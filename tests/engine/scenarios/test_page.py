"""docs/findings/scenarios.md lists all of them, and each test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

from outrider_sanitizer.races import RACES

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "findings" / "scenarios.md").read_text().splitlines()
    if re.match(r"\| \d", line)
]


def named(row):
    return re.findall(r"`(tests/[^`]+)`", row[3])


def test_the_list_is_complete():
    assert [int(row[0].strip("| ")) for row in ROWS] == list(range(1, 28))
    assert all(len(row) == 5 and all(row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_each_named_test_exists(row):
    number = int(row[0].strip("| "))
    assert named(row)
    for test in named(row):
        path, _, name = test.partition("::")
        name, _, parameter = name.partition("[")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if parameter:
            assert parameter.rstrip("]") in RACES
        else:
            assert name.startswith(f"test_{number}_")
