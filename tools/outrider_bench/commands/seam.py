"""``outrider bench seam``: what the seam's calls cost the host, beside the raw torch calls that they come down to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from outrider.cli.environment import backend_from_environment
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.device.errors import ConfigError
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.device import Backend

_CALLS = 1000
_ROUNDS = 11

Pair = tuple[str, Callable[[], object], Callable[[], object], str]


def seam(backend: BackendOption = None, json_output: JsonOption = False) -> Report:
    """Measure each call of the seam against the raw torch call, in host microseconds.

    Both are timed in turns, many calls at a time; the median of the rounds counts. Little is ever queued: what
    is measured is the host.
    """
    from outrider.cli.torch_probe import require_torch

    del json_output
    require_torch()
    registry = Registry()
    device = registry.create(registry.select(backend, backend_from_environment()))
    rows = []
    for name, ours, raw, raw_name in _pairs(device):
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(_ROUNDS + 1):
            for call, found in zip((ours, raw), times, strict=True):
                began = time.perf_counter()
                for _ in range(_CALLS):
                    call()
                elapsed = (time.perf_counter() - began) / _CALLS * 1e6
                device.synchronize()
                if number:  # the first round warms up
                    found.append(elapsed)
        seam_us, raw_us = (statistics.median(found) for found in times)
        rows.append({"call": name, "seam_us": seam_us, "raw_us": raw_us, "over_us": seam_us - raw_us, "raw": raw_name})
    data: dict[str, object] = {
        "backend": device.name,
        "device": str(device.device),
        "versions": dict(device.versions()),
        "calls": _CALLS * _ROUNDS,
        "results": rows,
    }
    return Report(data=data, render=lambda console: _render(console, data, rows))


def _pairs(backend: Backend) -> list[Pair]:
    """(name, through the seam, raw, what raw is) for every call of a running step."""
    import torch

    from outrider.device import CaptureContext, TorchDeviceBackend

    if not isinstance(backend, TorchDeviceBackend):
        raise ConfigError(f"{backend.label} isn't made of torch's own streams, so there is no raw call to compare with")
    module = backend.module
    stream, other = backend.create_stream("seam"), backend.create_stream("seam-other")
    event, waited = backend.create_event("seam"), backend.create_event("seam-waited")
    stream.record(event)
    other.record(waited)
    raw_event, raw_waited = module.Event(), module.Event()
    raw_event.record(stream.native)
    raw_waited.record(other.native)
    with backend.on(stream):
        cell = torch.zeros(256, device=backend.device)
        pinned = backend.empty_pinned("bench seam", (256,), torch.float32).tensor
    stream.synchronize()
    graph: Any = None
    if backend.capabilities.captures_graphs:

        def grow(context: CaptureContext) -> None:
            context.inputs["cell"].add_(1)

        graph = backend.capture("seam", grow, stream=stream, inputs={"cell": cell}, outputs={})

    def scope() -> None:
        with backend.on(stream):
            pass

    def raw_scope() -> None:
        with module.stream(stream.native):
            pass

    def copy() -> None:
        backend.copy_async(cell, pinned, stream=stream)

    def raw_copy() -> None:
        with module.stream(stream.native):
            cell.copy_(pinned, non_blocking=True)

    def raw_replay() -> None:
        with module.stream(stream.native):
            graph.native.replay()

    pairs: list[Pair] = [
        ("on(stream), entered and left", scope, raw_scope, "with torch.<device>.stream(s)"),
        ("stream.record(event)", lambda: stream.record(event), lambda: raw_event.record(stream.native), "event.record(s)"),
        ("stream.wait(event)", lambda: stream.wait(waited), lambda: stream.native.wait_event(raw_waited), "s.wait_event(e)"),
        ("stream.query()", stream.query, stream.native.query, "s.query()"),
        ("stream.synchronize(), idle", stream.synchronize, stream.native.synchronize, "s.synchronize()"),
        ("event.query()", event.query, raw_event.query, "e.query()"),
        ("event.synchronize(), done", event.synchronize, raw_event.synchronize, "e.synchronize()"),
        ("copy_async(device, pinned)", copy, raw_copy, "copy_(non_blocking=True) in a scope"),
    ]
    if graph is not None:
        pairs.append(("graph.replay(stream)", lambda: graph.replay(stream), raw_replay, "graph.replay() in a scope"))
    return pairs


def _render(console: Console, data: dict[str, object], rows: list[dict[str, Any]]) -> None:
    console.print(f"{data['backend']} ({data['device']}), host microseconds a call\n")
    table = Table("call", "seam", "raw torch", "over raw", "raw call", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["call"], *(f"{row[key]:.2f}" for key in ("seam_us", "raw_us", "over_us")), row["raw"])
    console.print(table)
