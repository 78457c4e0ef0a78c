"""Cosines and sines of the positions of a forward pass. Letters: T new tokens, D rotated
dimensions of a head, P positions of the table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.model.config.rope import RopeConfig, inverse_frequencies, long_frequencies

DRAFT_MARGIN = 256
"""Table positions beyond the context. Drafts past the end are never accepted, but must be finite and inside the table."""
_MAX_TABLE_BYTES = 512 << 20  # a context of a million positions with heads of 128 in bfloat16 fits
_ROWS_PER_CHUNK = 1 << 16  # table rows that are computed at once

_Angles = Callable[[Tensor, Tensor | None], Tensor]
"""Function from int64 positions [T] (or [3, T]) and prompt lengths [T] (or None) to the float32 angles [T, D/2]."""


Rotary = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Function from int64 positions [T] (or [3, T]) and prompt lengths [T] (or None) to cosines and sines [T, D].

It enqueues on the current stream, supports capture, and reads nothing on the host.
"""


def make_rotary(
    rope: RopeConfig, head_size: int, positions: int, *, kernels: KernelSet, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Return the angles of ``rope`` for positions below ``positions``, with results in ``dtype`` on ``device``.

    A table has the angles of all positions, unless it would be too large or the angles depend on more than one position.
    """
    rows = positions + DRAFT_MARGIN
    if rope.sections:
        angles = _angles_by_axis(rope, head_size, device)
    elif rope.kind == "dynamic":
        angles = _dynamic_angles(rope, head_size, device)
    elif rope.kind == "longrope":
        angles = _long_angles(rope, head_size, device)
    elif rows * 2 * rope.rotated_size(head_size) * dtype.itemsize > _MAX_TABLE_BYTES:
        angles = _angles(rope, head_size, device)
    else:
        return _table_rotary(rope, head_size, rows, kernels, dtype, device)
    return lambda positions, prompt_lens: _cos_sin(angles(positions, prompt_lens), rope.amplitude, dtype)


def _table_rotary(
    rope: RopeConfig, head_size: int, rows: int, kernels: KernelSet, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Return the function that looks up angles, computed once in float32 for every position and stored in ``dtype``."""
    frequencies = inverse_frequencies(rope, head_size)
    table = torch.empty(rows, 4 * frequencies.shape[0], dtype=dtype)
    for begin in range(0, rows, _ROWS_PER_CHUNK):
        positions = torch.arange(begin, min(begin + _ROWS_PER_CHUNK, rows), dtype=torch.float32)
        cos, sin = _half_cos_sin(positions.unsqueeze(1) * frequencies, rope.amplitude, dtype)
        # Cosines and sines are side by side, so that one gather reads both.
        torch.cat((cos, cos, sin, sin), dim=1, out=table[begin : begin + _ROWS_PER_CHUNK])
    on_device = table.to(device)

    def gather(positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        del prompt_lens
        cos, sin = kernels.gather_rows(on_device, positions).chunk(2, dim=1)
        return cos, sin

    return gather


def _angles(rope: RopeConfig, head_size: int, device: torch.device) -> _Angles:
    frequencies = inverse_frequencies(rope, head_size).to(device)
    return lambda positions, prompt_lens: positions.to(torch.float32).unsqueeze(1) * frequencies


def _angles_by_axis(rope: RopeConfig, head_size: int, device: torch.device) -> _Angles:
    """Return the angles of multimodal rope: each frequency uses the position on its own axis.

    There is no table, because a video's time axis isn't bounded by the number of tokens.
    """
    frequencies = inverse_frequencies(rope, head_size).to(device)
    axis = torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections))
    if rope.interleaved:
        axis.zero_()
        for index in (1, 2):
            axis[index : 3 * rope.sections[index] : 3] = index
    axis = axis.to(device)
    return lambda positions, prompt_lens: positions.index_select(0, axis).t().to(torch.float32) * frequencies


def _dynamic_angles(rope: RopeConfig, head_size: int, device: torch.device) -> _Angles:
    """Return the angles of dynamic NTK scaling: past the original context the base grows with the sequence."""
    size = rope.rotated_size(head_size)
    power = size / (size - 2)
    exponent = (torch.arange(0, size, 2, dtype=torch.float32) / size).to(device)

    def angles(positions: Tensor, prompt_lens: Tensor | None) -> Tensor:
        lens = _sequence_lens(positions, prompt_lens).clamp(min=rope.original_context).unsqueeze(1).to(torch.float32)
        base = rope.theta * (rope.factor * lens / rope.original_context - (rope.factor - 1)) ** power
        return positions.unsqueeze(1).to(torch.float32) * (1.0 / base**exponent)

    return angles


def _long_angles(rope: RopeConfig, head_size: int, device: torch.device) -> _Angles:
    """Return the angles of longrope: past the original context the frequencies have other factors."""
    short, long = inverse_frequencies(rope, head_size).to(device), long_frequencies(rope, head_size).to(device)

    def angles(positions: Tensor, prompt_lens: Tensor | None) -> Tensor:
        is_long = (_sequence_lens(positions, prompt_lens) > rope.original_context).unsqueeze(1)
        return positions.unsqueeze(1).to(torch.float32) * torch.where(is_long, long, short)

    return angles


def _sequence_lens(positions: Tensor, prompt_lens: Tensor | None) -> Tensor:
    """Return the number of tokens int64 [T] that decides the angles of each token: up to itself, and all of its prompt."""
    return positions + 1 if prompt_lens is None else torch.maximum(positions + 1, prompt_lens)


def _cos_sin(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, D] of float32 ``angles`` [T, D/2]. Both halves of a head rotate by the same angles."""
    return _half_cos_sin(torch.cat((angles, angles), dim=-1), amplitude, dtype)


def _half_cos_sin(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and the sine of each angle."""
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)
