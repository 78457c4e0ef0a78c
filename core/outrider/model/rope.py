"""Rotary position embeddings: the frequencies of each scaling type, and the cosines and sines of a forward.

Letters: T new tokens, D head size, P positions of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import ConfigError

# Drafts may run past the end of the context. What they compute there is never accepted, but it must be finite, and a
# gather must not leave the table.
DRAFT_MARGIN = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """How positions turn into angles. Only the fields of ``kind`` count.

    ``kind``: ``default``, ``linear``, ``dynamic``, ``llama3`` or ``yarn``. ``original_context`` is the context of the
    pretraining, before any scaling (``dynamic``, ``llama3``, ``yarn``). ``sections`` not empty: positions have three axes
    (time, height, width), and each takes that many of the D/2 frequencies, in order (Qwen2-VL's mrope).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _FREQUENCIES:
            raise ConfigError(f"rope: kind is {self.kind!r}, expected one of {', '.join(sorted(_FREQUENCIES))}")
        for name in ("theta", "factor", "high_freq_factor", "low_freq_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"rope: {name} is {value}, expected a positive number")
        if self.kind in ("dynamic", "llama3", "yarn") and self.original_context <= 0:
            raise ConfigError(f"rope of kind {self.kind!r}: original_context is {self.original_context}, expected > 0")
        if self.sections and len(self.sections) != 3:
            raise ConfigError(f"rope: sections are {self.sections}, expected three: time, height, width")

    @property
    def axes(self) -> int:
        """Rows of the positions: 3 for mrope, else 1."""
        return 3 if self.sections else 1

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines: yarn's attention temperature (Peng et al. 2023), else 1."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)


def inverse_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Angle per position of each frequency → float32 [D/2], on the host."""
    return _FREQUENCIES[rope.kind](rope, head_size)


def _default(rope: RopeConfig, head_size: int) -> Tensor:
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / (rope.theta**exponent)


def _linear(rope: RopeConfig, head_size: int) -> Tensor:
    return _default(rope, head_size) / rope.factor


def _llama3(rope: RopeConfig, head_size: int) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended (Llama 3.1)."""
    plain = _default(rope, head_size)
    wavelength = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, between)
    return torch.where(wavelength < shortest, plain, scaled)


def _yarn(rope: RopeConfig, head_size: int) -> Tensor:
    """NTK by parts: a ramp between interpolated and plain frequencies (Peng et al. 2023, section 3.2)."""

    def dimension_of(rotations: float) -> float:
        return head_size * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    wavelengths = rope.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_FREQUENCIES: Mapping[str, Callable[[RopeConfig, int], Tensor]] = MappingProxyType(
    # dynamic scaling leaves the frequencies alone up to the original context, which is the context it's served with
    {"default": _default, "linear": _linear, "dynamic": _default, "llama3": _llama3, "yarn": _yarn}
)


class RotaryTable:
    """Cosines and sines of every position, computed once in float32 and kept in the model's dtype.

    For mrope the table is not kept: a time axis isn't bounded by the number of tokens, so the angles are computed from
    the positions, in float32 too.
    """

    def __init__(self, rope: RopeConfig, head_size: int, positions: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._rope = rope
        self._dtype = dtype
        frequencies = inverse_frequencies(rope, head_size)
        if rope.sections:
            axis = torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections))
            self._frequencies = frequencies.to(device)
            self._axis = axis.to(device)
        else:
            angles = torch.arange(positions + DRAFT_MARGIN, dtype=torch.float32).unsqueeze(1) * frequencies
            angles = torch.cat((angles, angles), dim=-1)
            self._cos = (angles.cos() * rope.amplitude).to(dtype).to(device)
            self._sin = (angles.sin() * rope.amplitude).to(dtype).to(device)

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D] of int64 ``positions`` [T], or [3, T] for mrope. Reads nothing on the host."""
        if not self._rope.sections:
            return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        axes = positions.index_select(0, self._axis).t()  # [T, D/2]: each frequency's own axis
        angles = axes.to(torch.float32) * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._rope.amplitude).to(self._dtype), (angles.sin() * self._rope.amplitude).to(self._dtype)
