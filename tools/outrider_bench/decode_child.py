"""``outrider bench decode`` in a process of its own, for commands that compare it with something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_bench.child import answer


def measure(given: Mapping[str, Any]) -> dict[str, object]:
    """The command's data; ``given`` are its arguments by name."""
    from outrider_bench.commands.decode import decode

    return dict(decode(**{name: value for name, value in given.items() if name != "started"}).data)


if __name__ == "__main__":
    answer(measure)
