"""Prompts with images: image files are read, prepared for the vision tower, and placed among the tokens of the prompt."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.cli.options.option_values import INPUT_FILE, option
from outrider.cli.terminal.inputs import read_bounded
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.model import Media, Tokenizer

ImageOption = Annotated[
    list[Path] | None,
    option(
        "--image",
        value=INPUT_FILE,
        help="Image for a vision-language model. Repeatable. It replaces <|image_pad|> in the prompt, or precedes the text.",
    ),
]

_IMAGE_START, _IMAGE_END = "<|vision_start|>", "<|vision_end|>"
"""Tokens that Qwen's models expect around an image."""
_MAX_IMAGE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in the form that the engine takes: token ids, and the media that belong to placeholders among them."""

    tokens: Sequence[int]
    media: Sequence[Media] = ()

    @classmethod
    def encode(cls, engine: Engine, text: str | Sequence[int], model: Path, images: Sequence[Path]) -> EncodedPrompt:
        """Encode the text, unless it's token ids already, and read the images.

        Raises :class:`RequestError` for a file that isn't an image, for an image without a placeholder, and for a text if the
        checkpoint has no tokenizer.
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
        media = [processor.image(_read_image(path)) for path in images]
        if vision.image_token not in tokens and engine.has_tokenizer:
            tokens = _with_image_placeholders(
                engine.tokenizer, tokens, vision.image_token, len(images), engine.model.config.bos_token_id
            )
        return cls(tokens, media)


def _with_image_placeholders(
    tokenizer: Tokenizer, tokens: list[int], image_token: int, count: int, start: int | None
) -> list[int]:
    """Return ``tokens`` with placeholders for ``count`` images after the start token and before the text."""
    around = [[token] if (token := tokenizer.token_id(name)) is not None else [] for name in (_IMAGE_START, _IMAGE_END)]
    begin = 1 if tokens[:1] == [start] else 0
    return [*tokens[:begin], *[*around[0], image_token, *around[1]] * count, *tokens[begin:]]


def _read_image(path: Path) -> object:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read_bounded(path, "an image", _MAX_IMAGE_BYTES))) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"{path}: can't be read as an image: {error}") from error
