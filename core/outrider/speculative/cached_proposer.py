"""Base classes of proposers with their own KV cache and of those that draft trees, and the conversions that they share.

Letters as in ``proposer``, and Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError, KernelSet
from outrider.model import BaseDraftHead, ForwardInput, KVCache, ModelConfig, RopeConfig, speculative_positions
from outrider.speculative.proposer import MAX_BATCH_REQUESTS, DraftInputs, ExtendInputs, Proposer, slots_of
from outrider.speculative.tree import Level, TreeShape

UNBOUNDED = 1 << 62
"""A last position greater than every position."""


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


def target_tokens(kernels: KernelSet, drafted: Tensor, ids: Tensor | None) -> Tensor:
    """Return the target's tokens of draft-vocabulary tokens of any shape.

    ``ids`` int64 [Vd] are the target's tokens; None means that both vocabularies are the same.
    """
    return drafted if ids is None else kernels.gather_rows(ids, drafted.flatten()).view(drafted.shape)


def over_target(probs: Tensor, ids: Tensor | None, vocabulary: int) -> Tensor:
    """Expand distributions [B, K, Vd] over the draft vocabulary to the target's vocabulary [B, K, V]."""
    if ids is None:
        return probs
    full = probs.new_zeros((*probs.shape[:-1], vocabulary))
    return full.index_copy_(-1, ids, probs)


def too_many_branches(branches: int, vocabulary: int) -> ConfigError:
    """Return the error of a tree with more branches than the draft vocabulary has tokens."""
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

    def attention(self, index: int, host_name: str) -> AttentionMetadata:
        """Return the metadata of the pass over the tokens at ``index``. ``host_name`` is the name of its host parameter."""
        inputs, num_tokens = self._inputs, index + 1
        return AttentionMetadata(
            query_start=self._query_start,
            seq_lens=self._seq_lens[index],
            block_table=inputs.tables,
            max_query=1,
            max_kv=inputs.max_kv,
            uniform=True,
            seq_lens_host=inputs.seq_lens_host.host_param(host_name, num_tokens)
            if inputs.seq_lens_host is not None
            else None,
        )


class CachedProposer(Proposer):
    """A proposer with keys and values of the layers of ``config``, in pages with the target's page numbers."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._cache: KVCache | None = None
        self._page_size = 0
        self._query_start = torch.empty(0, dtype=torch.int32)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        config = self._config
        return KVCache.page_bytes(config.num_layers, config.num_kv_heads, config.head_size, page_size=1, dtype=self._dtype)

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the key and value tensors of each layer of the proposer."""
        config = self._config
        self._page_size = page_size
        # The number of pages doesn't limit the batch: captured and measured batches are padded.
        self._query_start = torch.arange(MAX_BATCH_REQUESTS + 1, dtype=torch.int32, device=backend.device)
        self._cache = KVCache.allocate(
            config.num_layers,
            config.num_kv_heads,
            config.head_size,
            pages=pages,
            page_size=page_size,
            dtype=self._dtype,
            device=backend.device,
        )

    def next_positions(self, kernels: KernelSet, inputs: DraftInputs, *, count: int) -> DraftPositions:
        """Return positions, slots and lengths of the next ``count`` tokens of each request."""
        return DraftPositions(kernels, inputs, self._query_start, count=count, page_size=self._page_size)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """Key and value tensors of each layer in turn."""
        return tuple(tensor for pair in self.cache.layers for tensor in pair)

    @property
    def cache(self) -> KVCache:
        """The proposer's KV cache. It exists from :meth:`allocate` on."""
        if self._cache is None:
            raise ConfigError(f"the proposer {self.name!r} has no cache yet; the engine allocates it")
        return self._cache


class ChainProposer(CachedProposer):
    """Base class of proposers of chains whose first token is relayed, with one draft pass for each further token."""

    _draft_tokens: int
    _tokens_ahead = 0
    """Number of tokens that draft-extend adds to the cached length."""

    @property
    def depth(self) -> int:
        """K, the number of drafted tokens."""
        return self._draft_tokens

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

    def to_target_tokens(self, drafted: Tensor) -> Tensor:
        """Return the target's tokens of draft-vocabulary tokens of any shape."""
        return target_tokens(self.head.kernels, drafted, self.head.target_ids)

    def expand_to_target(self, probs: Tensor) -> Tensor:
        """Expand distributions [B, K, Vd] over the draft vocabulary to the target's vocabulary [B, K, V]."""
        return over_target(probs, self.head.target_ids, self.head.target.config.vocab_size)


class TreeProposer(CachedProposer):
    """A proposer of trees of one shape that relays the T first tokens with their log-probabilities.

    Keys and values of drafted nodes use scratch slots after the cached tokens, under a tree mask; later iterations overwrite
    them. The selection of nodes is deterministic, also for requests that sample.
    """

    is_tree = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, shape: TreeShape) -> None:
        super().__init__(config, dtype)
        self._shape = shape

    @property
    def depth(self) -> int:
        """D, the longest path of the shape."""
        return self._shape.depth

    @property
    def nodes(self) -> int:
        """K, the number of nodes of the shape."""
        return self._shape.nodes

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the KV cache and the constants of the shape."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        self._shape.allocate_constants(backend.device)

    def level_input(
        self, inputs: DraftInputs, level: Level, rope: RopeConfig, positions: Tensor, *, ahead: int
    ) -> ForwardInput:
        """Return the pass over the nodes of ``level`` at ``positions`` int64 [B, M].

        ``ahead`` tokens lie between the cached tokens and the first node's slot.
        """
        batch, nodes = level.tokens.shape
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
