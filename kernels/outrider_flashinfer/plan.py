"""Attention plans: schedules that FlashInfer's host code computes for a batch, and the buffers that its kernels read.

One wrapper serves decoding, verify and prefill: ``BatchPrefillWithPagedKVCacheWrapper`` with backend ``fa2``. It splits
cached tokens among programs, as few queries require, and accepts masks. FlashInfer's tensor-core decoding uses the same
code. Each dtype and head size therefore needs one compiled module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from outrider.device import AttentionMetadata, AttentionShape, Backend, InterfaceError, Stream
from outrider.device.kernels.operators import register_operator
from outrider_flashinfer.buffers import fill_indices, fill_mask, mask_bytes

if TYPE_CHECKING:
    from outrider_flashinfer.kernelset import Attention

_TILES = (16, 64, 128)
"""Rows of a query block that FlashInfer chooses from; a row is a query of one head of a group."""
_PROGRAMS = 2
"""Programs per multiprocessor for which FlashInfer plans."""
_INT_BYTES = 1 << 20
"""Bytes of the tables that FlashInfer's plan fills with a few words per block. FlashInfer raises if they don't fit."""


def scratch_bytes(shape: AttentionShape, *, batch: int, rows: int, processors: int) -> int:
    """Return the bytes of float32 partial results if cached tokens are split among programs."""
    group = shape.heads // shape.kv_heads
    blocks = _PROGRAMS * processors // shape.kv_heads
    most = 0
    for tile in _TILES:
        tiles = max(blocks, -(-rows * group // tile) + batch - 1)
        most = max(most, shape.heads * tiles * tile * (shape.head_size + 1) * 4)
    return most + (1 << 20)


class AttentionPlan:
    """An attention plan for one size of uniform batches (requests and queries per request), or for prefill of at most a
    number of requests.

    A graph may replay a uniform batch, so the plan's buffers keep their addresses. The host writes into pinned memory, and
    first waits until earlier copies from it have run.
    """

    def __init__(
        self, attention: Attention, metadata: AttentionMetadata, shapes: Sequence[AttentionShape], stream: Stream
    ) -> None:
        self._backend: Backend = attention.backend
        self._uniform = metadata.uniform
        self.batch, self._pages = metadata.block_table.shape
        self._queries = metadata.max_query
        self.tokens = 0
        """Number of new tokens in the batch for which the plan was last computed."""
        device, batch = self._backend.device, self.batch
        self._pinned = self._backend.empty_pinned("FlashInfer's plan", (4 * batch + 2,), torch.int32)
        self._copied = self._backend.create_event("FlashInfer's plan copied")
        rows = batch * self._queries if self._uniform else 0
        need = [scratch_bytes(s, batch=batch, rows=rows, processors=attention.processors) for s in shapes]
        self.scratch = attention.scratch(stream, max(need))
        capacity = self._pages * shapes[0].page_size
        self._starts = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.indices = torch.zeros(batch * self._pages, dtype=torch.int32, device=device)
        self.mask: Tensor | None = None
        fixed: dict[str, Any] = {}
        if self._uniform:
            fixed = {
                "use_cuda_graph": True,
                "qo_indptr_buf": torch.zeros(batch + 1, dtype=torch.int32, device=device),
                "paged_kv_indptr_buf": self._starts,
                "paged_kv_indices_buf": self.indices,
                "paged_kv_last_page_len_buf": torch.zeros(batch, dtype=torch.int32, device=device),
            }
            if metadata.tree_mask is not None:
                each = mask_bytes(self._queries, capacity)
                self.mask = torch.zeros((batch, each), dtype=torch.uint8, device=device)
                fixed["custom_mask_buf"] = self.mask.view(-1)
                fixed["mask_indptr_buf"] = torch.arange(0, (batch + 1) * each, each, dtype=torch.int32, device=device)
        self.tables = {shape: torch.zeros(_INT_BYTES, dtype=torch.uint8, device=device) for shape in shapes}
        """FlashInfer's tables on the device, uint8, by attention shape; FlashInfer's kernels read the plan from them."""
        self.wrappers: dict[AttentionShape, Any] = {}
        for shape, tables in self.tables.items():
            made = BatchPrefillWithPagedKVCacheWrapper(self.scratch, "NHD", backend="fa2", **fixed)
            made.reset_workspace_buffer(self.scratch, tables)
            register_tables(tables, made)
            self.wrappers[shape] = made

    def fits(self, metadata: AttentionMetadata, shapes: Sequence[AttentionShape]) -> bool:
        """Return whether this plan's buffers and wrappers can serve the batch."""
        batch, pages = metadata.block_table.shape
        if metadata.uniform != self._uniform or pages != self._pages or set(shapes) != set(self.wrappers):
            return False
        return batch == self.batch and metadata.max_query == self._queries if self._uniform else batch <= self.batch

    def wait(self) -> None:
        """Block the host until the device has copied what the host last wrote to pinned memory."""
        if self._copied.generation:
            self._copied.synchronize()

    def renew(self, metadata: AttentionMetadata, stream: Stream) -> None:
        """Compute the plan for this batch and copy it to the plan's buffers, in the scope of ``stream``.

        Raises :class:`InterfaceError` for lengths that the block table can't hold.
        """
        batch = metadata.block_table.shape[0]
        lens = _lengths(metadata, batch)
        page_size = next(iter(self.wrappers)).page_size
        pages = [-(-length // page_size) for length in lens]
        if min(lens) < 1 or max(pages) > self._pages:
            raise InterfaceError(
                f"a plan was asked for lengths {lens}: the block table holds 1 to {self._pages * page_size} tokens"
            )
        starts, total = [0], 0
        for count in pages:
            total += count
            starts.append(total)
        queries = _query_starts(metadata, batch)
        self.tokens = queries[-1]
        last = [length - (count - 1) * page_size for length, count in zip(lens, pages, strict=True)]
        self.wait()
        self._pinned.renew()
        packed = torch.tensor((*queries, *starts, *last, *lens), dtype=torch.int32)
        host = self._pinned.tensor[: packed.shape[0]]
        host.copy_(packed)
        host_queries, host_starts, host_last, host_lens = host.split((batch + 1, batch + 1, batch, batch))
        if not self._uniform:
            tables = metadata.block_table
            indices = torch.cat([tables[i, :count] for i, count in enumerate(pages)])
        else:
            indices = self.indices[:total]
        for shape, wrapper in self.wrappers.items():
            wrapper.plan(
                host_queries,
                host_starts,
                indices,
                host_last,
                shape.heads,
                shape.kv_heads,
                shape.head_size,
                shape.page_size,
                causal=True,
                sm_scale=shape.scale,
                window_left=shape.window - 1 if shape.window else -1,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
                non_blocking=True,
                seq_lens=host_lens,
                max_token_per_sequence=metadata.max_query,
            )
        stream.record(self._copied)
        if self._uniform:
            fill_indices(self.indices, self._starts[:-1], metadata.block_table)
        if self.mask is not None:
            assert metadata.tree_mask is not None
            fill_mask(self.mask, metadata.seq_lens, metadata.tree_mask)


def _lengths(metadata: AttentionMetadata, batch: int) -> tuple[int, ...]:
    if metadata.seq_lens_host is None or len(metadata.seq_lens_host.value) != batch:
        raise InterfaceError(f"a plan for {batch} sequences needs their lengths on the host, got {metadata.seq_lens_host}")
    return metadata.seq_lens_host.value


def _query_starts(metadata: AttentionMetadata, batch: int) -> tuple[int, ...]:
    if metadata.uniform:
        return tuple(range(0, (batch + 1) * metadata.max_query, metadata.max_query))
    if metadata.host_query_start is None or len(metadata.host_query_start) != batch + 1:
        raise InterfaceError(f"a plan for a ragged batch needs its offsets on the host, got {metadata.host_query_start}")
    return metadata.host_query_start


# -- the operator ------------------------------------------------------------------------------------------------------

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")


def register_tables(tables: Any, wrapper: object) -> None:
    """Register ``wrapper`` as the FlashInfer wrapper whose tables are the tensor ``tables``.

    A FlashInfer wrapper can't be an operand of an operator, but its tables can.
    """
    tables.flashinfer_wrapper = ref(wrapper)


def _run(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
    wrapper = rest[-1].flashinfer_wrapper()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wrapper.run(q, (k_cache, v_cache), out=out)
    return out


register_operator(
    _LIBRARY,
    "paged_attention.flashinfer(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_start, Tensor seq_lens, "
    "Tensor block_table, Tensor? tree_mask, int max_query, int max_kv, float scale, int window, Tensor indices, "
    "Tensor? mask, Tensor(a!) scratch, Tensor tables) -> Tensor",
    _run,
    lambda q, *rest: torch.empty(q.shape, dtype=q.dtype, device=q.device),
)
OPERATOR = torch.ops.outrider.paged_attention.flashinfer
"""Attention by a plan. Its operands include the plan's tables, so that observers see all memory that FlashInfer accesses."""
