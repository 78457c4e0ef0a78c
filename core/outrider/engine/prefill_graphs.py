"""Graphs of prefill: forward passes over short prompts, captured for buckets of tokens, because their launches take longer
than their work.

Chunks with few tokens in total are padded to the next bucket, with a fixed number of sequences, and replayed. A replay reads
only staged inputs, at fixed addresses, so the fences of a called prefill serve here too: *inputs ready* before the replay,
*shared reads done* after it.
"""

from __future__ import annotations

import time

from outrider.device import Backend, CaptureContext, Graph, StepMode
from outrider.engine.graphs import CaptureReport
from outrider.engine.prefill import Prefill, PrefilledChunks
from outrider.engine.requests.batch import Batch, Features
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.staging import Packer, PrefillBucket, prefill_inputs

MAX_GRAPH_TOKENS = 2048
"""Tokens of the largest chunk that is replayed. The device takes longer for a longer chunk than the host for its launches."""
MOST_SEQUENCES = 16


def max_graph_tokens(backend: Backend) -> int:
    """Return the number of tokens of the largest chunk of prompts that is replayed from a graph; 0 if each chunk is called.

    Tests and proofs replace this function, to replay chunks of few tokens and to replay on a device without graphs.
    """
    return MAX_GRAPH_TOKENS if backend.capabilities.captures_graphs else 0


def token_buckets(most: int) -> tuple[int, ...]:
    """Return bucket sizes up to ``most``: few sizes where weights determine the time of a forward pass, then steps with
    little padding.
    """
    sizes = (16, 64, *range(128, 1024, 128), *range(1024, most, 256))
    return (*(size for size in sizes if size < most), most)


class PrefillGraphs:
    """The launcher that replays prompt chunks from graphs, captured for every bucket at creation, and leaves other chunks to
    ``prefill``: those of a batch that is too large, or that needs media, sampling options or log-probabilities.
    """

    def __init__(self, parts: EngineParts, prefill: Prefill, *, tokens: int) -> None:
        self._backend = backend = parts.backend
        self._forward = parts.streams.forward
        self._prefill = prefill
        self._input_upload = parts.input_upload
        self._staging = staging = parts.staging
        self._capacity = parts.capacity
        self.sequences = min(MOST_SEQUENCES, staging.max_requests)
        self.buckets = token_buckets(tokens)
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self._pool = backend.create_graph_pool("prefill")
        limited = backend.capabilities.memory_limit
        before = backend.memory_info().free if limited else 0
        began = time.perf_counter()
        # The largest first: the smaller ones then fit into the memory that the pool has already.
        for size in reversed(self.buckets):
            for sampling in (False, True):
                self._graphs[size, sampling] = self._capture(size, sampling)
        after = backend.memory_info().free if limited else 0
        seconds = time.perf_counter() - began
        self.report = CaptureReport(len(self._graphs), self.buckets, before - after if limited else None, seconds)

    def bucket(self, batch: Batch) -> PrefillBucket | None:
        """Return the bucket of the batch's chunks; None if the batch has no chunks or they must be called."""
        chunks = batch.prefill
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        if not chunks or tokens > self.buckets[-1] or len(chunks) > self.sequences:
            return None
        features = Features.from_requests(tuple(chunk.request for chunk in chunks))
        if not Features(sampling=True).covers(features) or any(chunk.request.media is not None for chunk in chunks):
            return None
        return PrefillBucket(next(size for size in self.buckets if size >= tokens), self.sequences)

    def launch(self, batch: Batch, packer: Packer, bucket: PrefillBucket | None) -> PrefilledChunks | None:
        """Replay the chunks of ``batch``, which were staged for ``bucket``; the graph includes the pass of the draft."""
        if bucket is None:
            return self._prefill.launch(batch, packer)
        sampling = Features.from_requests(tuple(chunk.request for chunk in batch.prefill)).sampling
        self._graphs[bucket.tokens, sampling].replay(self._forward)
        return None

    def extend(self, filled: PrefilledChunks) -> None:
        """Enqueue the draft's pass over chunks that were called."""
        self._prefill.extend(filled)

    def _capture(self, size: int, sampling: bool) -> Graph:
        bucket = PrefillBucket(size, self.sequences)
        with self._backend.on(self._forward):
            segments = self._input_upload.stage_padding(bucket)  # warm-up and capture read the current contents

        # Products have the shapes of the other graph of this size; choices don't depend on the size.
        known = any(each == size for each, _ in self._graphs) and any(each == sampling for _, each in self._graphs)

        def run(context: CaptureContext) -> None:
            del context
            capture = self._backend.active_capture
            if known and capture is not None and capture.rehearsal:
                return
            inputs = prefill_inputs((), self._staging, segments, most=self._capacity)
            self._prefill.enqueue_chunks(inputs, Features(sampling=sampling))

        return self._backend.capture(
            f"prefill[{size}, {'sampling' if sampling else 'greedy'}]",
            run,
            stream=self._forward,
            inputs={"staged": self._staging.view((0, max(end for _, end in segments.values())))},
            outputs={},
            pool=self._pool,
        )


def _can_replay_prefill(parts: EngineParts) -> bool:
    """Return True if each part of the engine allows that chunks of prompts are replayed from graphs."""
    config, model, proposer = parts.config, parts.model, parts.proposer
    if parts.results.is_shared:
        return False  # data-parallel groups have different numbers of tokens in a prefill
    if config.step_mode is not StepMode.FUSED and not config.graphs:
        return False  # decoding isn't replayed either
    if parts.backend.speculative_sync.exact_host_lengths or parts.attention.plans_on_host:
        return False  # attention reads lengths on the host
    if model.config.rope.sections or model.config.rope.depends_on_length:
        return False  # rope depends on more than a position
    if model.config.recurrent is not None and not model.kernels.is_native("chunk_gated_delta_rule"):
        return False  # the reference's launches grow with the tokens of a chunk
    if not model.native or model.kernels.row_invariant:
        return False  # kernels launch a call for each token, or belong to another model's code
    return proposer.accepts_padding or not proposer.extends


def build_prefill_graphs(parts: EngineParts, prefill: Prefill) -> PrefillGraphs | None:
    """Capture the graphs that replay short chunks of prompts. Returns None for an engine that calls every chunk."""
    most = min(parts.config.prefill_chunk, parts.config.max_requests * parts.capacity)
    tokens = min(max_graph_tokens(parts.backend), most)
    if not tokens or not _can_replay_prefill(parts):
        return None
    return PrefillGraphs(parts, prefill, tokens=tokens)


PrefillLauncher = Prefill | PrefillGraphs
"""The launcher of prompt chunks, which calls them all or replays short ones."""
