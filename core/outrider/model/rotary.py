"""Cosines and sines of a forward's positions. Letters: T new tokens, D head size, P positions of the table."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.model.rope import RopeConfig, inverse_frequencies

# Drafts may run past the end of the context. What they compute there is never accepted, but it must be finite, and a
# gather must not leave the table.
DRAFT_MARGIN = 256
# Bytes of a table: a context of a million with heads of 128 in bfloat16 fits. A config that promises more gets none.
_TABLE_LIMIT = 512 << 20
_CHUNK = 1 << 16  # rows of a table that are computed at once


class Rotary(ABC):
    """Angles of one model. Enqueues on the ambient stream, may be captured, reads nothing on the host."""

    @abstractmethod
    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D] of int64 ``positions`` [T] (or [3, T]); see :class:`ForwardInput`."""


def rotary(
    rope: RopeConfig, head_size: int, positions: int, *, kernels: KernelSet, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """The angles of ``rope`` for positions below ``positions``, results in ``dtype`` on ``device``."""
    if rope.sections:
        return _Axes(rope, head_size, dtype, device)
    if rope.kind == "dynamic":
        return _Dynamic(rope, head_size, dtype, device)
    rows = positions + DRAFT_MARGIN
    if rows * 2 * head_size * dtype.itemsize > _TABLE_LIMIT:
        return _Angles(rope, head_size, dtype, device)
    return _Table(rope, head_size, rows, kernels, dtype, device)


class _Table(Rotary):
    """Every position's, computed once in float32 and kept in the model's dtype."""

    def __init__(
        self, rope: RopeConfig, head_size: int, rows: int, kernels: KernelSet, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kernels = kernels
        frequencies = inverse_frequencies(rope, head_size)
        table = torch.empty(rows, 2 * head_size, dtype=dtype)
        for begin in range(0, rows, _CHUNK):
            positions = torch.arange(begin, min(begin + _CHUNK, rows), dtype=torch.float32)
            # Side by side, so that they are gathered at once.
            cos_sin = _cos_sin(positions.unsqueeze(1) * frequencies, rope.amplitude, dtype)
            torch.cat(cos_sin, dim=1, out=table[begin : begin + _CHUNK])
        self._cos_sin = table.to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        del prompt_lens
        cos, sin = self._kernels.gather_rows(self._cos_sin, positions).chunk(2, dim=1)
        return cos, sin


class _Angles(Rotary):
    """A context too long for a table: computed for each forward, in float32, from the same frequencies."""

    def __init__(self, rope: RopeConfig, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._amplitude, self._dtype = rope.amplitude, dtype
        self._frequencies = inverse_frequencies(rope, head_size).to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        del prompt_lens
        return _cos_sin(positions.to(torch.float32).unsqueeze(1) * self._frequencies, self._amplitude, self._dtype)


class _Axes(Rotary):
    """mrope: each frequency takes the position on its own axis.

    No table: a video's time axis isn't bounded by the number of tokens.
    """

    def __init__(self, rope: RopeConfig, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._amplitude, self._dtype = rope.amplitude, dtype
        self._frequencies = inverse_frequencies(rope, head_size).to(device)
        self._axis = torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections)).to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        del prompt_lens
        own = positions.index_select(0, self._axis).t()  # [T, D/2]
        return _cos_sin(own.to(torch.float32) * self._frequencies, self._amplitude, self._dtype)


class _Dynamic(Rotary):
    """Dynamic NTK scaling: past the original context the base grows with the sequence.

    A prompt is rotated by the base of its whole length, in however many chunks it comes, and each token after it by the
    base of its own length, as happens when transformers prefills a prompt and then decodes; keys keep the rotation that
    they were written with. So a token's angles depend on its position and its prompt alone, and neither speculation,
    nor chunking, nor recomputation after a preemption changes them.
    """

    def __init__(self, rope: RopeConfig, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._dtype = rope, dtype
        self._power = head_size / (head_size - 2)
        self._exponent = (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size).to(device)

    def gather(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        rope = self._rope
        lens = positions + 1 if prompt_lens is None else torch.maximum(positions + 1, prompt_lens)
        lens = lens.clamp(min=rope.original_context).unsqueeze(1).to(torch.float32)  # [T, 1]
        base = rope.theta * (rope.factor * lens / rope.original_context - (rope.factor - 1)) ** self._power
        angles = positions.unsqueeze(1).to(torch.float32) * (1.0 / base**self._exponent)
        return _cos_sin(angles, rope.amplitude, self._dtype)


def _cos_sin(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, D] each from float32 ``angles`` [T, D/2]: both halves of a head turn by the same angles."""
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)
