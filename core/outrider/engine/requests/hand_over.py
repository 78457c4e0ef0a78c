"""HandOver: a request that moves from one engine to another, in the middle of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from outrider.device import Backend, ConfigError, Fence, Stream
from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import LanguageModel, Media, ModelConfig
from outrider.speculative.proposer import Proposer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HandOver:
    """Everything that another engine needs to go on with a request; in one process, for now.

    ``length``: tokens in the target's cache, all but the last of ``output``. ``keys_values``: keys and values of each layer
    of the target in turn, [length, key heads, head size]. ``draft_caches``: the proposer's entries for the same tokens and
    the one behind them, [length + 1, ...]. ``relay``: what the proposer relays, [1, ...] by name. Counts for penalties
    aren't here: they follow from the tokens.

    The tensors are on ``backend``, written on ``stream``, and may be read behind ``ready``.

    Where several ranks run the engine, each of them holds its part, under ``key``; only those of the data-parallel ``group``
    that the request ran in have tensors.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams
    priority: int
    media: tuple[Media, ...]
    logprobs: tuple[TokenLogprobs, ...]
    iterations: int
    verified_tokens: int
    length: int
    keys_values: tuple[Tensor, ...] = field(repr=False)
    draft_caches: tuple[Tensor, ...] = field(repr=False)
    relay: Mapping[str, Tensor] = field(repr=False)
    model: ModelConfig = field(repr=False)
    dtype: torch.dtype
    cache_dtype: torch.dtype
    proposer: str
    backend: Backend = field(repr=False)
    stream: Stream = field(repr=False)
    ready: Fence = field(repr=False)
    key: str | None = None
    group: int = 0

    def check_fits(self, model: LanguageModel, proposer: Proposer) -> None:
        """Raise :class:`ConfigError` unless an engine of ``model`` and ``proposer`` can go on with it."""
        config, dtype = model.config, model.dtype
        if config != self.model:
            names = [each.name for each in fields(config)]
            differing = [name for name in names if getattr(config, name) != getattr(self.model, name)]
            raise ConfigError(f"the request comes from an engine of another model: {', '.join(differing)} differ")
        if dtype != self.dtype:
            raise ConfigError(f"the request comes from an engine of dtype {self.dtype}, this one has {dtype}")
        if model.cache_dtype != self.cache_dtype:
            raise ConfigError(
                f"the request comes from an engine whose KV cache is in {self.cache_dtype}, this one's is in "
                f"{model.cache_dtype}; build both with the same kv_dtype"
            )
        if proposer.name != self.proposer:
            raise ConfigError(
                f"the request comes from an engine whose proposer is {self.proposer!r}, this one's is {proposer.name!r}"
            )
        if not self.keys_values:
            return  # the part of a rank in another data-parallel group, which has no tensors
        theirs = _shapes(self.draft_caches, 1), {name: _shape(value, 1) for name, value in self.relay.items()}
        ours = _shapes(proposer.caches, 2), {spec.name: (spec.shape, spec.dtype) for spec in proposer.relay}
        if theirs != ours:
            raise ConfigError(
                f"the request comes from an engine whose proposer {self.proposer!r} has other caches or relays something "
                f"else: {theirs}, this one {ours}; build both with the same draft model and draft options"
            )


def _shape(tensor: Tensor, skip: int) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape[skip:]), tensor.dtype


def _shapes(tensors: Sequence[Tensor], skip: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [_shape(tensor, skip) for tensor in tensors]
