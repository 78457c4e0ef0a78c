"""Notes of a command about the start of its engine, on standard error: progress, choices, compilation and capture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn

from outrider.cli.terminal.streams import note

if TYPE_CHECKING:
    from outrider.engine.config import Choice
    from outrider.engine.engine import Engine

Tell = Callable[[str, int, int], None]


LOADING = "loading weights"
"""Name of the progress task whose amounts are bytes; other tasks count items."""


class _Amount(ProgressColumn):
    def render(self, task: Task) -> str:
        """Return the text of the progress bar's column: the finished amount of ``task`` and its total."""
        if task.total is None:
            return ""
        form = filesize.decimal if task.description == LOADING else str
        return f"{form(int(task.completed))} of {form(int(task.total))}"


@contextmanager
def show_progress(shown: bool = True) -> Generator[Tell]:
    """Show a progress bar on a terminal for each task that is reported as ``(task, done, total)``, if ``shown``.

    Total 0: the amount of work is unknown.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), _Amount(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and _has_terminal())) as bars:
        bar_of: dict[str, TaskID] = {}

        def tell(task: str, done: int, total: int) -> None:
            if task not in bar_of:
                bar_of[task] = bars.add_task(task, total=None)
            bars.update(bar_of[task], completed=done, total=total or None)

        yield tell


def sum_of_loads(tell: Tell) -> Tell:
    """Return a progress callback for the engine's loads of target and draft, which shows both as one task through
    ``tell``.
    """
    before, last = 0, (0, 0)

    def progress(tensor: str, done: int, total: int) -> None:
        nonlocal before, last
        del tensor
        if total != last[1] or done < last[0]:  # the next load has begun
            before += last[1]
        last = done, total
        tell(LOADING, before + done, before + total)

    return progress


def _has_terminal() -> bool:
    """Return whether standard error is a terminal. rich also counts a file or a pipe as one where FORCE_COLOR is set."""
    return sys.stderr.isatty()


def chosen(engine: Engine, command_choices: Sequence[Choice] = ()) -> list[dict[str, object]]:
    """Return the settings that the engine and the command chose, with the reasons, as JSON data."""
    return [asdict(choice) for choice in (*command_choices, *engine.chosen)]


def print_engine(engine: Engine, command_choices: Sequence[Choice] = ()) -> None:
    """Print what the engine and the command chose, compiled and captured on standard error, one line each."""
    found: list[object] = [*command_choices, *engine.chosen, engine.warm_up, engine.captured]
    if engine.captured_prefill is not None:
        found.append(f"of prompts, {engine.captured_prefill}")
    if engine.draft_length.costs:
        found.append(engine.draft_length)
    note("".join(f"outrider: {each}\n" for each in found if each is not None))
