"""Device tensors that a plan's kernels read: page numbers and tree masks, computed from the engine's device tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_indices(indices: Tensor, starts: Tensor, block_table: Tensor) -> None:
    """Concatenate the page numbers of all sequences in ``indices``, int32 [B*P].

    Row i of ``block_table``, int32 [B, P], contributes its first pages, from ``starts[i]`` on up to the next row's start.
    ``starts`` is int32 [B], strictly increasing from 0. Entries after the last sequence's pages repeat page numbers of the
    last row.
    """
    places = torch.arange(indices.shape[0], dtype=torch.int32, device=indices.device)
    # Each entry looks up its page: pages that look up their entry would all write the unneeded page numbers to one place.
    rows = torch.searchsorted(starts, places, right=True) - 1
    columns = (places - starts[rows]).clamp(max=block_table.shape[1] - 1)
    indices.copy_(block_table[rows, columns])


def mask_bytes(queries: int, capacity: int) -> int:
    """Return the bytes of one sequence's mask: a bit for each of ``queries`` and each of ``capacity`` cached tokens."""
    return -(-queries * capacity // 8)


def fill_mask(packed: Tensor, seq_lens: Tensor, tree_mask: Tensor) -> None:
    """Write the tree masks to ``packed`` as bits, lowest first.

    Bit ``n * kv_len + k`` of a row says whether node n attends to cached token k. ``packed`` is uint8 [B, M] with M of
    :func:`mask_bytes`, ``seq_lens`` int32 [B], ``tree_mask`` bool [B*N, N]. Every node attends to all tokens before the
    nodes, and to the nodes that its row of ``tree_mask`` names.
    """
    batch, nodes = packed.shape[0], tree_mask.shape[1]
    lens = seq_lens.unsqueeze(1)
    bit = torch.arange(packed.shape[1] * 8, dtype=torch.int32, device=packed.device)
    node = bit // lens
    new = bit - node * lens - (lens - nodes)
    entry = node.clamp(max=nodes - 1) * nodes + new.clamp(min=0)
    sees = (new < 0) | tree_mask.view(batch, nodes * nodes).gather(1, entry.to(torch.int64))
    values = 1 << torch.arange(8, dtype=torch.int32, device=packed.device)
    bits = (sees & (node < nodes)).view(batch, -1, 8)
    packed.copy_((bits * values).sum(dim=-1, dtype=torch.int32).to(torch.uint8))
