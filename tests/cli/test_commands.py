"""The table of commands: what one package offers stops none of another's, whatever is wrong with it."""

import sys
from dataclasses import fields, replace
from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.commands import table
from outrider.cli.commands.table import GROUP, OWN, CommandUnavailable, commands, group


def offer(name, value, distribution=None):
    point = EntryPoint(name, value, GROUP)
    if distribution is not None:
        point._for(type("Made", (), {"name": distribution})())
    return point


def test_own_commands_are_there_without_any_package():
    assert commands([]) == dict(OWN)


def test_a_dot_makes_a_group():
    assert commands([offer("bench.a", "m:a"), offer("bench.b", "m:b")])["bench"] == {"a": "m:a", "b": "m:b"}


def test_two_packages_with_one_name_are_both_named():
    table = commands([offer("more", "one:more", "first"), offer("more", "two:more", "second"), offer("other", "three:other")])
    assert table["more"].reason == "first (one:more) and second (two:more) both offer a command 'more'"
    assert table["other"] == "three:other"
    table = commands([offer("bench.more", "one:more", "first"), offer("bench.more", "two:more", "second")])
    assert table["bench"]["more"].reason == "first (one:more) and second (two:more) both offer a command 'bench more'"


def test_one_package_seen_twice_is_one():
    assert commands([offer("more", "one:more", "first"), offer("more", "one:more", "first")])["more"] == "one:more"


def test_a_command_and_a_group_of_one_name_exclude_each_other():
    found = commands([offer("bench", "one:bench", "first"), offer("bench.a", "two:a", "second")])["bench"]
    assert isinstance(found, CommandUnavailable)
    assert found.reason == "first (one:bench) offers 'bench' as a command, second (two:a) as a group of commands"


@pytest.mark.parametrize("name", ["serve", "serve.deep", "bench", "bench.decode"])
def test_another_package_breaks_no_name_of_outriders_tools(name):
    own = [offer("serve", "own:serve", "outrider"), offer("bench.decode", "own:decode", "outrider")]
    for found in ([*own, offer(name, "other:command", "first")], [offer(name, "another:command", "first"), *own]):
        assert commands(found) == {**OWN, "serve": "own:serve", "bench": {"decode": "own:decode"}}


@pytest.mark.parametrize("name", ["generate", "doctor.deep"])
def test_outriders_own_names_stay_its_own(name):
    assert commands([offer(name, "other:command")]) == dict(OWN)


@pytest.fixture
def app(monkeypatch, tmp_path):
    """Three commands: one works, one's module can't be imported, one's function isn't there."""
    (tmp_path / "good_commands.py").write_text(
        'def works() -> None:\n    """It does something."""\nasync def waits() -> None:\n    """It would do nothing."""'
    )
    (tmp_path / "torn_commands.py").write_text("raise ImportError('no such driver')")
    (tmp_path / "leaving_commands.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = {
        "works": "good_commands:works",
        "torn": "torn_commands:torn",
        "leaving": "leaving_commands:leave",
        "absent": "good_commands:not_there",
        "waits": "good_commands:waits",
        "twice": CommandUnavailable("two packages offer it"),
    }
    yield group(table, help="Made up.")
    sys.modules.pop("good_commands", None)


REASONS = {
    "torn": "ImportError: no such driver",
    "leaving": "SystemExit: 3",
    "absent": "AttributeError",
    "waits": "expected a function that isn't async",
    "twice": "two packages offer it",
}


def test_the_help_lists_every_command_and_says_what_is_wrong(app):
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400"})
    assert shown.exit_code == 0
    lines = {line.split()[0]: line for line in shown.output.splitlines() if line.startswith("  ")}
    assert "It does something." in lines["works"]
    # The list has room for the beginning of a reason; the command's own help has all of it.
    for name, target in {"torn": "torn_commands:torn", "absent": "good_commands", "twice": "two packages offer it"}.items():
        assert f"Not available: {target}" in lines[name]
    for name, reason in REASONS.items():
        assert reason in " ".join(CliRunner().invoke(app, [name, "--help"]).output.split())


def test_what_works_goes_on_working(app):
    assert CliRunner().invoke(app, ["works"]).exit_code == 0


@pytest.mark.parametrize("name", REASONS)
def test_what_does_not_says_why(app, name):
    error = CliRunner().invoke(app, [name, "--option", "value"]).exception
    assert isinstance(error, CommandUnavailable)
    assert REASONS[name] in str(error)


def test_outrider_help_shows_the_reason(outrider, monkeypatch):
    """The installed commands and a broken one: ``outrider --help`` is exit code 0, and the command is exit code 1."""
    real = table.installed_entry_points

    def found(group):
        have = real(group)
        return replace(have, entry_points=(*have.entry_points, offer("torn", "no_such_module:torn", "torn-package")))

    monkeypatch.setattr(table, "installed_entry_points", found)
    monkeypatch.setenv("COLUMNS", "300")
    shown = outrider("--help")
    assert shown.code == 0
    assert {"generate", "sanitize", "conform", "bench"} <= {
        line.split()[0] for line in shown.out.splitlines() if line.split()
    }
    assert "no_such_module" in shown.out
    result = outrider("torn", "--json")
    assert result.code == 1
    assert "no_such_module:torn can't be loaded" in result.json["error"]["message"]


@pytest.mark.parametrize(
    ("name", "beyond"),
    [
        ("generate", {"--exact", "--expert-parallel", "--quantize", "--verbose"}),
        (
            "serve",
            {
                "--exact",
                "--expert-parallel",
                "--role",
                "--tool-format",
                "--reasoning-format",
                "--decode-server",
                "--decode-secret-file",
                "--quantize",
                "--verbose",
            },
        ),
    ],
)
def test_a_command_has_at_most_30_options(name, beyond):
    """The help is one of them. ``beyond``: options that aren't counted."""
    top = typer.main.get_command(group(commands(), help="."))
    context = top.make_context("outrider", ["models"])
    command = top.get_command(context, name)
    options = {parameter.opts[0] for parameter in command.get_params(context)} - beyond
    assert "--help" in options
    assert len(options) <= 30, sorted(options)


def test_an_engine_has_at_most_20_settings():
    """Not counted: the memory of recurrent states, which only hybrid models have."""
    from outrider import EngineConfig

    assert len({field.name for field in fields(EngineConfig)} - {"state_checkpoints"}) <= 20
