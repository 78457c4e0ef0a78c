"""Commands of Outrider and of installed packages in one table, and a group that imports a command on use."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

import typer
from typer.core import TyperGroup

from outrider.cli.commands.command_parsing import DEBUG_ROW, CheckedCommand, write_options
from outrider.cli.options.option_values import UsageError, closest
from outrider.device.errors import OutriderError
from outrider.registry.discovery import installed_entry_points

_ROOT_OPTIONS = (("--version", "Show the version of outrider."), DEBUG_ROW)


class CommandUnavailable(OutriderError):
    """The command of an installed package can't be loaded."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A command that can't be loaded. ``reason`` names the package and says why."""

    reason: str


Target: TypeAlias = "str | Broken | Mapping[str, Target]"
"""``module:function``, a table of subcommands, or the reason why the command can't be loaded."""

GROUP = "outrider.commands"
"""Entry-point group of further commands. The name is what people type, ``bench.decode`` for ``outrider bench decode``; the
value is ``module:function``. Nothing is loaded before the command is asked for."""

OWN: Mapping[str, Target] = {
    "generate": "outrider.cli.commands.generate:generate",
    "chat": "outrider.cli.commands.chat:chat",
    "models": "outrider.cli.commands.supported_models:models",
    "backends": "outrider.cli.commands.backends:backends",
    "doctor": "outrider.cli.commands.doctor:doctor",
    "fences": "outrider.cli.commands.fences:fences",
    "tune": "outrider.cli.commands.tune:tune",
    "quantize": "outrider.cli.commands.quantize:quantize",
    "draft-vocabulary": "outrider.cli.commands.draft_vocabulary:draft_vocabulary",
}


def commands(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> dict[str, Target]:
    """Return every command as a table for :func:`group`.

    ``entry_points`` replaces the installed ones. No package replaces a command of Outrider. A name that two packages offer is
    broken, and its reason names both packages.
    """
    found = installed_entry_points(GROUP).entry_points if entry_points is None else entry_points
    offers: dict[str, dict[str, str]] = {}
    for point in sorted(found, key=lambda point: point.name):
        distribution = point.dist.name if point.dist is not None else "an unknown package"
        # One package may be visible twice, through its source tree and its installation.
        offers.setdefault(point.name, {})[point.value] = distribution
    table: dict[str, Target] = dict(OWN)
    below: dict[str, dict[str, Target]] = {}
    for name, values in offers.items():
        first, _, rest = name.partition(".")
        if first in OWN:
            continue
        target: Target = next(iter(values))
        if len(values) > 1:
            named = " and ".join(f"{distribution} ({value})" for value, distribution in values.items())
            target = Broken(f"{named} both offer a command {name.replace('.', ' ')!r}")
        if rest:
            below.setdefault(first, {})[rest] = target
        else:
            table[first] = target
    for first, inner in below.items():
        if first in table:
            table[first] = Broken(f"one package offers {first!r} as a command, another as a group of commands")
        else:
            table[first] = inner
    return table


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
