"""The parts of an engine that live as long as the engine: its streams, fences, caches and buffers."""

from __future__ import annotations

from collections.abc import Callable

from outrider.device import Backend, Fence
from outrider.engine.config import MAX_LOGPROBS, DecidedConfig, state_rows
from outrider.engine.fences import FenceSet, Streams
from outrider.engine.setup.checks import check_cache
from outrider.engine.state.buffers import StaticBuffers, step_buffers
from outrider.engine.state.options import OptionTable
from outrider.engine.state.plans import AttentionPlans
from outrider.engine.state.results import HostCopyRing, Probes, Results
from outrider.engine.state.rows import FutureMap, RowTable
from outrider.engine.state.staging import Staging, staging_capacity
from outrider.model import KVCache, LanguageModel, LayerState, VisionTower
from outrider.speculative.proposer import Proposer

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
