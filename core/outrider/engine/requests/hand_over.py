"""Records of requests that move between engines: handed over in one process, or lent through a network card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from torch import Tensor

from outrider.device import Backend, ConfigError, Fence, Stream
from outrider.engine.requests.sampling import SamplingParams, TokenLogprobs
from outrider.model import LanguageModel, Media, Shard, Shards
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
    fit: Mapping[str, str] = field(repr=False)
    """The properties of the sender's engine, see :func:`engine_fit`."""
    backend: Backend = field(repr=False)
    stream: Stream = field(repr=False)
    """The stream that writes the tensors."""
    ready: Fence = field(repr=False)
    """The fence after which the tensors may be read."""
    key: str | None = None
    """With several ranks: the key under which each rank stores its part."""
    group: int = 0
    """The data-parallel group that ran the request. Ranks of other groups have no tensors."""


KV_DIMS = 4
"""Dimensions of a cache of keys or values: [pages, page size, KV heads, head size]. Ranks share no other caches."""


def engine_fit(model: LanguageModel, proposer: Proposer, shards: Shards | None = None) -> dict[str, str]:
    """Return the properties, as text by name, that must be equal for one engine to continue the other's requests.

    ``shards``: of an engine of one rank, the properties that its first rank would have if several ranks shared the model.
    Raises :class:`ConfigError` for a model that so many ranks can't share.
    """
    shards = shards or Shards()
    config, recurrent = shards.local(model.config, "the prefill server's model"), proposer.recurrent
    caches = [(_slot_shape(cache, shards.attention), cache.dtype) for cache in proposer.caches]
    return {f"model.{each.name}": repr(getattr(config, each.name)) for each in fields(config)} | {
        "dtype": str(model.dtype),
        "kv_dtype": str(model.cache_dtype),
        "proposer": proposer.name,
        "proposer.caches": repr(caches),
        "proposer.recurrent": repr(recurrent and recurrent.shard(shards.attention.size)),
        "proposer.relay": repr({spec.name: (spec.shape, spec.dtype) for spec in proposer.relay}),
    }


def check_fit(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` that names the differing properties of this engine and the other side's engine."""
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if differing:
        listed = "; ".join(f"{name}: {theirs.get(name)} there, {ours.get(name)} here" for name in differing)
        raise ConfigError(
            f"the other side's engine doesn't fit this one's: {listed[:2000]}; make both from one model, with one dtype, one "
            "kv_dtype and one set of draft options"
        )


def _slot_shape(cache: Tensor, rank: Shard) -> tuple[int, ...]:
    """Return the shape of one token slot of ``cache`` on tensor-parallel rank ``rank``."""
    shape = tuple(cache.shape[2:])
    return (shape[0] // rank.kv_head_shard(shape[0]).size, *shape[1:]) if cache.dim() == KV_DIMS else shape


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
