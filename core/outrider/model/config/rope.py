"""RopeConfig: parameters of the rotary position embedding, and the frequencies of each scaling type. Letters: D head size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Parameters of the rotary position embedding. Only the fields of ``kind`` have an effect."""

    kind: str = "default"
    """``default``, ``linear``, ``dynamic``, ``llama3``, ``longrope``, ``yarn`` or ``proportional``."""
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0
    """Context length of pretraining, before any scaling, in tokens (all kinds but ``default`` and ``linear``)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """Divisors of the D/2 frequencies up to the original context (``longrope``)."""
    long_factors: tuple[float, ...] = ()
    """Divisors of the D/2 frequencies beyond the original context (``longrope``)."""
    query_beta: float = 0.0
    """Queries at position p are multiplied by 1 + ``query_beta`` ln(1 + floor(p / ``original_context``)) (Llama 4)."""
    rotated_share: float = 1.0
    """Share of a head's dimensions that are rotated, the first ones."""
    turning_share: float = 1.0
    """Share of the D/2 frequencies that aren't 0, the first ones (``proportional``)."""
    sections: tuple[int, ...] = ()
    """If not empty, positions have three axes (time, height, width). Each axis has that many of the frequencies, in order
    (Qwen2-VL's mrope).
    """
    interleaved: bool = False
    """True if the axes of ``sections`` alternate from one frequency to the next, for as long as height and width have some
    left (Qwen3-VL's mrope).
    """

    def __post_init__(self) -> None:
        if self.kind not in _FREQUENCIES:
            raise ConfigError(f"rope: kind is {self.kind!r}, expected one of {', '.join(sorted(_FREQUENCIES))}")
        for name in ("theta", "factor", "high_freq_factor", "low_freq_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"rope: {name} is {value}, expected a positive number")
        if (self.kind in _NEED_ORIGINAL_CONTEXT or self.query_beta) and self.original_context <= 0:
            raise ConfigError(f"rope of kind {self.kind!r}: original_context is {self.original_context}, expected > 0")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope: high_freq_factor is {self.high_freq_factor}, expected more than low_freq_factor, which is "
                f"{self.low_freq_factor}"
            )
        if not 0 < self.rotated_share <= 1:
            raise ConfigError(f"rope: partial_rotary_factor is {self.rotated_share}, expected above 0 and at most 1")
        if not 0 <= self.turning_share <= 1:
            raise ConfigError(f"rope: partial_rotary_factor is {self.turning_share}, expected a number from 0 to 1")
        if self.sections and len(self.sections) != 3:
            raise ConfigError(f"rope: sections are {self.sections}, expected three: time, height, width")
        if self.sections and self.depends_on_length:
            raise ConfigError(f"rope: scaling of kind {self.kind!r} together with sections isn't supported")

    def rotated_size(self, head_size: int) -> int:
        """Return the number of dimensions of a head that are rotated."""
        return int(round(head_size * self.rotated_share, 6))  # the share may be a quotient of two sizes

    @property
    def axes(self) -> int:
        """Number of position axes: 3 for mrope, else 1."""
        return 3 if self.sections else 1

    @property
    def depends_on_length(self) -> bool:
        """True if the angles of a token depend on the length of its prompt too."""
        return self.kind in ("dynamic", "longrope")

    def sharing_key(self, prompt_length: int) -> int:
        """Return a key that must be equal for two prompts that share the cached keys of a common prefix.

        The key is 0 unless the rope depends on the length and the prompt exceeds the original context. All angles of the
        prompt then follow its length (dynamic), or the other list of factors (longrope).
        """
        if not self.depends_on_length or prompt_length <= self.original_context:
            return 0
        return prompt_length if self.kind == "dynamic" else 1

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines: the attention temperature of yarn (Peng et al. 2023) and longrope, else 1."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_context))
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention: the square of yarn's temperature of all dimensions, else 1."""
        is_scaled = self.kind != "default" and self.mscale_all_dim
        return _yarn_mscale(self.factor, self.mscale_all_dim) ** 2 if is_scaled else 1.0


def inverse_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Return the angle per position of each frequency, float32 [Dr/2] for Dr rotated dimensions, on the host."""
    return _FREQUENCIES[rope.kind](rope, rope.rotated_size(head_size))


def long_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Return the angle per position of each frequency of a longrope beyond its original context, float32 [D/2], on the
    host.
    """
    return _default(rope, rope.rotated_size(head_size)) / torch.tensor(rope.long_factors, dtype=torch.float32, device="cpu")


def query_scales(rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return the factor of the queries at ``positions`` int64 [T], float32 [T, 1, 1]."""
    return (1 + rope.query_beta * torch.log(1 + torch.floor(positions / rope.original_context))).view(-1, 1, 1)


def _short(rope: RopeConfig, head_size: int) -> Tensor:
    return _default(rope, head_size) / torch.tensor(rope.short_factors, dtype=torch.float32, device="cpu")


def _default(rope: RopeConfig, head_size: int) -> Tensor:
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / (rope.theta**exponent)


def _linear(rope: RopeConfig, head_size: int) -> Tensor:
    return _default(rope, head_size) / rope.factor


def _llama3(rope: RopeConfig, head_size: int) -> Tensor:
    """Return frequencies with long wavelengths stretched by ``factor``, short ones kept, and a blend between (Llama 3.1)."""
    unscaled = _default(rope, head_size)
    wavelength = 2 * math.pi / unscaled
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * unscaled / rope.factor + blend * unscaled
    scaled = torch.where(wavelength > longest, unscaled / rope.factor, blended)
    return torch.where(wavelength < shortest, unscaled, scaled)


def _yarn(rope: RopeConfig, head_size: int) -> Tensor:
    """Return frequencies interpolated by parts (NTK): a ramp between scaled and unscaled ones (Peng et al. 2023, section
    3.2).
    """

    def dimension_of(rotations: float) -> float:
        return head_size * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # avoid a division by zero
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    unscaled_share = 1 - ramp
    wavelengths = rope.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    return 1.0 / (rope.factor * wavelengths) * (1 - unscaled_share) + 1.0 / wavelengths * unscaled_share


def _proportional(rope: RopeConfig, head_size: int) -> Tensor:
    """Return frequencies that are 0 but for the first ones: the others' pairs of dimensions don't turn (Gemma 4)."""
    turning = int(rope.turning_share * head_size // 2)
    frequencies = _default(rope, head_size) / rope.factor
    frequencies[turning:] = 0.0
    return frequencies


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_FREQUENCIES: Mapping[str, Callable[[RopeConfig, int], Tensor]] = MappingProxyType(
    # Dynamic, longrope: the frequencies up to the original context. Beyond it they depend on the sequence's length.
    {
        "default": _default,
        "linear": _linear,
        "dynamic": _default,
        "llama3": _llama3,
        "longrope": _short,
        "yarn": _yarn,
        "proportional": _proportional,
    }
)
_NEED_ORIGINAL_CONTEXT = ("dynamic", "llama3", "longrope", "yarn")
ROPE_KINDS = tuple(sorted(_FREQUENCIES.keys() - {"proportional"}))
"""Rope types that a config may name for all layers alike."""
