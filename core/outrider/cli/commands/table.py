"""Commands of Outrider and of installed packages in one table, a group that imports a command on use, and commands that check
their arguments.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

from outrider.cli.options.option_values import GENERAL, JsonOption, UsageError, checking_options, closest
from outrider.cli.terminal.files import check_utf8
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import OutriderError
from outrider.errors import shown
from outrider.registry.plugins import installed_entry_points

DEBUG_ROW = ("--debug", "Show the traceback of an error. May stand anywhere.")
_MAX_OPTION_WIDTH = 24
_DEFAULT = "[default: "
_LIKELY_OPTIONS = ("--prompt", "--model")
"""Options to suggest for a value that a user gives as an argument, the most likely first."""


class CheckedCommand(TyperCommand):
    """A command that refuses texts that are empty or not UTF-8, and surplus arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line ``args``. Raises :class:`UsageError` for a value that the class refuses, and typer's own
        errors.
        """
        if not ctx.resilient_parsing:  # completion of an unfinished line
            _check_texts(args, {name for each in self.params if each.default == "" for name in each.opts})
        surplus_allowed, ctx.allow_extra_args = ctx.allow_extra_args, True
        surplus = super().parse_args(ctx, args)
        if surplus and not surplus_allowed and not ctx.resilient_parsing:
            raise UsageError(f"unexpected argument {shown(surplus[0])}; {self._advice(ctx, surplus[0])}")
        return surplus

    def _advice(self, ctx: Any, surplus: str) -> str:
        options = {name for each in self.params for name in each.opts}
        for name in _LIKELY_OPTIONS:
            if name in options:
                return f"did you mean {name} {shown(surplus)}?"
        return f"run `{ctx.command_path} --help`"

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the paragraphs of the command's docstring to its help."""
        del ctx
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            formatter.write("\n" + _fill(paragraph, formatter.width, "  ") + "\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by heading: first those without a heading, last those that every command has."""
        write_options(self, ctx, formatter, DEBUG_ROW)


def write_options(command: Any, ctx: Any, formatter: Any, *others: tuple[str, str]) -> None:
    """Write the options of a command or a group by heading, and the rows ``others`` with the general options."""
    rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    general: list[tuple[str, str]] = []
    for each in command.get_params(ctx):
        record = each.get_help_record(ctx)
        if record is None:
            continue
        heading = getattr(each, "rich_help_panel", None) or "Options"
        if each.param_type_name == "argument":
            heading, record = "Arguments", (each.metavar or record[0], record[1])
        if heading == GENERAL or each.name in ("help", "install_completion", "show_completion"):
            general.append(record)
        else:
            rows.setdefault(heading, []).append(record)
    for heading, records in (rows | {GENERAL: [*others, *general]}).items():
        if records:
            formatter.write(f"\n{heading}:\n")
            _write_rows(formatter, records)


def _write_rows(formatter: Any, rows: Sequence[tuple[str, str]]) -> None:
    """Write rows of an option and its help in two columns. The help of a longer option begins on the next line."""
    column = min(max(len(option) for option, _ in rows), _MAX_OPTION_WIDTH) + 4
    for option, help in rows:
        text = _fill(help.replace(_DEFAULT, "[default:\xa0"), formatter.width, " " * column).replace("\xa0", " ")
        begins_below = len(option) + 4 > column
        formatter.write(f"  {option}\n{text}\n" if begins_below else f"  {option}{text[len(option) + 2 :]}\n")


def _fill(text: str, width: int, indent: str) -> str:
    """Return ``text`` in lines of at most ``width`` characters, indented after the first by ``indent``. Lines end only
    between words; typer's own also end at hyphens, and so within option names.
    """
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _check_texts(words: Sequence[str], may_be_empty: set[str]) -> None:
    """Raise :class:`UsageError` for a value that is empty or not UTF-8, up to ``--``: arguments of a script follow."""
    name = "an argument"
    for word in words:
        if word == "--":
            return
        option, equals, value = word.partition("=") if word.startswith("--") else (name, "=", word)
        if equals:
            with checking_options():
                check_utf8(option, value)
            if not value and option not in may_be_empty:
                raise UsageError(f"{option} is empty; give at least one character, or leave it out")
        name = word if word.startswith("-") and not equals else "an argument"


_ROOT_OPTIONS = (("--version", "Show the version of outrider."), DEBUG_ROW)


class CommandUnavailable(OutriderError):
    """Raised when a command of an installed package is called that can't be loaded. ``reason`` names the package too."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this command isn't available: {reason}; repair or uninstall the package that offers it")
        self.reason = reason


Target: TypeAlias = "str | CommandUnavailable | Mapping[str, Target]"
"""``module:function``, a table of subcommands, or the error of a command that can't be loaded."""

GROUP = "outrider.commands"
"""Entry-point group of further commands. The name is what people type, ``bench.decode`` for ``outrider bench decode``; the
value is ``module:function``. Nothing is loaded before the command is asked for."""

OWN: Mapping[str, Target] = {
    "generate": "outrider.cli.commands.generate:generate",
    "chat": "outrider.cli.commands.chat:chat",
    "models": "outrider.cli.commands.listings:models",
    "backends": "outrider.cli.commands.listings:backends",
    "doctor": "outrider.cli.commands.listings:doctor",
    "fences": "outrider.cli.commands.listings:fences",
    "tune": "outrider.cli.commands.preparation:tune",
    "quantize": "outrider.cli.commands.preparation:quantize",
    "draft-vocabulary": "outrider.cli.commands.preparation:draft_vocabulary",
}


def commands(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> dict[str, Target]:
    """Return every command as a table for :func:`group`.

    ``entry_points`` replaces the installed ones. No package replaces or breaks a command of Outrider. A name that two other
    packages offer is broken, and its reason names both packages.
    """
    found = installed_entry_points(GROUP).entry_points if entry_points is None else entry_points
    offers: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
    for point in sorted(found, key=lambda point: point.name):
        # One package may be visible twice, through its source tree and its installation.
        offers.setdefault(point.name, {})[point.value] = point
    table: dict[str, Target] = dict(OWN)
    below: dict[str, dict[str, Target]] = {}
    for name, values in offers.items():
        first, _, rest = name.partition(".")
        if first in OWN:
            continue
        own = [value for value, point in values.items() if _is_own(point)] if len(values) > 1 else []
        target: Target = next(iter(own or values))
        if len(values) > 1 and not own:
            named = " and ".join(map(_named_offer, values.values()))
            target = CommandUnavailable(f"{named} both offer a command {name.replace('.', ' ')!r}")
        if rest:
            below.setdefault(first, {})[rest] = target
        else:
            table[first] = target
    for first, inner in below.items():
        command = next(iter(offers[first].values())) if first in offers else None
        members = [next(iter(values.values())) for name, values in offers.items() if name.startswith(f"{first}.")]
        if command is None or any(map(_is_own, members)):
            table[first] = inner
        elif not _is_own(command):
            both = f"{_named_offer(command)} offers {first!r} as a command, {_named_offer(members[0])} as a group of commands"
            table[first] = CommandUnavailable(both)
    return table


def _is_own(point: importlib.metadata.EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "outrider"


def _named_offer(point: importlib.metadata.EntryPoint) -> str:
    """Return package and target for an error message.

    Without a conflict of names, no package's name is read: each access parses its metadata.
    """
    return f"{point.dist.name if point.dist is not None else 'an unknown package'} ({point.value})"


class LazyGroup(TyperGroup):
    """A group that looks up its commands in ``targets``.

    The function's signature gives the options, its docstring the help. A command that can't be loaded is listed in the help
    with the reason, raises :class:`CommandUnavailable` when it is called, and doesn't affect other commands.
    """

    targets: ClassVar[Mapping[str, Target]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the table."""
        del ctx
        return list(self.targets)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and its arguments. An unknown name raises :class:`UsageError` with a suggestion."""
        if args[0] not in self.targets and not args[0].startswith("-") and not ctx.resilient_parsing:
            suggestion = closest(args[0], self.targets)
            raise UsageError(f"No such command {args[0]!r}; `{ctx.command_path} --help` lists the commands{suggestion}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, and then the options."""
        self.format_commands(ctx, formatter)
        if ctx.parent is None:
            write_options(self, ctx, formatter, *_ROOT_OPTIONS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build a command. Returns None for an unknown name."""
        del ctx
        target = self.targets.get(cmd_name)
        if target is None:
            return None
        if isinstance(target, Mapping):
            command = typer.main.get_command(group(target, help=f"Commands of {cmd_name}: {', '.join(target)}."))
        elif isinstance(target, CommandUnavailable):
            command = _unavailable(target)
        else:
            try:
                command = _load(cmd_name, target)
            except (Exception, SystemExit) as error:
                command = _unavailable(CommandUnavailable(f"{target} can't be loaded: {type(error).__name__}: {error}"))
        command.name = cmd_name
        return command


def _load(name: str, target: str) -> Any:
    """Import a command. One that returns a :class:`CommandReport` has the option ``--json``, which the dispatcher handles."""
    module, _, function_name = target.partition(":")
    function = getattr(import_module(module), function_name)
    if inspect.iscoroutinefunction(function):
        raise TypeError("it is a coroutine function, which a command can't await; expected a function that isn't async")
    command = _command(function, name=name, cls=CheckedCommand)
    returned = inspect.signature(function).return_annotation
    if returned in ("CommandReport", CommandReport) and all(each.name != "json_output" for each in command.params):
        (option,) = (each for each in _command(_with_json).params if each.name == "json_output")
        option.expose_value = False
        command.params.append(option)
    return command


def _with_json(json_output: JsonOption = False) -> None: ...


def _command(function: Callable[..., object], **options: Any) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(**options)(function)
    return typer.main.get_command(app)


def _unavailable(error: CommandUnavailable) -> Any:
    """Return a command that accepts any arguments and raises ``error``."""

    def command() -> None:
        raise error

    command.__doc__ = f"Not available: {error.reason}."
    return _command(command, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})


def group(table: Mapping[str, Target], *, help: str, completion: bool = False) -> typer.Typer:
    """Return a typer application for a table of commands. ``completion``: with options that install shell completion."""
    app = typer.Typer(
        cls=type("Commands", (LazyGroup,), {"targets": table}), add_completion=completion, help=help, rich_markup_mode=None
    )

    @app.callback()
    def callback() -> None: ...

    callback.__doc__ = help
    return app
