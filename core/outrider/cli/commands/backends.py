"""``outrider backends``: list the installed backend plugins."""

from __future__ import annotations

from typing import Annotated

from rich.console import Console
from rich.table import Table

from outrider.cli.commands.listing import survey
from outrider.cli.options.option_values import JsonOption, option
from outrider.cli.terminal.environment import plugin_probe
from outrider.cli.terminal.report import CommandReport
from outrider.cli.terminal.starting import show_progress
from outrider.cli.terminal.torch_probe import known_torch


def backends(
    open_devices: Annotated[bool, option("--open", help="Also open each usable device and show what it declares.")] = False,
    json_output: JsonOption = False,
) -> CommandReport:
    """List the installed backends and say for each whether it can run on this machine."""
    del json_output
    with show_progress() as tell:
        tell("probing backends", 0, 0)
        found = survey(known_torch(plugin_probe()), open_devices=open_devices)
    rows, extras = found.backends, found.others

    def render(console: Console) -> None:
        table = Table("name", "status", "priority", "devices", "distribution", "description", box=None, pad_edge=False)
        for values in rows:
            table.add_row(
                *(_cell(values[key]) for key in ("name", "status", "priority", "device_count", "distribution")),
                _cell(values["description"] or values["reason"]),
            )
        console.print(table)
        for values in rows:
            if values.get("capabilities"):
                console.print(f"\n{values['name']} on {values['device']}: {_declared(values['capabilities'])}")
        if extras:
            console.print()
            others = Table("also installed", "what", "status", "distribution", "how", box=None, pad_edge=False)
            for values in extras:
                cells = [_cell(values[key]) for key in ("name", "kind", "status", "distribution")]
                others.add_row(*cells, _cell(values["detail"] or values["reason"]))
            console.print(others)
        if found.notes:
            console.print()
        for note in found.notes:
            console.print(f"note: {note}")
        if not all(values["can_run"] for values in rows) or not rows:
            console.print("\n`outrider doctor` says why a backend can't run")

    return CommandReport(data={"backends": rows, "others": extras, "notes": list(found.notes)}, render=render)


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _declared(capabilities: object) -> str:
    assert isinstance(capabilities, dict)
    return ", ".join(_said(key, value) for key, value in capabilities.items() if value)


def _said(key: str, value: object) -> str:
    if isinstance(value, bool):
        return key
    return f"{key} {' '.join(value)}" if isinstance(value, list) else f"{key} {value}"
