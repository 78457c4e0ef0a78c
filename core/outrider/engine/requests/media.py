"""RequestMedia: the images and videos of a request, their token spans, their positions, and their features until prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.errors import RequestError
from outrider.model import Media, VisionConfig, VisionTower, expand_placeholders, prompt_positions


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The placeholder tokens of ``media`` in the prompt, ``start`` inclusive to ``end`` exclusive."""

    start: int
    end: int
    media: Media


class RequestMedia:
    """The media of one prompt whose placeholders are expanded.

    The first prefill chunk that needs the features of a medium computes them on the prefill stream. The chunk with the
    medium's last token drops them. A prefill after a preemption computes them again.
    """

    def __init__(self, media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig) -> None:
        positions, self.mrope_position_delta = prompt_positions(prompt, [each.grid for each in media], vision)
        self.media = tuple(media)
        self._positions: list[list[int]] = positions.tolist()
        self._spans = _spans(media, prompt, vision)
        self._features: dict[int, Tensor] = {}

    def positions(self, axis: int, start: int, end: int) -> list[int]:
        """Return the positions of the tokens ``start`` to ``end`` on one axis. Tokens after the prompt count as text."""
        prompt = self._positions[axis]
        return prompt[start:end] + [index + self.mrope_position_delta for index in range(max(start, len(prompt)), end)]

    def digests(self, start: int, end: int) -> tuple[tuple[int, bytes], ...]:
        """Return (first token, digest) of each medium in the tokens ``start`` to ``end``, to tell apart equal tokens."""
        return tuple((span.start, span.media.digest) for span in self._spans if span.start < end and start < span.end)

    def embed(self, tower: VisionTower, start: int, end: int, embeddings: Tensor, embedded: Tensor) -> None:
        """Write the features of the media tokens among ``start`` to ``end`` into their rows of ``embeddings`` [n, H].

        Sets ``embedded`` bool [n] to True for these rows. The tower may block the host.
        """
        for index, span in enumerate(self._spans):
            first, last = max(span.start, start), min(span.end, end)
            if first >= last:
                continue
            if index not in self._features:
                # Encode one medium per call: a batch with other media could change the last bits of its features.
                (self._features[index],) = tower.encode([span.media])
            embeddings[first - start : last - start] = self._features[index][first - span.start : last - span.start]
            embedded[first - start : last - start] = True
            if last == span.end:
                del self._features[index]


def expand_prompt(tokens: Sequence[int], media: Sequence[Media], vision: VisionConfig | None) -> tuple[int, ...]:
    """Return ``tokens`` with one placeholder for each feature. The input has one for each feature or for each medium.

    Raises :class:`RequestError` if tokens and media don't match, or if the model has no vision part.
    """
    if vision is None:
        if media:
            raise RequestError(f"{len(media)} images and videos were given, but the model takes text alone")
        return tuple(tokens)
    placeholders = sum(token in (vision.image_token, vision.video_token) for token in tokens)
    if placeholders > len(media) or not media:  # already expanded, or wrong: RequestMedia raises for wrong placeholders
        return tuple(tokens)
    return tuple(expand_placeholders(tokens, media, vision))


def request_media(
    media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig | None, tower: VisionTower | None
) -> RequestMedia | None:
    """Return the media of a prompt, or None for a text prompt.

    Raises :class:`RequestError` for placeholders without media, and for media if there is no vision ``tower``.
    """
    if vision is None:
        return None
    prompt_media = RequestMedia(media, prompt, vision)
    if not media:
        return None
    if tower is None:
        raise RequestError("this engine was built without a vision tower; use Engine.from_checkpoint, or pass vision")
    return prompt_media


def _spans(media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig) -> tuple[MediaSpan, ...]:
    spans: list[MediaSpan] = []
    index = 0
    for each in media:
        while prompt[index] not in (vision.image_token, vision.video_token):
            index += 1
        spans.append(MediaSpan(index, index + each.grid.features(vision), each))
        index = spans[-1].end
    return tuple(spans)
