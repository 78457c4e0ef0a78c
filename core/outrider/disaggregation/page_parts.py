"""Parts of pages: the memory that a link registers when the decode ranks share the KV heads of every page.

A prefill engine of one rank has all heads of a page, and a tensor-parallel decode rank has its part of them. Both sides then
transfer *token slots* instead of pages. A slot is contiguous on both sides, and the transport copies it without staging.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.model import Shard

_KV_DIMS = 4
"""Dimensions of a cache of keys or values: [pages, page size, KV heads, head size]. Other caches aren't shared out."""


def part_shape(cache: Tensor, rank: Shard) -> list[int]:
    """Return the shape of one page of ``cache`` on tensor-parallel rank ``rank``."""
    shape = list(cache.shape[1:])
    if cache.dim() == _KV_DIMS:
        shape[1] //= rank.kv_head_shard(shape[1]).size
    return shape


def slots_of_part(caches: Sequence[Tensor], rank: Shard) -> tuple[Tensor, ...]:
    """Return views [token slots, elements of a slot] of the part of ``caches`` that tensor-parallel rank ``rank`` holds."""
    parts = []
    for cache in caches:
        heads = rank.kv_head_shard(cache.shape[2]) if cache.dim() == _KV_DIMS else Shard()
        slots = cache.flatten(0, 1)
        parts.append(slots.reshape(slots.shape[0], heads.size, -1)[:, heads.rank])
    return tuple(parts)


def registered_memory(caches: Sequence[Tensor], tensor_ranks: int) -> tuple[Tensor, ...]:
    """Return the regions that a decode rank registers with its link: ``caches`` themselves, or views of their token slots if
    the rank is one of several tensor-parallel ranks.
    """
    return tuple(caches) if tensor_ranks == 1 else slots_of_part(caches, Shard())


def slots_of_pages(pages: Sequence[int], page_size: int) -> list[int]:
    """Return the numbers of the token slots of ``pages``, in order."""
    return [page * page_size + slot for page in pages for slot in range(page_size)]
