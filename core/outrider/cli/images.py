"""Images on the command line: read, prepared for the checkpoint's tower, and given their places in the prompt."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.inputs import read_bounded
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.model import Media, Tokenizer

ImageOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="An image for a vision-language model; may be given several times. It goes where the prompt says "
        "<|image_pad|>, or before the text.",
    ),
]

_BEFORE, _BEHIND = "<|vision_start|>", "<|vision_end|>"
"""What Qwen's models expect around an image."""
_MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as the engine takes it."""

    tokens: Sequence[int]
    media: Sequence[Media] = ()

    @classmethod
    def ask(cls, engine: Engine, text: str | Sequence[int], model: Path, images: Sequence[Path]) -> Question:
        """Encode the text, unless it's token ids already; read the images.

        Raises :class:`RequestError` for what isn't an image, or has no place, and for a text without a tokenizer.
        """
        if not isinstance(text, str):
            tokens = list(text)
        elif engine.has_tokenizer:
            tokens = engine.tokenizer.encode(text)
        else:
            raise RequestError(f"{model} has no tokenizer; give the prompt as --token-ids, and token ids come back")
        vision = engine.model.config.vision
        if not images:
            return cls(tokens)
        if vision is None:
            raise RequestError(f"--image was given, but {model} is a checkpoint of a model of text alone")
        from outrider.model import MediaProcessor

        processor = MediaProcessor.from_checkpoint(model)
        media = [processor.image(_read(path)) for path in images]
        if vision.image_token not in tokens and engine.has_tokenizer:
            tokens = _placed(engine.tokenizer, tokens, vision.image_token, len(images), engine.model.config.bos_token_id)
        return cls(tokens, media)


def _placed(tokenizer: Tokenizer, tokens: list[int], image_token: int, count: int, start: int | None) -> list[int]:
    """``tokens`` with places for ``count`` images before the text, behind the start token."""
    around = [[token] if (token := tokenizer.token_id(name)) is not None else [] for name in (_BEFORE, _BEHIND)]
    begin = 1 if tokens[:1] == [start] else 0
    return [*tokens[:begin], *[*around[0], image_token, *around[1]] * count, *tokens[begin:]]


def _read(path: Path) -> object:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read_bounded(path, "an image", _MOST_BYTES))) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"{path}: can't be read as an image: {error}") from error
