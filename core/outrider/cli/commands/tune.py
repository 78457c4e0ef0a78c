"""``outrider tune``: measure kernel candidates for a model on this machine, and store the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from outrider.bundled import bundled
from outrider.cli.options.models import ModelOption
from outrider.cli.options.option_values import DIRECTORY, SHAPE, BackendOption, JsonOption, UsageError, number, option
from outrider.cli.terminal.environment import backend_from_environment, plugin_probe, tuned_directory
from outrider.cli.terminal.files import check_directory
from outrider.cli.terminal.report import CommandReport, Interrupted
from outrider.cli.terminal.starting import show_progress
from outrider.device.errors import CapabilityError, ConfigError
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.device import DecoderShape, TuningResult


def tune(
    backend: BackendOption = None,
    model: ModelOption = None,
    shape: Annotated[
        list[str] | None,
        option(
            "--shape",
            value=SHAPE,
            help="Instead of a checkpoint: a published shape, NAME/RANKS for one rank's shard of it, or a config. "
            "Repeatable; all shapes share the deadline.",
        ),
    ] = None,
    deadline: Annotated[float, option("--deadline", value=number(1), help="Seconds after which measuring ends.")] = 60.0,
    cache: Annotated[
        Path | None,
        option(
            "--cache", value=DIRECTORY, help="Directory of the tuned choices. Default: outrider/tuned in the user's cache."
        ),
    ] = None,
    json_output: JsonOption = False,
) -> CommandReport:
    """Measure kernel candidates for a model on this device in bfloat16, and store each choice at once.

    An engine loads the stored choices if it starts on such a device with the same torch, Triton and kernels. Choices that
    weren't measured are derived from the device's properties. Ctrl-C keeps the choices that were made until then.
    """
    from outrider.cli.terminal.torch_probe import require_torch

    del json_output
    if model is not None and shape:
        raise UsageError("--model and --shape both say what to tune for; give one of them")
    require_torch()
    directory = cache or tuned_directory()
    if directory is None:
        raise ConfigError("there is no home directory to keep tuned choices in; name one with --cache")
    from outrider.model.checkpoint.location import find_checkpoint

    names = shape or [str(bundled("target") if model is None else find_checkpoint(model))]
    shapes = [_shape(name) for name in names]
    registry = Registry(probe=plugin_probe())
    device = registry.create(registry.select(backend, backend_from_environment()))
    kernels = device.kernels_in_use
    if not kernels.tunes:
        raise CapabilityError(
            f"the kernels of {device.label}, {kernels.name!r}, don't tune; choose a backend or kernels that do: --backend"
        )
    check_directory("--cache", directory)
    data: dict[str, Any] = {
        "backend": device.name,
        "device": str(device.device),
        "versions": dict(device.versions()),
        "directory": str(directory),
        "deadline_s": deadline,
        "before": kernels.use_tuned(directory),
    }
    said: list[str] = []
    try:
        with show_progress() as tell:

            def progress(done: int, total: int, text: str) -> None:
                said.append(text)
                tell("tuning kernels", done, total)

            results = kernels.tune(shapes, deadline_s=deadline, directory=directory, progress=progress)
    except KeyboardInterrupt as error:
        kept = kernels.use_tuned(directory)
        message = f"interrupted; {directory} has {kept} choices for this device, {data['before']} of them from before"
        raise Interrupted(message, {**data, "kept": kept, "said": said}) from error
    data["results"] = [_result(name, result) for name, result in zip(names, results, strict=True)]
    data["said"] = said
    return CommandReport(data=data, render=lambda console: _render(console, data))


def _shape(name: str) -> DecoderShape:
    import torch

    from outrider.model.config.shapes import decoder_shape, shape_config

    return decoder_shape(shape_config(name), torch.bfloat16)


def _result(name: str, result: TuningResult) -> dict[str, object]:
    return {
        "shape": name,
        "measured": result.measured,
        "kept": result.kept,
        "complete": result.complete,
        "seconds": result.seconds,
        "before_us": result.before_us,
        "after_us": result.after_us,
    }


def _render(console: Console, data: Mapping[str, Any]) -> None:
    for result in data["results"]:
        end = "" if result["complete"] else ", the deadline came first"
        console.print(
            f"{result['shape']}: {result['measured']} measurements in {result['seconds']:.0f} s{end}; {result['kept']} "
            f"choices kept; layers {result['before_us']:.0f} us before, {result['after_us']:.0f} now"
        )
    console.print(f"kept in {data['directory']}")
