"""Multimodal rotary positions on three axes (time, height, width), as in Qwen2-VL and its successors.

Text advances all three axes together, so text positions are ordinary positions plus a delta per sequence. The delta is the
difference between the positions and the tokens that earlier media take. Letters: n tokens of a prompt, T new tokens, B
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.model.config.model_config import VisionConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaGrid:
    """Extent of an image or a video in patches: temporal patches (``frames``), rows and columns."""

    kind: Literal["image", "video"]
    frames: int
    rows: int
    columns: int
    seconds_per_frame: float = 1.0
    """Time between temporal patches. Only models with ``tokens_per_second`` use it."""

    @property
    def patches(self) -> int:
        """Number of patches that the vision tower reads."""
        return self.frames * self.rows * self.columns

    def features(self, vision: VisionConfig) -> int:
        """Return the number of features that the vision tower computes, which is the number of placeholder tokens."""
        return self.patches // vision.merge**2

    def runs(self, vision: VisionConfig) -> tuple[MediaGrid, ...]:
        """Return the grids of consecutive placeholders: the temporal patches of a video with times as text, or the grid."""
        if self.kind == "image" or vision.frame_marks is None:
            return (self,)
        return (replace(self, frames=1),) * self.frames


def prompt_positions(tokens: Sequence[int], media: Sequence[MediaGrid], vision: VisionConfig) -> tuple[Tensor, int]:
    """Return the positions int64 [3, n] of a prompt, on the host, and the prompt's position delta.

    ``tokens`` hold one placeholder token per feature; ``media`` are in order of appearance. A token after the prompt, at
    index i, has position i + delta on every axis.

    The positions equal those of transformers' ``get_rope_index``, in which text continues after the larger side of a video,
    whatever the extent of its time axis. The delta equals that of ``generate``, which continues from the last token.
    ``get_rope_index`` returns another delta if the time axis of a video extends further.

    Raises :class:`RequestError` if placeholders and media don't match.
    """
    remaining = (run for grid in media for run in grid.runs(vision))
    parts: list[Tensor] = []
    start = index = 0
    while index < len(tokens):
        kind = _kind(tokens[index], vision)
        length = _run_length(tokens, index, vision)
        if kind is None:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
        else:
            grid = _next_grid(remaining, kind, length, vision)
            parts.append(_grid_positions(grid, start, vision))
            start += max(grid.rows, grid.columns) // vision.merge
        index += length
    if next(remaining, None) is not None:
        raise RequestError(f"{len(media)} images and videos were given, but the prompt has places for fewer")
    if not parts:
        return torch.empty(3, 0, dtype=torch.int64), 0
    positions = torch.cat(parts, dim=1)
    return positions, int(positions[:, -1].max()) + 1 - len(tokens)


def speculative_positions(positions: Tensor, mrope_position_deltas: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return positions int64 [3, T] of new text tokens, drafts included, from their indices and their sequences' deltas.

    ``positions`` int64 [T] are indices in the sequence (its length plus the depth in the draft tree), the same number for
    each sequence, sequence by sequence. ``mrope_position_deltas`` is int64 [B]. The result depends on these inputs only,
    never on an earlier result, so recomputing it after a join changes nothing. ``out`` [3, T], if given, is written in place:
    a static buffer of a graph.
    """
    each = mrope_position_deltas.unsqueeze(1).expand(-1, positions.shape[0] // mrope_position_deltas.shape[0]).flatten()
    shifted = (positions + each).expand(3, -1)
    return shifted.contiguous() if out is None else out.copy_(shifted)


def _kind(token: int, vision: VisionConfig) -> Literal["image", "video"] | None:
    return "image" if token == vision.image_token else "video" if token == vision.video_token else None


def _run_length(tokens: Sequence[int], begin: int, vision: VisionConfig) -> int:
    """Return the number of consecutive tokens from index ``begin`` on that are of one kind: text, image or video."""
    kind = _kind(tokens[begin], vision)
    end = begin
    while end < len(tokens) and _kind(tokens[end], vision) == kind:
        end += 1
    return end - begin


def _next_grid(remaining: Iterator[MediaGrid], kind: str, length: int, vision: VisionConfig) -> MediaGrid:
    grid = next(remaining, None)
    if grid is None:
        raise RequestError(f"the prompt has a place for one more {kind} than were given")
    if grid.kind != kind or grid.features(vision) != length:
        raise RequestError(
            f"the prompt has {length} {kind} tokens in a row, but what was given next is a {grid.kind} of "
            f"{grid.features(vision)} features"
        )
    return grid


def _grid_positions(grid: MediaGrid, start: int, vision: VisionConfig) -> Tensor:
    """Return positions [3, features] of a grid whose first feature is at ``start`` on each axis."""
    spacing = 1.0
    if grid.kind == "video" and vision.tokens_per_second:
        spacing = vision.tokens_per_second * grid.seconds_per_frame
    time = (torch.arange(grid.frames) * spacing).long() + start
    rows = torch.arange(grid.rows // vision.merge) + start
    columns = torch.arange(grid.columns // vision.merge) + start
    return torch.stack(torch.meshgrid(time, rows, columns, indexing="ij")).reshape(3, -1)
