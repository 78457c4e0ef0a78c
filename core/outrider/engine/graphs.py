"""How stages are run: called for just the batch, or captured for buckets of batch sizes and replayed.

A batch is run by the graph of the smallest bucket that holds it; the rest of the bucket is padding, which has the reserved
row 0 and writes to the reserved page 0. Graphs of one stage share a pool, since they never run at the same time; pools of
different stages don't alias.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.device import AttentionMetadata, Backend, CaptureContext, Graph, GraphPool, Stream
from outrider.engine.requests.features import Features
from outrider.engine.stage_io import (
    AttentionInput,
    Capturable,
    DecodeBatch,
    DraftStageInput,
    ExtendAttentionInput,
    ExtendStageInput,
    In,
    IterationInput,
    Out,
    Stage,
    VerifyStageInput,
)
from outrider.engine.stages import DraftStage, Extend, Iteration, Stages, Verify
from outrider.engine.state.buffers import StaticBuffers
from outrider.speculative.seq_lens import HostSeqLens

CaptureProgress = Callable[[int, int], None]
AnyStage = Capturable[Any, Any]


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Powers of two below ``most``, and ``most``: a batch is padded to less than twice its size."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


class Runner(ABC):
    """Runs stages on their streams, by graphs or by calls; both have this interface. ``report``: what was captured; None
    without graphs.
    """

    report: CaptureReport | None = None

    def __init__(self, backend: Backend, buffers: StaticBuffers) -> None:
        self._backend = backend
        self._buffers = buffers

    @abstractmethod
    def batch(self, count: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None) -> DecodeBatch:
        """What the stages are told of ``count`` requests: a size that holds them, abilities that cover ``features``."""

    def bind(self, batch: DecodeBatch, stream: Stream) -> None:
        """Give the stages the host parameters of this iteration; work on ``stream``. Does nothing where calls pass them."""
        del batch, stream

    def run(self, stage: Stage[In, Out], given: In) -> Out:
        """Enqueue a stage on its stream, and fill the padding behind what it begins; returns what it writes."""
        batch, group = given.batch, stage.fills
        with self._backend.on(stage.stream):
            if group is None:
                return stage.run(given)
            self._buffers.mark_stale(group, bucket=batch.bucket)
            written = stage.run(given)
            self._buffers.pad(group, count=batch.count, bucket=batch.bucket)
            return written


class EagerRunner(Runner):
    """Calls the stages: no padding, no graphs."""

    def batch(self, count: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None) -> DecodeBatch:
        """Just the batch."""
        return DecodeBatch(count, count, features, max_kv, seq_lens_host=seq_lens_host)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing took. ``bytes``: device memory that the graphs' pools hold, None where the device can't tell.
    ``seconds``: of the host, warm-up and compilation of what the graphs hold included.
    """

    graphs: int
    buckets: tuple[int, ...]
    bytes: int | None
    seconds: float

    def __str__(self) -> str:
        memory = "an unknown amount of memory" if self.bytes is None else f"{self.bytes / 2**20:.0f} MiB"
        return f"{self.graphs} graphs captured in {self.seconds:.1f} s, holding {memory}"


class GraphRunner(Runner):
    """Captures the stages ``which`` for every bucket when it's made; nothing is captured later. Other stages are called.

    Three sets of features are captured: greedy, sampling, and everything. A batch gets the first that covers it.
    ``capacity``: tokens that a block table holds.
    """

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        stages: Stages,
        *,
        which: Sequence[AnyStage],
        buckets: Sequence[int],
        everything: Features,
        capacity: int,
        progress: CaptureProgress | None = None,
    ) -> None:
        super().__init__(backend, buffers)
        self.buckets = tuple(sorted(buckets))
        self._stages = stages
        self._which = tuple(which)
        self._features = tuple(dict.fromkeys((Features(), Features(sampling=True), everything)))
        self._capacity = capacity
        self._graphs: dict[tuple[int, Features], Mapping[str, Graph]] = {}
        pools = {stage.name: backend.create_graph_pool(stage.name) for stage in which}
        limited = backend.capabilities.memory_limit
        before = backend.memory_info().free if limited else 0
        began = time.perf_counter()
        total, done = len(self.buckets) * len(self._features), 0
        for count in range(1, self.buckets[-1] + 1):
            buffers.views(count)  # made before any replay, they are known to follow what graphs write
        self._shared: dict[tuple[str, int, bool], Graph] = {}
        # The largest first: the smaller ones then fit into the memory that the pool has already.
        for bucket in reversed(self.buckets):
            for features in self._features:
                self._graphs[bucket, features] = self._capture(bucket, features, pools)
                done += 1
                if progress is not None:
                    progress(done, total)
        after = backend.memory_info().free if limited else 0
        graphs = len({id(graph) for captured in self._graphs.values() for graph in captured.values()})
        seconds = time.perf_counter() - began
        self.report = CaptureReport(graphs, self.buckets, before - after if limited else None, seconds)

    def bucket(self, count: int) -> int:
        """The smallest bucket that holds ``count`` requests."""
        return next(bucket for bucket in self.buckets if bucket >= count)

    def batch(self, count: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None) -> DecodeBatch:
        """In the smallest bucket. Its bound of cached tokens is the capacity, since it was captured once for all."""
        del max_kv
        bucket = self.bucket(count)
        features = next(each for each in self._features if each.covers(features))
        padded = None if seq_lens_host is None else seq_lens_host.padded(bucket)
        return DecodeBatch(count, bucket, features, self._capacity, captured=True, seq_lens_host=padded)

    def bind(self, batch: DecodeBatch, stream: Stream) -> None:
        """Rebind the lengths of every stage's graph, padding included."""
        seq_lens = batch.seq_lens_host
        if seq_lens is None:
            return
        for stage in self._which:
            if stage.host_params:
                least = stage.least_lengths
                params = {name: seq_lens.plus(ahead, least.get(name, 0)) for name, ahead in stage.host_params.items()}
                self._graph_of(stage, batch).update_params(params, stream=stream)

    def run(self, stage: Stage[In, Out], given: In) -> Out:
        """Replay what was captured. A library that plans has brought the plan that was captured up to date."""
        if not isinstance(stage, Capturable) or stage not in self._which:
            return super().run(stage, given)
        self._graph_of(stage, given.batch).replay(stage.stream)
        written: Out = stage.written(given.batch)
        return written

    def _graph_of(self, stage: AnyStage, batch: DecodeBatch) -> Graph:
        return self._graphs[batch.bucket, batch.features][stage.name]

    def _capture(self, bucket: int, features: Features, pools: Mapping[str, GraphPool]) -> Mapping[str, Graph]:
        """One size with all its stages."""
        stages = self._stages
        batch = DecodeBatch(bucket, bucket, features, self._capacity, captured=True)
        nothing, plan = HostSeqLens((0,) * bucket, self._capacity), stages.verify_attention.stream
        with self._backend.on(plan):
            attention = stages.verify_attention.run(AttentionInput(batch, nothing))
            along = stages.extend_attention.run(ExtendAttentionInput(batch, attention, nothing))
        plan.synchronize()
        graphs: dict[str, Graph] = {}
        for stage in self._which:
            if not isinstance(stage, DraftStage | Extend):
                graphs[stage.name] = self._graph(stage, batch, attention, pools[stage.name])
                continue
            # They know of sampling alone.
            key = (stage.name, bucket, features.sampling)
            narrow = replace(batch, features=Features(sampling=features.sampling))
            if key not in self._shared:
                self._shared[key] = self._graph(stage, narrow, along, pools[stage.name])
            graphs[stage.name] = self._shared[key]
        return graphs

    def _graph(self, stage: AnyStage, batch: DecodeBatch, attention: AttentionMetadata, pool: GraphPool) -> Graph:
        backend, count, features = self._backend, batch.count, batch.features
        exact = backend.speculative_sync.exact_host_lengths
        nothing = HostSeqLens((0,) * count, self._capacity)
        params = stage.host_params if exact else {}

        def run(context: CaptureContext) -> None:
            # The stage reads the same buffers by their views; only host parameters are the context's.
            seq_lens = replace(nothing, captured=context.params) if exact else None
            stage.run(self._given(stage, replace(batch, seq_lens_host=seq_lens), attention))

        kind = "everything" if features.options else "sampling" if features.sampling else "greedy"
        graph = backend.capture(
            f"{stage.name}[{count}, {kind}]",
            run,
            stream=stage.stream,
            inputs=self._buffers.group(*stage.reads, count=count),
            outputs=self._buffers.group(*stage.writes, count=count),
            params={name: nothing.plus(ahead, stage.least_lengths.get(name, 0)) for name, ahead in params.items()},
            pool=pool,
        )
        for name in params:
            backend.mark_mirror((graph, name), self._buffers.views(count).inputs.seq_lens)
        return graph

    def _given(self, stage: AnyStage, batch: DecodeBatch, attention: AttentionMetadata) -> object:
        """A stage's input, all of it in static buffers."""
        views = self._buffers.views(batch.count)
        match stage:
            case DraftStage():
                return DraftStageInput(batch, views.inputs)
            case Verify():
                return VerifyStageInput(batch, views.inputs, views.draft, views.verify, attention)
            case Extend():
                return ExtendStageInput(batch, views.inputs, views.verify, views.outputs, views.extend, attention)
            case Iteration():
                return IterationInput(batch)
        raise AssertionError(f"{stage.name} isn't captured")
