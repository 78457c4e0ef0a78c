"""Cosines and sines of the positions of a forward pass. Letters: T new tokens, D rotated
dimensions of a head, P positions of the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.model.config.rope import RopeConfig, inverse_frequencies, long_frequencies

DRAFT_MARGIN = 256
"""Table positions beyond the context. Drafts past the end are never accepted, but must be finite and inside the table."""
_MAX_TABLE_BYTES = 512 << 20  # a context of a million positions with heads of 128 in bfloat16 fits
_ROWS_PER_CHUNK = 1 << 16  # table rows that are computed at once


class Rotary(ABC):
    """Rotary angles of one model. Enqueues on the current stream, supports capture, and reads nothing on the host."""

    @abstractmethod
    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, D] of int64 ``positions`` [T] (or [3, T]); see :class:`ForwardInput`."""


def make_rotary(
    rope: RopeConfig, head_size: int, positions: int, *, kernels: KernelSet, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Return the angles of ``rope`` for positions below ``positions``, with results in ``dtype`` on ``device``."""
    if rope.sections:
        return _MropeRotary(rope, head_size, dtype, device)
    if rope.depends_on_length:
        kind = _DynamicRotary if rope.kind == "dynamic" else _LongRotary
        return kind(rope, head_size, dtype, device)
    rows = positions + DRAFT_MARGIN
    if rows * 2 * rope.rotated_size(head_size) * dtype.itemsize > _MAX_TABLE_BYTES:
        return _OnTheFlyRotary(rope, head_size, dtype, device)
    return _TableRotary(rope, head_size, rows, kernels, dtype, device)


class _TableRotary(Rotary):
    """Rotary angles of every position, computed once in float32 and stored in the model's dtype."""

    def __init__(
        self, rope: RopeConfig, head_size: int, rows: int, kernels: KernelSet, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kernels = kernels
        frequencies = inverse_frequencies(rope, head_size)
        table = torch.empty(rows, 4 * frequencies.shape[0], dtype=dtype)
        for begin in range(0, rows, _ROWS_PER_CHUNK):
            positions = torch.arange(begin, min(begin + _ROWS_PER_CHUNK, rows), dtype=torch.float32)
            # Cosines and sines are side by side, so that one gather reads both.
            cos_sin = _cos_sin(positions.unsqueeze(1) * frequencies, rope.amplitude, dtype)
            torch.cat(cos_sin, dim=1, out=table[begin : begin + _ROWS_PER_CHUNK])
        self._cos_sin = table.to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        del prompt_lens
        cos, sin = self._kernels.gather_rows(self._cos_sin, positions).chunk(2, dim=1)
        return cos, sin


class _OnTheFlyRotary(Rotary):
    """Rotary angles computed in float32 for each forward, for a context whose table would be too large."""

    def __init__(self, rope: RopeConfig, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._amplitude, self._dtype = rope.amplitude, dtype
        self._frequencies = inverse_frequencies(rope, head_size).to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        del prompt_lens
        return _cos_sin(positions.to(torch.float32).unsqueeze(1) * self._frequencies, self._amplitude, self._dtype)


class _MropeRotary(Rotary):
    """Multimodal rope: each frequency uses the position on its own axis.

    There is no table, because a video's time axis isn't bounded by the number of tokens.
    """

    def __init__(self, rope: RopeConfig, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._amplitude, self._dtype = rope.amplitude, dtype
        self._frequencies = inverse_frequencies(rope, head_size).to(device)
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections))
        if rope.interleaved:
            axis.zero_()
            for index in (1, 2):
                axis[index : 3 * rope.sections[index] : 3] = index
        self._axis = axis.to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        del prompt_lens
        axis_positions = positions.index_select(0, self._axis).t()  # [T, D/2]
        return _cos_sin(axis_positions.to(torch.float32) * self._frequencies, self._amplitude, self._dtype)


class _DynamicRotary(Rotary):
    """Rotary angles with dynamic NTK scaling: past the original context the base grows with the sequence."""

    def __init__(self, rope: RopeConfig, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._dtype = rope, dtype
        head_size = rope.rotated_size(head_size)
        self._power = head_size / (head_size - 2)
        self._exponent = (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size).to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        rope = self._rope
        lens = positions + 1 if prompt_lens is None else torch.maximum(positions + 1, prompt_lens)
        lens = lens.clamp(min=rope.original_context).unsqueeze(1).to(torch.float32)  # [T, 1]
        base = rope.theta * (rope.factor * lens / rope.original_context - (rope.factor - 1)) ** self._power
        angles = positions.unsqueeze(1).to(torch.float32) * (1.0 / base**self._exponent)
        return _cos_sin(angles, rope.amplitude, self._dtype)


class _LongRotary(Rotary):
    """Rotary angles of longrope: past the original context the frequencies have other factors."""

    def __init__(self, rope: RopeConfig, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._dtype = rope, dtype
        self._short = inverse_frequencies(rope, head_size).to(device)
        self._long = long_frequencies(rope, head_size).to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        lens = positions + 1 if prompt_lens is None else torch.maximum(positions + 1, prompt_lens)
        is_long = (lens > self._rope.original_context).unsqueeze(1)
        angles = positions.unsqueeze(1).to(torch.float32) * torch.where(is_long, self._long, self._short)
        return _cos_sin(angles, self._rope.amplitude, self._dtype)


def _cos_sin(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, D] of float32 ``angles`` [T, D/2]. Both halves of a head rotate by the same angles."""
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)
