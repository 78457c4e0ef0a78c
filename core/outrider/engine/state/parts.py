"""The parts of an engine that live as long as the engine: its streams, fences, caches, buffers, and state of request rows.

Row 0 is reserved for padding and stays zero. The input upload writes :class:`RowTable`, which the host decides. The forward
stream writes :class:`FutureMap`, which the device decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outrider.device import Backend, Fence, KernelSet
from outrider.engine.config import MAX_LOGPROBS, DecidedConfig, state_rows
from outrider.engine.fences import FenceSet, Streams
from outrider.engine.requests.batch import Batch
from outrider.engine.setup.checks import check_cache
from outrider.engine.state.buffers import StaticBuffers, step_buffers
from outrider.engine.state.options import Masks, OptionTable
from outrider.engine.state.plans import AttentionPlans
from outrider.engine.state.results import HostCopyRing, Probes, Results
from outrider.engine.state.staging import Staged, Staging, floats_of_bits, staging_capacity
from outrider.model import KVCache, LanguageModel, LayerState, VisionTower
from outrider.speculative.proposer import Proposer, RelaySpec


class RowTable:
    """Block tables and sampling parameters of all R request rows."""

    def __init__(self, *, rows: int, pages: int, device: torch.device) -> None:
        self.tables = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        """Block tables, int32 [R, P]."""
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        """Sampling temperatures, float32 [R]."""
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        """Random seeds, int64 [R]."""
        self.mrope_position_deltas = torch.zeros(rows, dtype=torch.int64, device=device)
        """Rope position minus sequence index of tokens after a prompt with media, int64 [R]."""

    def update(self, batch: Batch, staged: Staged) -> None:
        """Write sampling parameters, rope position deltas and an empty block table to the rows of the batch's admitted
        requests, then the new block-table entries of all its requests, on the current stream.
        """
        if batch.admitted:
            rows = staged("admitted")
            self.temperature[rows] = floats_of_bits(staged("temperature"))
            self.seeds[rows] = staged("seeds")
            self.mrope_position_deltas[rows] = staged("mrope_position_deltas")
            self.tables.index_fill_(0, rows, 0)
        if batch.table_updates:
            self.tables.view(-1)[staged("entries")] = staged("pages").to(torch.int32)


class FutureMap:
    """The next-iteration state of all R request rows. Padding uses row 0, which stays zero.

    The schedule stream reads published lengths after the fence *published*. Only the forward stream reads the stashed last
    tokens and relay, in stream order.
    """

    def __init__(self, kernels: KernelSet, *, rows: int, relay: tuple[RelaySpec, ...], device: torch.device) -> None:
        self._kernels = kernels
        self.seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        """Published lengths: tokens in the target's KV cache, int64 [R]."""
        self.batch_seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        """The lengths of a batch in its order, int64 [R], which the schedule stream writes."""
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """Stashed last tokens, int64 [R]."""
        self.relay: Mapping[str, Tensor] = {
            spec.name: torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device) for spec in relay
        }
        """The stashed tensors that the proposer relays between iterations, by name, [R, ...]."""

    def publish(self, rows: Tensor, seq_lens: Tensor) -> None:
        """Write the new lengths ``seq_lens`` of ``rows``, int64 [B] each, on forward. Row 0 keeps length 0."""
        self.seq_lens[rows] = torch.where(rows > 0, seq_lens, 0)

    def resolve_seq_lens(self, rows: Tensor) -> None:
        """Gather the published lengths of ``rows`` int64 [B] into ``batch_seq_lens``, on the schedule stream."""
        self.batch_seq_lens[: rows.shape[0]] = self.seq_lens.index_select(0, rows)

    def stash(self, rows: Tensor, last_tokens: Tensor, relay: Mapping[str, Tensor]) -> None:
        """Write last tokens int64 [B] and the proposer's relay to ``rows`` int64 [B]."""
        self._kernels.scatter_rows(self.last_tokens, rows, last_tokens)
        self.stash_relay(rows, relay)

    def stash_relay(self, rows: Tensor, relay: Mapping[str, Tensor]) -> None:
        """Write the proposer's relay tensors [B, ...] to ``rows`` int64 [B], on forward. Tensors that ``relay`` lacks keep
        their value.
        """
        for name, value in relay.items():
            self._kernels.scatter_rows(self.relay[name], rows, value)

    def gather_relay(self, rows: Tensor) -> Mapping[str, Tensor]:
        """Return copies of the relayed tensors of ``rows`` int64 [B], by name, [B, ...] each."""
        return {name: self._kernels.gather_rows(value, rows) for name, value in self.relay.items()}


_MAX_TRANSFERS = 64
"""Maximum number of requests on their way to other engines, and from other engines, at a time."""


class EngineParts:
    """The parts that live as long as the engine. Creating them allocates all memory of the engine, whose addresses then stay
    the same.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: Backend,
        *,
        proposer: Proposer,
        config: DecidedConfig,
        lengths: tuple[int, ...],
        widths: tuple[int, ...],
        vision: VisionTower | None,
        wrap_fence: Callable[[Fence], Fence] | None = None,
    ) -> None:
        """Allocate streams, fences, caches and buffers.

        ``lengths`` are the numbers of tokens that an iteration may draft; for a tree, its nodes. ``widths`` are those of the
        draft-length policy (:attr:`~outrider.engine.requests.draft_length.DraftLengthPolicy.widths`).
        """
        self.backend, self.model, self.proposer = backend, model, proposer
        self.config = config
        self.lengths, self.widths = lengths, widths
        self.vision = vision
        page_size, entries, requests = config.page_size, ring_entries(config), config.max_requests
        vocabulary, kernels, device = model.config.vocab_size, model.kernels, backend.device
        table_width = -(-(config.max_context + proposer.slots) // page_size)
        check_cache(backend, config, model, pages=config.num_pages)
        self.streams = streams = _create_streams(backend, config)
        data = model.ranks.data
        # Allocations are enqueued on forward and completed before work starts on any other stream.
        with backend.on(streams.forward), backend.guard("allocating the engine's caches and buffers"):
            self.cache = self._allocate_cache()
            proposer.allocate(backend=backend, pages=config.num_pages, page_size=page_size)
            proposer.allocate_states(backend=backend, rows=state_rows(requests, config.state_checkpoints), requests=requests)
            self.rows = RowTable(rows=requests + 1, pages=table_width, device=device)
            self.options = OptionTable(rows=requests + 1, vocabulary=vocabulary, device=device)
            self.masks = Masks(backend, proposer, entries=entries, max_requests=requests, vocabulary=vocabulary)
            self.future = FutureMap(kernels, rows=requests + 1, relay=proposer.relay, device=device)
            self.buffers = self._allocate_buffers(table_width)
            self.staging = self._allocate_staging(table_width)
            self.probes = Probes(kernels, proposer, vocabulary=vocabulary, ranks=not model.ranks.is_single)
            self.results = Results(
                backend,
                entries=entries,
                max_requests=requests,
                depth=proposer.depth,
                probes=self.probes,
                max_logprobs=min(MAX_LOGPROBS, vocabulary),
                data=data,
            )
            self.seq_lens_ring = HostCopyRing(backend, "lengths", self.future.seq_lens, entries=entries)
            """Copies of the published lengths for attention that takes lengths as host integers."""
        streams.forward.synchronize()
        transfers = min(requests, _MAX_TRANSFERS)
        self.fences = FenceSet(backend.speculative_sync, entries=entries, transfers=transfers, wrap=wrap_fence)
        self.attention = AttentionPlans(model, proposer, page_size=page_size)

    def _allocate_cache(self) -> KVCache:
        """Allocate the KV pages and recurrent states of the target."""
        config, model, depth = self.config, self.model, self.proposer.depth
        return KVCache.for_model(
            model.config,
            pages=config.num_pages,
            page_size=config.page_size,
            dtype=model.dtype,
            cache_dtype=model.cache_dtype,
            rows=state_rows(config.max_requests, config.state_checkpoints),
            device=self.backend.device,
            windows=(state_rows(config.max_requests, 0), depth + 1 if depth else 0),
        )

    def _allocate_buffers(self, pages: int) -> StaticBuffers:
        """Allocate the static buffers; a block table has ``pages`` entries."""
        model, proposer = self.model, self.proposer
        layouts = {
            drafted: step_buffers(model, proposer, pages=pages, drafted=drafted)
            for drafted in sorted({*self.lengths, proposer.nodes})
        }
        return StaticBuffers(self.backend, layouts, max_requests=self.config.max_requests)

    def _allocate_staging(self, pages: int) -> Staging:
        config, vocabulary = self.config, self.model.config.vocab_size
        capacity = staging_capacity(requests=config.max_requests, pages=pages, prefill_chunk=config.prefill_chunk)
        capacity += OptionTable.capacity(requests=config.max_requests, vocabulary=vocabulary, max_context=config.max_context)
        return Staging(self.backend, entries=ring_entries(config), capacity=capacity, max_requests=config.max_requests)

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a request: those of a full block table."""
        return self.rows.tables.shape[1] * self.config.page_size

    @property
    def last_position(self) -> int:
        """The last position of the model's context; rejected tokens may lie beyond it."""
        return self.config.max_context - 1

    @property
    def spare(self) -> int:
        """Number of cache slots that a request needs in addition to one per token.

        The nodes of a tree lie in slots after the cached tokens, and each counts until the accepted path is moved.
        """
        return max(self.proposer.slots - 2, 0) if self.proposer.is_tree else 0

    @property
    def states(self) -> tuple[LayerState, ...]:
        """The states of all recurrent layers: those of the target, then those of the proposer."""
        return (*self.cache.states, *self.proposer.states)

    @property
    def has_extend_work(self) -> bool:
        """Return True if work follows verify: a draft-extend pass, or KV of a tree that must move."""
        return self.proposer.extends or self.proposer.is_tree


def ring_entries(config: DecidedConfig) -> int:
    """Return how many iterations use pinned buffers at the same time: two with overlap, else one."""
    return 2 if config.overlap else 1


def _create_streams(backend: Backend, config: DecidedConfig) -> Streams:
    sync = backend.speculative_sync
    schedule, forward = backend.create_stream("schedule"), backend.create_stream("forward")
    plan = backend.create_stream("plan") if config.plan_stream else forward
    copy = forward if sync.results_on_forward else backend.create_stream("copy")
    update = backend.create_stream("update") if sync.rebind_params and config.graphs else None
    return Streams(schedule, forward, plan, copy, update)
