"""``outrider models``: the model families that run, and the proposers that can draft for them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_values import JsonOption
from outrider.cli.terminal.environment import plugin_probe
from outrider.cli.terminal.report import CommandReport
from outrider.registry import Plugins
from outrider.registry.engine_plugins import PROPOSERS, with_reserved_name_check
from outrider.speculative.plugin import BUILTIN_PROPOSERS


def models(json_output: JsonOption = False) -> CommandReport:
    """List model families that run natively, rope scalings, dtypes, and proposers with the checkpoint that each needs."""
    del json_output
    from outrider.engine.config import DTYPES
    from outrider.model import supported_families
    from outrider.model.config.rope import ROPE_KINDS

    plugins = Plugins(PROPOSERS, probe=plugin_probe())
    families = supported_families()
    proposers = dict(BUILTIN_PROPOSERS)
    for candidate in map(with_reserved_name_check, plugins.candidates()):
        if candidate.info is not None and candidate.status == "usable":
            proposers[candidate.name] = f"{candidate.info.needs} (from {candidate.distribution})"
    data = {
        "families": list(families),
        "rope": list(ROPE_KINDS),
        "dtypes": list(DTYPES),
        "proposers": proposers,
        "through_transformers": "other decoders with a replaceable attention, slower",
    }

    def render(console: Console) -> None:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_row("families", ", ".join(families))
        table.add_row("", "others with --through-transformers, if transformers can replace their attention: slower")
        table.add_row("rope", ", ".join(ROPE_KINDS))
        table.add_row("dtypes", ", ".join(DTYPES))
        console.print(table)
        drafts = Table("--speculate", "needs", box=None, pad_edge=False)
        for name, needs in proposers.items():
            drafts.add_row(name, needs)
        console.print()
        console.print(drafts)

    return CommandReport(data=data, render=render)
