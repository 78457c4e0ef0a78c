"""``outrider bench kernels``: compare the time of each kernel with the time to move its bytes and with torch's kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_values import DTYPES, WEIGHT_FORMATS, BackendOption, one_of, option, text
from outrider.cli.terminal.environment import open_backend
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import CapabilityError
from outrider_bench.options import SIZES, RequiredShapeOption, parse_names, parse_sizes, some_of

if TYPE_CHECKING:
    import torch

    from outrider.device import Backend, DecoderShape, KernelSet, Stream
    from outrider_bench.kernel_cases import TimedKernelCase
    from outrider_bench.rates import DeviceRates

_REPLAYS = 5
_CALLS = 16
_ROTATE_BYTES = 256 << 20  # several times the cache of a device
_COLUMNS = ("kernel", "case", "us", "own us", "torch us", "bytes us", "products us", "of limit", "of torch")


def kernels(
    backend: BackendOption = None,
    shape: RequiredShapeOption = "llama-3.1-8b",
    tokens: Annotated[str, option("--tokens", value=SIZES, help="Numbers of tokens of matrix products.")] = "1,4,32,128",
    only: Annotated[
        str | None, option("--only", value=text(), help="Measure only kernels whose name contains this text.")
    ] = None,
    dtype: Annotated[str, option("--dtype", value=one_of(*DTYPES), help="Dtype.")] = "bfloat16",
    quantized: Annotated[
        str | None,
        option("--quantized", value=some_of(*WEIGHT_FORMATS), help="Measure only products with quantised weights."),
    ] = None,
) -> CommandReport:
    """Measure the backend's kernels and torch's, in microseconds a call, with 16 calls in a graph.

    If kernels are selected by name (``cuda:kernels=flashinfer``), *own* are the backend's default kernels. Planning on the
    host isn't part of the time of a call.

    The limit is the larger of two times, *bytes* and *products*: the bytes that a call must move over the best measured
    bandwidth, and its operations over the best measured rate. Data that fits in the device's
    cache may beat the limit. *torch* is the reference of the backend interface, for a matrix product the library of torch.
    """
    from outrider.cli.terminal.torch_probe import require_torch

    require_torch()

    from outrider.device import KernelSet
    from outrider.device.kernels.weight_formats import weight_format
    from outrider.engine.config import DTYPES as TORCH_DTYPES
    from outrider.model.config.shapes import decoder_shape, shape_config
    from outrider_bench.rates import measure_rates

    sizes = parse_sizes(tokens)
    formats = [] if quantized is None else parse_names(quantized, WEIGHT_FORMATS)
    device = open_backend(backend)
    if not (device.capabilities.captures_graphs and device.capabilities.event_timing):
        raise CapabilityError(f"{device.label} can't be measured here: it needs captures_graphs and event_timing")
    columns = shape_config(shape).hidden_size
    with device.on(device.create_stream("weights")):
        weights = [
            weight_format(name).random_weight(columns, columns, device=device.device, scales_dtype=TORCH_DTYPES[dtype])
            for name in formats
        ]
    device.synchronize()
    rates = measure_rates(device, TORCH_DTYPES[dtype], kernels=device.kernels, weights=weights)
    stream = device.create_stream("bench")
    decoder = decoder_shape(shape_config(shape), TORCH_DTYPES[dtype])
    used, own = device.kernels_in_use.for_shape(decoder), device.kernels.for_shape(decoder)
    rows = []
    for case in _cases(device, stream, decoder, sizes, TORCH_DTYPES[dtype], formats):
        if only is not None and only not in case.kernel:
            continue
        us = _microseconds(device, stream, case, used)
        others = device.kernels_in_use is not device.kernels
        own_us = _microseconds(device, stream, case, own) if others else us
        torch_us = _microseconds(device, stream, case, KernelSet())
        rows.append(_row(case, us, own_us, torch_us, rates))
    data: dict[str, object] = {
        "backend": device.name,
        "device": str(device.device),
        "versions": dict(device.versions()),
        "kernels": device.kernels_in_use.name,
        "shape": shape,
        "dtype": dtype,
        **rates.describe(),
        "results": rows,
    }
    return CommandReport(data=data, render=lambda console: _render(console, data, rows))


def _row(case: TimedKernelCase, us: float, own_us: float, torch_us: float, rates: DeviceRates) -> dict[str, Any]:
    bytes_us, products_us = 1e6 * case.bytes / rates.bandwidth, 1e6 * case.operations / rates.operations
    limit_us = max(bytes_us, products_us)
    return {
        "kernel": case.kernel,
        "case": case.name,
        "us": us,
        "own_us": own_us,
        "torch_us": torch_us,
        "limit_us": limit_us,
        "bytes_us": bytes_us,
        "products_us": products_us,
        "bytes": case.bytes,
        "ratio_to_limit": us / limit_us,
        "ratio_to_torch": us / torch_us,
        "tb_per_s": case.bytes / us / 1e6,
    }


def _cases(
    device: Backend, stream: Stream, decoder: DecoderShape, sizes: list[int], dtype: torch.dtype, quantized: list[str]
) -> Iterator[TimedKernelCase]:
    """Yield the timed cases: products with weights in the formats of ``quantized``, or without formats all other kernels."""
    from outrider_bench.kernel_cases import kernel_cases, product_cases

    def placed(cases: Iterator[TimedKernelCase]) -> Iterator[TimedKernelCase]:
        while True:
            with device.on(stream):
                case = next(cases, None)
            if case is None:
                return
            stream.synchronize()
            yield case

    formats: list[str | None] = list(quantized) or [None]
    for format in formats:
        for count in sizes:
            yield from placed(
                product_cases(
                    decoder, tokens=count, rotate_bytes=_ROTATE_BYTES, dtype=dtype, device=device.device, format=format
                )
            )
    if not quantized:
        yield from placed(kernel_cases(decoder, dtype=dtype, device=device.device))


def _microseconds(device: Backend, stream: Stream, case: TimedKernelCase, kernels: KernelSet) -> float:
    from outrider_bench.rates import median_seconds

    if case.planned is not None:
        with device.on(stream):
            case = case.planned(kernels, stream)
        stream.synchronize()
    call: Callable[[KernelSet, int], object] = case.call

    def work(context: object) -> None:
        del context
        for number in range(_CALLS):
            call(kernels, number)

    graph = device.capture(f"{case.kernel} {case.name}", work, stream=stream, inputs={}, outputs={})
    return 1e6 * median_seconds(device, stream, lambda: graph.replay(stream), _REPLAYS) / _CALLS


def _render(console: Console, data: dict[str, object], rows: list[dict[str, Any]]) -> None:
    console.print(f"{data['kernels']} on {data['backend']} ({data['device']}), {data['shape']}, {data['dtype']}")
    console.print(f"{data['rates']}\n")
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row["kernel"],
            row["case"],
            *(f"{row[key]:.2f}" for key in ("us", "own_us", "torch_us", "bytes_us", "products_us")),
            *(f"{row[key]:.2f}x" for key in ("ratio_to_limit", "ratio_to_torch")),
        )
    console.print(table)
