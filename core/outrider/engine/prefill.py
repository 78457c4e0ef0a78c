"""Prefill: the passes of the target and the draft over chunks of prompts, on the forward stream; and graphs of mixed batches,
in which prompts and decoding requests share a pass of the target.

Launches of forward passes over few tokens take longer than their work. So chunks with few tokens in total are padded to the
next bucket of tokens, with a fixed number of sequences, and replayed from a graph. A replay reads only staged inputs, at
fixed addresses, so the fences of a called prefill serve here too: *inputs ready* before the replay, *shared reads done* after
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import CaptureContext, DeviceError, Graph, StepMode
from outrider.engine.graphs import CaptureReport, can_load_in_capture, measure_captures
from outrider.engine.guided import GuidedDecoding
from outrider.engine.requests.batch import Batch, BatchFeatures, PrefillChunk
from outrider.engine.requests.request import RequestFailed
from outrider.engine.setup.facts import MAX_GRAPH_TOKENS, max_graph_tokens
from outrider.engine.stages import DecodeBatch, Iteration, MixedPrompts, TargetPass, build_frame, run_target
from outrider.engine.state.input_upload import InputUpload
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.staging import Packer, PrefillBucket, PrefillInputs, prefill_attention, prefill_inputs
from outrider.model import ForwardInput, KeptRows, StateInput
from outrider.speculative.proposer import ExtendInputs, HostSeqLens


@dataclass(frozen=True, slots=True)
class PrefilledChunks:
    """Prompt chunks that the target has processed: ``first``, the token after each chunk, int64 [S], and the inputs of the
    draft's pass, None if the draft processes no prompts.
    """

    inputs: PrefillInputs
    first: Tensor
    extend: ExtendInputs | None


@dataclass(frozen=True, slots=True)
class PreparedChunks:
    """Staged prompt chunks, ready for the target's pass: its ``forward`` input, and the last rows, which may be ``kept``."""

    inputs: PrefillInputs
    features: BatchFeatures
    forward: ForwardInput
    kept: KeptRows
    seq_lens_host: HostSeqLens | None


class Prefill:
    """The launcher of prompt chunks: first for the target, then for the draft, so that first tokens do not wait for the
    draft. It replays the chunks that :attr:`graphs` has a bucket for, and calls all others.
    """

    def __init__(self, parts: EngineParts, guided: GuidedDecoding) -> None:
        self._parts = parts
        self._forward = parts.streams.forward
        self._exact = parts.backend.speculative_sync.exact_host_lengths
        self._guided = guided
        self.graphs: PrefillGraphs | None = None
        """The graphs of short chunks, captured once the kernels are compiled; None: every chunk is called."""

    def bucket(self, batch: Batch) -> PrefillBucket | None:
        """Return the padded size of the batch's chunks; None if they are called for their exact size."""
        return None if self.graphs is None else self.graphs.bucket(batch)

    def launch(self, batch: Batch, packer: Packer, bucket: PrefillBucket | None) -> PrefilledChunks | None:
        """Enqueue the target's pass over the chunks, which were staged for ``bucket``. Only the last chunk of a prompt
        publishes a length.

        Returns the chunks that :meth:`extend` must pass to the draft; None if a graph includes the draft's pass. A graph that
        decodes, too, is not replayed here.
        """
        if bucket is not None and self.graphs is not None:
            if not bucket.decoding:
                self.graphs.replay(bucket)
            return None
        requests = tuple(chunk.request for chunk in batch.prefill)
        features = BatchFeatures.from_requests(requests)
        with self._parts.backend.on(self._forward):
            self._guided.report_late_prompts(requests)
            inputs = prefill_inputs(batch.prefill, self._parts.staging, packer.segments)
            seq_lens_host = HostSeqLens(tuple(chunk.end for chunk in batch.prefill), self._parts.capacity)
            return self._fill(inputs, features, seq_lens_host, self._media_features(batch, inputs.tokens.shape[0]))

    def enqueue_chunks(self, inputs: PrefillInputs, features: BatchFeatures) -> None:
        """Enqueue all work of staged ``inputs`` in the caller's scope of forward, for capture. The host knows only bounds,
        and attention has no plan.
        """
        self._extend(self._fill(inputs, features, None))

    def enqueue_mixed(
        self, inputs: PrefillInputs, features: BatchFeatures, iteration: Iteration, decode: DecodeBatch
    ) -> None:
        """Enqueue a whole iteration of ``decode``, whose verify computes the chunks of ``inputs`` in the same pass, for
        capture; the draft's pass over the chunks comes last. Otherwise as :meth:`enqueue_chunks`.
        """
        chunks = self._prepare(inputs, features, None)
        frame = build_frame(self._parts.buffers, decode)
        frame.prompts = prompts = MixedPrompts(replace(chunks.forward, kept=None), inputs.last)
        iteration.run(decode, frame)
        assert prompts.results is not None  # verify left them
        self._extend(self._choose_first(chunks, prompts.results))

    def extend(self, filled: PrefilledChunks) -> None:
        """Enqueue the draft's pass over chunks that :meth:`launch` returned, on forward, and stash the relay that the next
        chunk or the first draft reads.
        """
        with self._parts.backend.on(self._forward):
            self._extend(filled)

    def _fill(
        self,
        inputs: PrefillInputs,
        features: BatchFeatures,
        seq_lens_host: HostSeqLens | None,
        media: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> PrefilledChunks:
        """Enqueue the target's pass and the choice of first tokens. Arguments: see :meth:`_prepare`."""
        chunks = self._prepare(inputs, features, seq_lens_host, media)
        ends = (lambda hidden: hidden[inputs.last]) if chunks.forward.kept is None else None
        return self._choose_first(chunks, run_target(self._parts, chunks.forward, ends))

    def _prepare(
        self,
        inputs: PrefillInputs,
        features: BatchFeatures,
        seq_lens_host: HostSeqLens | None,
        media: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> PreparedChunks:
        """Gather what the target's pass reads. ``seq_lens_host`` is None during capture, see :meth:`enqueue_chunks`.
        ``media`` are features [T, F] and the bool mask [T] of their tokens.
        """
        parts = self._parts
        tables = parts.rows.tables.index_select(0, inputs.rows)
        attention = prefill_attention(inputs, tables, seq_lens_host if self._exact else None)
        if seq_lens_host is not None:
            attention = parts.attention.plan("prefill", attention, seq_lens_host, 0, self._forward)
        kept = KeptRows.last_of_each(attention, inputs.last)
        forward = ForwardInput(
            inputs.tokens,
            inputs.rope_positions,
            inputs.slots,
            attention,
            *media,
            prompt_lens=inputs.prompt_lens,
            kept=None if parts.proposer.reads_hidden else kept,
            states=None if parts.model.config.recurrent is None else StateInput(inputs.rows),
        )
        return PreparedChunks(inputs, features, forward, kept, seq_lens_host if self._exact else None)

    def _choose_first(self, chunks: PreparedChunks, computed: TargetPass) -> PrefilledChunks:
        """Enqueue the choice of first tokens from the logits [S, V] that the target ``computed``, and publish the lengths."""
        parts, inputs, features = self._parts, chunks.inputs, chunks.features
        rows, future, proposer = parts.rows, parts.future, parts.proposer
        temperature = rows.temperature.index_select(0, inputs.rows)
        seeds = rows.seeds.index_select(0, inputs.rows)
        first = self._choose(features, inputs, computed.logits, temperature, seeds)
        parts.results.write_prefill(first)
        # Row 0 takes what an unfinished prompt must not publish.
        future.publish(torch.where(inputs.final, inputs.rows, 0), inputs.ends)
        if not proposer.extends:
            return PrefilledChunks(inputs, first, None)
        # Padding writes once more what its owner writes, to the same place.
        own = first if inputs.owner is None else first.index_select(0, inputs.owner)
        following = inputs.following.index_copy(0, inputs.last, torch.where(inputs.final, own, inputs.following[inputs.last]))
        axes = bool(parts.model.config.rope.sections)
        extend = ExtendInputs(
            tokens=following,
            hidden=computed.hidden if proposer.reads_hidden else None,
            aux_hidden_states=computed.aux_hidden_states,
            positions=inputs.positions,
            rope_positions=inputs.rope_positions,
            mrope_position_deltas=rows.mrope_position_deltas.index_select(0, inputs.rows) if axes else None,
            slots=inputs.slots,
            attention=chunks.forward.attention,
            last=inputs.last,
            next_positions=inputs.ends + 1,
            temperature=temperature,
            seeds=seeds,
            sampling=features.sampling,
            rows=inputs.rows,
            relay=future.gather_relay(inputs.rows),
            continues=inputs.continues,
            prompt=inputs.tokens,
            embeddings=chunks.forward.embeddings,
            embedded=chunks.forward.embedded,
            prompt_lens=inputs.prompt_lens,
            kept=chunks.kept,
            seq_lens_host=chunks.seq_lens_host,
        )
        return PrefilledChunks(inputs, first, extend)

    def _extend(self, filled: PrefilledChunks) -> None:
        """Enqueue the draft's pass over the prompt chunks of ``filled``, and stash first tokens and relay."""
        inputs, first = filled.inputs, filled.first
        relay: Mapping[str, Tensor] = {} if filled.extend is None else self._parts.proposer.extend(filled.extend)
        # A chunk that isn't the last stashes too, for the next one; its row isn't drafted for before that.
        stashed = first if inputs.owner is None else torch.where(inputs.rows > 0, first, 0)
        self._parts.future.stash(inputs.rows, stashed, relay)

    def _choose(
        self, features: BatchFeatures, inputs: PrefillInputs, logits: Tensor, temperature: Tensor, seeds: Tensor
    ) -> Tensor:
        """Return the token after each chunk [S] from ``logits`` [S, V]. The token has no meaning if the prompt continues."""
        parts, kernels = self._parts, self._parts.model.kernels
        parts.probes.check_for_nan("target.logits", logits, parts.results.prefill_probe_results(logits.shape[0]))
        options = parts.options.gather(features, inputs.rows)
        shaped = self._guided.mask_first_tokens(kernels, logits) if features.guided else logits
        if options is not None:
            shaped = options.process(
                kernels,
                shaped.unsqueeze(1),
                temperature=temperature,
                tokens=inputs.ends.unsqueeze(1),  # a single node has no drafted token: not read
                tree_mask=None,
                positions=inputs.ends.unsqueeze(1),
            ).squeeze(1)
        first = self._sample(shaped, temperature, seeds, inputs)
        if options is not None:
            options.commit(kernels, torch.where(inputs.final, first, -1).unsqueeze(1))
        if features.logprobs is not None:
            reported = kernels.logprobs(logits.unsqueeze(1), first.unsqueeze(1), features.logprobs)
            parts.results.write_logprobs(*reported, prefill=True)
        return first

    def _sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, inputs: PrefillInputs) -> Tensor:
        return self._parts.model.kernels.sample(logits, temperature, seeds, inputs.ends)

    def _media_features(self, batch: Batch, tokens: int) -> tuple[Tensor | None, Tensor | None]:
        """Compute on the prefill stream the media features in the chunks. Return them [T, F] with the bool mask [T] of their
        tokens; both None without media. F is the model's ``feature_size``.
        """
        chunks = [chunk for chunk in batch.prefill if chunk.request.media is not None]
        model, vision = self._parts.model, self._parts.vision
        if vision is None or not chunks:
            return None, None
        embeddings = torch.zeros((tokens, model.config.feature_size), dtype=model.dtype, device=model.device)
        embedded = torch.zeros(tokens, dtype=torch.bool, device=model.device)
        begin = 0
        for index, chunk in enumerate(batch.prefill):
            end = begin + chunk.end - chunk.start
            if chunk.request.media is not None:
                place = embeddings[begin:end], embedded[begin:end]
                try:
                    with self._parts.backend.guard("reading a request's media"):
                        chunk.request.media.embed(vision, chunk.start, chunk.end, *place)
                except DeviceError:
                    raise
                except Exception as error:  # what transformers' tower says of this image
                    embeddings[begin:end] = 0
                    self._refuse_media(chunk, index, error)
            begin = end
        return embeddings, embedded

    def _refuse_media(self, chunk: PrefillChunk, index: int, error: Exception) -> None:
        """Raise :class:`RequestFailed`, which ends the request of chunk ``index``: its media cannot be read."""
        del index
        raise RequestFailed(chunk.request, error) from error


LEAST_WITHOUT_CONTEXT = 1024
"""Minimum number of tokens from which a second graph serves chunks that begin their prompts. Attention may then copy
the keys and values of the chunks to contiguous memory.
"""
MOST_SEQUENCES = 16
LARGE_MIXED_SIZES = (1024, 1536, 2048)
"""Numbers of tokens of large passes over prompts and decoding requests; of smaller ones all buckets. Reading the weights once
less saves little of a longer pass.
"""
TOKENS_BOUND_BY_BYTES = 192
"""Number of tokens up to which a pass takes the time of reading the weights, whatever their number."""
MIXED_REQUESTS = (8, 32)
"""Numbers of decoding requests that share a pass with prompts. The products of more are bound by operations, and gain little
from weights that were read for prompts.
"""


def token_buckets(most: int) -> tuple[int, ...]:
    """Return ascending bucket sizes up to ``most``: few small ones, for which reading the weights determines the time, then
    steps that waste little on padding.
    """
    sizes = (16, 64, *range(128, 1024, 128), *range(1024, 2048, 256), *range(2048, most, 512))
    return (*(size for size in sizes if size < most), most)


class PrefillGraphs:
    """The graphs of prompt chunks, captured for every bucket at creation. They serve no batch that is too large, or that
    needs media, sampling options or log-probabilities.

    With an ``iteration``, further graphs hold it for greedy requests, with prompt chunks in the same pass of the target:
    products read each weight once for both (mixed batches).
    """

    def __init__(self, parts: EngineParts, prefill: Prefill, iteration: Iteration | None, *, tokens: int) -> None:
        self._backend = backend = parts.backend
        self._forward = parts.streams.forward
        self._prefill = prefill
        self._input_upload = InputUpload(parts)
        self._staging = staging = parts.staging
        self._capacity = parts.capacity
        self._loads_in_capture = can_load_in_capture(parts)
        self.sequences = min(MOST_SEQUENCES, staging.max_requests)
        self.buckets = token_buckets(tokens)
        self._iteration, self._drafted = iteration, max(parts.lengths)
        self._mixed = () if iteration is None else self._mixed_buckets(parts)
        self._graphs: dict[PrefillBucket, Graph] = {}
        self._pool = backend.create_graph_pool("prefill")
        measured = measure_captures(backend)
        # The largest first: the smaller ones then fit into the memory that the pool has already.
        for size in reversed(self.buckets):
            for has_context in (True, False) if size >= LEAST_WITHOUT_CONTEXT else (True,):
                bucket = PrefillBucket(size, self.sequences, has_context)
                self._graphs[bucket] = self._capture(bucket)
        for bucket in reversed(self._mixed):
            self._graphs[bucket] = self._capture(bucket)
        self.report = CaptureReport(len(self._graphs), self.buckets, *measured())

    def bucket(self, batch: Batch) -> PrefillBucket | None:
        """Return the bucket of the batch's chunks; None if the batch has no chunks or they must be called."""
        chunks = batch.prefill
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        if not chunks or tokens > self.buckets[-1] or len(chunks) > self.sequences:
            return None
        features = BatchFeatures.from_requests(tuple(chunk.request for chunk in chunks))
        if not BatchFeatures(sampling=True).covers(features) or any(chunk.request.media is not None for chunk in chunks):
            return None
        has_context = any(chunk.start > 0 for chunk in chunks)
        size = next(size for size in self.buckets if size >= tokens)
        alone = PrefillBucket(size, self.sequences, has_context or size < LEAST_WITHOUT_CONTEXT)
        mixed = self._mixed_bucket(batch, tokens, has_context=has_context)
        return alone if mixed is None or self._takes_longer(mixed, alone) else mixed

    @property
    def max_mixed_requests(self) -> int:
        """Maximum number of decoding requests that share a pass with prompts; 0 if none do."""
        return max((bucket.decoding for bucket in self._mixed), default=0)

    def _mixed_buckets(self, parts: EngineParts) -> tuple[PrefillBucket, ...]:
        """Return the buckets of prompts and decoding requests in one pass: by number of decoding requests, then by tokens.

        Such a pass has as many tokens as prompts alone have in a bucket, since products of other sizes waste parts of their
        tiles. Each graph takes time at start, so there are fewer sizes.
        """
        most = min(parts.config.max_requests, MIXED_REQUESTS[-1])
        counts, width = (*(count for count in MIXED_REQUESTS if count < most), most), self._drafted + 1
        all_sizes = token_buckets(self.buckets[-1] + most * width)  # a whole chunk, and the drafts of all requests
        sizes = [size for size in all_sizes if size < LARGE_MIXED_SIZES[0] or size in LARGE_MIXED_SIZES]
        return tuple(
            PrefillBucket(size - count * width, self.sequences, size < LEAST_WITHOUT_CONTEXT, count)
            for count in counts
            for size in sizes
            if size > count * width
        )

    def _mixed_bucket(self, batch: Batch, tokens: int, *, has_context: bool) -> PrefillBucket | None:
        """Return the smallest bucket that holds the decoding requests of ``batch`` and ``tokens`` tokens of its chunks; None
        if each part has a graph of its own.
        """
        count = len(batch.decode)
        if not count or batch.drafted != self._drafted or batch.draft_lengths or batch.features != BatchFeatures():
            return None
        large_enough = (
            bucket
            for bucket in self._mixed
            if bucket.decoding >= count and bucket.tokens >= tokens and (bucket.has_context or not has_context)
        )
        return next(large_enough, None)

    def _takes_longer(self, mixed: PrefillBucket, alone: PrefillBucket) -> bool:
        """Return True if a pass of ``mixed`` takes longer, by its padding, than prompts ``alone`` and decoding after them."""
        decoding = mixed.decoding * (self._drafted + 1)

        def cost(tokens: int) -> int:
            return max(tokens, TOKENS_BOUND_BY_BYTES)

        return cost(mixed.tokens + decoding) > cost(alone.tokens) + cost(decoding)

    def replay(self, bucket: PrefillBucket) -> None:
        """Replay the chunks, which were staged for ``bucket``, for the target and the draft; also the iteration of a bucket
        with decoding requests.
        """
        self._graphs[bucket].replay(self._forward)

    def _capture(self, bucket: PrefillBucket) -> Graph:
        """Capture the chunks of ``bucket`` with features that also serve greedy requests."""
        with self._backend.on(self._forward):
            segments = self._input_upload.stage_padding(bucket)  # warm-up and capture read the current contents

        # Products have the shapes of the other graph of this size; the kernels of attention don't depend on the size.
        captured = [each for each in self._graphs if each.decoding == bucket.decoding]
        known = self._loads_in_capture or any(each.tokens == bucket.tokens for each in captured)
        known = known and any(each.has_context == bucket.has_context for each in captured)

        def run(context: CaptureContext) -> None:
            del context
            if known and self._backend.is_rehearsing:
                return
            inputs = prefill_inputs((), self._staging, segments, most=self._capacity, has_context=bucket.has_context)
            if self._iteration is not None and bucket.decoding:
                count = bucket.decoding
                decode = DecodeBatch(count, count, self._drafted, BatchFeatures(), self._capacity, captured=True)
                self._prefill.enqueue_mixed(inputs, BatchFeatures(sampling=True), self._iteration, decode)
            else:
                self._prefill.enqueue_chunks(inputs, BatchFeatures(sampling=True))

        mixed = f", {bucket.decoding} decoding" if bucket.decoding else ""
        return self._backend.capture(
            f"prefill[{bucket.tokens}{'' if bucket.has_context else ', without context'}{mixed}]",
            run,
            stream=self._forward,
            inputs={"staged": self._staging.view((0, max(end for _, end in segments.values())))},
            outputs={},
            pool=self._pool,
        )


def _can_replay_prefill(parts: EngineParts) -> bool:
    """Return True if config, backend, kernels, model and proposer all allow graphs of prompt chunks."""
    config, model, proposer = parts.config, parts.model, parts.proposer
    if parts.results.is_shared:
        return False  # data-parallel groups have different numbers of tokens in a prefill
    if config.step_mode is not StepMode.FUSED and not config.graphs:
        return False  # decoding isn't replayed either
    if parts.backend.speculative_sync.exact_host_lengths or parts.attention.plans_on_host:
        return False  # attention reads lengths on the host
    if model.config.rope.depends_on_length:
        return False  # rope depends on more than a position
    if parts.states and not model.kernels.is_native("chunk_gated_delta_rule"):
        return False  # the reference's launches grow with the tokens of a chunk
    if not model.native or model.kernels.row_invariant:
        return False  # kernels launch a call for each token, or belong to another model's code
    return proposer.accepts_padding or not proposer.extends


def _max_chunk_tokens(parts: EngineParts) -> int:
    return min(parts.config.prefill_chunk, parts.config.max_requests * parts.capacity)


def build_prefill_graphs(parts: EngineParts, prefill: Prefill, iteration: Iteration | None) -> PrefillGraphs | None:
    """Capture the graphs that replay short chunks of prompts, alone and with a fused ``iteration``. Returns None for an
    engine that calls every chunk.
    """
    tokens = min(max_graph_tokens(parts.backend.capabilities), _max_chunk_tokens(parts))
    if not tokens or not _can_replay_prefill(parts):
        return None
    # A tree's mask, and recurrent states that verify may take back, are for the tokens of drafts alone.
    can_mix = not parts.proposer.is_tree and not parts.states
    return PrefillGraphs(parts, prefill, iteration if can_mix else None, tokens=tokens)


def stage_prompt_padding(parts: EngineParts) -> PrefillInputs | None:
    """Stage the largest prompt of a graph as padding, on the current stream, and return its inputs; None for an engine that
    can't replay prompts from graphs.
    """
    if not _can_replay_prefill(parts):
        return None
    tokens = min(MAX_GRAPH_TOKENS, _max_chunk_tokens(parts))
    bucket = PrefillBucket(tokens, min(MOST_SEQUENCES, parts.staging.max_requests))
    segments = InputUpload(parts).stage_padding(bucket)
    return prefill_inputs((), parts.staging, segments, most=parts.capacity)
