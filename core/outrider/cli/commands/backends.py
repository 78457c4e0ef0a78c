"""``outrider backends``: list the installed backend plugins, and say whether they can run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_values import JsonOption, option
from outrider.cli.terminal.environment import disable_autoload, plugin_probe
from outrider.cli.terminal.report import CommandReport
from outrider.cli.terminal.starting import show_progress
from outrider.cli.terminal.torch_probe import TorchState, known_torch
from outrider.device.errors import OutriderError
from outrider.device.plugin import BackendInfo
from outrider.registry import Candidate, Plugins, Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The installed plugins as rows of JSON data. ``others``: kernel sets and proposers. ``notes``: one line per problem."""

    torch: TorchState
    registry: Registry
    backends: list[dict[str, object]]
    others: list[dict[str, object]]
    notes: tuple[str, ...]


def survey(torch: TorchState, *, open_devices: bool) -> Survey:
    """Probe every plugin; ``torch``: whether torch imports; ``open_devices``: also open the device of each usable backend."""
    from outrider.registry.proposers import PROPOSERS

    # A plugin may import torch in this process, and an import that crashes would end the process.
    importable = torch.ok or torch.version_without_autoload is not None
    if not torch.ok:
        disable_autoload()
    probe = plugin_probe()
    registry, proposers = Registry(probe=probe), Plugins(PROPOSERS, probe=probe)
    rows = [row(candidate) for candidate in registry.candidates(load=importable)]
    for values in rows:
        if not torch.ok:
            _block(values, torch)
        elif open_devices:
            open_row(registry, values)
    others = extra_rows(registry, proposers, load=importable)
    notes = dict.fromkeys((*registry.notes, *proposers.notes))
    for values in (*rows, *others):
        changes = values["changes"]
        if isinstance(changes, list) and changes:
            notes[f"loading {values['name']!r} of {values['distribution']} changes {', '.join(map(str, changes))}"] = None
    return Survey(torch=torch, registry=registry, backends=rows, others=others, notes=tuple(notes))


def _block(values: dict[str, object], torch: TorchState) -> None:
    """Change each usable backend's row to unusable, with the reason that torch can't be imported."""
    own = f" (the plugin itself: {values['reason']})" if values["reason"] else ""
    values.update(can_run=False, status="unusable", reason=f"torch doesn't import{own}", advice=" ".join(torch.advice))


def _described(candidate: Candidate[Any]) -> dict[str, object]:
    """Return a plugin and its status on this machine as a row of JSON data."""
    return {
        "name": candidate.name,
        "status": candidate.status,
        "can_run": candidate.status == "usable",
        "reason": candidate.reason,
        "advice": candidate.advice,
        "distribution": candidate.distribution,
        "entry_point": candidate.entry_point,
        "description": candidate.info.description if candidate.info else "",
    }


def row(candidate: Candidate[BackendInfo]) -> dict[str, object]:
    """Return what ``outrider backends --json`` prints about one backend plugin."""
    info = candidate.info
    return {
        **_described(candidate),
        "priority": info.priority if info else None,
        "device_count": info.device_count if info else None,
        "interface": [info.interface_min, info.interface_max] if info else None,
        "changes": list(candidate.changes),
    }


def extra_row(candidate: Candidate[Any], kind: str, detail: str) -> dict[str, object]:
    """Return a kernel set or proposer plugin as JSON data. ``detail``: the backends it serves, or the draft it needs."""
    detail = detail if candidate.info else ""
    return {"kind": kind, **_described(candidate), "detail": detail, "changes": list(candidate.changes)}


def extra_rows(registry: Registry, proposers: Plugins[Any], *, load: bool = True) -> list[dict[str, object]]:
    """Return the installed kernel sets and proposers as JSON data. ``load=False`` loads no plugin."""
    from outrider.registry.proposers import with_reserved_name_check

    rows = []
    for kernels in registry.kernels.candidates(load=load):
        names = kernels.info.backends if kernels.info else ()
        rows.append(extra_row(kernels, "kernels", f"for {', '.join(names) or 'any backend'}: NAME:kernels={kernels.name}"))
    for proposer in proposers.candidates(load=load):
        needs = proposer.info.needs if proposer.info else ""
        rows.append(extra_row(with_reserved_name_check(proposer), "proposer", f"--speculate {proposer.name}, needs {needs}"))
    return rows


def open_row(registry: Registry, values: dict[str, object]) -> None:
    """Open the device of a usable backend and add its capabilities to the row; a failure becomes the row's reason."""
    if not values["can_run"]:
        return
    try:
        backend = registry.create(str(values["name"]))
    except OutriderError as error:
        values.update(can_run=False, status="unusable", reason=str(error), advice="see the reason")
        return
    values.update(device=str(backend.device), capabilities=backend.capabilities.as_dict(), versions=dict(backend.versions()))


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
