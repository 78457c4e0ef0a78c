"""Entry points of the installed distributions, read separately so that a damaged distribution doesn't hide others."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from os import PathLike
from pathlib import Path

_ENTRY_POINTS_FILE = "entry_points.txt"


@dataclass(frozen=True, slots=True)
class InstalledEntryPoints:
    """The entry points of one group in all installed distributions, and notes about unreadable ones."""

    entry_points: tuple[EntryPoint, ...]
    notes: tuple[str, ...] = ()
    """One line for each distribution that can't be read."""


def installed_entry_points(group: str) -> InstalledEntryPoints:
    """Return the entry points of ``group`` in every installed distribution.

    If two distributions have the same name, the first one on the import path counts, as in
    :func:`importlib.metadata.entry_points`.
    """
    names: dict[str, None] = {}
    notes: dict[str, None] = {}
    for distribution in importlib.metadata.distributions():
        try:
            if group in _groups(distribution.read_text(_ENTRY_POINTS_FILE) or ""):
                names[distribution.name] = None
        except Exception as error:  # the type depends on the damage: a line without "=" raises TypeError
            notes[f"{_label(distribution)} was passed over: {_cause(error)}"] = None
    entry_points: list[EntryPoint] = []
    for name in names:
        try:
            entry_points += importlib.metadata.distribution(name).entry_points.select(group=group)
        except Exception as error:
            notes[f"distribution {name!r} was passed over: {_cause(error)}"] = None
    return InstalledEntryPoints(tuple(entry_points), tuple(notes))


class _FileContents(Distribution):
    """A distribution that has only the text of its entry-point file."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == _ENTRY_POINTS_FILE else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        raise NotImplementedError  # abstract in the base class; reading entry points doesn't call it


@functools.lru_cache(maxsize=4096)
def _groups(text: str) -> frozenset[str]:
    """Return the names of the groups in the text of an entry-point file. The cache avoids parsing about a hundred files
    again.
    """
    return frozenset(_FileContents(text).entry_points.groups)


def _label(distribution: Distribution) -> str:
    try:
        name = f"distribution {distribution.name!r}"
    except Exception:
        name = "a distribution"
    return f"{name} in {distribution.locate_file('')}"


def _cause(error: Exception) -> str:
    problem = f"its metadata ({_ENTRY_POINTS_FILE}, METADATA) can't be read: {type(error).__name__}: {error}"
    return f"{problem}; repair or uninstall it"
