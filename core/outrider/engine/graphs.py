"""Runners of stages: eager for the exact batch, or captured for buckets of batch sizes and replayed.

A batch uses the graph of the smallest bucket that holds it. The unused rows of the bucket are padding: they read the reserved
row 0 and write to the reserved page 0. Graphs of one stage share a pool, since they never run at the same time. Pools of
different stages do not alias.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.device import Backend, CaptureContext, ConfigError, Graph, GraphPool, Stream
from outrider.engine.config import MAX_LOGPROBS
from outrider.engine.requests.batch import BatchFeatures
from outrider.engine.stages import DecodeBatch, Frame, Stage, Stages, build_frame
from outrider.engine.state.buffers import EXTEND, INPUTS, VERIFY
from outrider.engine.state.parts import EngineParts
from outrider.speculative.proposer import HostSeqLens

CaptureProgress = Callable[[int, int], None]


def measure_captures(backend: Backend) -> Callable[[], tuple[int | None, float]]:
    """Start a measurement of captures. The returned function returns the bytes of device memory that are taken since, None if
    the device does not report them, and the seconds.
    """
    limited = backend.capabilities.memory_limit
    before, began = backend.memory_info().free if limited else 0, time.perf_counter()

    def measured() -> tuple[int | None, float]:
        after = backend.memory_info().free if limited else 0
        return (before - after if limited and after <= before else None), time.perf_counter() - began

    return measured


def can_load_in_capture(parts: EngineParts) -> bool:
    """Return True if calls with new sizes can be captured without having run before (``KernelSet.loads_in_capture``).
    Collectives of several ranks can't.
    """
    return parts.model.kernels.loads_in_capture and parts.model.ranks.is_single


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


def captured_features(parts: EngineParts) -> tuple[BatchFeatures, BatchFeatures, BatchFeatures]:
    """Return the features of the graphs: greedy, sampling, and everything."""
    logprobs = min(MAX_LOGPROBS, parts.model.config.vocab_size)
    everything = BatchFeatures(sampling=True, biased=True, penalized=True, truncated=True, logprobs=logprobs)
    return BatchFeatures(), BatchFeatures(sampling=True), everything


class Runner:
    """The runner that calls each stage for the exact batch, without padding or graphs. The step uses a runner for every
    stage.
    """

    report: CaptureReport | None = None
    """The captured graphs; None for a runner without graphs."""

    def __init__(self, parts: EngineParts) -> None:
        self._backend = parts.backend
        self._buffers = parts.buffers

    def pad(self, batch: DecodeBatch) -> DecodeBatch:
        """Return the batch that the stages receive for ``batch``, whose sizes are exact. Here it stays unchanged."""
        return batch

    def bind(self, batch: DecodeBatch, stream: Stream) -> None:
        """Rebind the KV lengths that captured graphs take as host parameters, on ``stream``. Does nothing here: a called
        stage gets its lengths directly.
        """
        del batch, stream

    def run(self, stage: Stage, batch: DecodeBatch, frame: Frame) -> None:
        """Enqueue ``stage`` on its stream for ``batch``, and write padding to the rows of a bucket in the buffer group that
        the stage fills.
        """
        group = stage.fills
        with self._backend.on(stage.stream):
            if group is None:
                stage.run(batch, frame)
                return
            self._buffers.mark_stale(group, bucket=batch.bucket, drafted=batch.drafted)
            stage.run(batch, frame)
            self._buffers.pad(group, count=batch.count, bucket=batch.bucket, drafted=batch.drafted)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """The result of capturing all graphs of an engine."""

    graphs: int
    """Number of captured graphs."""
    buckets: tuple[int, ...]
    """Captured batch sizes of greedy batches, in ascending order."""
    bytes: int | None
    """Device memory that the pools of the graphs hold; None if the device does not report it."""
    seconds: float
    """Host time of all captures in seconds, with the warm-up and compilation of the captured kernels."""
    lengths: tuple[int, ...] = ()
    """Captured draft lengths, in tokens."""

    def __str__(self) -> str:
        memory = "an unknown amount of memory" if self.bytes is None else f"{self.bytes / 2**20:.0f} MiB"
        return f"{self.graphs} graphs captured in {self.seconds:.1f} s, holding {memory}"


GraphKind = tuple[int, int | None, BatchFeatures]
"""Draft length, mean number of verified tokens (None: of each request all), and features of a captured iteration."""


def _captured_sizes(parts: EngineParts) -> dict[GraphKind, tuple[int, ...]]:
    """Return the batch sizes to capture, in ascending order, by kind of iteration.

    The config's ``buckets`` are batch sizes; None selects :func:`buckets_up_to` for greedy batches, powers of two for
    sampling, and powers of four for everything. Shorter drafts than the longest, and draft lengths of each request, are
    captured for greedy batches of :func:`sizes_of_shorter`.
    """
    most, lengths = parts.config.max_requests, parts.lengths
    greedy, sampling, everything = captured_features(parts)
    # Few batches sample, and fewer use everything: for them there are fewer sizes.
    sizes = {greedy: buckets_up_to(most), sampling: powers_up_to(most), everything: powers_up_to(most, 4)}
    if parts.config.buckets is not None:
        sizes = dict.fromkeys(sizes, tuple(sorted(parts.config.buckets)))
    shorter = sizes_of_shorter(sizes[greedy])
    wanted: dict[GraphKind, tuple[int, ...]] = {(max(lengths), None, kind): sizes[kind] for kind in sizes}
    wanted |= {(drafted, None, greedy): shorter for drafted in lengths if drafted < max(lengths)}
    return wanted | {(max(lengths), width, greedy): shorter for width in parts.widths}


class GraphRunner(Runner):
    """The runner that captures the stages ``which`` for every bucket when it is created, and calls all other stages.

    It captures three sets of features: greedy, sampling, and everything. A batch uses the first set that covers its features.
    """

    def __init__(
        self, parts: EngineParts, stages: Stages, which: Sequence[Stage], progress: CaptureProgress | None = None
    ) -> None:
        super().__init__(parts)
        self._stages = stages
        self._which = tuple(which)
        self._capacity = parts.capacity
        self._most_drafted = max(parts.lengths)
        self._sizes, self._widths = _captured_sizes(parts), parts.widths
        self._loads_in_capture = can_load_in_capture(parts)
        self.buckets = self._sizes[self._most_drafted, None, BatchFeatures()]
        pools = {stage.name: parts.backend.create_graph_pool(stage.name) for stage in which}
        measured = measure_captures(parts.backend)
        for drafted in parts.lengths:
            for count in range(1, parts.config.max_requests + 1):
                parts.buffers.views(count, drafted)  # views made before any replay are known to follow the writes of graphs
        self._captured: dict[tuple[str, int, GraphKind], Graph] = {}
        # The largest size first: smaller graphs then fit into the memory that the pool already holds.
        wanted = sorted(
            ((size, kind) for kind, sizes in self._sizes.items() for size in sizes), key=lambda key: key[0], reverse=True
        )
        self._graphs: dict[tuple[int, GraphKind], Mapping[str, Graph]] = {}
        for done, (size, kind) in enumerate(wanted, start=1):
            self._graphs[size, kind] = self._capture(size, kind, pools)
            if progress is not None:
                progress(done, len(wanted))
        self.report = CaptureReport(len(self._captured), self.buckets, *measured(), tuple(sorted(parts.lengths)))

    def pad(self, batch: DecodeBatch) -> DecodeBatch:
        """Return ``batch`` in the smallest bucket that holds it, with features that cover its own. Its bound of cached tokens
        is the capacity, as the graphs were captured.

        Raises :class:`ConfigError` if no graph has as many tokens as requests with draft lengths of their own need.
        """
        count, drafted, seq_lens_host = batch.count, batch.drafted, batch.seq_lens_host
        features = next(kind for _, _, kind in self._sizes if kind.covers(batch.features))
        width = None if batch.packed is None else self._smallest_width(count, drafted, batch.packed)
        bucket = self.bucket(count, (drafted, width, features))
        padded = None if seq_lens_host is None else seq_lens_host.padded(bucket)
        packed = None if width is None else width * bucket
        return DecodeBatch(
            count, bucket, drafted, features, self._capacity, captured=True, seq_lens_host=padded, packed=packed
        )

    def bucket(self, count: int, kind: GraphKind) -> int:
        """Return the smallest captured batch size that holds ``count`` requests."""
        return next(size for size in self._sizes[kind] if size >= count)

    def _smallest_width(self, count: int, drafted: int, verified: int) -> int:
        """Return the smallest captured mean number of verified tokens whose graph holds ``verified`` tokens, and one token
        for each padding request.
        """
        for width in self._widths:
            bucket = self.bucket(count, (drafted, width, BatchFeatures()))
            if verified + bucket - count <= width * bucket:
                return width
        raise ConfigError(
            f"the policy of draft lengths chose {verified} tokens to verify for {count} requests; expected at most a mean of "
            f"{self._widths[-1]}, its largest width"
        )

    def bind(self, batch: DecodeBatch, stream: Stream) -> None:
        """Rebind the KV lengths in the graph of every captured stage, also those of padding rows."""
        seq_lens = batch.seq_lens_host
        if seq_lens is None:
            return
        for stage in self._which:
            params = stage.host_params(batch.drafted, seq_lens)
            if params:
                self._graphs_of(batch)[stage.name].update_params(params, stream=stream)

    def run(self, stage: Stage, batch: DecodeBatch, frame: Frame) -> None:
        """Replay the stage's graph, or call the stage if it was not captured. Captured attention plans are already up to
        date.
        """
        graph = self._graphs_of(batch).get(stage.name)
        if graph is None:
            super().run(stage, batch, frame)
        else:
            graph.replay(stage.stream)

    def _graphs_of(self, batch: DecodeBatch) -> Mapping[str, Graph]:
        width = None if batch.packed is None else batch.packed // batch.bucket
        return self._graphs[batch.bucket, (batch.drafted, width, batch.features)]

    def _capture(self, bucket: int, kind: GraphKind, pools: Mapping[str, GraphPool]) -> Mapping[str, Graph]:
        """Capture all stages for one bucket and kind of iteration, and return their graphs by stage name."""
        stages, (drafted, width, features) = self._stages, kind
        packed = None if width is None else width * bucket
        batch = DecodeBatch(bucket, bucket, drafted, features, self._capacity, captured=True, packed=packed)
        nothing, plan = HostSeqLens((0,) * bucket, self._capacity), stages.verify_attention.stream
        frame = build_frame(self._buffers, batch)
        frame.seq_lens_host = nothing
        with self._backend.on(plan):
            for group in (INPUTS, VERIFY, EXTEND):  # the buffers hold values of another length, or of warm-up requests
                self._buffers.pad(group, count=0, bucket=bucket, drafted=drafted)
            stages.verify_attention.run(batch, frame)
            stages.extend_attention.run(batch, frame)
        plan.synchronize()
        graphs: dict[str, Graph] = {}
        for stage in self._which:
            if not stage.has_work(drafted):
                continue
            served = BatchFeatures(sampling=features.sampling) if stage.needs_sampling_only else features
            key = (stage.name, bucket, (drafted, None if stage.needs_sampling_only else width, served))
            if key not in self._captured:
                self._captured[key] = self._graph(stage, replace(batch, features=served), frame, pools[stage.name])
            graphs[stage.name] = self._captured[key]
        return graphs

    def _graph(self, stage: Stage, batch: DecodeBatch, frame: Frame, pool: GraphPool) -> Graph:
        backend, count, features = self._backend, batch.count, batch.features
        exact = backend.speculative_sync.exact_host_lengths
        nothing = HostSeqLens((0,) * count, self._capacity)
        params = stage.host_params(batch.drafted, nothing) if exact else {}
        is_first = all((name, kind[2]) != (stage.name, features) for name, _, kind in self._captured)
        known = self._loads_in_capture and not is_first

        def run(context: CaptureContext) -> None:
            if known and backend.is_rehearsing:
                return
            # The stage reads its static buffers; only the host parameters come from the capture context.
            seq_lens = replace(nothing, captured=context.params) if exact else None
            stage.run(replace(batch, seq_lens_host=seq_lens), frame)

        shorter = "" if batch.drafted == self._most_drafted else f", {batch.drafted} drafted"
        shorter = shorter if batch.packed is None else f", {batch.packed} verified"
        kind = "everything" if features.options else "sampling" if features.sampling else "greedy"
        graph = backend.capture(
            f"{stage.name}[{count}, {kind}{shorter}]",
            run,
            stream=stage.stream,
            inputs=self._buffers.group(*stage.reads, count=count, drafted=batch.drafted),
            outputs=self._buffers.group(*stage.writes, count=count, drafted=batch.drafted),
            params=params,
            pool=pool,
        )
        for name in params:
            backend.mark_mirror((graph, name), self._buffers.views(count, batch.drafted).inputs.seq_lens)
        return graph
