"""The levels of conformance. A backend passes a level with the abilities that it declares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from outrider.device import ConfigError

LEVELS: Mapping[int, str] = MappingProxyType(
    {
        0: "discovery, identity, errors",
        1: "streams, events, copies, memory, lifetime",
        2: "graphs: capture, replay, pools, failure inside a capture, addresses, outputs",
        3: "flags and graph parameters",
        4: "kernels against the references; the overlapped speculative engine",
        5: "performance figures: reported, not checked",
        6: "collectives between two ranks: verbs, order, graphs, errors, a peer that dies",
    }
)
DEFAULT_LEVEL = 4
REPORTED = 5
"""Number of the level whose tests report figures and never fail a backend."""
_MODULE = re.compile(r"test_l(\d)_")


def parse_level(text: str) -> int:
    """Return the number of a level (``L4`` or ``4`` gives 4). Raises :class:`ConfigError` for an unknown level."""
    digits = text.strip().upper().removeprefix("L")
    if not digits.isdecimal() or int(digits) not in LEVELS:
        raise ConfigError(f"level {text!r} doesn't exist; expected one of {', '.join(f'L{n}' for n in LEVELS)}")
    return int(digits)


def required_level(level: int) -> int:
    """Return the highest level that must be passed if ``level`` is requested: ``level``, but L4 for L5, whose tests only
    report figures.
    """
    return level - 1 if level == REPORTED else level


def level_of(path: Path) -> int | None:
    """Return the level of a module of the suite, or None for any other file."""
    found = _MODULE.match(path.name)
    return int(found[1]) if found and path.parent == SUITE else None


SUITE = Path(__file__).parent / "suite"
MODULES = "test_l*.py"
"""Pattern of the suite's modules in :data:`SUITE`."""
