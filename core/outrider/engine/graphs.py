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
from outrider.engine.state.buffers import EXTEND, INPUTS, VERIFY, StaticBuffers
from outrider.speculative.seq_lens import HostSeqLens

CaptureProgress = Callable[[int, int], None]
AnyStage = Capturable[Any, Any]

SHORTER_FROM = 64
"""From so many requests on a shorter draft may be faster."""


def powers_up_to(most: int, base: int = 2) -> tuple[int, ...]:
    """Powers of ``base`` below ``most``, and ``most``: a batch is padded to less than ``base`` times its size."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size *= base
    return (*sizes, most)


def buckets_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, every 8 to 32, every 16 to 96, every 32 to 192, every 64 behind that, and ``most``: a batch is padded by a
    third of it at most, from 8 requests on by half. A graph takes time to capture and holds memory, so there are no more.
    """
    steps = (1, 2, 4, *range(8, 32, 8), *range(32, 96, 16), *range(96, 192, 32), *range(192, most, 64))
    return (*(size for size in steps if size < most), most)


def sizes_of_shorter(sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of ``sizes`` for which drafts are captured that are shorter than they can be: multiples of 64, and the largest.
    Fewer requests are bound by memory, so that they seldom need one; they can have the graph of 64.
    """
    return tuple(size for size in sizes if size % SHORTER_FROM == 0 or size == max(sizes))


class Runner(ABC):
    """Runs stages on their streams, by graphs or by calls; both have this interface. ``report``: what was captured; None
    without graphs.
    """

    report: CaptureReport | None = None

    def __init__(self, backend: Backend, buffers: StaticBuffers) -> None:
        self._backend = backend
        self._buffers = buffers

    @abstractmethod
    def batch(
        self, count: int, drafted: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None
    ) -> DecodeBatch:
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
            self._buffers.mark_stale(group, bucket=batch.bucket, drafted=batch.drafted)
            written = stage.run(given)
            self._buffers.pad(group, count=batch.count, bucket=batch.bucket, drafted=batch.drafted)
            return written


class EagerRunner(Runner):
    """Calls the stages: no padding, no graphs."""

    def batch(
        self, count: int, drafted: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None
    ) -> DecodeBatch:
        """Just the batch."""
        return DecodeBatch(count, count, drafted, features, max_kv, seq_lens_host=seq_lens_host)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing took. ``bytes``: device memory that the graphs' pools hold, None where the device can't tell (or torch
    gave back more
    meanwhile than they took).
    ``seconds``: of the host, warm-up and compilation of what the graphs hold included. ``lengths``: of the drafts.
    """

    graphs: int
    buckets: tuple[int, ...]
    bytes: int | None
    seconds: float
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        memory = "an unknown amount of memory" if self.bytes is None else f"{self.bytes / 2**20:.0f} MiB"
        return f"{self.graphs} graphs captured in {self.seconds:.1f} s, holding {memory}"


class GraphRunner(Runner):
    """Captures the stages ``which`` for every bucket when it's made; nothing is captured later. Other stages are called.

    Three sets of features are captured: greedy, sampling, and everything. A batch gets the first that covers it.
    ``buckets``: sizes of batches; None: :func:`buckets_up_to` the most requests for greedy ones, powers of two for those that
    sample, of four for everything. ``lengths``: of drafts, all nodes of a tree; the shorter ones are captured for greedy
    batches, of :func:`sizes_of_shorter`. ``capacity``: tokens that a block table holds.
    """

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        stages: Stages,
        *,
        which: Sequence[AnyStage],
        buckets: Sequence[int] | None,
        most: int,
        lengths: Sequence[int],
        everything: Features,
        capacity: int,
        progress: CaptureProgress | None = None,
    ) -> None:
        super().__init__(backend, buffers)
        greedy, sampling = Features(), Features(sampling=True)
        # Few batches sample, and fewer use everything: for them there are fewer sizes.
        sizes = {greedy: buckets_up_to(most), sampling: powers_up_to(most), everything: powers_up_to(most, 4)}
        if buckets is not None:
            sizes = dict.fromkeys(sizes, tuple(sorted(buckets)))
        self.buckets = sizes[greedy]
        self._sizes = {(max(lengths), kind): sizes[kind] for kind in sizes}
        # Only greedy batches are drafted for by less than can be.
        shorter = sizes_of_shorter(sizes[greedy])
        self._sizes |= {(drafted, greedy): shorter for drafted in lengths if drafted < max(lengths)}
        self._stages = stages
        self._which = tuple(which)
        self._capacity = capacity
        self._most_drafted = max(lengths)
        self._graphs: dict[tuple[int, int, Features], Mapping[str, Graph]] = {}
        pools = {stage.name: backend.create_graph_pool(stage.name) for stage in which}
        limited = backend.capabilities.memory_limit
        before = backend.memory_info().free if limited else 0
        began = time.perf_counter()
        for drafted in lengths:
            for count in range(1, most + 1):
                buffers.views(count, drafted)  # made before any replay, they are known to follow what graphs write
        self._shared: dict[tuple[str, int, int, bool], Graph] = {}
        wanted = [
            (size, drafted, kind)
            for size in sorted({size for sizes in self._sizes.values() for size in sizes}, reverse=True)
            for (drafted, kind), sizes in self._sizes.items()
            if size in sizes
        ]
        # The largest first: the smaller ones then fit into the memory that the pool has already.
        for done, (size, drafted, kind) in enumerate(wanted, start=1):
            self._graphs[size, drafted, kind] = self._capture(size, drafted, kind, pools)
            if progress is not None:
                progress(done, len(wanted))
        after = backend.memory_info().free if limited else 0
        graphs = len({id(graph) for captured in self._graphs.values() for graph in captured.values()})
        seconds = time.perf_counter() - began
        held = before - after if limited and after <= before else None
        self.report = CaptureReport(graphs, self.buckets, held, seconds, tuple(sorted(lengths)))

    def bucket(self, count: int, drafted: int | None = None, features: Features | None = None) -> int:
        """The smallest bucket that holds ``count`` requests with ``features``, which are captured; of the longest draft and
        of greedy requests unless it's said.
        """
        key = self._most_drafted if drafted is None else drafted, features or Features()
        return next(size for size in self._sizes[key] if size >= count)

    def batch(
        self, count: int, drafted: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None
    ) -> DecodeBatch:
        """In the smallest bucket. Its bound of cached tokens is the capacity, since it was captured once for all."""
        del max_kv
        features = next(kind for _, kind in self._sizes if kind.covers(features))
        bucket = self.bucket(count, drafted, features)
        padded = None if seq_lens_host is None else seq_lens_host.padded(bucket)
        return DecodeBatch(count, bucket, drafted, features, self._capacity, captured=True, seq_lens_host=padded)

    def bind(self, batch: DecodeBatch, stream: Stream) -> None:
        """Rebind the lengths of every stage's graph, padding included."""
        seq_lens = batch.seq_lens_host
        if seq_lens is None:
            return
        for stage in self._which:
            least = stage.least_lengths(batch.drafted)
            params = {
                name: seq_lens.plus(ahead, least.get(name, 0)) for name, ahead in stage.host_params(batch.drafted).items()
            }
            if params:
                self._graphs_of(batch)[stage.name].update_params(params, stream=stream)

    def run(self, stage: Stage[In, Out], given: In) -> Out:
        """Replay what was captured. A library that plans has brought the plan that was captured up to date."""
        if not isinstance(stage, Capturable) or stage not in self._which or not _has_work(stage, given.batch.drafted):
            return super().run(stage, given)
        self._graphs_of(given.batch)[stage.name].replay(stage.stream)
        written: Out = stage.written(given.batch)
        return written

    def _graphs_of(self, batch: DecodeBatch) -> Mapping[str, Graph]:
        return self._graphs[batch.bucket, batch.drafted, batch.features]

    def _capture(self, bucket: int, drafted: int, features: Features, pools: Mapping[str, GraphPool]) -> Mapping[str, Graph]:
        """One size and length with all its stages."""
        stages = self._stages
        batch = DecodeBatch(bucket, bucket, drafted, features, self._capacity, captured=True)
        nothing, plan = HostSeqLens((0,) * bucket, self._capacity), stages.verify_attention.stream
        with self._backend.on(plan):
            for group in (INPUTS, VERIFY, EXTEND):  # what lies there is of another length, or of a warm-up's requests
                self._buffers.pad(group, count=0, bucket=bucket, drafted=drafted)
            attention = stages.verify_attention.run(AttentionInput(batch, nothing))
            along = stages.extend_attention.run(ExtendAttentionInput(batch, attention, nothing))
        plan.synchronize()
        graphs: dict[str, Graph] = {}
        for stage in self._which:
            if not _has_work(stage, drafted):
                continue
            if not isinstance(stage, DraftStage | Extend):
                graphs[stage.name] = self._graph(stage, batch, attention, pools[stage.name])
                continue
            # They know of sampling alone.
            key = (stage.name, bucket, drafted, features.sampling)
            narrow = replace(batch, features=Features(sampling=features.sampling))
            if key not in self._shared:
                self._shared[key] = self._graph(stage, narrow, along, pools[stage.name])
            graphs[stage.name] = self._shared[key]
        return graphs

    def _graph(self, stage: AnyStage, batch: DecodeBatch, attention: AttentionMetadata, pool: GraphPool) -> Graph:
        backend, count, features = self._backend, batch.count, batch.features
        exact = backend.speculative_sync.exact_host_lengths
        nothing = HostSeqLens((0,) * count, self._capacity)
        params = stage.host_params(batch.drafted) if exact else {}
        least = stage.least_lengths(batch.drafted)

        def run(context: CaptureContext) -> None:
            # The stage reads the same buffers by their views; only host parameters are the context's.
            seq_lens = replace(nothing, captured=context.params) if exact else None
            stage.run(self._given(stage, replace(batch, seq_lens_host=seq_lens), attention))

        shorter = "" if batch.drafted == self._most_drafted else f", {batch.drafted} drafted"
        kind = "everything" if features.options else "sampling" if features.sampling else "greedy"
        graph = backend.capture(
            f"{stage.name}[{count}, {kind}{shorter}]",
            run,
            stream=stage.stream,
            inputs=self._buffers.group(*stage.reads, count=count, drafted=batch.drafted),
            outputs=self._buffers.group(*stage.writes, count=count, drafted=batch.drafted),
            params={name: nothing.plus(ahead, least.get(name, 0)) for name, ahead in params.items()},
            pool=pool,
        )
        for name in params:
            backend.mark_mirror((graph, name), self._buffers.views(count, batch.drafted).inputs.seq_lens)
        return graph

    def _given(self, stage: AnyStage, batch: DecodeBatch, attention: AttentionMetadata) -> object:
        """A stage's input, all of it in static buffers."""
        views = self._buffers.views(batch.count, batch.drafted)
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


def _has_work(stage: AnyStage, drafted: int) -> bool:
    """Whether a stage does anything in an iteration that drafts so many tokens."""
    return drafted > 0 or not isinstance(stage, DraftStage)
