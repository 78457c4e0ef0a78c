"""Everything that an engine allocates on its device, made before the first step."""

from __future__ import annotations

from collections.abc import Callable

from outrider.device import Backend, Fence, StepMode
from outrider.engine.checks import check_cache
from outrider.engine.config import EngineConfig
from outrider.engine.fences import FenceSet
from outrider.engine.graphs import Caller, CaptureProgress, GraphRunner, Runner, buckets_up_to
from outrider.engine.parts import StepParts
from outrider.engine.requests.features import Features
from outrider.engine.stages import Stage, Stages
from outrider.engine.state.attention_plans import AttentionPlans
from outrider.engine.state.buffers import StaticBuffers, step_buffers
from outrider.engine.state.options import OptionTable
from outrider.engine.state.plans import Plans
from outrider.engine.state.probes import Probes
from outrider.engine.state.results import Results
from outrider.engine.state.rows import FutureMap, LengthsOnHost, RowTable
from outrider.engine.state.staging import Staging, staging_capacity
from outrider.engine.streams import Streams
from outrider.model import KVCache, LanguageModel, VisionTower
from outrider.speculative.proposer import Proposer


def ring_slots(config: EngineConfig) -> int:
    """Iterations whose pinned buffers are in use at the same time."""
    return 2 if config.overlap else 1


def assemble(
    model: LanguageModel,
    backend: Backend,
    *,
    proposer: Proposer,
    config: EngineConfig,
    max_context: int,
    vision: VisionTower | None,
    wrap_fence: Callable[[Fence], Fence] | None = None,
) -> StepParts:
    """Streams, fences, caches and buffers of an engine; all of it is there when this returns."""
    table_width = -(-(max_context + proposer.slots) // config.page_size)
    pages = config.num_pages or config.max_requests * table_width + 1
    check_cache(backend, config, model, pages=pages)
    slots = ring_slots(config)
    device = backend.device

    sync = backend.speculative_sync
    schedule, forward = backend.create_stream("schedule"), backend.create_stream("forward")
    plan = backend.create_stream("plan") if config.plan_stream else forward
    copy = forward if sync.results_on_forward else backend.create_stream("copy")
    update = backend.create_stream("update") if sync.rebind_params and config.graphs else None
    streams = Streams(schedule, forward, plan, copy, update)
    # Everything that lives as long as the engine is made on forward, and finished before any stream starts.
    with backend.on(streams.forward), backend.guard("allocating the engine's caches and buffers"):
        cache = KVCache.allocate(
            model.config.num_layers,
            model.config.num_kv_heads,
            model.config.head_size,
            pages=pages,
            page_size=config.page_size,
            dtype=config.torch_dtype,
            device=device,
        )
        proposer.allocate(backend=backend, pages=pages, page_size=config.page_size)
        rows = RowTable(rows=config.max_requests + 1, pages=table_width, device=device)
        options = OptionTable(
            rows=config.max_requests + 1,
            vocabulary=model.config.vocab_size,
            penalties=config.penalties,
            device=device,
        )
        future = FutureMap(model.kernels, rows=config.max_requests + 1, relay=proposer.relay, device=device)
        buffers = StaticBuffers(backend, step_buffers(model, proposer, pages=table_width), max_requests=config.max_requests)
        capacity = staging_capacity(requests=config.max_requests, pages=table_width, prefill_chunk=config.prefill_chunk)
        capacity += OptionTable.capacity(
            requests=config.max_requests,
            vocabulary=model.config.vocab_size,
            max_context=max_context,
            penalties=config.penalties,
        )
        staging = Staging(backend, slots=slots, capacity=capacity, max_requests=config.max_requests)
        probes = Probes(model.kernels, proposer, vocabulary=model.config.vocab_size)
        results = Results(
            backend,
            slots=slots,
            max_requests=config.max_requests,
            depth=proposer.depth,
            probes=probes,
            max_logprobs=min(config.max_logprobs, model.config.vocab_size),
        )
        lengths = LengthsOnHost(backend, slots=slots, rows=config.max_requests + 1)
    streams.forward.synchronize()
    return StepParts(
        backend=backend,
        streams=streams,
        fences=FenceSet(backend.speculative_sync, slots=slots, wrap=wrap_fence),
        model=model,
        cache=cache,
        proposer=proposer,
        rows=rows,
        options=options,
        future=future,
        buffers=buffers,
        plans=Plans(model.kernels, buffers, proposer, page_size=config.page_size, max_context=max_context),
        attention=AttentionPlans(model, proposer, page_size=config.page_size),
        probes=probes,
        staging=staging,
        results=results,
        lengths=lengths,
        page_size=config.page_size,
        max_context=max_context,
        vision=vision,
    )


def build_runner(parts: StepParts, stages: Stages, config: EngineConfig, progress: CaptureProgress | None = None) -> Runner:
    """Graphs for every bucket, captured now, or none."""
    fused = config.step_mode is StepMode.FUSED
    if not (fused or config.graphs):
        return Caller(parts, stages)
    which = [Stage.ITERATION]
    if not fused:
        which = [*([Stage.DRAFT] if stages.drafts else []), Stage.VERIFY, *([Stage.EXTEND] if stages.extends else [])]
    everything = Features(
        sampling=True,
        biased=True,
        penalized=config.penalties,
        truncated=True,
        logprobs=min(config.max_logprobs, parts.model.config.vocab_size),
    )
    buckets = config.buckets or buckets_up_to(config.max_requests)
    return GraphRunner(parts, stages, which=which, buckets=buckets, everything=everything, progress=progress)
