"""Measured rankings of prefill attention kernels, stored for the next start in one file per kind of operands.

The files lie next to the tuning choices for the same device, torch, Triton and kernel sources. Each names the releases of
other libraries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider_triton.tuned_store import write_whole

Ranking = Mapping[int, tuple[str, ...]]
"""Names of candidates, the fastest first, by the number of new tokens."""
_ATTENTION_LIBRARIES = ("fa3-fwd",)


def libraries() -> dict[str, str]:
    """Return releases of attention libraries that torch doesn't bring along; an empty string if one isn't installed."""
    releases = {}
    for name in _ATTENTION_LIBRARIES:
        try:
            releases[name] = version(name)
        except PackageNotFoundError:
            releases[name] = ""
    return releases


class PromptStore:
    """The ranking files under ``directory``, which needn't exist yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, key: Sequence[object], counts: Sequence[int]) -> Ranking:
        """Return the ranking for all ``counts`` of new tokens. Return {} if a file is incomplete, unreadable or of other
        libraries.
        """
        try:
            row = json.loads(self._path(key).read_text(encoding="utf-8"))
            ranked = {count: tuple(map(str, row["ranked"][str(count)])) for count in counts}
            same_libraries = row["libraries"] == libraries()
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}
        return ranked if same_libraries and all(ranked.values()) else {}

    def write(self, key: Sequence[object], ranked: Ranking) -> None:
        """Store a ranking in place of the previous one. Raises OSError if the directory can't be written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        row = {"libraries": libraries(), "ranked": {str(count): list(names) for count, names in ranked.items()}}
        write_whole(self._path(key), json.dumps(row) + "\n")

    def _path(self, key: Sequence[object]) -> Path:
        return self._directory / ("-".join(str(each).removeprefix("torch.") for each in key) + ".json")
