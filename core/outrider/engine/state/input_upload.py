"""The input upload: pack the host's decisions about a batch, copy them to the device, and write them to request rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from outrider.device import Stream
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.request import RequestFailed
from outrider.engine.state.options import OptionTable
from outrider.engine.state.rows import FutureMap, RowTable
from outrider.engine.state.staging import Packer, PrefillBucket, Staging, pack
from outrider.model import RopeConfig


class InputUpload:
    """The steps of an input upload. Each step enqueues work on the current stream; the caller orders the streams."""

    def __init__(
        self,
        *,
        staging: Staging,
        rows: RowTable,
        options: OptionTable,
        future: FutureMap,
        page_size: int,
        rope: RopeConfig,
    ) -> None:
        self._staging = staging
        self._rows = rows
        self._options = options
        self._future = future
        self._page_size = page_size
        self._rope = rope

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
        packer = pack(
            batch,
            page_size=self._page_size,
            table_width=self._rows.tables.shape[1],
            max_requests=self._staging.max_requests,
            rope=self._rope,
            bucket=bucket,
        )
        self._options.pack(batch.admitted, packer)
        return packer

    def stage_padding(self, bucket: PrefillBucket) -> Mapping[str, tuple[int, int]]:
        """Write an empty batch, padded to ``bucket``, to the staging buffer. Return the segments."""
        packer = self._packed(Batch((), (), (), ()), bucket)
        self._staging.write_from_host(packer)
        return packer.segments

    def matches_previous(self, packer: Packer) -> bool:
        """Return True if ``packer`` equals the previous upload, so that no copy is needed.

        In consecutive decode iterations only new pages change the inputs.
        """
        return self._staging.matches_previous(packer)

    def invalidate(self) -> None:
        """Count the device's copy as invalid, after a failure."""
        self._staging.invalidate()

    def upload(self, packer: Packer, entry: int, schedule: Stream) -> None:
        """Copy the packed values to ring entry ``entry`` on the device, on the stream ``schedule``."""
        self._staging.upload(entry, packer.packed, schedule)

    def unpack(self, batch: Batch, packer: Packer, entry: int | None) -> None:
        """Copy ring entry ``entry`` to the staging buffer, and write parameters and pages of ``batch`` to request rows.

        ``entry`` None: the staging buffer already has these values.
        """
        if entry is not None:
            self._staging.unpack(entry, packer)
        self._rows.update(batch, self._staging.view, packer.segments)
        if batch.admitted:
            self._options.admit(self._staging.view, packer.segments)

    def resolve_seq_lens(self, batch: Batch) -> None:
        """Gather the published lengths of the decoding requests, on the schedule stream."""
        self._future.resolve_seq_lens(self._staging.decode_rows(len(batch.decode)))

    def write_token_counts(self, packer: Packer) -> None:
        """Write the token counts of new requests with penalties, on the forward stream, before the first count."""
        self._options.write_token_counts(self._staging.view, packer.segments)

    def decoding(self, count: int) -> tuple[Tensor, Tensor]:
        """Return rows and resolved lengths of the decoding requests, int64 [count] each."""
        return self._staging.decode_rows(count), self._future.batch_seq_lens[:count]
