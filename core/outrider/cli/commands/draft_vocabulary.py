"""``outrider draft-vocabulary``: a draft vocabulary of the most frequent tokens of a text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.bundled import bundled
from outrider.cli.options.models import ModelOption
from outrider.cli.options.option_values import JsonOption, checking_options, option, output_file, whole
from outrider.cli.terminal.files import write_whole
from outrider.cli.terminal.report import CommandReport
from outrider.cli.terminal.starting import show_progress
from outrider.device.errors import ConfigError

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
    json_output: JsonOption = False,
) -> CommandReport:
    """Count a model's tokens in text, and write a list of the most frequent ones, for --draft-vocabulary.

    The list always has the tokens that end a text. The report gives its share of the text's tokens; its share of other
    text is lower.
    """
    from outrider.cli.terminal.torch_probe import require_torch

    del json_output
    with checking_options():
        sizes = [_bytes_of(path) for path in texts]
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
