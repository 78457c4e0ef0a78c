"""``outrider bench collectives``: the time of a collective between ranks, by kind, size and implementation."""

from __future__ import annotations

from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_values import BackendOption, one_of, option, whole
from outrider.cli.terminal.environment import backend_from_environment
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import CapabilityError
from outrider.registry import Registry
from outrider_bench.options import SIZES, parse_names, parse_sizes, some_of

KINDS = ("all_reduce", "all_reduce_rms_norm", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
_LIMIT_S = 240.0


def collectives(
    backend: BackendOption = None,
    ranks: Annotated[int, option("--ranks", value=whole(2, 64), help="Ranks: processes on as many devices.")] = 2,
    kinds: Annotated[str, option("--kinds", value=some_of(*KINDS), help="Kinds.")] = ",".join(KINDS),
    tokens: Annotated[str, option("--tokens", value=SIZES, help="Rows of a rank's tensor.")] = "1,4,16,64,128",
    width: Annotated[int, option("--width", value=whole(1), help="Elements of a row.")] = 4096,
    dtype: Annotated[str, option("--dtype", value=one_of("float32", "bfloat16", "float16"), help="Dtype.")] = "bfloat16",
) -> CommandReport:
    """Measure collectives between ranks of this host, in microseconds a call.

    Each kind is measured with each implementation of the backend: the vendor's library first, then the replacements for
    small tensors. all_reduce_rms_norm is an all-reduce followed by the norm, "fused" is one kernel for both. If collectives
    can be captured, 64 calls of a graph are timed on the device; otherwise 8 calls are timed in sequence. ratio is the time
    over that of the library in this run.
    """
    from outrider.cli.terminal.torch_probe import require_torch

    require_torch()
    from outrider_conformance.ranks.runner import TaskProcesses

    chosen, sizes = parse_names(kinds, KINDS), parse_sizes(tokens)
    registry = Registry()
    spec = registry.select(backend, backend_from_environment())
    count = registry.backends.info(spec.name).device_count
    if (count is not None and 1 < count < ranks) or (count == 1 and registry.create(spec).capabilities.asynchronous):
        raise CapabilityError(f"--ranks {ranks} needs as many devices, and backend {spec.name!r} has {count} here")
    work = {"kinds": chosen, "tokens": sizes, "width": width, "dtype": dtype}
    with TaskProcesses(str(spec), ranks) as processes:
        found, *_ = processes.run_task("outrider_bench.rates:measure_collectives", work, limit_s=_LIMIT_S)
    rows: list[dict[str, Any]] = found.pop("rows")
    libraries: dict[tuple[str, int], float] = {}
    for row in rows:
        library = libraries.setdefault((row["kind"], row["tokens"]), row["us"])
        row["bytes"] = row["tokens"] * found["bytes_per_token"]
        row["ratio_to_library"] = row["us"] / library
    data: dict[str, object] = {**found, "ranks": ranks, "width": width, "dtype": dtype, "results": rows}
    return CommandReport(data=data, render=lambda console: _render(console, data, rows))


def _render(console: Console, data: dict[str, object], rows: list[dict[str, Any]]) -> None:
    console.print(f"{data['ranks']} ranks of {data['backend']}, tokens x {data['width']} {data['dtype']}, us a call\n")
    table = Table("kind", "tokens", "KiB", "implementation", "us", "ratio", "in a graph", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            *(row["kind"], str(row["tokens"]), f"{row['bytes'] / 1024:g}", row["way"], f"{row['us']:.1f}"),
            *(f"{row['ratio_to_library']:.2f}", "yes" if row["in_graph"] else "no"),
        )
    console.print(table)
