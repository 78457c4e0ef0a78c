"""Commands that say what is installed and what it can do: ``outrider backends``, ``doctor``, ``models`` and ``fences``."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.cli.options.models import ModelOption
from outrider.cli.options.option_values import BackendOption, option
from outrider.cli.terminal.environment import (
    AUTOLOAD_VARIABLE,
    BACKEND_VARIABLE,
    backend_from_environment,
    disable_autoload,
    open_backend,
    plugin_probe,
)
from outrider.cli.terminal.report import CommandReport, show_progress
from outrider.cli.terminal.torch_probe import TorchState, known_torch, loaded_torch, probe_torch, require_torch
from outrider.device.errors import OutriderError
from outrider.device.plugin import INTERFACE_VERSION, BackendInfo
from outrider.registry import Candidate, Plugins, Registry
from outrider.registry.engine_plugins import PROPOSERS, with_reserved_name_check
from outrider.registry.probing import PluginProbe
from outrider.speculative.plugin import BUILTIN_PROPOSERS


def survey(registry: Registry, probe: PluginProbe, torch: TorchState, *, open_devices: bool) -> dict[str, Any]:
    """Probe every plugin and return JSON data: rows of ``backends`` and of ``others`` (kernel sets and proposers), and one
    line of ``notes`` per problem.

    ``torch``: whether torch imports; ``open_devices``: also open the device of each usable backend.
    """
    # A plugin may import torch in this process, and an import that crashes would end the process.
    importable = torch.ok or torch.version_without_autoload is not None
    if not torch.ok:
        disable_autoload()
    proposers = Plugins(PROPOSERS, probe=probe)
    rows = [_backend_row(candidate) for candidate in registry.backends.candidates(load=importable)]
    for values in rows:
        if not torch.ok:
            _block(values, torch)
        elif open_devices:
            _open_row(registry, values)
    others = _other_rows(registry, proposers, load=importable)
    notes = dict.fromkeys((*registry.notes, *proposers.notes))
    for values in (*rows, *others):
        changes = values["changes"]
        if isinstance(changes, list) and changes:
            notes[f"loading {values['name']!r} of {values['distribution']} changes {', '.join(map(str, changes))}"] = None
    return {"backends": rows, "others": others, "notes": list(notes)}


def _block(values: dict[str, object], torch: TorchState) -> None:
    """Change each usable backend's row to unusable, with the reason that torch can't be imported."""
    own = f" (the plugin itself: {values['reason']})" if values["reason"] else ""
    values.update(can_run=False, status="unusable", reason=f"torch doesn't import{own}", advice=" ".join(torch.advice))


def _row(candidate: Candidate[Any], **details: object) -> dict[str, object]:
    """Return a plugin, its status on this machine and ``details`` of its kind as a row of JSON data."""
    return {
        "name": candidate.name,
        "status": candidate.status,
        "can_run": candidate.status == "usable",
        "reason": candidate.reason,
        "advice": candidate.advice,
        "distribution": candidate.distribution,
        "entry_point": candidate.entry_point,
        "description": candidate.info.description if candidate.info else "",
        **details,
        "changes": list(candidate.changes),
    }


def _backend_row(candidate: Candidate[BackendInfo]) -> dict[str, object]:
    info = candidate.info
    return _row(
        candidate,
        priority=info.priority if info else None,
        device_count=info.device_count if info else None,
        interface=[info.interface_min, info.interface_max] if info else None,
    )


def _other_rows(registry: Registry, proposers: Plugins[Any], *, load: bool) -> list[dict[str, object]]:
    """Return the installed kernel sets and proposers as JSON data, with the backends that a set serves or the draft that a
    proposer needs. ``load=False`` loads no plugin.
    """
    rows = []
    for kernels in registry.kernels.candidates(load=load):
        names = ", ".join(kernels.info.backends if kernels.info else ()) or "any backend"
        detail = f"for {names}: NAME:kernels={kernels.name}" if kernels.info else ""
        rows.append(_row(kernels, kind="kernels", detail=detail))
    for proposer in map(with_reserved_name_check, proposers.candidates(load=load)):
        detail = f"--speculate {proposer.name}, needs {proposer.info.needs}" if proposer.info else ""
        rows.append(_row(proposer, kind="proposer", detail=detail))
    return rows


def _open_row(registry: Registry, values: dict[str, object]) -> None:
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
) -> CommandReport:
    """List the installed backends and say for each whether it can run on this machine."""
    with show_progress() as tell:
        tell("probing backends", 0, 0)
        probe = plugin_probe()
        torch = known_torch(probe)
        found = survey(Registry(probe=probe), probe, torch, open_devices=open_devices)
    rows, extras, notes = found["backends"], found["others"], found["notes"]

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
        if notes:
            console.print()
        for note in notes:
            console.print(f"note: {note}")
        if not all(values["can_run"] for values in rows) or not rows:
            console.print("\n`outrider doctor` says why a backend can't run")

    return CommandReport(data=found, render=render)


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _declared(capabilities: object) -> str:
    assert isinstance(capabilities, dict)
    return ", ".join(_format_entry(key, value) for key, value in capabilities.items() if value)


def _format_entry(key: str, value: object) -> str:
    if isinstance(value, bool):
        return key
    return f"{key} {' '.join(value)}" if isinstance(value, list) else f"{key} {value}"


def models() -> CommandReport:
    """List model families that run natively, rope scalings, dtypes, and proposers with the checkpoint that each needs."""
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


def fences(backend: BackendOption = None) -> CommandReport:
    """List the fences: producer, consumers, hazard, protected resources, and the backend's mechanism."""
    from outrider.engine.fences import FENCES

    require_torch()
    device = open_backend(backend)
    sync = device.speculative_sync
    rows = [
        {
            "name": fence.name,
            "producer": fence.producer,
            "consumer": list(fence.consumers),
            "hazard": fence.hazard,
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
            table.add_row(fence.name, edge, fence.hazard, str(row["mechanism"]), fence.resources)
        console.print(table)
        console.print()
        for name, value in policy.items():
            console.print(f"{name}: {', '.join(map(str, value)) or 'none' if isinstance(value, list) else value}")

    return CommandReport(data={"backend": device.name, "fences": rows, "policy": policy}, render=render)


_PACKAGES = ("numpy", "pluggy", "transformers", "tokenizers", "safetensors", "pillow", "typer", "rich")


def doctor(
    open_devices: Annotated[bool, option("--open", help="Also open each device that says it can run.")] = False,
    model: ModelOption = None,
    backend: BackendOption = None,
) -> CommandReport:
    """Print for each installed backend why it can or can't run on this machine. The exit code is 1 if none can.

    With --model, predict the memory that an engine takes, then load the model and print which implementation computes each
    block of its layers and each primitive: the kernels of the backend, the composition of primitives, or the torch reference.
    """
    if model is not None:
        return _implementations(model, backend)
    with show_progress() as tell:
        tell("probing backends", 0, 0)
        torch = loaded_torch() or probe_torch()
        probe = plugin_probe()
        registry = Registry(probe=probe)
        found = survey(registry, probe, torch, open_devices=open_devices)
    chosen, why = _chosen(registry, torch)
    data: dict[str, object] = {
        "outrider": _version("outrider"),
        "interface_version": INTERFACE_VERSION,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": {"ok": torch.ok, **asdict(torch)},
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {BACKEND_VARIABLE: backend_from_environment()},
        **found,
        "chosen": chosen,
        "chosen_because": why,
    }
    can_run = any(values["can_run"] for values in found["backends"])
    return CommandReport(data=data, render=lambda console: _render(console, data), exit_code=0 if can_run else 1)


def _implementations(model: Path, backend: str | None) -> CommandReport:
    """Load a decoder and report what computes its blocks and primitives."""
    require_torch()
    from outrider.device.kernels.weights import quantized_products
    from outrider.engine.config import DTYPES, EngineConfig
    from outrider.engine.setup.checks import predict_memory
    from outrider.engine.setup.resolve import choose_dtype
    from outrider.model import checkpoint_dtype, find_checkpoint, plan_decoder

    directory, device = find_checkpoint(model), open_backend(backend)
    dtype = DTYPES[str(choose_dtype(device.capabilities, checkpoint_dtype(directory)).value)]
    plan = plan_decoder(directory, backend=device, dtype=dtype)
    memory = predict_memory(plan, device, EngineConfig())
    decoder = plan.load()
    data = {
        "model": str(directory),
        "backend": device.name,
        "kernels": decoder.kernels.name,
        "memory": {"weights": memory.weights, "kv_cache": memory.pages, "states": memory.states, "free": memory.free},
        "memory_lines": memory.lines(),
        "stored": None if plan.quantization is None else plan.quantization.method,
        "quantized": dict(quantized_products(decoder.weights)),
        **decoder.implementations(),
    }
    return CommandReport(data=data, render=lambda console: _render_implementations(console, data))


def _render_implementations(console: Console, data: Mapping[str, Any]) -> None:
    console.print(f"{data['model']} on {data['backend']}, kernels {data['kernels']}\n\nmemory, predicted from the headers")
    for line in data["memory_lines"]:
        console.print(f"  {line}")
    if data["stored"] is not None:
        found = ", ".join(f"{label} in {count} weights" for label, count in data["quantized"].items())
        console.print(f"\nquantised as {data['stored']}: {found or 'dequantized while loading'}")
    console.print("\nblocks")
    layers: dict[tuple[str, str], list[int]] = {}
    for index, blocks in enumerate(data["blocks"]):
        for block in blocks.items():
            layers.setdefault(block, []).append(index)
    for (name, implementation), indices in layers.items():
        console.print(f"  {name}: {implementation} in layers {', '.join(map(str, indices))}")
    console.print("\nprimitives")
    for implementation in ("native", "reference"):
        names = [name for name, found in data["primitives"].items() if found == implementation]
        console.print(f"  {implementation}: {', '.join(names) or 'none'}")


def _chosen(registry: Registry, torch: TorchState) -> tuple[str | None, str]:
    """Return the backend that a command without ``--backend`` would use, or None, and the reason."""
    if not torch.ok:
        return None, "torch doesn't import"
    environment = backend_from_environment()
    try:
        spec = registry.select(None, environment)
    except OutriderError as error:
        return None, str(error)
    if spec.chosen_by == "environment":
        return str(spec), f"{BACKEND_VARIABLE}={environment}"
    return str(spec), "the usable backend of highest priority"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _render(console: Console, data: Mapping[str, Any]) -> None:
    torch = data["torch"]
    console.print(f"outrider {data['outrider']} (interface version {data['interface_version']})")
    console.print(f"python   {data['python']}  {data['executable']}")
    console.print(f"platform {data['platform']}")
    packages = (f"{name} {version or 'missing'}" for name, version in data["packages"].items())
    console.print(f"packages {', '.join(packages)}")
    if torch["ok"]:
        console.print(f"torch    {torch['version']}")
    else:
        console.print("torch    can't be imported")
        for depth, text in enumerate(torch["errors"]):
            console.print(f"         {'  ' * depth}{text}")
        console.print(f"         {torch['explanation']}")
        for advice in torch["advice"]:
            console.print(f"         - {advice}")
        if torch["version_without_autoload"]:
            console.print(f"         Tried: with {AUTOLOAD_VARIABLE}=0 torch {torch['version_without_autoload']} imports.")
    if torch["extensions"]:
        console.print(f"         loads by itself: {', '.join(torch['extensions'])}")
    console.print("\nbackends")
    for values in data["backends"]:
        verdict = "can run" if values["can_run"] else "can't run"
        console.print(f"  {values['name']}: {verdict}, from {values['distribution']}")
        for key in ("description", "reason", "advice"):
            if values[key]:
                console.print(f"      {key}: {values[key]}")
    if not data["backends"]:
        console.print("  none is installed")
    if data["others"]:
        console.print("\nkernels and proposers of plugins, used where they're asked for by name")
    for values in data["others"]:
        console.print(f"  {values['name']}: {values['kind']}, {values['status']}, from {values['distribution']}")
        for key in ("description", "detail", "reason", "advice"):
            if values[key]:
                console.print(f"      {key}: {values[key]}")
    if data["notes"]:
        console.print("\nnotes")
    for note in data["notes"]:
        console.print(f"  {note}")
    console.print(f"\nchosen without --backend: {data['chosen'] or 'none'} ({data['chosen_because']})")
