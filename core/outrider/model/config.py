"""ModelConfig: everything about a decoder's shape that its tensors don't say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.device import ConfigError
from outrider.model.rope import RopeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """How images and videos appear in the tokens and positions of a vision-language model.

    ``image_token`` and ``video_token`` stand for one feature each. ``merge`` x ``merge`` patches make one feature.
    ``tokens_per_second`` spaces the frames of a video on the time axis; 0 where each frame takes one position.
    """

    image_token: int
    video_token: int
    merge: int
    tokens_per_second: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's MLP.

    ``count`` experts of inner size ``intermediate_size``, of which a token goes to ``per_token``; ``renormalize``: their
    weights add up to 1. ``shared_size``: inner size of an expert that every token goes to besides; 0: there is none.
    ``dense_layers`` have an MLP, of the model's own inner size.

    Raises :class:`ConfigError` for impossible values.
    """

    count: int
    per_token: int
    intermediate_size: int
    renormalize: bool
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.count, self.per_token, self.intermediate_size) < 1 or self.shared_size < 0:
            raise ConfigError(f"model config: experts are {self}, expected positive numbers")
        if self.per_token > self.count:
            raise ConfigError(
                f"model config: a token goes to {self.per_token} experts, expected at most the {self.count} there are"
            )

    def shared_out(self, ranks: int) -> ExpertsConfig:
        """What one of ``ranks`` has: its part of every expert's inner size.

        Raises :class:`ConfigError` where that can't be shared out among so many.
        """
        for size in (self.intermediate_size, self.shared_size):
            if size % ranks:
                raise ConfigError(
                    f"experts of an inner size of {size} can't be shared out among {ranks} ranks; expected a number that "
                    "divides it"
                )
        return replace(self, intermediate_size=self.intermediate_size // ranks, shared_size=self.shared_size // ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder of the Llama kind.

    ``family`` is the checkpoint's model type. ``windows`` has one entry a layer: how many positions a token of that
    layer sees, its own included, or 0 for all. ``attention_bias`` is that of the q, k and v projections,
    ``output_bias`` that of the projection after attention. ``qk_norm``: q and k are normed per head before they're
    rotated. ``experts``: a mixture of them in place of MLPs, or None. ``vision`` is None for a model of text alone.
    ``eos_token_ids`` end a generation; ``bos_token_id`` is None where a prompt needs none.

    Raises :class:`ConfigError` for impossible values.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_eps: float
    max_context: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    vision: VisionConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "max_context",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"model config: {name} is {value!r}, expected a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model config: num_heads {self.num_heads} isn't a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ConfigError(f"model config: head_size is {self.head_size}, expected an even number")
        if not (math.isfinite(self.rms_eps) and self.rms_eps >= 0):
            raise ConfigError(f"model config: rms_eps is {self.rms_eps}, expected a number of at least 0")
        if self.rope.kind == "dynamic" and self.head_size < 4:
            raise ConfigError(f"model config: head_size is {self.head_size}, expected at least 4 for dynamic rope scaling")
        if self.rope.sections and sum(self.rope.sections) != self.head_size // 2:
            raise ConfigError(
                f"model config: rope sections {self.rope.sections} sum to {sum(self.rope.sections)}, expected half the "
                f"head size, {self.head_size // 2}"
            )
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        if len(self.windows) != self.num_layers or min(self.windows) < 0:
            raise ConfigError(f"model config: windows are {self.windows}, expected {self.num_layers} numbers of at least 0")

    @property
    def inner_width(self) -> int:
        """How many numbers an MLP, or the experts of a token together, make of it on the way."""
        experts = self.experts
        if experts is None:
            return self.intermediate_size
        mixed = experts.per_token * experts.intermediate_size + experts.shared_size
        return max(mixed, self.intermediate_size if experts.dense_layers else 0)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has a mixture of experts in place of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> ModelConfig:
        """Read ``config.json`` and ``generation_config.json`` of a checkpoint directory.

        Raises :class:`CheckpointError` when there is no readable config, when its architecture is unknown (the error
        names the known ones), or when it asks for something that isn't done here; the error names file and field.
        """
        from outrider.model.checkpoint_config import read_model_config

        return read_model_config(Path(directory))
