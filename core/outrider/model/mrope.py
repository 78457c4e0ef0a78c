"""Positions on three axes (time, height, width), as Qwen2-VL and Qwen2.5-VL take them.

Text advances all three together, so that on text they're plain positions, shifted by a delta of the sequence: the
images before it took fewer positions than tokens. Letters: n tokens of a prompt, T new tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.model.config import VisionConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaGrid:
    """Extent of an image or a video in patches: frames (temporal patches), rows and columns.

    ``seconds_per_frame`` is the time between temporal patches; only a model with ``tokens_per_second`` uses it.
    """

    kind: Literal["image", "video"]
    frames: int
    rows: int
    columns: int
    seconds_per_frame: float = 1.0

    @property
    def patches(self) -> int:
        """Patches that the vision tower reads."""
        return self.frames * self.rows * self.columns

    def features(self, vision: VisionConfig) -> int:
        """Features that the vision tower makes of it: so many tokens stand for it."""
        return self.patches // vision.merge**2


def prompt_positions(tokens: Sequence[int], media: Sequence[MediaGrid], vision: VisionConfig) -> tuple[Tensor, int]:
    """Positions int64 [3, n] of a prompt, on the host, and its delta.

    ``tokens`` hold each feature's placeholder token; ``media`` are in order of appearance. A token after the prompt, at
    index i, has position i + delta on every axis.

    The positions are those of transformers' ``get_rope_index``, which lets text go on after the larger side of a video,
    whatever its time axis took. The delta is that of ``generate``, which goes on from the last token;
    ``get_rope_index`` returns another one where a video's time axis went further than that.

    Raises :class:`RequestError` when placeholders and media don't match.
    """
    waiting = iter(media)
    parts: list[Tensor] = []
    start = index = 0
    while index < len(tokens):
        kind = _kind(tokens[index], vision)
        length = _run(tokens, index, vision)
        if kind is None:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
        else:
            grid = _next_grid(waiting, kind, length, vision)
            parts.append(_grid_positions(grid, start, vision))
            start += max(grid.rows, grid.columns) // vision.merge
        index += length
    if next(waiting, None) is not None:
        raise RequestError(f"{len(media)} images and videos were given, but the prompt has places for fewer")
    if not parts:
        return torch.empty(3, 0, dtype=torch.int64), 0
    positions = torch.cat(parts, dim=1)
    return positions, int(positions[:, -1].max()) + 1 - len(tokens)


def speculative_positions(positions: Tensor, mrope_position_deltas: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Positions int64 [3, T] of new text tokens, drafts included, from their indices and their sequences' deltas.

    ``positions`` int64 [T] are indices in the sequence (its length plus the depth in the draft tree), equally many of each
    sequence, one sequence after the other; ``mrope_position_deltas`` int64 [B]. Always from these sources, never from an
    earlier result, so that computing it again after a join changes nothing. ``out`` [3, T] is written in place, for a
    static buffer of a graph.
    """
    each = mrope_position_deltas.unsqueeze(1).expand(-1, positions.shape[0] // mrope_position_deltas.shape[0]).flatten()
    shifted = (positions + each).expand(3, -1)
    return shifted.contiguous() if out is None else out.copy_(shifted)


def _kind(token: int, vision: VisionConfig) -> Literal["image", "video"] | None:
    return "image" if token == vision.image_token else "video" if token == vision.video_token else None


def _run(tokens: Sequence[int], begin: int, vision: VisionConfig) -> int:
    """Tokens of one kind from ``begin`` on."""
    kind = _kind(tokens[begin], vision)
    end = begin
    while end < len(tokens) and _kind(tokens[end], vision) == kind:
        end += 1
    return end - begin


def _next_grid(waiting: Iterator[MediaGrid], kind: str, length: int, vision: VisionConfig) -> MediaGrid:
    grid = next(waiting, None)
    if grid is None:
        raise RequestError(f"the prompt has a place for one more {kind} than were given")
    if grid.kind != kind or grid.features(vision) != length:
        raise RequestError(
            f"the prompt has {length} {kind} tokens in a row, but what was given next is a {grid.kind} of "
            f"{grid.features(vision)} features"
        )
    return grid


def _grid_positions(grid: MediaGrid, start: int, vision: VisionConfig) -> Tensor:
    """Positions [3, features] of a grid whose first feature is at ``start`` on each axis."""
    spacing = 1.0
    if grid.kind == "video" and vision.tokens_per_second:
        spacing = vision.tokens_per_second * grid.seconds_per_frame
    time = (torch.arange(grid.frames) * spacing).long() + start
    rows = torch.arange(grid.rows // vision.merge) + start
    columns = torch.arange(grid.columns // vision.merge) + start
    return torch.stack(torch.meshgrid(time, rows, columns, indexing="ij")).reshape(3, -1)
