"""The upload of an iteration's inputs: the batch is packed on the host, copied to the device and written to request rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from outrider.engine.requests.batch import Batch
from outrider.engine.requests.request import RequestFailed
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.staging import (
    RESTORED_STATES,
    SAVED_STATES,
    Packer,
    PrefillBucket,
    Staged,
    float_bits,
    pack_prefill,
)


class InputUpload:
    """The steps of an input upload. Each step enqueues work on the current stream; the caller orders the streams."""

    def __init__(self, parts: EngineParts) -> None:
        self._staging, self._rows, self._options, self._future = parts.staging, parts.rows, parts.options, parts.future
        self._model, self._cache, self._states = parts.model, parts.cache, parts.states
        self._page_size, self._draft_lengths = parts.config.page_size, bool(parts.widths)

    def pack(self, batch: Batch, bucket: PrefillBucket | None = None) -> Packer:
        """Pack the inputs of ``batch`` on the host, with prefill chunks padded to ``bucket``.

        Raises :class:`RequestFailed` for a request that can't be packed.
        """
        try:
            return self._packed(batch, bucket)
        except Exception as error:
            for request in dict.fromkeys((*batch.requests, *batch.admitted)):
                try:
                    self._packed(batch.part_of_request(request))
                except Exception as request_error:
                    raise RequestFailed(request, request_error) from error
            raise

    def _packed(self, batch: Batch, bucket: PrefillBucket | None = None) -> Packer:
        """Pack the inputs of a batch.

        The rows of decoding requests come first, padded with row 0, then their draft lengths if each request can have its
        own. Prefill chunks follow, padded to ``bucket``. Segments that a graph reads so have constant addresses.
        """
        packer, padding = Packer(), [0] * (self._staging.max_requests - len(batch.decode))
        packer.add("decode_rows", [*(r.row for r in batch.decode), *padding])
        if self._draft_lengths:
            padding = [0] * (self._staging.max_requests - len(batch.draft_lengths))
            packer.add("draft_lengths", [*batch.draft_lengths, *padding])
        pack_prefill(packer, batch, self._page_size, self._model.config.rope, bucket)
        packer.add("admitted", [r.row for r in batch.admitted])
        packer.add("temperature", [float_bits(r.params.temperature) for r in batch.admitted])
        packer.add("seeds", [r.params.seed for r in batch.admitted])
        packer.add("mrope_position_deltas", [r.mrope_position_delta for r in batch.admitted])
        table_width = self._rows.tables.shape[1]
        packer.add("entries", [row * table_width + index for row, index, _ in batch.table_updates])
        packer.add("pages", [page for _, _, page in batch.table_updates])
        for name, copies in ((RESTORED_STATES, batch.restored_states), (SAVED_STATES, batch.saved_states)):
            if copies:
                packer.add(name, chain.from_iterable(copies))
        self._options.pack(batch.admitted, packer)
        return packer

    def stage_padding(self, bucket: PrefillBucket) -> Mapping[str, tuple[int, int]]:
        """Write an empty batch, padded to ``bucket``, to the staging buffer. Return the segments."""
        packer = self._packed(Batch((), (), (), ()), bucket)
        self._staging.write_from_host(packer)
        return packer.segments

    def unpack(self, batch: Batch, packer: Packer, entry: int | None) -> None:
        """Copy ring entry ``entry`` to the staging buffer, and write parameters and pages of ``batch`` to request rows.

        ``entry`` None: the staging buffer already has these values.
        """
        if entry is not None:
            self._staging.unpack(entry, packer)
        staged = self._staged(packer)
        self._rows.update(batch, staged)
        if batch.admitted:
            self._options.admit(staged)

    def _staged(self, packer: Packer) -> Staged:
        return lambda name: self._staging.view(packer.segments[name])

    def resolve_seq_lens(self, batch: Batch) -> None:
        """Gather the published lengths of the decoding requests, on the schedule stream."""
        self._future.resolve_seq_lens(self._staging.decode_rows(len(batch.decode)))

    def write_token_counts(self, packer: Packer) -> None:
        """Write the token counts of new requests with penalties, on the forward stream, before the first count."""
        self._options.write_token_counts(self._staged(packer))

    def forget_pending(self, packer: Packer) -> None:
        """Drop the verified tokens that earlier owners left in the windows of new requests, on the forward stream."""
        if self._cache.pending is not None:
            self._cache.pending.index_fill_(0, self._staged(packer)("admitted"), 0)

    def copy_states(self, packer: Packer, which: str) -> None:
        """Copy the states of all recurrent layers from the first to the second row of each pair in the segment ``which``, on
        the forward stream.

        States are restored before the prefill that continues them and saved after the prefill that wrote them, of the draft
        too.
        """
        kernels, pairs = self._model.kernels, self._staged(packer)(which).view(-1, 2)
        sources, targets = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        if which == SAVED_STATES:
            self._model.settle(self._cache, sources)
        for layer in self._states:
            for state in layer:
                kernels.scatter_rows(state, targets, kernels.gather_rows(state, sources))
