"""Prefill: chunks of prompts, on the forward stream alone."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.parts import StepParts
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.features import Features
from outrider.engine.state.attention_plans import Planned
from outrider.engine.state.staging import Packer, prefill_attention, prefill_inputs
from outrider.model import ForwardInput
from outrider.speculative.lengths import HostLengths
from outrider.speculative.proposer import ExtendInputs


class Prefill:
    """Launches the prompt chunks of a batch."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._exact = parts.backend.speculative_sync.exact_host_lengths

    def launch(self, batch: Batch, packer: Packer) -> None:
        """Enqueue the chunks. Only a prompt's last chunk publishes and stashes."""
        parts, forward = self._parts, self._parts.streams.forward
        kernels = parts.model.kernels
        requests = tuple(chunk.request for chunk in batch.prefill)
        features = Features.of(requests)
        with parts.backend.on(forward):
            inputs = prefill_inputs(batch, parts.staging, packer.segments)
            tables = parts.rows.tables.index_select(0, inputs.rows)
            temperature = parts.rows.temperature.index_select(0, inputs.rows)
            seeds = parts.rows.seeds.index_select(0, inputs.rows)
            lengths = self._lengths(batch)
            attention = prefill_attention(inputs, tables, lengths if self._exact else None)
            attention = parts.attention.plan(Planned.PREFILL, attention, lengths, 0, forward)
            embeddings, embedded = self._features(batch, inputs.tokens.shape[0])
            flat = ForwardInput(
                inputs.tokens,
                inputs.rope_positions,
                inputs.slots,
                attention,
                embeddings,
                embedded,
                inputs.prompt_lens,
            )
            layers = parts.proposer.capture_layers
            hidden, captured = parts.model.forward_captured(flat, parts.cache, layers)
            logits = parts.model.logits(hidden[inputs.last])
            found = parts.results.found_in_prefill(len(requests))
            parts.probes.look("target.logits", logits, found)
            options = parts.options.gather(features, inputs.rows)
            shaped = logits
            if options is not None:
                shaped = options.process(
                    kernels,
                    logits.unsqueeze(1),
                    temperature=temperature,
                    tokens=inputs.ends.unsqueeze(1),  # a single node has no drafted token: not read
                    tree_mask=None,
                    positions=inputs.ends.unsqueeze(1),
                ).squeeze(1)
            first = kernels.sample(shaped, temperature, seeds, inputs.ends)
            if options is not None:
                options.commit(kernels, torch.where(inputs.final, first, -1).unsqueeze(1))
            if features.logprobs is not None:
                reported = kernels.logprobs(logits.unsqueeze(1), first.unsqueeze(1), features.logprobs)
                parts.results.write_prefill_logprobs(*reported)
            parts.results.write_prefill(first)
            # Row 0 takes what an unfinished prompt must not publish.
            rows = torch.where(inputs.final, inputs.rows, 0)
            parts.future.publish(rows, inputs.ends)
            if parts.proposer.extends:
                following = inputs.following.index_copy(
                    0, inputs.last, torch.where(inputs.final, first, inputs.following[inputs.last])
                )
                relay = parts.proposer.extend(
                    ExtendInputs(
                        tokens=following,
                        hidden=hidden,
                        captured=captured,
                        positions=inputs.positions,
                        rope_positions=inputs.rope_positions,
                        deltas=parts.rows.deltas.index_select(0, inputs.rows) if parts.model.config.rope.sections else None,
                        slots=inputs.slots,
                        attention=attention,
                        last=inputs.last,
                        next_positions=inputs.ends + 1,
                        temperature=temperature,
                        seeds=seeds,
                        sampling=features.sampling,
                        relay=parts.future.relayed(inputs.rows),
                        continues=inputs.continues,
                        prompt=inputs.tokens,
                        embeddings=embeddings,
                        embedded=embedded,
                        prompt_lens=inputs.prompt_lens,
                        host_lens=lengths if self._exact else None,
                    )
                )
            else:
                relay = {}
            # A chunk that isn't the last stashes too, for the next one; its row isn't drafted for before that.
            parts.future.stash(inputs.rows, first, relay)

    def _lengths(self, batch: Batch) -> HostLengths:
        """How far each chunk goes."""
        parts = self._parts
        capacity = parts.rows.tables.shape[1] * parts.page_size
        return HostLengths(tuple(chunk.end for chunk in batch.prefill), capacity)

    def _features(self, batch: Batch, tokens: int) -> tuple[Tensor | None, Tensor | None]:
        """Features of images and videos in the chunks [T, H], and where they are, bool [T]."""
        parts = self._parts
        chunks = [chunk for chunk in batch.prefill if chunk.request.media is not None]
        if parts.vision is None or not chunks:
            return None, None
        model = parts.model
        embeddings = torch.zeros((tokens, model.config.hidden_size), dtype=model.dtype, device=model.device)
        embedded = torch.zeros(tokens, dtype=torch.bool, device=model.device)
        begin = 0
        for chunk in batch.prefill:
            end = begin + chunk.end - chunk.start
            if chunk.request.media is not None:
                chunk.request.media.embed(parts.vision, chunk.start, chunk.end, embeddings[begin:end], embedded[begin:end])
            begin = end
        return embeddings, embedded
