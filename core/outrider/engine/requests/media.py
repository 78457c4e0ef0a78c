"""The images and videos of a request: their places in its prompt, their positions, and until prefill their features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.errors import RequestError
from outrider.model import Media, VisionConfig, VisionTower, expand_placeholders, prompt_positions


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of the prompt, ``start`` inclusive to ``end`` exclusive, that stand for ``media``."""

    start: int
    end: int
    media: Media


class RequestMedia:
    """Media of one prompt, placeholders expanded. Host state, but for features between encoding and prefill.

    Features are made when a chunk first needs them and dropped once their last token is prefilled; a prompt that is
    prefilled again after a preemption has them made again. All of that is on the stream of the prefill.
    """

    def __init__(self, media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig) -> None:
        positions, self.mrope_position_delta = prompt_positions(prompt, [each.grid for each in media], vision)
        self.media = tuple(media)
        self._positions: list[list[int]] = positions.tolist()
        self._spans = _spans(media, prompt, vision)
        self._features: dict[int, Tensor] = {}

    def positions(self, axis: int, start: int, end: int) -> list[int]:
        """Positions of the tokens ``start`` to ``end`` on one axis. Those behind the prompt are text."""
        prompt = self._positions[axis]
        return prompt[start:end] + [index + self.mrope_position_delta for index in range(max(start, len(prompt)), end)]

    def digests(self, start: int, end: int) -> tuple[tuple[int, bytes], ...]:
        """Identifies the media behind the tokens ``start`` to ``end``: prompts with the same tokens may have other images."""
        return tuple((span.start, span.media.digest) for span in self._spans if span.start < end and start < span.end)

    def embed(self, tower: VisionTower, start: int, end: int, embeddings: Tensor, embedded: Tensor) -> None:
        """Write the features of the tokens ``start`` to ``end`` into their rows of ``embeddings`` [n, H], and mark these in
        ``embedded`` bool [n]. The tower may block the host: prompts with media only.
        """
        for index, span in enumerate(self._spans):
            first, last = max(span.start, start), min(span.end, end)
            if first >= last:
                continue
            if index not in self._features:
                # One at a time: what else is in the chunk must not change the last bits of an image.
                (self._features[index],) = tower.encode([span.media])
            embeddings[first - start : last - start] = self._features[index][first - span.start : last - span.start]
            embedded[first - start : last - start] = True
            if last == span.end:
                del self._features[index]


def expanded(tokens: Sequence[int], media: Sequence[Media], vision: VisionConfig | None) -> tuple[int, ...]:
    """``tokens`` with a placeholder for each feature; they may come so, or with one for each medium.

    Raises :class:`RequestError` where tokens and media don't match, or the model takes none.
    """
    if vision is None:
        if media:
            raise RequestError(f"{len(media)} images and videos were given, but the model takes text alone")
        return tuple(tokens)
    places = sum(token in (vision.image_token, vision.video_token) for token in tokens)
    if places > len(media) or not media:  # expanded already, or wrong, which the positions find
        return tuple(tokens)
    return tuple(expand_placeholders(tokens, media, vision))


def request_media(
    media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig | None, tower: VisionTower | None
) -> RequestMedia | None:
    """The media of a prompt; None for text alone. Raises :class:`RequestError` for placeholders without media, or media
    without a ``tower`` that sees them.
    """
    if vision is None:
        return None
    pictures = RequestMedia(media, prompt, vision)
    if not media:
        return None
    if tower is None:
        raise RequestError("this engine was built without a vision tower; use Engine.from_checkpoint, or pass vision")
    return pictures


def _spans(media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig) -> tuple[Span, ...]:
    spans: list[Span] = []
    index = 0
    for each in media:
        while prompt[index] not in (vision.image_token, vision.video_token):
            index += 1
        spans.append(Span(index, index + each.grid.features(vision), each))
        index = spans[-1].end
    return tuple(spans)
