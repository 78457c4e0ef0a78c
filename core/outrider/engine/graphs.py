"""How stages are run: called for just the batch, or captured for buckets of batch sizes and replayed.

A batch is run by the graph of the smallest bucket that holds it; the rest of the bucket is padding, which has the reserved
row 0 and writes to the reserved page 0. Graphs of one stage share a pool, since they never run at the same time; pools of
different stages don't alias.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.device import AttentionMetadata, CaptureContext, Graph, GraphPool, Stream
from outrider.engine.parts import StepParts
from outrider.engine.requests.features import Features
from outrider.engine.stages import Call, Stage, Stages
from outrider.engine.state.buffers import DRAFT, EXTEND, INPUTS, OUTPUTS, VERIFY
from outrider.speculative.lengths import HostLengths

CaptureProgress = Callable[[int, int], None]


_READS = {
    Stage.DRAFT: (INPUTS,),
    Stage.VERIFY: (INPUTS, DRAFT, VERIFY),
    Stage.EXTEND: (INPUTS, VERIFY, OUTPUTS, EXTEND),
    Stage.ITERATION: (),
}
_WRITES = {
    Stage.DRAFT: (DRAFT,),
    Stage.VERIFY: (OUTPUTS,),
    Stage.EXTEND: (),
    Stage.ITERATION: (INPUTS, DRAFT, VERIFY, OUTPUTS, EXTEND),
}


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Powers of two below ``most``, and ``most``: a batch is padded to less than twice its size."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


class Runner(ABC):
    """Runs stages on forward. What it is asked for a batch is the same for graphs and without. ``report``: what was captured;
    None without graphs.
    """

    report: CaptureReport | None = None

    def __init__(self, parts: StepParts, stages: Stages) -> None:
        self._parts = parts
        self._stages = stages

    @abstractmethod
    def call(self, count: int, features: Features, max_kv: int, lengths: HostLengths | None) -> Call:
        """What the stages are run for: views that hold ``count`` requests, and abilities that cover ``features``."""

    def bind(self, call: Call, stream: Stream) -> None:
        """Give the stages the host parameters of this iteration; work on ``stream``. Nothing where they come with a call."""
        del call, stream

    @abstractmethod
    def run(self, stage: Stage, call: Call, attention: AttentionMetadata | None = None) -> None:
        """Enqueue a stage on forward, with the planned ``attention`` if it has any."""


class Caller(Runner):
    """Calls the stages: no padding, no graphs."""

    def call(self, count: int, features: Features, max_kv: int, lengths: HostLengths | None) -> Call:
        """Views of just the batch."""
        return Call(self._parts.buffers.views(count), features, max_kv, lengths=lengths)

    def run(self, stage: Stage, call: Call, attention: AttentionMetadata | None = None) -> None:
        """Call it in the scope of forward."""
        with self._parts.backend.on(self._parts.streams.forward):
            self._stages.run(stage, call, attention)


@dataclass(frozen=True, slots=True)
class Captured:
    """One size with all its stages: what they're called with, and their graphs."""

    call: Call
    graphs: dict[Stage, Graph]


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
    """Captures ``stages`` for every bucket when it's made; nothing is captured later.

    Three sets of features are captured: greedy, sampling, and everything. A batch gets the first that covers it.
    """

    def __init__(
        self,
        parts: StepParts,
        stages: Stages,
        *,
        which: Sequence[Stage],
        buckets: Sequence[int],
        everything: Features,
        progress: CaptureProgress | None = None,
    ) -> None:
        super().__init__(parts, stages)
        self.buckets = tuple(sorted(buckets))
        self._features = tuple(dict.fromkeys((Features(), Features(sampling=True), everything)))
        self._capacity = parts.rows.tables.shape[1] * parts.page_size
        self._captured: dict[tuple[int, Features], Captured] = {}
        pools = {stage: parts.backend.create_graph_pool(stage.value) for stage in which}
        limited = parts.backend.capabilities.memory_limit
        before = parts.backend.memory_info().free if limited else 0
        began = time.perf_counter()
        total, done = len(self.buckets) * len(self._features), 0
        for count in range(1, self.buckets[-1] + 1):
            parts.buffers.views(count)  # made before any replay, they are known to follow what graphs write
        self._shared: dict[tuple[Stage, int, bool], Graph] = {}
        # The largest first: the smaller ones then fit into the memory that the pool has already.
        for bucket in reversed(self.buckets):
            for features in self._features:
                self._captured[bucket, features] = self._capture(bucket, features, pools)
                done += 1
                if progress is not None:
                    progress(done, total)
        after = parts.backend.memory_info().free if limited else 0
        count = len({id(graph) for captured in self._captured.values() for graph in captured.graphs.values()})
        seconds = time.perf_counter() - began
        self.report = CaptureReport(count, self.buckets, before - after if limited else None, seconds)

    def bucket(self, count: int) -> int:
        """The smallest bucket that holds ``count`` requests."""
        return next(bucket for bucket in self.buckets if bucket >= count)

    def call(self, count: int, features: Features, max_kv: int, lengths: HostLengths | None) -> Call:
        """That of the smallest bucket. Its bound of cached tokens is the capacity, since it was captured once for all."""
        del max_kv
        bucket = self.bucket(count)
        call = next(self._captured[bucket, each].call for each in self._features if each.covers(features))
        return call if lengths is None else replace(call, lengths=lengths.padded(bucket))

    def bind(self, call: Call, stream: Stream) -> None:
        """Rebind the lengths of every stage's graph, padding included."""
        if call.lengths is None:
            return
        for stage, graph in self._of(call).graphs.items():
            ahead = self._stages.ahead(stage)
            if ahead:
                graph.update_params({name: call.lengths.plus(more) for name, more in ahead.items()}, stream=stream)

    def run(self, stage: Stage, call: Call, attention: AttentionMetadata | None = None) -> None:
        """Replay. A library that plans has brought the plan that was captured up to date."""
        del attention
        self._of(call).graphs[stage].replay(self._parts.streams.forward)

    def _of(self, call: Call) -> Captured:
        return self._captured[call.views.count, call.features]

    def _capture(self, bucket: int, features: Features, pools: dict[Stage, GraphPool]) -> Captured:
        parts, stages = self._parts, self._stages
        call = Call(parts.buffers.views(bucket), features, self._capacity, static=True)
        plan, nothing = parts.streams.plan, HostLengths((0,) * bucket, self._capacity)
        with parts.backend.on(plan):
            attention = stages.plan_verify(call, nothing, plan)
            along = stages.plan_extend(call, attention, nothing, plan)
        plan.synchronize()
        planned = {Stage.VERIFY: attention, Stage.EXTEND: along}
        graphs: dict[Stage, Graph] = {}
        for stage, pool in pools.items():
            if stage in (Stage.DRAFT, Stage.EXTEND):
                # They know of sampling alone.
                key = (stage, bucket, features.sampling)
                narrow = replace(call, features=Features(sampling=features.sampling))
                if key not in self._shared:
                    self._shared[key] = self._graph(stage, narrow, planned.get(stage), pool)
                graphs[stage] = self._shared[key]
            else:
                graphs[stage] = self._graph(stage, call, planned.get(stage), pool)
        return Captured(call, graphs)

    def _graph(self, stage: Stage, call: Call, attention: AttentionMetadata | None, pool: GraphPool) -> Graph:
        parts, count = self._parts, call.views.count

        exact = parts.backend.speculative_sync.exact_host_lengths
        nothing = HostLengths((0,) * count, self._capacity)
        ahead = self._stages.ahead(stage) if exact else {}

        def run(context: CaptureContext) -> None:
            # The stage reads the same buffers by their views; only host parameters are the context's.
            lengths = replace(nothing, captured=context.params) if exact else None
            self._stages.run(stage, replace(call, lengths=lengths), attention)

        kind = "everything" if call.features.options else "sampling" if call.features.sampling else "greedy"
        graph = parts.backend.capture(
            f"{stage}[{count}, {kind}]",
            run,
            stream=parts.streams.forward,
            inputs=parts.buffers.group(*_READS[stage], count=count),
            outputs=parts.buffers.group(*_WRITES[stage], count=count),
            params={name: nothing.plus(more) for name, more in ahead.items()},
            pool=pool,
        )
        for name in ahead:
            parts.backend.mark_mirror((graph, name), call.views.inputs.lens)
        return graph
