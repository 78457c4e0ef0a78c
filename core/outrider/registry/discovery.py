"""Entry points of the installed distributions, read one distribution at a time."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from os import PathLike
from pathlib import Path

_FILE = "entry_points.txt"


@dataclass(frozen=True, slots=True)
class Installed:
    """What a group holds. ``notes``: a line for each distribution that couldn't be read; it hides no other."""

    entry_points: tuple[EntryPoint, ...]
    notes: tuple[str, ...] = ()


def installed(group: str) -> Installed:
    """The entry points of ``group``, of every installed distribution that can be read.

    Of two distributions of one name the first on the import path counts, as for :func:`importlib.metadata.entry_points`.
    """
    names: dict[str, None] = {}
    notes: dict[str, None] = {}
    for distribution in importlib.metadata.distributions():
        try:
            if group in _groups(distribution.read_text(_FILE) or ""):
                names[distribution.name] = None
        except Exception as error:  # what is wrong with a file decides the type: a line without "=" is a TypeError
            notes[f"{_label(distribution)} was passed over: {_cause(error)}"] = None
    found: list[EntryPoint] = []
    for name in names:
        try:
            found += importlib.metadata.distribution(name).entry_points.select(group=group)
        except Exception as error:
            notes[f"distribution {name!r} was passed over: {_cause(error)}"] = None
    return Installed(tuple(found), tuple(notes))


class _Text(Distribution):
    """A distribution of which that one file is known."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == _FILE else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        raise NotImplementedError  # its interface has it, and who reads entry points asks for no other file


@functools.lru_cache(maxsize=4096)
def _groups(text: str) -> frozenset[str]:
    """The groups of a file of entry points. Files are read each time, and parsed once: parsing a hundred takes longer than
    all else that making a backend does.
    """
    return frozenset(_Text(text).entry_points.groups)


def _label(distribution: Distribution) -> str:
    try:
        name = f"distribution {distribution.name!r}"
    except Exception:
        name = "a distribution"
    return f"{name} in {distribution.locate_file('')}"


def _cause(error: Exception) -> str:
    return f"its metadata ({_FILE}, METADATA) can't be read: {type(error).__name__}: {error}; repair or uninstall it"
