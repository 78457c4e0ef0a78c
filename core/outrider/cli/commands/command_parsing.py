"""A command with checked arguments, and a help that groups its options."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from outrider.cli.options.option_values import GENERAL, UsageError, checking_options
from outrider.cli.terminal.inputs import check_utf8
from outrider.errors import shown

DEBUG_ROW = ("--debug", "Show the traceback of an error. May stand anywhere.")
_MAX_OPTION_WIDTH = 24
_DEFAULT = "[default: "
_LIKELY_OPTIONS = ("--prompt", "--model")
"""Options for a value that a user gives as an argument, most likely first."""


class CheckedCommand(TyperCommand):
    """A command that refuses texts that are empty or not UTF-8, numbers that aren't finite, and surplus arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises :class:`UsageError`, and typer's own errors."""
        if not ctx.resilient_parsing:  # completion of an unfinished line
            _check_texts(args, {name for each in self.params if each.default == "" for name in each.opts})
        surplus_allowed, ctx.allow_extra_args = ctx.allow_extra_args, True
        surplus = super().parse_args(ctx, args)
        if surplus and not surplus_allowed and not ctx.resilient_parsing:
            raise UsageError(f"unexpected argument {shown(surplus[0])}; {self._advice(ctx, surplus[0])}")
        for each in self.params:
            value = ctx.params.get(each.name or "")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{each.opts[0]} is {value}; expected a finite number")
        return surplus

    def _advice(self, ctx: Any, surplus: str) -> str:
        options = {name for each in self.params for name in each.opts}
        for name in _LIKELY_OPTIONS:
            if name in options:
                return f"did you mean {name} {shown(surplus)}?"
        return f"run `{ctx.command_path} --help`"

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the paragraphs of the docstring."""
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
    """Return ``text`` in lines that end between words; typer's own lines also end at hyphens, and so within options."""
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
