"""``outrider quantize``: write a quantised copy of an unquantised checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from outrider.bundled import bundled
from outrider.cli.options.option_values import (
    CHECKPOINT,
    DIRECTORY,
    WEIGHT_FORMATS,
    JsonOption,
    UsageError,
    one_of,
    option,
    whole,
)
from outrider.cli.terminal.report import CommandReport
from outrider.cli.terminal.starting import show_progress
from outrider.errors import shown

_MIB = 1 << 20


def quantize(
    format: Annotated[
        str,
        option(
            "--format",
            value=one_of(*WEIGHT_FORMATS),
            help="fp8, int8: one scale per weight row and per token of activations. -tensor, -block: one scale per weight, "
            "per block of 128 by 128. int4: one scale per group of columns, unquantised activations.",
        ),
    ],
    out: Annotated[Path, option("--out", value=DIRECTORY, help="Directory to create; it appears once it is complete.")],
    model: Annotated[
        Path | None,
        option(
            "--model",
            value=CHECKPOINT,
            help="Unquantised checkpoint of a model or of a draft head. Default: the bundled model.",
        ),
    ] = None,
    group: Annotated[
        int | None,
        option("--group", value=whole(1), help="For int4: columns that share a scale. Default: the format's."),
    ] = None,
    lm_head: Annotated[bool, option("--lm-head", help="Quantise the output head too.")] = False,
    json_output: JsonOption = False,
) -> CommandReport:
    """Write a checkpoint with quantised weights in the format of compressed-tensors. Runs on the host.

    Each weight is rounded to the nearest value, without calibration. Embeddings, norms, biases and routers stay unquantised.
    """
    from outrider.cli.terminal.torch_probe import require_torch

    del json_output
    require_torch()
    from outrider.device.kernels.weight_formats import weight_format
    from outrider.model.checkpoint.location import find_checkpoint
    from outrider.model.checkpoint.reading import read_json
    from outrider.model.config.checkpoint_config import supported_families
    from outrider.model.heads.eagle3_config import ENVELOPE
    from outrider.model.quantization.writing import quantize_checkpoint

    rounding = weight_format(format)
    if group is not None and not rounding.is_grouped:
        raise UsageError(f"--group is {group}, and {format} has no scales of groups; leave --group out, or take int4")
    source = bundled("target") if model is None else find_checkpoint(model)
    began = time.monotonic()
    with show_progress() as tell:
        written = quantize_checkpoint(
            source,
            out,
            format=format,
            group=group,
            head=lm_head,
            progress=lambda key, done, total: tell("quantising", done, total),
        )
    described = read_json(out / "config.json")
    layer = described.get(ENVELOPE)
    family = (layer if isinstance(layer, dict) else described).get("model_type")
    native = family in supported_families()
    data = {
        "model": str(source),
        "out": str(out),
        "format": format,
        "group": (group or rounding.columns) if rounding.is_grouped else None,
        "quantized": written.quantized,
        "plain": written.plain,
        "bytes_before": written.bytes_before,
        "bytes_after": written.bytes_after,
        "runs_here": native,
        "seconds": time.monotonic() - began,
    }

    return CommandReport(data=data, render=lambda console: _summary(console, data, family, supported_families()))


def _summary(console: Console, data: dict[str, Any], family: object, families: Sequence[str]) -> None:
    """Print the sizes before and after, and a note if this engine does not run the written checkpoint."""
    console.print(
        f"{data['out']}: {data['quantized']} weights in {data['format']}, {data['plain']} tensors as they were; "
        f"{data['bytes_before'] / _MIB:.1f} MiB before, {data['bytes_after'] / _MIB:.1f} now"
    )
    if not data["runs_here"]:
        console.print(
            f"It's for other engines: Outrider runs quantised weights of {', '.join(families)}, and this "
            f"model's type is {shown(family)}"
        )
