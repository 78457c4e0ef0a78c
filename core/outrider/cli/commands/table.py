"""The table of commands: Outrider's own, and the commands that installed packages add."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping

from outrider.cli.commands.lazy import Broken, Target
from outrider.registry.discovery import installed_entry_points

GROUP = "outrider.commands"
"""Entry-point group of further commands. The name is what people type, ``bench.decode`` for ``outrider bench decode``; the
value is ``module:function``. Nothing is loaded before the command is asked for."""

OWN: Mapping[str, Target] = {
    "generate": "outrider.cli.commands.generate:generate",
    "chat": "outrider.cli.commands.chat:chat",
    "models": "outrider.cli.commands.supported_models:models",
    "backends": "outrider.cli.commands.backends:backends",
    "doctor": "outrider.cli.commands.doctor:doctor",
    "fences": "outrider.cli.commands.fences:fences",
    "tune": "outrider.cli.commands.tune:tune",
    "quantize": "outrider.cli.commands.quantize:quantize",
    "draft-vocabulary": "outrider.cli.commands.draft_vocabulary:draft_vocabulary",
}


def commands(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> dict[str, Target]:
    """Return every command as a table for :func:`outrider.cli.commands.lazy.group`.

    ``entry_points`` replaces the installed ones. No package replaces a command of Outrider. A name that two packages offer is
    broken, and its reason names both packages.
    """
    found = installed_entry_points(GROUP).entry_points if entry_points is None else entry_points
    offers: dict[str, dict[str, str]] = {}
    for point in sorted(found, key=lambda point: point.name):
        distribution = point.dist.name if point.dist is not None else "an unknown package"
        # One package may be visible twice, through its source tree and its installation.
        offers.setdefault(point.name, {})[point.value] = distribution
    table: dict[str, Target] = dict(OWN)
    below: dict[str, dict[str, Target]] = {}
    for name, values in offers.items():
        first, _, rest = name.partition(".")
        if first in OWN:
            continue
        target: Target = next(iter(values))
        if len(values) > 1:
            named = " and ".join(f"{distribution} ({value})" for value, distribution in values.items())
            target = Broken(f"{named} both offer a command {name.replace('.', ' ')!r}")
        if rest:
            below.setdefault(first, {})[rest] = target
        else:
            table[first] = target
    for first, inner in below.items():
        if first in table:
            table[first] = Broken(f"one package offers {first!r} as a command, another as a group of commands")
        else:
            table[first] = inner
    return table
