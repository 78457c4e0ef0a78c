"""Runners of stages: eager for the exact batch, or captured for buckets of batch sizes and replayed.

A batch uses the graph of the smallest bucket that holds it. The unused rows of the bucket are padding: they read the reserved
row 0 and write to the reserved page 0. Graphs of one stage share a pool, since they never run at the same time. Pools of
different stages do not alias.
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
from outrider.speculative.host_seq_lens import HostSeqLens

CaptureProgress = Callable[[int, int], None]
AnyStage = Capturable[Any, Any]

MIN_REQUESTS_SHORTER_DRAFT = 64
"""Minimum number of requests at which a shorter draft can be faster."""


def powers_up_to(most: int, base: int = 2) -> tuple[int, ...]:
    """Return the powers of ``base`` below ``most``, and ``most``. A batch is padded to less than ``base`` times its size."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size *= base
    return (*sizes, most)


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Return the batch sizes of buckets: 1, 2, 4, every 8 to 32, every 16 to 96, every 32 to 192, every 64 above, and
    ``most``.

    A batch of 8 or more requests is padded by at most half. Each graph takes time to capture and holds memory, so there are
    no more sizes.
    """
    steps = (1, 2, 4, *range(8, 32, 8), *range(32, 96, 16), *range(96, 192, 32), *range(192, most, 64))
    return (*(size for size in steps if size < most), most)


def sizes_of_shorter(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes for which shorter drafts are captured: multiples of 64, and the largest size.

    Smaller batches are bound by memory and seldom gain from a shorter draft; they use the graph of 64 requests.
    """
    return tuple(size for size in sizes if size % MIN_REQUESTS_SHORTER_DRAFT == 0 or size == max(sizes))


class Runner(ABC):
    """The interface of both runners, which run stages on their streams from graphs or by calls."""

    report: CaptureReport | None = None
    """The captured graphs; None for a runner without graphs."""

    def __init__(self, backend: Backend, buffers: StaticBuffers) -> None:
        self._backend = backend
        self._buffers = buffers

    @abstractmethod
    def batch(
        self, count: int, drafted: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None
    ) -> DecodeBatch:
        """Return the batch that the stages receive: a bucket that holds ``count`` requests, and features that cover
        ``features``.
        """

    def bind(self, batch: DecodeBatch, stream: Stream) -> None:
        """Rebind the host parameters of captured stages on ``stream``. A called stage gets its parameters directly."""
        del batch, stream

    def run(self, stage: Stage[In, Out], given: In) -> Out:
        """Enqueue ``stage`` on its stream, pad the buffer group that it fills, and return its output."""
        batch, group = given.batch, stage.fills
        with self._backend.on(stage.stream):
            if group is None:
                return stage.run(given)
            self._buffers.mark_stale(group, bucket=batch.bucket, drafted=batch.drafted)
            written = stage.run(given)
            self._buffers.pad(group, count=batch.count, bucket=batch.bucket, drafted=batch.drafted)
            return written


class EagerRunner(Runner):
    """The runner that calls each stage for the exact batch, without padding or graphs."""

    def batch(
        self, count: int, drafted: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None
    ) -> DecodeBatch:
        """Return a batch of exactly ``count`` requests."""
        return DecodeBatch(count, count, drafted, features, max_kv, seq_lens_host=seq_lens_host)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """The result of capturing all graphs of an engine."""

    graphs: int
    """Number of captured graphs."""
    buckets: tuple[int, ...]
    """Batch sizes of greedy batches."""
    bytes: int | None
    """Device memory that the pools of the graphs hold; None if the device does not report it."""
    seconds: float
    """Host time, with warm-up and compilation of the captured kernels."""
    lengths: tuple[int, ...] = ()
    """Captured draft lengths, in tokens."""

    def __str__(self) -> str:
        memory = "an unknown amount of memory" if self.bytes is None else f"{self.bytes / 2**20:.0f} MiB"
        return f"{self.graphs} graphs captured in {self.seconds:.1f} s, holding {memory}"


class GraphRunner(Runner):
    """The runner that captures the stages ``which`` for every bucket when it is created, and calls all other stages.

    It captures three sets of features: greedy, sampling, and everything. A batch uses the first set that covers its features.
    ``buckets`` are batch sizes; None selects :func:`buckets_up_to` for greedy batches, powers of two for sampling, and powers
    of four for everything. ``lengths`` are draft lengths, with all nodes of a tree; shorter drafts are captured for greedy
    batches of :func:`sizes_of_shorter`. ``capacity`` is the number of tokens that a block table holds.
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
        # Only greedy batches use a shorter draft than the maximum.
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
                buffers.views(count, drafted)  # views made before any replay are known to follow the writes of graphs
        self._shared: dict[tuple[str, int, int, bool], Graph] = {}
        wanted = [
            (size, drafted, kind)
            for size in sorted({size for sizes in self._sizes.values() for size in sizes}, reverse=True)
            for (drafted, kind), sizes in self._sizes.items()
            if size in sizes
        ]
        # The largest size first: smaller graphs then fit into the memory that the pool already holds.
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
        """Return the smallest bucket that holds ``count`` requests. The defaults are the longest draft and greedy
        requests.
        """
        key = self._most_drafted if drafted is None else drafted, features or Features()
        return next(size for size in self._sizes[key] if size >= count)

    def batch(
        self, count: int, drafted: int, features: Features, max_kv: int, seq_lens_host: HostSeqLens | None
    ) -> DecodeBatch:
        """Return the batch in its smallest bucket. Its bound of cached tokens is the capacity, as the graphs were
        captured.
        """
        del max_kv
        features = next(kind for _, kind in self._sizes if kind.covers(features))
        bucket = self.bucket(count, drafted, features)
        padded = None if seq_lens_host is None else seq_lens_host.padded(bucket)
        return DecodeBatch(count, bucket, drafted, features, self._capacity, captured=True, seq_lens_host=padded)

    def bind(self, batch: DecodeBatch, stream: Stream) -> None:
        """Rebind the KV lengths in the graph of every captured stage, also those of padding rows."""
        seq_lens = batch.seq_lens_host
        if seq_lens is None:
            return
        for stage in self._which:
            least = stage.least_lengths(batch.drafted)
            params = {
                name: seq_lens.lengths_after(ahead, least.get(name, 0))
                for name, ahead in stage.host_params(batch.drafted).items()
            }
            if params:
                self._graphs_of(batch)[stage.name].update_params(params, stream=stream)

    def run(self, stage: Stage[In, Out], given: In) -> Out:
        """Replay the stage's graph, or call the stage if it was not captured. Captured attention plans are already up to
        date.
        """
        if not isinstance(stage, Capturable) or stage not in self._which or not _has_work(stage, given.batch.drafted):
            return super().run(stage, given)
        self._graphs_of(given.batch)[stage.name].replay(stage.stream)
        written: Out = stage.written(given.batch)
        return written

    def _graphs_of(self, batch: DecodeBatch) -> Mapping[str, Graph]:
        return self._graphs[batch.bucket, batch.drafted, batch.features]

    def _capture(self, bucket: int, drafted: int, features: Features, pools: Mapping[str, GraphPool]) -> Mapping[str, Graph]:
        """Capture all stages for one bucket, draft length and feature set, and return their graphs by stage name."""
        stages = self._stages
        batch = DecodeBatch(bucket, bucket, drafted, features, self._capacity, captured=True)
        nothing, plan = HostSeqLens((0,) * bucket, self._capacity), stages.verify_attention.stream
        with self._backend.on(plan):
            for group in (INPUTS, VERIFY, EXTEND):  # the buffers hold values of another length, or of warm-up requests
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
            # Draft and extend depend on no feature but sampling, so other feature sets share their graphs.
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
            # The stage reads its static buffers; only the host parameters come from the capture context.
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
            params={name: nothing.lengths_after(ahead, least.get(name, 0)) for name, ahead in params.items()},
            pool=pool,
        )
        for name in params:
            backend.mark_mirror((graph, name), self._buffers.views(count, batch.drafted).inputs.seq_lens)
        return graph

    def _given(self, stage: AnyStage, batch: DecodeBatch, attention: AttentionMetadata) -> object:
        """Return the input record of ``stage``, with views of static buffers only."""
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
    """Return True if ``stage`` has work in an iteration that drafts ``drafted`` tokens."""
    return drafted > 0 or not isinstance(stage, DraftStage)
