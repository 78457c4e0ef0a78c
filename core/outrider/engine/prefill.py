"""Prefill: the passes of the target and the draft over chunks of prompts, on the forward stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import DeviceError
from outrider.engine.guided import GuidedDecoding
from outrider.engine.requests.batch import Batch, Features, PrefillChunk
from outrider.engine.requests.request import RequestFailed
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.plans import AttentionBatchKind
from outrider.engine.state.staging import Packer, PrefillBucket, PrefillInputs, prefill_attention, prefill_inputs
from outrider.model import ForwardInput, KeptRows, StateInput
from outrider.speculative.host_seq_lens import HostSeqLens
from outrider.speculative.proposer import ExtendInputs


@dataclass(frozen=True, slots=True)
class PrefilledChunks:
    """Chunks that the target has read: ``first``, the token after each chunk [S], and the inputs of the draft, None if the
    draft reads no prompts.
    """

    inputs: PrefillInputs
    first: Tensor
    extend: ExtendInputs | None


class Prefill:
    """The launcher of prompt chunks: first for the target, then for the draft, so that first tokens do not wait for the
    draft.
    """

    def __init__(self, parts: EngineParts, guided: GuidedDecoding) -> None:
        self._backend = parts.backend
        self._forward = parts.streams.forward
        self._model = parts.model
        self._proposer = parts.proposer
        self._cache = parts.cache
        self._rows = parts.rows
        self._future = parts.future
        self._options = parts.options
        self._attention = parts.attention
        self._probes = parts.probes
        self._staging = parts.staging
        self._results = parts.results
        self._vision = parts.vision
        self._capacity = parts.capacity
        self._exact = parts.backend.speculative_sync.exact_host_lengths
        self._guided = guided

    def bucket(self, batch: Batch) -> PrefillBucket | None:
        """Return the padded size of the batch's chunks; None if they are called for their exact size."""
        del batch
        return None

    def launch(self, batch: Batch, packer: Packer, bucket: PrefillBucket | None = None) -> PrefilledChunks | None:
        """Enqueue the target's pass over the chunks. Only the last chunk of a prompt publishes a length.

        Returns the chunks that :meth:`extend` must pass to the draft; None if the draft has read them.
        """
        del bucket
        requests = tuple(chunk.request for chunk in batch.prefill)
        features = Features.from_requests(requests)
        with self._backend.on(self._forward):
            self._guided.report_late_prompts(requests)
            inputs = prefill_inputs(batch.prefill, self._staging, packer.segments)
            seq_lens_host = HostSeqLens(tuple(chunk.end for chunk in batch.prefill), self._capacity)
            return self._fill(inputs, features, seq_lens_host, self._features(batch, inputs.tokens.shape[0]))

    def enqueue_chunks(self, inputs: PrefillInputs, features: Features) -> None:
        """Enqueue all work of staged ``inputs`` in the caller's scope of forward, for capture. The host knows only bounds,
        and attention has no plan.
        """
        self._extend(self._fill(inputs, features, None))

    def extend(self, filled: PrefilledChunks) -> None:
        """Enqueue the draft's pass over chunks that were launched. Only after the last chunk of a prompt is there a draft."""
        with self._backend.on(self._forward):
            self._extend(filled)

    def _fill(
        self,
        inputs: PrefillInputs,
        features: Features,
        seq_lens_host: HostSeqLens | None,
        media: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> PrefilledChunks:
        """Enqueue the target's pass. ``seq_lens_host`` is None during capture, see :meth:`enqueue_chunks`. ``media`` are
        features [T, H] and the bool mask [T] of their tokens.
        """
        model, rows, future, proposer = self._model, self._rows, self._future, self._proposer
        tables = rows.tables.index_select(0, inputs.rows)
        temperature = rows.temperature.index_select(0, inputs.rows)
        seeds = rows.seeds.index_select(0, inputs.rows)
        attention = prefill_attention(inputs, tables, seq_lens_host if self._exact else None)
        if seq_lens_host is not None:
            attention = self._attention.plan(AttentionBatchKind.PREFILL, attention, seq_lens_host, 0, self._forward)
        kept = KeptRows.last_of_each(attention, inputs.last)
        flat = ForwardInput(
            inputs.tokens,
            inputs.rope_positions,
            inputs.slots,
            attention,
            *media,
            prompt_lens=inputs.prompt_lens,
            kept=None if proposer.reads_hidden else kept,
            states=None if model.config.recurrent is None else StateInput(inputs.rows),
        )
        layers = proposer.aux_hidden_state_layers
        hidden, aux_hidden_states = model.forward_with_aux_hidden_states(flat, self._cache, layers)
        ends = hidden[inputs.last] if flat.kept is None else hidden
        first = self._choose(features, inputs, model.logits(ends), temperature, seeds)
        self._results.write_prefill(first)
        # Row 0 takes what an unfinished prompt must not publish.
        future.publish(torch.where(inputs.final, inputs.rows, 0), inputs.ends)
        if not proposer.extends:
            return PrefilledChunks(inputs, first, None)
        # Padding writes once more what its owner writes, to the same place.
        own = first if inputs.owner is None else first.index_select(0, inputs.owner)
        following = inputs.following.index_copy(0, inputs.last, torch.where(inputs.final, own, inputs.following[inputs.last]))
        axes = bool(model.config.rope.sections)
        extend = ExtendInputs(
            tokens=following,
            hidden=hidden if proposer.reads_hidden else None,
            aux_hidden_states=aux_hidden_states,
            positions=inputs.positions,
            rope_positions=inputs.rope_positions,
            mrope_position_deltas=rows.mrope_position_deltas.index_select(0, inputs.rows) if axes else None,
            slots=inputs.slots,
            attention=attention,
            last=inputs.last,
            next_positions=inputs.ends + 1,
            temperature=temperature,
            seeds=seeds,
            sampling=features.sampling,
            relay=future.gather_relay(inputs.rows),
            continues=inputs.continues,
            prompt=inputs.tokens,
            embeddings=media[0],
            embedded=media[1],
            prompt_lens=inputs.prompt_lens,
            kept=kept,
            seq_lens_host=seq_lens_host if self._exact else None,
        )
        return PrefilledChunks(inputs, first, extend)

    def _extend(self, filled: PrefilledChunks) -> None:
        """Enqueue the draft's pass over the prompt chunks of ``batch``."""
        inputs, first = filled.inputs, filled.first
        relay: Mapping[str, Tensor] = {} if filled.extend is None else self._proposer.extend(filled.extend)
        # A chunk that isn't the last stashes too, for the next one; its row isn't drafted for before that.
        stashed = first if inputs.owner is None else torch.where(inputs.rows > 0, first, 0)
        self._future.stash(inputs.rows, stashed, relay)

    def _choose(
        self, features: Features, inputs: PrefillInputs, logits: Tensor, temperature: Tensor, seeds: Tensor
    ) -> Tensor:
        """Return the token after each chunk [S] from ``logits`` [S, V]. The token has no meaning if the prompt continues."""
        kernels = self._model.kernels
        self._probes.check_for_nan("target.logits", logits, self._results.prefill_probe_results(logits.shape[0]))
        options = self._options.gather(features, inputs.rows)
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
            self._results.write_prefill_logprobs(*reported)
        return first

    def _sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, inputs: PrefillInputs) -> Tensor:
        return self._model.kernels.sample(logits, temperature, seeds, inputs.ends)

    def _features(self, batch: Batch, tokens: int) -> tuple[Tensor | None, Tensor | None]:
        """Return features [T, H] of images and videos in the chunks, and the bool mask [T] of their tokens."""
        chunks = [chunk for chunk in batch.prefill if chunk.request.media is not None]
        if self._vision is None or not chunks:
            return None, None
        model = self._model
        embeddings = torch.zeros((tokens, model.config.hidden_size), dtype=model.dtype, device=model.device)
        embedded = torch.zeros(tokens, dtype=torch.bool, device=model.device)
        begin = 0
        for index, chunk in enumerate(batch.prefill):
            end = begin + chunk.end - chunk.start
            if chunk.request.media is not None:
                place = embeddings[begin:end], embedded[begin:end]
                try:
                    with self._backend.guard("reading a request's media"):
                        chunk.request.media.embed(self._vision, chunk.start, chunk.end, *place)
                except DeviceError:
                    raise
                except Exception as error:  # what transformers' tower says of this image
                    embeddings[begin:end] = 0
                    self._refuse_media(chunk, index, error)
            begin = end
        return embeddings, embedded

    def _refuse_media(self, chunk: PrefillChunk, index: int, error: Exception) -> None:
        """End the request of chunk ``index``, whose media cannot be read."""
        del index
        raise RequestFailed(chunk.request, error) from error
