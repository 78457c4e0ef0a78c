"""The interface of a proposer, and base classes of those with a KV cache of their own and of those that draft trees.

Non-speculative decoding is the proposer that drafts nothing.

Letters: B requests of a batch, K drafted tokens, N = K+1 nodes of a draft with its root. D is the longest path from the root
(D = K for a chain). M rows of a flat token batch, H hidden size, V vocabulary, Vd draft vocabulary, P
pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, AttentionShape, Backend, CapabilityError, ConfigError, HostParam, KernelSet
from outrider.model import (
    BaseDraftHead,
    ForwardInput,
    KeptRows,
    KVCache,
    LayerState,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
    StateInput,
    speculative_positions,
)
from outrider.speculative.tree import DynamicTree, Level, Tree


@dataclass(frozen=True, slots=True)
class HostSeqLens:
    """KV lengths of a batch's requests on the host, for attention that takes lengths as host integers."""

    values: tuple[int, ...]
    """Number of cached tokens of each request."""
    capacity: int
    """Number of tokens that a block table covers. Lengths are clamped to it; only finished requests exceed it."""
    captured: Mapping[str, HostParam] | None = None
    """Parameters of the open capture, which are rebound before each replay."""

    def host_param(self, name: str, ahead: int, *, least: int = 0) -> HostParam:
        """Return the lengths plus ``ahead``, at least ``least``, as a host parameter of an attention kernel."""
        if self.captured is not None:
            return self.captured[name]
        return HostParam(name, self.lengths_after(ahead, least))

    def lengths_after(self, ahead: int, least: int = 0) -> tuple[int, ...]:
        """Return the lengths plus ``ahead``, at least ``least``."""
        return tuple(max(min(value + ahead, self.capacity), least) for value in self.values)

    def padded(self, count: int) -> HostSeqLens:
        """Return the lengths for ``count`` requests; the additional ones have no cached tokens."""
        return HostSeqLens((*self.values, *[0] * (count - len(self.values))), self.capacity)


def slots_of(positions: Tensor, tables: Tensor, page_size: int) -> Tensor:
    """Return the cache slots int64 [B, Q] of ``positions`` int64 [B, Q] under block tables [B, pages].

    A slot is page * page size + offset. Positions beyond the table map to the reserved page 0; they belong to finished
    requests, whose tokens the host discards.
    """
    index = positions // page_size
    inside = index < tables.shape[1]
    page = tables.gather(1, index.clamp(max=tables.shape[1] - 1)).to(torch.int64)
    return torch.where(inside, page, 0) * page_size + positions % page_size


MAX_BATCH_REQUESTS = 4096
"""Maximum number of requests in a batch, padding included."""


@dataclass(frozen=True, slots=True)
class RelaySpec:
    """One tensor per request that a proposer relays from one iteration to the next."""

    name: str
    shape: tuple[int, ...]
    """Shape of the tensor for one request, without the dimension B."""
    dtype: torch.dtype
    bounds: tuple[int, int] | None = None
    """Lower bound (inclusive) and upper bound (exclusive) of integers, which probes check. None: they are tokens of the
    target.
    """


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Inputs of a draft. Every tensor is private to the draft, on the stream that the draft runs on."""

    seq_lens: Tensor
    """Number of tokens in the target's cache, int64 [B]."""
    last_tokens: Tensor
    """The token after the cached tokens, int64 [B], which is not cached yet."""
    tables: Tensor
    """Block tables, int32 [B, P]."""
    temperature: Tensor
    """Sampling temperatures, float32 [B]; 0 for greedy requests."""
    seeds: Tensor
    """Random seeds, int64 [B]."""
    mrope_position_deltas: Tensor | None
    """Difference of a token's mrope position and its index, int64 [B]. None if the target has no mrope."""
    rows: Tensor
    """Rows of the requests' recurrent states, int64 [B]; row 0 for padding."""
    relay: Mapping[str, Tensor]
    """Tensors [B, ...] that the previous iteration relayed, by name."""
    max_kv: int
    """Upper bound of cached tokens after this iteration, known on the host."""
    sampling: bool
    """True if a request has a temperature above 0, so that draft distributions are needed."""
    seq_lens_host: HostSeqLens | None = None
    """``seq_lens`` on the host, only if attention takes host integers. Every pass then names its own lengths in its metadata
    (:attr:`Proposer.host_lengths`).
    """
    count: int | None = None
    """Number of tokens to draft, 1 to K; None means K. Fewer than K are requested only from chains. If the proposer drafts
    more, the engine uses the first ``count`` tokens.
    """


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafted tokens of each request, as a chain or as a tree."""

    tokens: Tensor
    """Draft tokens, int64 [B, K]. In a tree, column i is the token of node i + 1; node 0, the root, is the request's last
    token.
    """
    probs: Tensor | None
    """Distribution that each token of a chain was sampled from, float32 [B, K, V]. None for a tree, and if no request
    samples. Trees are verified without distributions (``KernelSet.verify_tree``).
    """
    tree: Tree | None = None
    """The tree of the tokens; None for a chain."""


@dataclass(frozen=True, slots=True)
class ExtendInputs:
    """Newly accepted tokens with the target's hidden states, which update the draft's state.

    The flat batch of M tokens has the same number of tokens for each request as its accepted path or prompt chunk, or more;
    the excess is padding.
    """

    tokens: Tensor
    """The token *after* each position, int64 [M]."""
    hidden: Tensor | None
    """The target's final hidden state at each position, [M, H]. None for prompts unless :attr:`Proposer.reads_hidden` is
    true.
    """
    aux_hidden_states: tuple[Tensor, ...]
    """States [M, H] at the inputs of the target's layers ``aux_hidden_state_layers``."""
    positions: Tensor
    """Indices of the tokens in their sequences, int64 [M]."""
    rope_positions: Tensor
    """Positions for the target's rope, int64 [M], or [3, M] with mrope."""
    mrope_position_deltas: Tensor | None
    """Difference of mrope position and index, int64 [B], see :class:`DraftInputs`. None if the target has no mrope."""
    slots: Tensor
    """Cache slots of the tokens, int64 [M]."""
    attention: AttentionMetadata
    """Metadata of the attention over the draft's own cache."""
    last: Tensor
    """Index into M of each request's last valid token, int64 [B]. Later tokens of the request are padding and never read."""
    next_positions: Tensor
    """Position of the first token to draft, int64 [B]."""
    temperature: Tensor
    seeds: Tensor
    sampling: bool
    rows: Tensor
    """Rows of the requests' recurrent states, int64 [B]; row 0 for padding."""
    relay: Mapping[str, Tensor]
    """Tensors [B, ...] that the previous call relayed, by name. Valid only where ``continues`` is true."""
    continues: Tensor
    """True if the previous call ended where this one starts, bool [B]."""
    prompt: Tensor | None
    """The token *at* each position of a prompt, int64 [M]. None when decoding: earlier calls had these tokens in
    ``tokens``.
    """
    first_tokens: Tensor | None = None
    """The token at each request's first position, int64 [B]. None for prompts."""
    embeddings: Tensor | None = None
    """Media features of a prompt, as in :class:`ForwardInput`."""
    embedded: Tensor | None = None
    """Rows of ``embeddings`` that are valid, as in :class:`ForwardInput`."""
    prompt_lens: Tensor | None = None
    """Length of each token's prompt, as in :class:`ForwardInput`."""
    kept: KeptRows | None = None
    """Selects the tokens at ``last`` as the only rows of a pass whose results are needed. None if attention takes host
    lengths, or if all tokens are needed. A pass may compute all rows nevertheless.
    """
    seq_lens_host: HostSeqLens | None = None
    """``attention.seq_lens`` on the host, see :class:`DraftInputs`."""


def sample_draft(
    kernels: KernelSet, logits: Tensor, inputs: DraftInputs | ExtendInputs, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample a draft token for each row of ``logits`` [B, V], and return the distribution float32 [B, V] that it was sampled
    from.

    If no request samples, the second result is meaningless.
    """
    token = kernels.sample(logits, inputs.temperature, inputs.seeds, positions, draft=True)
    if not inputs.sampling:
        return token, logits
    # Rows at temperature 0 don't use their distribution. Dividing by 1 keeps their values finite.
    scale = torch.where(inputs.temperature > 0, inputs.temperature, 1.0).unsqueeze(-1)
    return token, torch.softmax(logits.float() / scale, dim=-1)


def sample_draft_rows(
    kernels: KernelSet, logits: Tensor, inputs: DraftInputs, positions: Tensor, zero_temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample n positions of each request at once with :func:`sample_draft`.

    ``logits`` are [B * n, V] at ``positions`` int64 [B, n]. Returns tokens [B, n] and distributions [B, n, V].
    ``zero_temperatures`` are at least B * n zeros in float32 on the device.
    """
    count, flat_positions = positions.shape[1], positions.flatten()
    if inputs.sampling:
        temperature, seeds = inputs.temperature.repeat_interleave(count), inputs.seeds.repeat_interleave(count)
    else:  # greedy: seeds are unused and all temperatures are 0, so repeating them would waste two kernels
        temperature, seeds = zero_temperatures[: flat_positions.shape[0]], flat_positions
    sampled, probs = sample_draft(kernels, logits, replace(inputs, temperature=temperature, seeds=seeds), flat_positions)
    return sampled.view(positions.shape), probs.view(*positions.shape, -1)


class Proposer(ABC):
    """Drafts tokens for a batch. Apart from its caches it keeps no state between calls; the relay holds the state of each
    request.

    The engine calls a proposer inside the scope of the forward stream and orders all work around it. A proposer opens no
    scope, waits for nothing, and reads no device value on the host.
    """

    name: str
    accepts_padding = False
    """True if :meth:`extend` accepts requests without tokens, whose ``last`` is another request's. A prefill that is replayed
    from a graph has such requests. Their results are never read.
    """
    depends_on_other_requests = False
    """True if a request's drafts depend on earlier or concurrent requests. Its acceptance rate then depends on the order of
    requests; its tokens never do.
    """
    looks_up = False
    """True if drafts are looked up in the request's own text, so that they are likelier accepted where the text repeats."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """D, the longest path of a draft in tokens; 0 for non-speculative decoding."""

    @property
    def nodes(self) -> int:
        """K, the number of tokens drafted in an iteration. At least D, and D for a chain."""
        return self.depth

    @property
    def is_tree(self) -> bool:
        """True if drafts are trees; each draft then has a :class:`Tree`."""
        return False

    @property
    def slots(self) -> int:
        """Number of cache slots after the cached tokens that an iteration may write: those of verify, or more for the draft's
        own cache.
        """
        return self.nodes + 1

    @property
    def max_context(self) -> int | None:
        """The context in tokens that the draft was made for, or None for the target's.

        Requests may become longer. Chains aren't drafted while every request of a batch is longer; otherwise the draft also
        runs at positions beyond its context, where its tokens may be anything.
        """
        return None

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs ``extend`` reads."""
        return ()

    @property
    def reads_hidden(self) -> bool:
        """True if ``extend`` reads ``ExtendInputs.hidden`` of prompts, the target's final hidden state at every token.

        Otherwise the target computes that state only for the last token of a chunk. The default is :attr:`extends`.
        """
        return self.extends

    @property
    @abstractmethod
    def relay(self) -> tuple[RelaySpec, ...]:
        """The declarations of the tensors that :meth:`extend` returns and the next :meth:`draft` and
        :meth:`extend` receive.
        """

    @property
    def extends(self) -> bool:
        """True if :meth:`extend` must process the accepted tokens before the next draft. The engine then launches
        draft-extend.
        """
        return bool(self.relay)

    @property
    def lookahead(self) -> int:
        """Number of tokens after a position on which its cache entry depends. Prompts that share a prefix must agree on these
        too.
        """
        return 1 if self.extends else 0

    @property
    def host_lengths(self) -> Mapping[str, int] | None:
        """Host parameters of the attention lengths by name, for devices whose attention takes lengths as host integers.

        ``draft.*`` gives, for each pass of ``draft``, the number of cached tokens after ``DraftInputs.seq_lens``. ``extend``
        and ``extend.*`` give, for each pass of ``extend``, the number after ``ExtendInputs.attention.seq_lens``. None: the
        device decides the lengths, so the proposer can't run on such a device.
        """
        return None

    def host_lengths_of(self, count: int) -> Mapping[str, int] | None:
        """Return the entries of ``host_lengths`` that a draft of ``count`` >= 1 tokens (``DraftInputs.count``) uses.

        The graph of a shorter draft that skips passes lacks their parameters, so they can't be rebound. The default is all
        entries, correct for a proposer that always makes the same passes.
        """
        del count
        return self.host_lengths

    @property
    def host_widths(self) -> Mapping[str, int]:
        """Passes of ``extend`` in ``host_lengths`` whose length is at least their number of tokens.

        The value is how many tokens per request such a pass has in addition to those of ``ExtendInputs``. The default is
        empty.
        """
        return {}

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return the number of tokens of each pass that ``extend`` makes over shared layers, for chunks of prompts.

        ``tokens`` and ``sequences`` are the numbers of tokens and chunks, ``longest`` is the longest chunk. Data-parallel
        groups have different prompts and run the same passes concurrently. The default raises :class:`CapabilityError`.
        """
        del tokens, sequences, longest
        raise CapabilityError(
            f"the proposer {self.name!r} doesn't say which passes it makes over a prompt (prompt_passes); it can't draft "
            "where data-parallel groups run together"
        )

    def attention_shapes(self, page_size: int) -> tuple[AttentionShape, ...]:
        """Return the attention shapes that ``extend`` runs over ``ExtendInputs.attention`` unchanged, for kernels with a
        plan.

        See ``KernelSet.plan_attention``. The default is empty: the attention isn't planned.
        """
        del page_size
        return ()

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """The proposer's own caches, each [pages, page size, ...], with all entries of a token in its slot.

        A request that moves to another engine takes these entries along. They exist from :meth:`allocate` on.
        """
        return ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the proposer's own caches, known before they exist; an engine sizes its KV cache by it.

        The default is 0, for a proposer without caches.
        """
        return 0

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The recurrent layers of the proposer, whose states follow the target's. The default is None."""
        return None

    @property
    def states(self) -> tuple[LayerState, ...]:
        """The states of the proposer's recurrent layers, in the rows of the target's states, after the same tokens.

        The engine saves, restores and moves them with the target's. They exist from :meth:`allocate_states` on.
        """
        return ()

    @property
    def state_bytes(self) -> int:
        """Bytes of one row of :attr:`states`, known before they exist."""
        return 0

    @property
    def request_bytes(self) -> int:
        """Bytes that the proposer holds for each request besides its caches and states."""
        return 0

    @abstractmethod
    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the proposer's own caches, if any, with the page numbers of the target's cache."""

    def allocate_states(self, *, backend: Backend, rows: int, requests: int) -> None:
        """Allocate ``rows`` rows of states, of which row 0 takes padding and the next ``requests`` belong to requests.

        Called after :meth:`allocate`. The default is for proposers without recurrent layers.
        """
        del backend, rows, requests

    @abstractmethod
    def draft(self, inputs: DraftInputs) -> Draft:
        """Return a draft of K tokens, or ``inputs.count``, for each request. Called in each iteration that drafts, before
        verify.
        """

    @abstractmethod
    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Process the accepted tokens after verify, or a prompt chunk. Return the relay of each request, [B, ...] by name."""


class NonSpeculativeProposer(Proposer):
    """The proposer that drafts nothing: an iteration is one step of non-speculative decoding."""

    name = "none"
    depth = 0
    relay: tuple[RelaySpec, ...] = ()
    host_lengths: Mapping[str, int] = MappingProxyType({})

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate nothing, because there is no cache."""
        del backend, pages, page_size

    def draft(self, inputs: DraftInputs) -> Draft:
        """Return an empty chain for each request."""
        batch = inputs.seq_lens.shape[0]
        tokens = inputs.seq_lens.new_empty((batch, 0))
        return Draft(tokens=tokens, probs=None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Return an empty relay, because there is no state."""
        del inputs
        return {}


UNBOUNDED = 1 << 62
"""The last position that ``place_tokens`` may assign, if positions need no limit."""


def text_rope_positions(rope: RopeConfig, positions: Tensor, mrope_position_deltas: Tensor | None) -> Tensor:
    """Return the rope positions of new text tokens from their indices int64 [B * n].

    A draft without mrope uses the indices, whatever the target's rope is. ``mrope_position_deltas`` int64 [B] is None if the
    target has no mrope; the axes of a draft's mrope are then equal.
    """
    if not rope.sections:
        return positions
    if mrope_position_deltas is None:
        return positions.expand(3, -1)
    return speculative_positions(positions, mrope_position_deltas)


def extend_rope_positions(rope: RopeConfig, inputs: ExtendInputs) -> Tensor:
    """Return the rope positions of the tokens in draft-extend's ``inputs``, media included."""
    if not rope.sections:
        return inputs.positions
    return inputs.rope_positions if inputs.rope_positions.dim() == 2 else inputs.positions.expand(3, -1)


def too_many_branches(branches: int, vocabulary: int) -> ConfigError:
    """Return the :class:`ConfigError` for a tree with more branches than the draft vocabulary has tokens."""
    return ConfigError(
        f"draft_topk is {branches}, and drafts are drawn from {vocabulary} tokens; expected at most as many branches"
    )


class DraftPositions:
    """Positions, slots and lengths of the n tokens after each request's cached tokens, computed by one kernel.

    Each of the n draft passes processes one token per request.
    """

    def __init__(self, kernels: KernelSet, inputs: DraftInputs, query_start: Tensor, *, count: int, page_size: int) -> None:
        batch = inputs.seq_lens.shape[0]
        self._inputs = inputs
        self._query_start = query_start[: batch + 1]
        self.positions = inputs.seq_lens.new_empty((count, batch))
        self.slots = torch.empty_like(self.positions)
        self._seq_lens = torch.empty_like(self.positions, dtype=torch.int32)
        columns = (self.positions.t(), self.slots.t(), self._seq_lens.t())
        kernels.place_tokens(inputs.seq_lens, inputs.tables, page_size, UNBOUNDED, *columns)

    def pass_input(
        self, index: int, tokens: Tensor, rope: RopeConfig, host_name: str, states: StateInput | None = None
    ) -> ForwardInput:
        """Return the pass over ``tokens`` int64 [B], which follow the cached tokens as number ``index``, from 0.

        ``host_name`` is the name of the pass's host parameter.
        """
        inputs, lens, num_tokens = self._inputs, self._inputs.seq_lens_host, index + 1
        attention = AttentionMetadata(
            query_start=self._query_start,
            seq_lens=self._seq_lens[index],
            block_table=inputs.tables,
            max_query=1,
            max_kv=inputs.max_kv,
            uniform=True,
            seq_lens_host=None if lens is None else lens.host_param(host_name, num_tokens),
        )
        positions = text_rope_positions(rope, self.positions[index], inputs.mrope_position_deltas)
        return ForwardInput(tokens, positions, self.slots[index], attention, states=states)


class CachedProposer(Proposer):
    """A proposer with keys and values of the layers of ``config``, in pages with the target's page numbers."""

    _draft_tokens: int
    _tokens_ahead = 0
    """Number of tokens by which draft-extend's passes exceed the accepted tokens."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._cache: KVCache | None = None
        self._page_size = 0
        self._query_start = torch.empty(0, dtype=torch.int32)

    @property
    def depth(self) -> int:
        """The number of drafted tokens, or of those on the longest path of a tree."""
        return self._draft_tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers of the proposer."""
        return KVCache.page_bytes(self._config, page_size=1, dtype=self._dtype)

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the key and value tensors of each layer of the proposer, in pages with the target's page numbers."""
        self._page_size = page_size
        # The number of pages doesn't limit the batch: captured and measured batches are padded.
        self._query_start = torch.arange(MAX_BATCH_REQUESTS + 1, dtype=torch.int32, device=backend.device)
        self._cache = KVCache.allocate(
            self._config, pages=pages, page_size=page_size, dtype=self._dtype, device=backend.device
        )

    def next_positions(self, kernels: KernelSet, inputs: DraftInputs, *, count: int) -> DraftPositions:
        """Return positions, slots and lengths of the next ``count`` tokens of each request. One kernel computes them."""
        return DraftPositions(kernels, inputs, self._query_start, count=count, page_size=self._page_size)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """Key and value tensors of each layer of the proposer in turn."""
        return tuple(tensor for pair in self.cache.layers for tensor in pair)

    @property
    def cache(self) -> KVCache:
        """The proposer's KV cache. It exists from :meth:`allocate` on. Raises :class:`ConfigError` before."""
        if self._cache is None:
            raise ConfigError(f"the proposer {self.name!r} has no cache yet; the engine allocates it")
        return self._cache


class ChainProposer(CachedProposer):
    """Base class of proposers of chains whose first token is relayed, with one draft pass for each further token."""

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """Host parameters of the draft passes: each pass reads one cached token more than the previous pass."""
        return self.host_lengths_of(self._draft_tokens)

    def host_lengths_of(self, count: int) -> Mapping[str, int]:
        """Return the lengths of draft-extend and of ``count`` - 1 draft passes."""
        ahead, count = self._tokens_ahead, min(count, self._draft_tokens)
        return {"extend": ahead, **{f"draft.{step}": step + ahead for step in range(1, count)}}


class HeadProposer(CachedProposer):
    """Base class of proposers with one draft head for the target."""

    head: BaseDraftHead
    accepts_padding = True

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs the head reads."""
        return self.head.aux_hidden_state_layers

    @property
    def reads_hidden(self) -> bool:
        """True if the head reads the target's final hidden states."""
        return self.head.reads_hidden


class TreeProposer(CachedProposer):
    """A proposer of trees of one shape that relays the T first tokens with their log-probabilities.

    Keys and values of drafted nodes use scratch slots after the cached tokens, under a tree mask; later iterations overwrite
    them. The selection of nodes is deterministic, also for requests that sample.
    """

    is_tree = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, shape: DynamicTree) -> None:
        super().__init__(config, dtype)
        self._shape, self._draft_tokens = shape, shape.depth

    @property
    def nodes(self) -> int:
        """K, the number of nodes of the shape."""
        return self._shape.nodes

    @property
    def slots(self) -> int:
        """Number of slots that verify, draft-extend or the expanded nodes write, the largest of the three."""
        shape, ahead = self._shape, self._tokens_ahead
        return max(shape.nodes + 1, shape.depth + 1 + ahead, shape.expanded + ahead)

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The T first draft tokens and their log-probabilities, per request."""
        branches = self._shape.branches
        return (RelaySpec("tokens", (branches,), torch.int64), RelaySpec("scores", (branches,), torch.float32))

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """Host parameters of draft-extend, and of each level's draft pass, which adds the level's nodes."""
        ahead = self._tokens_ahead
        return {"extend": ahead, **{f"draft.{nodes}": nodes + ahead for nodes in self._shape.levels}}

    def level_input(self, inputs: DraftInputs, level: Level, rope: RopeConfig, positions: Tensor) -> ForwardInput:
        """Return the pass over the nodes of ``level`` at ``positions`` int64 [B, M]. Their slots follow the cached tokens and
        the tokens by which draft-extend exceeds them.
        """
        (batch, nodes), ahead = level.tokens.shape, self._tokens_ahead
        device = level.tokens.device
        lens = inputs.seq_lens_host
        attention = AttentionMetadata(
            query_start=torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32, device=device),
            seq_lens=(inputs.seq_lens + (ahead + nodes)).to(torch.int32),
            block_table=inputs.tables,
            max_query=nodes,
            max_kv=inputs.max_kv,
            tree_mask=level.mask.flatten(0, 1),
            uniform=True,
            seq_lens_host=None if lens is None else lens.host_param(f"draft.{nodes}", ahead + nodes),
        )
        slot_positions = inputs.seq_lens.unsqueeze(1) + torch.arange(ahead, ahead + nodes, device=device)
        return ForwardInput(
            level.tokens.flatten(),
            text_rope_positions(rope, positions.flatten(), inputs.mrope_position_deltas),
            slots_of(slot_positions, inputs.tables, self._page_size).flatten(),
            attention,
        )
