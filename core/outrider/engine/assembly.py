"""Everything that an engine allocates on its device, made before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.device import Backend, Fence
from outrider.engine.buffers import StepBuffers
from outrider.engine.config import EngineConfig
from outrider.engine.fences import FenceSet
from outrider.engine.options import OptionTable
from outrider.engine.results import Results
from outrider.engine.rows import FutureMap, RowTable
from outrider.engine.staging import Staging, staging_capacity
from outrider.engine.step import StepParts, Streams
from outrider.model import Decoder, KVCache, LanguageModel, Progress, VisionTower, load_decoder, load_through_transformers
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
    slots = ring_slots(config)
    device = backend.device

    streams = Streams(*(backend.create_stream(name) for name in ("schedule", "forward", "plan", "copy")))
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
        future = FutureMap(rows=config.max_requests + 1, relay=proposer.relay, device=device)
        buffers = StepBuffers(
            max_requests=config.max_requests,
            nodes=proposer.nodes,
            depth=proposer.depth,
            is_tree=proposer.is_tree,
            pages=table_width,
            axes=model.config.rope.axes,
            device=device,
        )
        capacity = staging_capacity(requests=config.max_requests, pages=table_width, prefill_chunk=config.prefill_chunk)
        capacity += OptionTable.capacity(
            requests=config.max_requests,
            vocabulary=model.config.vocab_size,
            max_context=max_context,
            penalties=config.penalties,
        )
        staging = Staging(backend, slots=slots, capacity=capacity)
        results = Results(
            backend,
            slots=slots,
            max_requests=config.max_requests,
            depth=proposer.depth,
            max_logprobs=min(config.max_logprobs, model.config.vocab_size),
        )
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
        staging=staging,
        results=results,
        page_size=config.page_size,
        max_context=max_context,
        vision=vision,
    )


def load_model(
    directory: Path, backend: Backend, config: EngineConfig, through_transformers: bool, progress: Progress | None
) -> LanguageModel:
    """The model of a checkpoint, native or by transformers' own code, with the kernels that the config asks for."""
    if through_transformers:
        return load_through_transformers(directory, backend=backend, dtype=config.torch_dtype)
    model = load_decoder(directory, backend=backend, dtype=config.torch_dtype, progress=progress)
    if config.batch_invariant:
        return Decoder(model.config, model.weights, backend.kernels_in_use.batch_invariant())
    return model
