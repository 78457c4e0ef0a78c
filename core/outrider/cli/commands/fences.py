"""``outrider fences``: list every edge between the streams of an iteration, and the backend's mechanism for each edge."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_values import BackendOption, JsonOption
from outrider.cli.terminal.environment import backend_from_environment, plugin_probe
from outrider.cli.terminal.report import CommandReport
from outrider.registry import Registry


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
