"""Random command lines, over the options that commands really have: whatever they say, the answer is an answer.

No traceback, no internal error, a documented exit code, and with ``--json`` one object on standard output.
"""

import json
from functools import cache
from importlib import import_module
from typing import get_type_hints

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.cli.commands.table import commands, group
from outrider.cli.main import main

# Commands that are cheap whatever they're given, with arguments that keep them so.
CHEAP = {
    "generate": ["--prompt", "def", "--max-tokens", "2"],
    "models": [],
    "backends": [],
    "doctor": [],
    "fences": [],
    "ci-matrix": [],
    "explore": ["--iterations", "1"],
    "trace": [],
    "sanitize": [],
    "new-backend": ["acme_x"],
}
EXIT_CODES = (0, 1, 2)

INTEGERS = ["-1", "0", "1", "2", "7", "1000000", "4294967296", str(10**23), "-9223372036854775809", "1.5", "x", ""]
FLOATS = ["-1", "0", "0.5", "1", "1e308", "nan", "inf", "-inf", "x", ""]
TEXTS = ["", " ", "x", "é€", "a\udcff", "cpu", "sim", "cpu:9", "sim:seed=x", "auto", "none", "ngram", "eagle", "fused", "--"]
PATHS = ["missing", ".", "/dev/null", "a\udcff", "x" * 300, ""]


@cache
def table():
    """Each command with its options: the names, and the values to try; none for a flag."""
    top = typer.main.get_command(group(commands(), help="."))
    context = top.make_context("outrider", ["models"])
    found = {}
    for name in CHEAP:
        module, _, function = commands()[name].partition(":")
        hints = get_type_hints(getattr(import_module(module), function))
        found[name] = options = []
        for parameter in top.get_command(context, name).params:
            if not parameter.opts[0].startswith("-"):
                options.append((None, TEXTS + PATHS))
                continue
            kind = str(hints.get(parameter.name))
            values = FLOATS if "float" in kind else INTEGERS if "int" in kind else PATHS if "Path" in kind else TEXTS
            flag = "bool" in kind or parameter.name == "help"
            options.extend((spelling, None if flag else values) for spelling in (*parameter.opts, *parameter.secondary_opts))
    return found


@st.composite
def command_lines(draw):
    name = draw(st.sampled_from([*CHEAP]))
    line = [name, *CHEAP[name]]
    for _ in range(draw(st.integers(0, 4))):
        spelling, values = draw(st.sampled_from(table()[name]))
        line += [spelling] if spelling is not None else []
        line += [draw(st.sampled_from(values))] if values is not None else []
    if draw(st.booleans()):
        line.insert(
            draw(st.integers(0, len(line))), draw(st.sampled_from(["--json", "--no-such-option", "--help", "--debugs"]))
        )
    return line


def check(line, capsys):
    code = main(line)
    out, err = capsys.readouterr()
    assert code in EXIT_CODES, (line, code)
    for wrong in ("Traceback", "internal error"):
        assert wrong not in err, (line, err)
        assert wrong not in out, (line, out)
    if "--json" in (line[: line.index("--")] if "--" in line else line):
        assert isinstance(json.loads(out), dict), (line, out)
        assert out.count("\n") == 1


FOUND = [
    ["generate", "--prompt", "a", "--draft-tokens", "100000", "--json"],
    ["generate", "--prompt", "a", "--draft-topk", "9999999", "--json"],
    ["generate", "--prompt-file", "/dev/zero", "--json"],
    ["generate", "--prompt", "a\udcff", "--json"],
    ["generate", "--prompt", "a", "--temperature", "1e39", "--json"],
]
"""Command lines that were answered wrongly once: by gigabytes, minutes or a traceback."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("line", FOUND)
def test_found_before(line, capsys):
    check(line, capsys)


BARE = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(BARE, max_examples=10, derandomize=True)
@given(line=command_lines())
def test_a_sample(line, capsys):
    check(line, capsys)


@pytest.mark.slow
@settings(BARE, max_examples=2000)
@given(line=command_lines())
def test_many(line, capsys):
    check(line, capsys)
