"""The parts of an engine that live as long as the engine: its streams, fences, caches and buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.device import Backend, Fence
from outrider.engine.config import MAX_LOGPROBS, DecidedConfig, state_rows
from outrider.engine.fences import FenceSet, Streams
from outrider.engine.setup.checks import check_cache
from outrider.engine.state.buffers import StaticBuffers, step_buffers
from outrider.engine.state.input_upload import InputUpload
from outrider.engine.state.masks import Masks
from outrider.engine.state.options import OptionTable
from outrider.engine.state.plans import AttentionPlans, Plans
from outrider.engine.state.probes import Probes
from outrider.engine.state.results import Results
from outrider.engine.state.rows import FutureMap, RowTable, SeqLensRing
from outrider.engine.state.staging import Staging, staging_capacity
from outrider.engine.state.transfer import StateTransfer
from outrider.model import KVCache, LanguageModel, VisionTower
from outrider.speculative.proposer import Proposer

_MAX_TRANSFERS = 64
"""Maximum number of requests on their way to other engines, and from other engines, at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts that live as long as the engine.

    ``lengths`` are the numbers of tokens that an iteration may draft; for a tree, its nodes.
    """

    backend: Backend
    streams: Streams
    fences: FenceSet
    model: LanguageModel
    cache: KVCache
    proposer: Proposer
    rows: RowTable
    options: OptionTable
    masks: Masks
    future: FutureMap
    buffers: StaticBuffers
    plans: Plans
    attention: AttentionPlans
    probes: Probes
    staging: Staging
    input_upload: InputUpload
    results: Results
    seq_lens_ring: SeqLensRing
    transfer: StateTransfer
    lengths: tuple[int, ...]
    config: DecidedConfig
    vision: VisionTower | None

    @property
    def capacity(self) -> int:
        """Number of tokens that a block table holds."""
        return self.rows.tables.shape[1] * self.config.page_size

    @property
    def spare(self) -> int:
        """Number of cache slots that a request needs in addition to one per token.

        The nodes of a tree lie in slots after the cached tokens, and each counts until the accepted path is moved.
        """
        return max(self.proposer.slots - 2, 0) if self.proposer.is_tree else 0

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


def _allocate_staging(model: LanguageModel, backend: Backend, config: DecidedConfig, *, pages: int) -> Staging:
    """Allocate the staging ring; a block table has ``pages`` entries."""
    capacity = staging_capacity(requests=config.max_requests, pages=pages, prefill_chunk=config.prefill_chunk)
    capacity += OptionTable.capacity(
        requests=config.max_requests, vocabulary=model.config.vocab_size, max_context=config.max_context
    )
    return Staging(backend, entries=ring_entries(config), capacity=capacity, max_requests=config.max_requests)


def _allocate_cache(model: LanguageModel, backend: Backend, config: DecidedConfig) -> KVCache:
    return KVCache.for_model(
        model.config,
        pages=config.num_pages,
        page_size=config.page_size,
        dtype=model.dtype,
        cache_dtype=model.cache_dtype,
        rows=state_rows(config.max_requests, config.state_checkpoints),
        device=backend.device,
    )


def _allocate_buffers(
    model: LanguageModel, backend: Backend, proposer: Proposer, config: DecidedConfig, lengths: tuple[int, ...], *, pages: int
) -> StaticBuffers:
    return StaticBuffers(
        backend,
        step_buffers(model, proposer, pages=pages),
        max_requests=config.max_requests,
        shorter={
            length: step_buffers(model, proposer, pages=pages, drafted=length)
            for length in lengths
            if length != proposer.nodes
        },
    )


def assemble(
    model: LanguageModel,
    backend: Backend,
    *,
    proposer: Proposer,
    config: DecidedConfig,
    lengths: tuple[int, ...],
    vision: VisionTower | None,
    wrap_fence: Callable[[Fence], Fence] | None = None,
) -> EngineParts:
    """Allocate streams, fences, caches and buffers of an engine. The allocations have completed when this returns."""
    table_width = -(-(config.max_context + proposer.slots) // config.page_size)
    pages, entries, device = config.num_pages, ring_entries(config), backend.device
    check_cache(backend, config, model, pages=pages)
    streams = _create_streams(backend, config)
    data = None if model.ranks is None else model.ranks.data
    # Allocations are enqueued on forward and completed before work starts on any other stream.
    with backend.on(streams.forward), backend.guard("allocating the engine's caches and buffers"):
        cache = _allocate_cache(model, backend, config)
        proposer.allocate(backend=backend, pages=pages, page_size=config.page_size)
        rows = RowTable(rows=config.max_requests + 1, pages=table_width, device=device)
        vocabulary = model.config.vocab_size
        options = OptionTable(rows=config.max_requests + 1, vocabulary=vocabulary, device=device)
        masks = Masks(backend, proposer, entries=entries, max_requests=config.max_requests, vocabulary=vocabulary)
        future = FutureMap(model.kernels, rows=config.max_requests + 1, relay=proposer.relay, device=device)
        buffers = _allocate_buffers(model, backend, proposer, config, lengths, pages=table_width)
        staging = _allocate_staging(model, backend, config, pages=table_width)
        probes = Probes(model.kernels, proposer, vocabulary=model.config.vocab_size, ranks=model.ranks is not None)
        results = Results(
            backend,
            entries=entries,
            max_requests=config.max_requests,
            depth=proposer.depth,
            probes=probes,
            max_logprobs=min(MAX_LOGPROBS, model.config.vocab_size),
            data=data,
        )
        seq_lens_ring = SeqLensRing(backend, future.seq_lens, entries=entries)
    streams.forward.synchronize()
    transfers = min(config.max_requests, _MAX_TRANSFERS)
    fences = FenceSet(backend.speculative_sync, entries=entries, transfers=transfers, wrap=wrap_fence)
    return EngineParts(
        backend=backend,
        streams=streams,
        fences=fences,
        model=model,
        cache=cache,
        proposer=proposer,
        rows=rows,
        options=options,
        masks=masks,
        future=future,
        buffers=buffers,
        plans=Plans(model.kernels, proposer, lane=buffers.lane, page_size=config.page_size, max_context=config.max_context),
        attention=AttentionPlans(model, proposer, page_size=config.page_size),
        probes=probes,
        staging=staging,
        input_upload=InputUpload(
            staging=staging,
            rows=rows,
            options=options,
            future=future,
            page_size=config.page_size,
            rope=model.config.rope,
        ),
        results=results,
        seq_lens_ring=seq_lens_ring,
        lengths=lengths,
        transfer=StateTransfer(
            backend,
            streams.forward,
            model,
            proposer,
            cache=cache,
            rows=rows,
            future=future,
            fences=fences,
            group=0 if data is None else data.rank,
        ),
        config=config,
        vision=vision,
    )
