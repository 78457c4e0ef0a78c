"""What a command shows while an engine is made: on standard error, on a terminal alone."""

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
def progress_shown(shown: bool = True) -> Generator[Tell]:
    """Yield a function that shows a bar for each ``(what, done, total)``: on a terminal only, and only if ``shown``."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and _has_terminal())) as bars:
        bar_of: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in bar_of:
                bar_of[what] = bars.add_task(what, total=total)
            bars.update(bar_of[what], completed=done)

        yield tell


def _has_terminal() -> bool:
    """Return whether standard error is a terminal. rich also counts a file or a pipe as one where FORCE_COLOR is set."""
    return sys.stderr.isatty()


def chosen(engine: Engine, beside: Sequence[Choice] = ()) -> list[dict[str, object]]:
    """What wasn't given but chosen, and why, for ``--json``. ``beside``: what the command chose itself."""
    return [asdict(choice) for choice in (*beside, *engine.chosen)]


def say_what_was_chosen(engine: Engine, beside: Sequence[Choice] = ()) -> None:
    """The same for people: one line on standard error."""
    made = "; ".join(str(choice) for choice in (*beside, *engine.chosen))
    if made:
        note(f"outrider: chosen for {engine.backend.device}: {made}\n")


def say_what_started(engine: Engine) -> None:
    """What was compiled and captured, and how the length of drafts is decided."""
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
