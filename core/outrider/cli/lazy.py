"""A command group whose commands are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup


class LazyGroup(TyperGroup):
    """Looks its commands up in ``targets``: a name, and ``module:function`` or a table of names below it.

    The function's signature is the command's, its docstring the help.
    """

    targets: ClassVar[Mapping[str, str | Mapping[str, str]]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        del ctx
        return list(self.targets)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build one command; None for an unknown name, which typer reports with suggestions."""
        del ctx
        target = self.targets.get(cmd_name)
        if target is None:
            return None
        if isinstance(target, Mapping):
            command = typer.main.get_command(group(target, help=f"Commands of {cmd_name}: {', '.join(target)}."))
        else:
            module, _, function = target.partition(":")
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command(cmd_name)(getattr(import_module(module), function))
            command = typer.main.get_command(app)
        command.name = cmd_name
        return command


def group(table: Mapping[str, str | Mapping[str, str]], *, help: str) -> typer.Typer:
    """A typer application over a table of commands."""
    app = typer.Typer(
        cls=type("Commands", (LazyGroup,), {"targets": table}), add_completion=False, help=help, rich_markup_mode=None
    )

    @app.callback()
    def callback() -> None: ...

    callback.__doc__ = help
    return app
