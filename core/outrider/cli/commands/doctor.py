"""``outrider doctor``: explain why each installed backend can or can't run on this machine."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from outrider.cli.commands.listings import survey
from outrider.cli.options.models import ModelOption
from outrider.cli.options.option_values import BackendOption, JsonOption, option
from outrider.cli.terminal.environment import AUTOLOAD_VARIABLE, BACKEND_VARIABLE, backend_from_environment, plugin_probe
from outrider.cli.terminal.report import CommandReport, show_progress
from outrider.cli.terminal.torch_probe import TorchState, loaded_torch, probe_torch
from outrider.device.errors import OutriderError
from outrider.device.plugin import INTERFACE_VERSION
from outrider.registry import Registry

_PACKAGES = ("numpy", "pluggy", "transformers", "tokenizers", "safetensors", "pillow", "typer", "rich")


def doctor(
    open_devices: Annotated[bool, option("--open", help="Also open each device that says it can run.")] = False,
    model: ModelOption = None,
    backend: BackendOption = None,
    json_output: JsonOption = False,
) -> CommandReport:
    """Print for each installed backend why it can or can't run on this machine. The exit code is 1 if none can.

    With --model, predict the memory that an engine takes, then load the model and print which implementation computes each
    block of its layers and each primitive: the kernels of the backend, the composition of primitives, or the torch reference.
    """
    del json_output
    if model is not None:
        return _implementations(model, backend)
    with show_progress() as tell:
        tell("probing backends", 0, 0)
        torch = loaded_torch() or probe_torch()
        found = survey(torch, open_devices=open_devices)
    rows = found.backends
    chosen, why = _chosen(found.registry, torch)
    data: dict[str, object] = {
        "outrider": _version("outrider"),
        "interface_version": INTERFACE_VERSION,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": {
            "ok": torch.ok,
            "version": torch.version,
            "errors": torch.errors,
            "explanation": torch.explanation,
            "advice": torch.advice,
            "version_without_autoload": torch.version_without_autoload,
            "extensions": torch.extensions,
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {BACKEND_VARIABLE: backend_from_environment()},
        "backends": rows,
        "others": found.others,
        "notes": list(found.notes),
        "chosen": chosen,
        "chosen_because": why,
    }
    can_run = any(values["can_run"] for values in rows)
    return CommandReport(data=data, render=lambda console: _render(console, data), exit_code=0 if can_run else 1)


def _implementations(model: Path, backend: str | None) -> CommandReport:
    """Load a decoder and report what computes its blocks and primitives."""
    from outrider.cli.terminal.torch_probe import require_torch

    require_torch()
    from outrider.engine.config import DTYPES, EngineConfig
    from outrider.engine.setup.checks import predict_memory
    from outrider.engine.setup.resolve import choose_dtype
    from outrider.model import checkpoint_dtype, find_checkpoint, plan_decoder

    registry = Registry(probe=plugin_probe())
    directory, device = find_checkpoint(model), registry.create(registry.select(backend, backend_from_environment()))
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
        **decoder.implementations(),
    }
    return CommandReport(data=data, render=lambda console: _render_implementations(console, data))


def _render_implementations(console: Console, data: Mapping[str, Any]) -> None:
    console.print(f"{data['model']} on {data['backend']}, kernels {data['kernels']}\n\nmemory, predicted from the headers")
    for line in data["memory_lines"]:
        console.print(f"  {line}")
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
