"""Notes of a command about the start of its engine, on standard error: progress, choices, compilation and capture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from outrider.cli.streams import note

if TYPE_CHECKING:
    from outrider.engine.config import Choice
    from outrider.engine.engine import Engine

Tell = Callable[[str, int, int], None]


@contextmanager
def show_progress(shown: bool = True) -> Generator[Tell]:
    """Show a progress bar on a terminal for each task that is reported as ``(task, done, total)``, if ``shown``."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and _has_terminal())) as bars:
        bar_of: dict[str, TaskID] = {}

        def tell(task: str, done: int, total: int) -> None:
            if task not in bar_of:
                bar_of[task] = bars.add_task(task, total=total)
            bars.update(bar_of[task], completed=done)

        yield tell


def _has_terminal() -> bool:
    """Return whether standard error is a terminal. rich also counts a file or a pipe as one where FORCE_COLOR is set."""
    return sys.stderr.isatty()


def chosen(engine: Engine, command_choices: Sequence[Choice] = ()) -> list[dict[str, object]]:
    """Return the settings that the engine and the command chose, with the reasons, as JSON data."""
    return [asdict(choice) for choice in (*command_choices, *engine.chosen)]


def print_choices(engine: Engine, command_choices: Sequence[Choice] = ()) -> None:
    """Print the settings that the engine and the command chose as one line on standard error."""
    made = "; ".join(str(choice) for choice in (*command_choices, *engine.chosen))
    if made:
        note(f"outrider: chosen for {engine.backend.device}: {made}\n")


def print_start_report(engine: Engine) -> None:
    """Print on a terminal which kernels were compiled, which graphs captured, and how the draft length is decided."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not _has_terminal():
        return
    if engine.warm_up is not None:
        console.print(f"outrider: {engine.warm_up}", style="dim")
    if engine.captured is not None:
        console.print(f"outrider: {engine.captured}", style="dim")
    if engine.captured_prefill is not None:
        console.print(f"outrider: of prompts, {engine.captured_prefill}", style="dim")
    if engine.draft_length.costs:
        console.print(f"outrider: {engine.draft_length}", style="dim")
