"""A command group that imports a command when the command is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

import typer
from typer.core import TyperGroup

from outrider.cli.commands.command_parsing import DEBUG_ROW, CheckedCommand, write_options
from outrider.cli.options.option_values import UsageError, closest
from outrider.device.errors import OutriderError


class CommandUnavailable(OutriderError):
    """The command of an installed package can't be loaded."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A command that can't be loaded. ``reason`` names the package and says why."""

    reason: str


_ROOT_OPTIONS = (("--version", "Show the version of outrider."), DEBUG_ROW)

Target: TypeAlias = "str | Broken | Mapping[str, Target]"
"""``module:function``, a table of subcommands, or the reason why the command can't be loaded."""


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
        elif isinstance(target, Broken):
            command = _unavailable(target.reason)
        else:
            try:
                command = _load(cmd_name, target)
            except (Exception, SystemExit) as error:
                command = _unavailable(f"{target} can't be loaded: {type(error).__name__}: {error}")
        command.name = cmd_name
        return command


def _load(name: str, target: str) -> Any:
    module, _, function = target.partition(":")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=CheckedCommand)(getattr(import_module(module), function))
    return typer.main.get_command(app)


def _unavailable(reason: str) -> Any:
    """Return a command that accepts any arguments and raises :class:`CommandUnavailable` with ``reason``."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    def command() -> None:
        raise CommandUnavailable(f"this command isn't available: {reason}; repair or uninstall the package that offers it")

    command.__doc__ = f"Not available: {reason}."
    app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(command)
    return typer.main.get_command(app)


def group(table: Mapping[str, Target], *, help: str, completion: bool = False) -> typer.Typer:
    """Return a typer application for a table of commands. ``completion``: with options that install shell completion."""
    app = typer.Typer(
        cls=type("Commands", (LazyGroup,), {"targets": table}), add_completion=completion, help=help, rich_markup_mode=None
    )

    @app.callback()
    def callback() -> None: ...

    callback.__doc__ = help
    return app
