"""Commands that list what is installed and supported: ``outrider backends``, ``outrider models`` and ``outrider fences``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_values import BackendOption, JsonOption, option
from outrider.cli.terminal.environment import backend_from_environment, disable_autoload, plugin_probe
from outrider.cli.terminal.report import CommandReport, show_progress
from outrider.cli.terminal.torch_probe import TorchState, known_torch
from outrider.device.errors import OutriderError
from outrider.device.plugin import BackendInfo
from outrider.registry import Candidate, Plugins, Registry
from outrider.registry.engine_plugins import PROPOSERS, with_reserved_name_check
from outrider.speculative.plugin import BUILTIN_PROPOSERS


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
    from outrider.registry.engine_plugins import PROPOSERS

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
    """Return the installed kernel sets and proposers as JSON data."""
    from outrider.registry.engine_plugins import with_reserved_name_check

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


def fences(backend: BackendOption = None, json_output: JsonOption = False) -> CommandReport:
    """List the fences: producer, consumers, hazard, protected resources, and the backend's mechanism."""
    del json_output
    from outrider.cli.terminal.torch_probe import require_torch
    from outrider.engine.fences import FENCES

    require_torch()
    registry = Registry(probe=plugin_probe())
    device = registry.create(registry.select(backend, backend_from_environment()))
    sync = device.speculative_sync
    rows = [
        {
            "name": fence.name,
            "producer": fence.producer,
            "consumer": list(fence.consumers),
            "hazard": fence.hazard.value,
            "resources": fence.resources,
            "mechanism": sync.create_fence(fence.name).mechanism,
        }
        for fence in FENCES
    ]
    policy = {
        "published_waiter": sync.published_waiter.value,
        "exact_host_lengths": sync.exact_host_lengths,
        "plans_on_host": device.kernels_in_use.plans_on_host,
        "results_on_forward": sync.results_on_forward,
        "recompute_after_join": sorted(what.value for what in sync.recompute_after_join),
        "refresh_before_replay": sorted(sync.refresh_before_replay),
        "draft_lengths": "all" if sync.draft_lengths is None else sorted(sync.draft_lengths),
        "bytes_per_request": sync.bytes_per_request,
        "step_modes": sorted(mode.value for mode in sync.step_modes),
    }

    def render(console: Console) -> None:
        table = Table("fence", "edge", "hazard", "mechanism", "protects", box=None, pad_edge=False)
        for fence, row in zip(FENCES, rows, strict=True):
            edge = f"{fence.producer} → {', '.join(fence.consumers)}"
            table.add_row(fence.name, edge, fence.hazard.value, str(row["mechanism"]), fence.resources)
        console.print(table)
        console.print()
        for name, value in policy.items():
            console.print(f"{name}: {', '.join(map(str, value)) or 'none' if isinstance(value, list) else value}")

    return CommandReport(data={"backend": device.name, "fences": rows, "policy": policy}, render=render)
