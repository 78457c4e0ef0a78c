"""Which kernels attend over prompts fastest, kept for the next start beside what tuning found: a file a kind of operands.

It lies with the choices of the same device, torch, Triton and sources of the kernels; other libraries are named within.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider_triton.tuned_store import write_whole

Ranking = Mapping[int, tuple[str, ...]]
"""Names of candidates, the fastest first, by the number of new tokens."""
_LIBRARIES = ("fa3-fwd",)


def libraries() -> dict[str, str]:
    """Releases of the libraries that attend and don't belong to torch; empty where one isn't installed."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


class PromptStore:
    """The files under ``directory``, which needn't exist yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, key: Sequence[object], counts: Sequence[int]) -> Ranking:
        """That of all these numbers of new tokens; empty where a file hasn't all, can't be read, or is of other libraries."""
        try:
            row = json.loads(self._path(key).read_text(encoding="utf-8"))
            ranked = {count: tuple(map(str, row["ranked"][str(count)])) for count in counts}
            alike = row["libraries"] == libraries()
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}
        return ranked if alike and all(ranked.values()) else {}

    def write(self, key: Sequence[object], ranked: Ranking) -> None:
        """In place of what was there. Raises OSError where the directory can't be written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        row = {"libraries": libraries(), "ranked": {str(count): list(names) for count, names in ranked.items()}}
        write_whole(self._path(key), json.dumps(row) + "\n")

    def _path(self, key: Sequence[object]) -> Path:
        return self._directory / ("-".join(str(each).removeprefix("torch.") for each in key) + ".json")
