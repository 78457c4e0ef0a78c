"""Stands in for FlashInfer 0.6.14: the wrapper's signatures, what it copies and when, and attention from its buffers alone.

Nothing of it is FlashInfer's code. Which names and arguments the real one has is held against its wheel by the contract test;
here is what the plugin relies on beyond that. The kernels read the wrapper's device buffers when they run, and the host's
tables through a copy from pinned memory, which the next plan overwrites at once.
"""

import torch

__version__ = "0.6.14"

_LIBRARY = torch.library.Library("emulated_flashinfer", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor queries, Tensor starts, Tensor indices, Tensor last, "
    "Tensor tables, Tensor? mask, Tensor? mask_starts, Tensor(a!) scratch, bool causal, float scale, int left, "
    "Tensor(b!) out) -> ()"
)


def _attend(
    q, k_cache, v_cache, queries, starts, indices, last, tables, mask, mask_starts, scratch, causal, scale, left, out
):
    page_size, kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // kv_heads
    scratch[:1].fill_(1)
    out.fill_(torch.nan)  # what nobody computes shows
    for i in range(starts.shape[0] - 1):
        pages = indices[starts[i] : starts[i + 1]].long()
        length = (len(pages) - 1) * page_size + int(last[i])
        if length != int(tables[i]):
            raise RuntimeError(
                f"sequence {i} runs with the tables of another batch: {length} tokens, {int(tables[i])} planned"
            )
        keys = k_cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
        values = v_cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
        begin, end = int(queries[i]), int(queries[i + 1])
        count = end - begin
        lane = torch.arange(length)
        place = length - count + torch.arange(count).unsqueeze(1)
        if mask is not None:
            bit = torch.arange(count * length)
            packed = mask[int(mask_starts[i]) + bit // 8].to(torch.int32)
            sees = ((packed >> (bit % 8).to(torch.int32)) & 1).bool().view(count, length)
        else:
            sees = lane <= place if causal else torch.ones(count, length, dtype=torch.bool)
        if left >= 0:
            sees = sees & (lane >= place - left)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * scale
        weights = torch.softmax(scores.masked_fill(~sees, -torch.inf), dim=-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("emulated_flashinfer::attend", lambda *operands: None, lib=_LIBRARY)


class BatchPrefillWithPagedKVCacheWrapper:
    pinned = None
    """Makes pinned memory of the device: set by the test."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
    ):
        assert (kv_layout, backend) == ("NHD", "fa2")
        assert float_workspace_buffer.dtype is torch.uint8
        self.device = float_workspace_buffer.device
        self._graph = use_cuda_graph
        self._scratch = float_workspace_buffer
        self._queries, self._starts, self._indices = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf
        self._last = paged_kv_last_page_len_buf
        self._mask, self._mask_starts = custom_mask_buf, mask_indptr_buf
        self._rows = None
        self._int_host = self._int = None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self._scratch = float_workspace_buffer
        self._int = int_workspace_buffer.view(torch.int32)
        self._int_host = type(self).pinned(self._int.shape)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        q_data_type="float16",
        kv_data_type=None,
        non_blocking=True,
        seq_lens=None,
        max_token_per_sequence=None,
    ):
        assert all(t.device.type == "cpu" for t in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens))
        assert all(t.dtype is torch.int32 for t in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len))
        assert paged_kv_indices.device == self.device
        assert q_data_type == kv_data_type
        batch, rows = len(qo_indptr) - 1, int(qo_indptr[-1])
        assert max_token_per_sequence == int((qo_indptr[1:] - qo_indptr[:-1]).max())
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        if self._graph:
            assert batch == len(self._queries) - 1, "the batch size is fixed"
            self._rows = self._rows or rows
            assert rows <= self._rows
            self._queries.copy_(qo_indptr, non_blocking=non_blocking)
            self._starts.copy_(paged_kv_indptr, non_blocking=non_blocking)
            self._last.copy_(paged_kv_last_page_len, non_blocking=non_blocking)
            self._indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
        else:
            self._queries = qo_indptr.to(self.device, non_blocking=non_blocking)
            self._starts = paged_kv_indptr.to(self.device, non_blocking=non_blocking)
            self._last = paged_kv_last_page_len.to(self.device, non_blocking=non_blocking)
            self._indices = paged_kv_indices
        self._int_host[:batch].copy_(seq_lens)
        self._int[:batch].copy_(self._int_host[:batch], non_blocking=True)
        self._tokens = rows
        self._options = (causal, sm_scale, window_left)
        self._shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type)

    def run(self, q, paged_kv_cache, *, out=None):
        k_cache, v_cache = paged_kv_cache
        assert q.shape[0] == self._tokens
        assert (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1], q.dtype) == self._shape
        causal, scale, left = self._options
        torch.ops.emulated_flashinfer.attend(
            q,
            k_cache,
            v_cache,
            self._queries,
            self._starts,
            self._indices,
            self._last,
            self._int,
            self._mask,
            self._mask_starts,
            self._scratch,
            causal,
            scale,
            left,
            out,
        )
        return out
