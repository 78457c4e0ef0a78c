"""The interface of a proposer, and plain decoding as the proposer that drafts nothing.

Letters: B requests of a batch, K drafted tokens, N = K+1 nodes of a draft with its root, D longest path from the root
(D = K for a chain), M rows of a flat token batch, H hidden size, V vocabulary, P pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, AttentionShape, Backend, CapabilityError, KernelSet
from outrider.model import KeptRows
from outrider.speculative.seq_lens import HostSeqLens
from outrider.speculative.tree import Tree

MOST_REQUESTS = 4096
"""Requests of a batch at most, padding included."""


@dataclass(frozen=True, slots=True)
class RelaySpec:
    """One tensor that a proposer relays from an iteration to the next, for each request.

    ``bounds``: what whole numbers in it are at least and below; None: they are tokens of the target. Probes check that.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bounds: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a draft works on; every tensor is private to the draft, on the stream that it runs on.

    ``seq_lens`` int64 [B]: tokens in the target's cache. ``last_tokens`` int64 [B]: the token after them, not cached yet.
    ``tables`` int32 [B, P]. ``temperature`` float32 [B], ``seeds`` int64 [B]. ``mrope_position_deltas`` int64 [B]: what a
    position on three axes is ahead of its index, None where the target's positions are plain. ``relay``: what the
    iteration before relayed, each [B, ...]. ``max_kv``: host bound of cached tokens after this iteration. ``sampling``:
    some row has a temperature above 0, so that draft distributions are needed. ``seq_lens_host``: ``seq_lens`` on the
    host, only where attention takes host integers; every pass then names its own in its metadata
    (:attr:`Proposer.host_lengths`).

    ``count``: how many tokens to draft, 1 to K; None: K. Only of a chain are less than K asked for, and of one that drafts
    more all the same the engine takes the first.
    """

    seq_lens: Tensor
    last_tokens: Tensor
    tables: Tensor
    temperature: Tensor
    seeds: Tensor
    mrope_position_deltas: Tensor | None
    relay: Mapping[str, Tensor]
    max_kv: int
    sampling: bool
    seq_lens_host: HostSeqLens | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What was drafted for each request: ``tokens`` int64 [B, K].

    ``tree`` None: they're a chain, and ``probs`` float32 [B, K, V] is the distribution that each was drawn from, None
    when no row samples. Else ``tokens[:, i]`` is the token of the tree's node i + 1 (node 0, the root, is the request's
    last token) and there are no ``probs``: a tree is verified without them (``KernelSet.verify_tree``).
    """

    tokens: Tensor
    probs: Tensor | None
    tree: Tree | None = None


@dataclass(frozen=True, slots=True)
class ExtendInputs:
    """Newly accepted tokens, with the target's hidden states, for the draft to catch up with.

    Flat over M tokens, as many of each request as its accepted path or its chunk of the prompt has, or more (then the rest
    is padding): ``tokens`` int64 [M], the token *after* each position; ``hidden`` [M, H], the target's final hidden state
    at it, and ``aux_hidden_states``, the states [M, H] that enter its layers ``aux_hidden_state_layers``; ``positions``
    (indices) and ``slots`` int64 [M]; ``attention`` over the draft's own cache. ``rope_positions``: positions as the
    target's rope takes them, [3, M] with axes, and then ``mrope_position_deltas`` int64 [B] is there (see
    :class:`DraftInputs`).

    Per request: ``last`` int64 [B], the index into M of its last valid token (what comes later is padding, never read);
    ``next_positions`` int64 [B], the position of the token to draft. ``relay``: what the call before relayed, each
    [B, ...]; it means something only where ``continues`` bool [B] holds: the call before ended just where this one starts.

    ``prompt`` int64 [M], the token *at* each position, where prompts are taken in; None when decoding, where these are
    tokens that earlier calls had in ``tokens``. With a prompt come ``embeddings``, ``embedded`` and ``prompt_lens`` as the
    target has them (:class:`ForwardInput`). ``hidden`` is None there unless the proposer says that it reads it
    (:attr:`Proposer.reads_hidden`). ``kept``: the tokens at ``last`` as the only ones of which a pass over all of them is to
    give a result, None where attention takes lengths that a host must know or all tokens are such; a pass may give them all
    the same. ``seq_lens_host``: ``attention.seq_lens`` on the host, see :class:`DraftInputs`.
    """

    tokens: Tensor
    hidden: Tensor | None
    aux_hidden_states: tuple[Tensor, ...]
    positions: Tensor
    rope_positions: Tensor
    mrope_position_deltas: Tensor | None
    slots: Tensor
    attention: AttentionMetadata
    last: Tensor
    next_positions: Tensor
    temperature: Tensor
    seeds: Tensor
    sampling: bool
    relay: Mapping[str, Tensor]
    continues: Tensor
    prompt: Tensor | None
    embeddings: Tensor | None = None
    embedded: Tensor | None = None
    prompt_lens: Tensor | None = None
    kept: KeptRows | None = None
    seq_lens_host: HostSeqLens | None = None


def draw(kernels: KernelSet, logits: Tensor, inputs: DraftInputs | ExtendInputs, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A draft token for each row of ``logits`` [B, V], and the distribution float32 [B, V] that it was drawn from.

    Where no row samples, the second is meaningless.
    """
    token = kernels.sample(logits, inputs.temperature, inputs.seeds, positions, draft=True)
    if not inputs.sampling:
        return token, logits
    # Rows at temperature 0 don't read their distribution; 1 keeps the division finite for them.
    scale = torch.where(inputs.temperature > 0, inputs.temperature, 1.0).unsqueeze(-1)
    return token, torch.softmax(logits.float() / scale, dim=-1)


def draw_rows(
    kernels: KernelSet, logits: Tensor, inputs: DraftInputs, positions: Tensor, cold: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`draw` for n places of each request at once: ``logits`` [B * n, V] at ``positions`` int64 [B, n] → tokens [B, n]
    and distributions [B, n, V]. ``cold``: B * n zeros in float32 on the device, or more.
    """
    count, places = positions.shape[1], positions.flatten()
    if inputs.sampling:
        temperature, seeds = inputs.temperature.repeat_interleave(count), inputs.seeds.repeat_interleave(count)
    else:  # nobody looks at seeds, and every temperature is 0; a copy of them would be a kernel of its own
        temperature, seeds = cold[: places.shape[0]], places
    drawn, probs = draw(kernels, logits, replace(inputs, temperature=temperature, seeds=seeds), places)
    return drawn.view(positions.shape), probs.view(*positions.shape, -1)


class Proposer(ABC):
    """Drafts tokens for a batch. Stateless between calls but for its cache: state per request travels in the relay.

    The engine calls it inside the scope of the forward stream and orders everything around it; a proposer opens no
    scope, waits for nothing and reads no device value on the host.
    """

    name: str
    takes_padding = False
    """Whether :meth:`extend` takes requests without tokens, whose ``last`` is another request's: a prefill that is replayed
    from a graph has some. What it returns for them is never read."""
    remembers = False
    """Whether what it drafts for a request depends on other requests, before or beside it. How much of a draft passes then
    depends on what ran when; the tokens never do."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """D: the longest path that it drafts in an iteration, in tokens; 0 for plain decoding."""

    @property
    def nodes(self) -> int:
        """K: how many tokens it drafts in an iteration, at least D; D for a chain."""
        return self.depth

    @property
    def is_tree(self) -> bool:
        """Whether its drafts are trees; then each has a :class:`Tree`."""
        return False

    @property
    def slots(self) -> int:
        """How many cache slots behind the cached tokens an iteration may write: those of verify, or more if the draft
        needs more in its own cache.
        """
        return self.nodes + 1

    @property
    def num_draft_tokens(self) -> int:
        """K, as it's called where people choose it."""
        return self.nodes

    @property
    def max_context(self) -> int | None:
        """The longest context that it was made for; None where the target's is the limit."""
        return None

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input it wants to see in ``extend``."""
        return ()

    @property
    def reads_hidden(self) -> bool:
        """Whether ``extend`` reads ``ExtendInputs.hidden`` of prompts: the target's final hidden state at every token. Where
        nobody does, the target computes it for the last token of a chunk alone. The default is whether it extends at all.
        """
        return self.extends

    @property
    @abstractmethod
    def relay(self) -> tuple[RelaySpec, ...]:
        """What it relays from one iteration to the next."""

    @property
    def extends(self) -> bool:
        """Whether it must see the accepted tokens (``extend``) before it can draft again."""
        return bool(self.relay)

    @property
    def lookahead(self) -> int:
        """How many tokens after a position its cache entry depends on: a shared prefix must agree on those too."""
        return 1 if self.extends else 0

    @property
    def host_lengths(self) -> Mapping[str, int] | None:
        """The host parameters that its attention has where lengths are host integers, by name: ``draft.…``, for each pass
        of ``draft``, how many tokens are cached behind ``DraftInputs.seq_lens`` then; ``extend`` and ``extend.…``, for each
        pass of ``extend``, how many behind ``ExtendInputs.attention.seq_lens``. None: its lengths are decided on the device,
        so that it can't run there.
        """
        return None

    def host_lengths_of(self, count: int) -> Mapping[str, int] | None:
        """Those of ``host_lengths`` that it reads where ``DraftInputs.count`` is ``count``, at least 1: a shorter draft that
        leaves passes out has a graph without them, in which nothing can be rebound. The default is all, right for a proposer
        that makes the same passes whatever it's asked for.
        """
        del count
        return self.host_lengths

    @property
    def host_widths(self) -> Mapping[str, int]:
        """Of ``host_lengths``, passes of ``extend`` whose length is at least the number of tokens that they take in: how many
        these are more than ``ExtendInputs`` has of each request. The default names none.
        """
        return {}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Tokens of each pass that ``extend`` makes over layers which ranks share, given a prompt's chunks: their tokens and
        number, and the longest. Data-parallel groups have different prompts, and run the same passes side by side.

        The default raises :class:`CapabilityError`, for a proposer that doesn't say.
        """
        del tokens, sequences, longest
        raise CapabilityError(
            f"the proposer {self.name!r} doesn't say which passes it makes over a prompt (prompt_passes); it can't draft "
            "where data-parallel groups run together"
        )

    def attention_shapes(self, page_size: int) -> tuple[AttentionShape, ...]:
        """The attentions that ``extend`` runs over ``ExtendInputs.attention`` as it comes, for kernels that plan (see
        ``KernelSet.plan_attention``). The default names none: its attention isn't planned.
        """
        del page_size
        return ()

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """Its own caches, [pages, page size, ...] each, all entries of a token in its slot; what a request takes along when
        another engine goes on with it. They exist from :meth:`allocate` on.
        """
        return ()

    @property
    def token_bytes(self) -> int:
        """What a token takes in its own caches, in bytes, before they exist; an engine sizes its own cache by it. The default
        is 0, for a proposer without any.
        """
        return 0

    @abstractmethod
    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Make its own cache, if it has one, with the page numbers that the target's cache uses."""

    @abstractmethod
    def draft(self, inputs: DraftInputs) -> Draft:
        """Draft K tokens for each request."""

    @abstractmethod
    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Take in accepted tokens; returns the relay of each request, [B, ...] by name."""


class PlainProposer(Proposer):
    """Drafts nothing: an iteration is one plain decoding step."""

    name = "none"

    @property
    def depth(self) -> int:
        """0."""
        return 0

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """Nothing but the last token, which the engine relays for every proposer."""
        return ()

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """It has no attention."""
        return {}

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """There is no cache."""
        del backend, pages, page_size

    def draft(self, inputs: DraftInputs) -> Draft:
        """An empty chain."""
        batch = inputs.seq_lens.shape[0]
        tokens = inputs.seq_lens.new_empty((batch, 0))
        return Draft(tokens=tokens, probs=None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Nothing to take in."""
        del inputs
        return {}
