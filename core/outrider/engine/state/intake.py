"""Brings in what the host decided of a batch: packed, uploaded, and written into rows."""

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


class Intake:
    """The steps of one intake. Each is enqueued in the scope that the caller opened; the caller orders them."""

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
        """Host: pack everything that the device must know of ``batch``, its chunks of prompts padded to ``bucket`` if there
        is one. Raises :class:`RequestFailed` for a request that can't be packed.
        """
        try:
            return self._packed(batch, bucket)
        except Exception as error:
            for request in dict.fromkeys((*batch.requests, *batch.admitted)):
                try:
                    self._packed(batch.only(request))
                except Exception as its_own:
                    raise RequestFailed(request, its_own) from error
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

    def stage_nothing(self, bucket: PrefillBucket) -> Mapping[str, tuple[int, int]]:
        """Write padding alone where chunks of ``bucket`` are staged, in the caller's scope; returns the segments."""
        packer = self._packed(Batch((), (), (), ()), bucket)
        self._staging.place(packer)
        return packer.segments

    def holds(self, packer: Packer) -> bool:
        """Host: whether the device has all of it from the iteration before. While requests decode, pages alone change."""
        return self._staging.holds(packer)

    def forget(self) -> None:
        """Host: after a failure the device may have anything."""
        self._staging.forget()

    def upload(self, packer: Packer, entry: int, schedule: Stream) -> None:
        """Copy it through an entry of the rings."""
        self._staging.upload(entry, packer.packed, schedule)

    def unpack(self, batch: Batch, packer: Packer, entry: int | None) -> None:
        """What was uploaded to ``entry``, to where it's read (None: it's there); new requests' parameters and new pages into
        rows.
        """
        if entry is not None:
            self._staging.unpack(entry, packer)
        self._rows.update(batch, self._staging.view, packer.segments)
        if batch.admitted:
            self._options.admit(self._staging.view, packer.segments)

    def resolve_seq_lens(self, batch: Batch) -> None:
        """On schedule: the lengths that the last iteration published, of the decoding requests."""
        self._future.resolve_seq_lens(self._staging.decode_rows(len(batch.decode)))

    def begin_counts(self, packer: Packer) -> None:
        """On forward: the history of new requests that penalise, before anything counts."""
        self._options.begin(self._staging.view, packer.segments)

    def decoding(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows and resolved lengths of the decoding requests, int64 [count] each."""
        return self._staging.decode_rows(count), self._future.batch_seq_lens[:count]
