"""Calls of kernels on memory whose end lies beyond 2**31 elements, where offsets of 32 bits overflow.

The memory is about 4 GiB, of which the calls touch a few pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet, OutOfDeviceMemory
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.paged_batch import preferred_dtypes
from outrider_conformance.reporting.verdict import not_applicable

_PAGE_SIZE, _HEADS, _HEAD_SIZE = 16, 8, 128
_PAGES = 2**31 // (_PAGE_SIZE * _HEADS * _HEAD_SIZE) + 2
_SLOTS = (_PAGE_SIZE, _PAGE_SIZE + 1, (_PAGES - 2) * _PAGE_SIZE, _PAGES * _PAGE_SIZE - 1)
"""Two slots at the beginning of the memory, the first one beyond 2**31 elements, and the last one."""
_NEEDED_BYTES = 6 << 30
_TOLERANCE = 0.03

Call = Callable[[KernelSet, Tensor, Tensor, Tensor], Tensor]
"""A call of a kernel on the cache, with slots int64 [4] and values [4, heads, head size]; it returns the values found."""


def _gather(kernels: KernelSet, cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    rows = cache.view(-1, _HEADS, _HEAD_SIZE)
    rows.index_copy_(0, slots, values)
    return kernels.gather_rows(rows, slots)


def _scatter(kernels: KernelSet, cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    rows = cache.view(-1, _HEADS, _HEAD_SIZE)
    kernels.scatter_rows(rows, slots, values)
    return rows.index_select(0, slots)


def _write(kernels: KernelSet, cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """Write equal keys and values, which aren't rotated, to one cache."""
    cos = torch.ones(len(slots), _HEAD_SIZE, dtype=cache.dtype, device=cache.device)
    kernels.rope_write_cache(values.clone(), values.clone(), values, cos, torch.zeros_like(cos), cache, cache, slots)
    return cache.view(-1, _HEADS, _HEAD_SIZE).index_select(0, slots)


def _move(kernels: KernelSet, cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    rows, (near, far) = cache.view(-1, _HEADS, _HEAD_SIZE), slots.chunk(2)
    found = []
    for sources, destinations, moved in ((far, near, values[:2]), (near, far, values[2:])):
        rows.index_copy_(0, sources, moved)
        kernels.move_cache(cache, cache, sources, destinations)
        found.append(rows.index_select(0, destinations))
    return torch.cat(found)


def _attend(kernels: KernelSet, cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """Attend with a token of each of two sequences, which has one cached token: the result is the value of that token."""
    device = cache.device
    table = (slots[::2] // _PAGE_SIZE).to(torch.int32).unsqueeze(1)
    cache.view(-1, _HEADS, _HEAD_SIZE).index_copy_(0, slots[::2], values[::2])
    starts, lens = torch.arange(3, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(starts, lens, table, 1, _PAGE_SIZE, uniform=True)
    made = kernels.paged_attention(values[::2].clone(), cache, cache, metadata, scale=1.0)
    return torch.stack((made, values[1::2]), dim=1).flatten(0, 1)


FAR_CALLS: Mapping[str, Call] = MappingProxyType(
    {
        "gather_rows": _gather,
        "scatter_rows": _scatter,
        "rope_write_cache": _write,
        "move_cache": _move,
        "paged_attention": _attend,
    }
)


def check_far_rows(lab: Lab, kernel: str) -> None:
    """Call ``kernel`` on rows at both ends of a large cache, and check the values that it reads or writes."""
    backend = lab.backend
    dtype = next((each for each in preferred_dtypes(backend) if each.itemsize == 2), None)
    if dtype is None:
        not_applicable("no dtype of 16 bits is declared or preferred")
    if backend.control is not None:
        not_applicable("a simulated device fills its memory")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if min(free, backend.memory_info().free if backend.capabilities.memory_limit else free) < _NEEDED_BYTES:
        not_applicable("less than 6 GiB of memory are free")
    (stream,) = lab.streams("s")
    values = torch.randn(len(_SLOTS), _HEADS, _HEAD_SIZE, generator=torch.Generator().manual_seed(lab.seed)).to(dtype)
    given = lab.upload(stream, {"slots": torch.tensor(_SLOTS), "values": values})
    try:
        with backend.on(stream):
            cache = torch.empty(_PAGES, _PAGE_SIZE, _HEADS, _HEAD_SIZE, dtype=dtype, device=backend.device)
    except (OutOfDeviceMemory, RuntimeError):
        not_applicable("4 GiB of memory can't be allocated")
    with backend.on(stream):
        made = FAR_CALLS[kernel](backend.kernels_in_use, cache, given["slots"], given["values"])
    stream.synchronize()
    for slot, found, wanted in zip(_SLOTS, made.cpu().float(), values.float(), strict=True):
        off = float((found - wanted).abs().nan_to_num(nan=float("inf")).max())
        assert off <= _TOLERANCE, (
            f"{kernel} in {dtype}: row {slot} of a cache of {_PAGES * _PAGE_SIZE} rows with {_HEADS * _HEAD_SIZE} numbers is "
            f"off by {off:.3g}; compute offsets in 64 bits"
        )
