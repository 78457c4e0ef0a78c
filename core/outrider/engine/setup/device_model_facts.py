"""The device and model facts that :mod:`outrider.engine.setup.resolve` decides by, collected from a backend, a model and its
proposer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from outrider.device import Backend
from outrider.engine.setup.resolve import CacheMemory, DeviceModelFacts
from outrider.model import DecoderPlan, KVCache, LanguageModel
from outrider.speculative.proposer import Proposer

_HOST_FIGURES = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"
_GROUPS = Path("/proc/self/cgroup")
_GROUP_FILES = Path("/sys/fs/cgroup")
_GROUP_NAMES = ("memory.max", "memory.current", "inactive_file")
_FIRST_GROUP_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Of a control group, in each version: its limit, what is used of it, and in ``memory.stat`` what of that can be dropped."""
_LOGITS_AT_ONCE = 16
"""Copies of a token's logits, in float32, that shaping, sampling and verification hold at the same time."""
_GRAPHS_BYTES, _GRAPHS_REQUEST_BYTES = 3 << 28, 8 << 20
"""What captured graphs take besides, in all and for each request: sixty megabytes each where it was measured, 17 of them for
32 requests and 41 for 256.
"""
_HIDDEN_AT_ONCE = 6
_INNER_AT_ONCE = 3
"""Rows of a layer that a forward holds at the same time, of the model's width and of its inner width."""


def situation_of(
    backend: Backend, model: LanguageModel | DecoderPlan, proposer: Proposer, *, unloaded_bytes: int = 0
) -> DeviceModelFacts:
    """Collect the facts for an engine of this model on this backend.

    ``unloaded_bytes``: weights that the memory is still to hold.
    """
    config, sync = model.config, backend.speculative_sync
    memory = memory_of(backend)
    if memory is not None:
        memory = replace(memory, free=memory.free - unloaded_bytes)
    layers = len(config.attention_layers)
    kept = KVCache.page_bytes(layers, config.num_kv_heads, config.head_size, page_size=1, dtype=model.cache_dtype)
    no_fused = no_graphs = "" if model.native else "the code of transformers may wait for the device"
    if model.kernels.plans_on_host:
        no_fused = no_fused or f"the kernels {model.kernels.name!r} plan each batch on the host"
    if sync.exact_host_lengths and not (sync.rebind_params and backend.capabilities.updates_graph_params):
        no_graphs = no_graphs or "attention takes lengths of the host, which the device can't rebind in a graph"
    captures = backend.capabilities.captures_graphs
    if backend.capabilities.captures_in_part:
        no_fused = no_graphs = "the device's graphs can't hold every operator of a model"
    if model.ranks is not None and not backend.capabilities.captures_collectives:
        no_fused = no_graphs = "the device captures no collectives, and several ranks have some in every stage"
    return DeviceModelFacts(
        capabilities=backend.capabilities,
        step_modes=sync.step_modes,
        dtype=model.dtype,
        cache_dtype=model.cache_dtype,
        cached_bytes=kept,
        state_bytes=0 if config.recurrent is None else config.recurrent.state_bytes(model.dtype),
        context=config.max_context,
        slots=proposer.slots,
        token_bytes=kept + proposer.token_bytes,
        prompt_token_bytes=model.dtype.itemsize
        * (_HIDDEN_AT_ONCE * config.hidden_size + _INNER_AT_ONCE * config.inner_width),
        drafted_token_bytes=_LOGITS_AT_ONCE * torch.float32.itemsize * config.vocab_size,
        # counts for penalties
        request_bytes=torch.int32.itemsize * config.vocab_size
        + (_GRAPHS_REQUEST_BYTES if captures else 0)
        + sync.bytes_per_request,
        fixed_bytes=_GRAPHS_BYTES if captures else 0,
        memory=memory,
        weight_bytes=unloaded_bytes,
        no_fused=no_fused,
        no_graphs=no_graphs,
        no_overlap_fused=sync.fused_host_wait,
    )


def memory_of(backend: Backend) -> CacheMemory | None:
    """Return the memory that a KV cache on this backend occupies: the device's if it reports one, else the host's if tensors
    of the device lie there. None if neither is known.
    """
    if backend.capabilities.memory_limit:
        info = backend.memory_info()
        return CacheMemory(info.total, info.free)
    if torch.empty(0, device=backend.device).untyped_storage().device == torch.empty(0).untyped_storage().device:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit, left = _of_groups()
        return CacheMemory(min(total, limit), min(_available(total), total, limit, left), shared=True)
    return None


def _available(otherwise: int) -> int:
    """Return the bytes of host memory that Linux reports as available without swapping; ``otherwise`` if nothing reports
    it.
    """
    try:
        lines = _HOST_FIGURES.read_text().splitlines()
    except OSError:
        return otherwise
    found = next((line.split() for line in lines if line.startswith(_AVAILABLE)), ())
    return int(found[1]) * 1024 if len(found) == 3 and found[1].isdecimal() else otherwise


def _of_groups() -> tuple[int, int]:
    """Return the smallest limit of the control groups of this process (such as a container), and the smallest rest.

    The limit is a large number if no group is limited.
    """
    limits, left = [sys.maxsize], [sys.maxsize]
    for directory, names in _groups():
        try:
            limit, used = (int((directory / name).read_text()) for name in names[:2])
            stat = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
            dropped = next((int(words[1]) for words in stat if words[:1] == [names[2]]), 0)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        limits.append(limit)
        left.append(max(0, limit - max(0, used - dropped)))
    return min(limits), min(left)


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the directory of each control group that limits this process's memory, and of its parents."""
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (_GROUP_FILES / "memory", _FIRST_GROUP_NAMES) if controllers else (_GROUP_FILES, _GROUP_NAMES)
        own = root / path.lstrip("/")
        yield from ((each, names) for each in (own, *own.parents) if each.is_relative_to(root))
