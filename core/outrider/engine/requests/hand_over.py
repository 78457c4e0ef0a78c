"""Records of requests that move between engines: handed over in one process, or lent through a network card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from outrider.device import Backend, ConfigError, Fence, Stream
from outrider.engine.requests.sampling import SamplingParams, TokenLogprobs
from outrider.model import LanguageModel, Media, ModelConfig
from outrider.speculative.proposer import Proposer


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestState:
    """A request without device state.

    An engine without the request's pages recomputes the keys and values of prompt and output. The following tokens are the
    same as without a migration, because sampling depends on seed and position only.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    output: tuple[int, ...] = ()
    """The tokens generated so far; empty for a new request."""
    priority: int = 0
    media: tuple[Media, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each output token if the request asks for log-probabilities, else empty."""
    iterations: int = 0
    """The number of target verifications so far."""
    verified_tokens: int = 0
    """The number of tokens that these verifications yielded."""

    @property
    def length(self) -> int:
        """The number of tokens in the target's KV cache: all but the last output token. 0 without output."""
        return len(self.prompt) + len(self.output) - 1 if self.output else 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HandOver(RequestState):
    """The host and device state that another engine needs to continue a request. Penalty counts follow from the tokens."""

    keys_values: tuple[Tensor, ...] = field(repr=False)
    """Keys, then values, of each target layer in turn: [length, key heads, head size] on ``backend``."""
    draft_caches: tuple[Tensor, ...] = field(repr=False)
    """The proposer's cache entries of the same tokens and the following one: [length + 1, ...] on ``backend``."""
    relay: Mapping[str, Tensor] = field(repr=False)
    """The tensors that the proposer relays between iterations, by name: [1, ...] on ``backend``."""
    states: tuple[Tensor, ...] = field(repr=False)
    """Convolution state, then delta state, of each recurrent layer of the target and then the proposer: [1, ...] on
    ``backend``.
    """
    model: ModelConfig = field(repr=False)
    dtype: torch.dtype
    cache_dtype: torch.dtype
    proposer: str
    """The name of the proposer."""
    backend: Backend = field(repr=False)
    stream: Stream = field(repr=False)
    """The stream that writes the tensors."""
    ready: Fence = field(repr=False)
    """The fence after which the tensors may be read."""
    key: str | None = None
    """With several ranks: the key under which each rank stores its part."""
    group: int = 0
    """The data-parallel group that ran the request. Ranks of other groups have no tensors."""

    def check_fits(self, model: LanguageModel, proposer: Proposer) -> None:
        """Raise :class:`ConfigError` unless an engine of ``model`` and ``proposer`` can continue the request."""
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
            return  # this rank is in another data-parallel group than the request
        own = 0 if config.recurrent is None else 2 * len(config.recurrent.layers)
        states = [state for layer in proposer.states for state in layer]
        sent = [_shapes(self.draft_caches, 1), _shapes(self.states[own:], 1)]
        expected = [_shapes(proposer.caches, 2), _shapes(states, 1)]
        relay = {name: _shape(value, 1) for name, value in self.relay.items()}
        declared = {spec.name: (spec.shape, spec.dtype) for spec in proposer.relay}
        if (sent, relay) != (expected, declared):
            raise ConfigError(
                f"the request comes from an engine whose proposer {self.proposer!r} has other caches or relays something "
                f"else: {sent}, {relay}, this one {expected}, {declared}; build both with the same draft model and draft "
                "options"
            )


def _shape(tensor: Tensor, leading_dims: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the tensor's shape without its first ``leading_dims`` dimensions, and its dtype, for comparison with another
    engine's.
    """
    return tuple(tensor.shape[leading_dims:]), tensor.dtype


def _shapes(tensors: Sequence[Tensor], leading_dims: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [_shape(tensor, leading_dims) for tensor in tensors]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LentPages:
    """The sender's record of a request. The sender keeps the pages until the network card has read them."""

    state: RequestState
    pages: tuple[int, ...]
    """Pages with the keys, values and draft caches of ``state.length`` tokens. The draft cache can have one token more. With
    recurrent layers, the block number of the state row comes first (:mod:`outrider.transports.link`).
    """
    relay: Mapping[str, Tensor] = field(repr=False)
    """The tensors that the proposer relays between iterations, by name: [1, ...] on the host."""
    ready: Fence = field(repr=False)
    """The fence after which ``pages`` and ``relay`` may be read."""
    read: Fence = field(repr=False)
    """The fence *pages read*, for the link: the link signals it once the network card has read the pages."""
    slot: int
    """The engine's index of the two fences."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedPages:
    """The receiver's record of a request, with pages that the network card fills.

    With data-parallel ranks, only the ranks of ``group`` may use the pages and the fences.
    """

    request: int
    """The request's number in the receiving engine."""
    pages: tuple[int, ...]
    """At least as many pages as the sender has. The network card fills the first ones. With recurrent layers, the block
    number of the state row comes first.
    """
    free: Fence = field(repr=False)
    """The fence *pages free*, after which the network card may write the pages."""
    written: Fence = field(repr=False)
    """The fence *pages written*, for the link: the link signals it once all pages have arrived."""
    slot: int
    """The engine's index of the two fences."""
    group: int = 0
    """The data-parallel group of the request."""


Arrival = HandOver | Mapping[str, Tensor]
"""The state that a request from another engine brings. Pages that a network card has written lack the tensors that the
proposer relays between iterations: these are [1, ...] in pinned memory, by name.
"""
