"""Commands that prepare a model: ``outrider quantize``, ``outrider draft-vocabulary`` and ``outrider tune``."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.bundled import bundled
from outrider.cli.options.models import ModelOption
from outrider.cli.options.option_values import (
    CHECKPOINT,
    DIRECTORY,
    SHAPE,
    WEIGHT_FORMATS,
    BackendOption,
    UsageError,
    checking_options,
    number,
    one_of,
    option,
    output_file,
    whole,
)
from outrider.cli.terminal.environment import open_backend, tuned_directory
from outrider.cli.terminal.files import check_directory, check_distinct, write_whole
from outrider.cli.terminal.report import CommandReport, Interrupted, show_progress
from outrider.cli.terminal.torch_probe import require_torch
from outrider.device.errors import CapabilityError, ConfigError
from outrider.errors import shown

if TYPE_CHECKING:
    from outrider.device import DecoderShape, TuningResult


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
) -> CommandReport:
    """Write a checkpoint with quantised weights in the format of compressed-tensors. Runs on the host.

    Each weight is rounded to the nearest value, without calibration. Embeddings, norms, biases and routers stay unquantised.
    """
    require_torch()
    from outrider.device.kernels.weight_formats import weight_format
    from outrider.model.checkpoint.files import read_json
    from outrider.model.checkpoint.location import find_checkpoint
    from outrider.model.config.checkpoint_config import supported_families
    from outrider.model.heads.draft_head import ENVELOPE
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

    return CommandReport(data=data, render=lambda console: _quantization_summary(console, data, family, supported_families()))


def _quantization_summary(console: Console, data: dict[str, Any], family: object, families: Sequence[str]) -> None:
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


_PIECE_CHARACTERS = 1 << 16  # encoded at once, and the remainder of their last line


def draft_vocabulary(
    texts: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="Files of text like the model's output, in UTF-8.", show_default=False),
    ],
    size: Annotated[int, option("--size", value=whole(1), help="Maximum number of tokens, such as 32768 of 128,000.")],
    out: Annotated[
        Path,
        option("--out", value=output_file(".json"), help="File for the list, most frequent token first."),
    ],
    model: ModelOption = None,
) -> CommandReport:
    """Count a model's tokens in text, and write a list of the most frequent ones, for --draft-vocabulary.

    The list always has the tokens that end a text. The report gives its share of the text's tokens; its share of other
    text is lower.
    """
    with checking_options():
        sizes = [_bytes_of(path) for path in texts]
        check_distinct("--out", out, texts)
    require_torch()
    from outrider.model import Tokenizer
    from outrider.model.checkpoint.location import find_checkpoint
    from outrider.model.config.checkpoint_config import read_model_config

    directory = bundled("target") if model is None else find_checkpoint(model)
    config, tokenizer = read_model_config(directory), Tokenizer.from_checkpoint(directory)
    counts: Counter[int] = Counter()
    done = 0
    with show_progress() as tell:
        for path, num_bytes in zip(texts, sizes, strict=True):
            for piece in _pieces(path):
                counts.update(tokenizer.encode(piece, special_tokens=False))
                tell("counting", min(done + len(piece), sum(sizes)), sum(sizes))
            done += num_bytes
    total = counts.total()
    if not total:
        raise ConfigError(f"there is no token in {', '.join(map(str, texts))}; expected text such as the model writes")
    ends = [token for token in config.eos_token_ids if token < config.vocab_size]
    kept = list(dict.fromkeys([*ends, *(token for token, _ in counts.most_common() if token < config.vocab_size)]))[:size]
    write_whole(out, json.dumps(kept) + "\n")
    share = sum(counts[token] for token in kept) / total
    data = {
        "model": str(directory),
        "out": str(out),
        "tokens": len(kept),
        "vocabulary": config.vocab_size,
        "counted": total,
        "different": len(counts),
        "share": share,
    }

    def render(console: Console) -> None:
        console.print(
            f"{out}: {len(kept)} of {config.vocab_size} tokens, {share:.2%} of the {total} that the text has "
            f"({len(counts)} different ones)"
        )

    return CommandReport(data=data, render=render)


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); expected a file of text") from None


def _pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces that end at line ends."""
    try:
        with path.open(encoding="utf-8") as file:
            while piece := file.read(_PIECE_CHARACTERS):
                yield piece + file.readline()
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); expected a file of text") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} isn't text in UTF-8 ({error.reason} at byte {error.start}); expected such a file"
        ) from None


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
) -> CommandReport:
    """Measure kernel candidates for a model on this device in bfloat16, and store each choice at once.

    An engine loads the stored choices if it starts on such a device with the same torch, Triton and kernels. Choices that
    weren't measured are derived from the device's properties. Ctrl-C keeps the choices that were made until then.
    """
    if model is not None and shape:
        raise UsageError("--model and --shape both say what to tune for; give one of them")
    require_torch()
    directory = cache or tuned_directory()
    if directory is None:
        raise ConfigError("there is no home directory to keep tuned choices in; name one with --cache")
    from outrider.model.checkpoint.location import find_checkpoint

    names = shape or [str(bundled("target") if model is None else find_checkpoint(model))]
    shapes = [_shape(name) for name in names]
    device = open_backend(backend)
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
    return CommandReport(data=data, render=lambda console: _tuning_summary(console, data))


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


def _tuning_summary(console: Console, data: Mapping[str, Any]) -> None:
    for result in data["results"]:
        end = "" if result["complete"] else ", the deadline came first"
        console.print(
            f"{result['shape']}: {result['measured']} measurements in {result['seconds']:.0f} s{end}; {result['kept']} "
            f"choices kept; layers {result['before_us']:.0f} us before, {result['after_us']:.0f} now"
        )
    console.print(f"kept in {data['directory']}")
