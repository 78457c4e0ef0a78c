"""Facts about the device and the model, from which an engine chooses its settings: capabilities, sizes and memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.device import Backend, Capabilities, StepMode
from outrider.model import DecoderPlan, KVCache, LanguageModel
from outrider.speculative.proposer import Proposer

_HOST_MEMORY = Path("/proc/meminfo")
_GROUP_LIST = Path("/proc/self/cgroup")
_GROUP_FILES = Path("/sys/fs/cgroup")
_GROUP_FIELDS = ("memory.max", "memory.current", "inactive_file")
_GROUP_FIELDS_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""For control groups version 1: the files of the limit and of the usage in bytes, and the row of ``memory.stat`` with the
bytes that the kernel can reclaim.
"""
_LOGITS_COPIES = 16
"""Number of float32 copies of a token's logits that option processing, sampling and verification hold at the same time."""
_GRAPHS_BYTES, _GRAPHS_REQUEST_BYTES = 3 << 28, 8 << 20
"""Estimated device memory of captured graphs in bytes: a fixed part, and a part for each request of the largest bucket."""
MAX_GRAPH_TOKENS = 6144
"""Maximum number of tokens of prompt chunks that are replayed from a graph. For more tokens the device takes longer than the
host needs to launch the kernels: a host that was idle just before takes some 2 ms a layer.
"""
_HIDDEN_ROWS = 6
_INNER_ROWS = 3
"""Numbers of activation rows per token that a forward pass holds at the same time: ``_HIDDEN_ROWS`` of the hidden size,
``_INNER_ROWS`` of the MLP's inner size.
"""


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes of the memory that holds the KV cache, in total and free after the weights. ``shared`` is True for host
    memory.
    """

    total: int
    free: int
    shared: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModelFacts:
    """The facts about device and model from which the engine chooses settings, collected after the weights were loaded."""

    capabilities: Capabilities
    """The capabilities that the device declares."""
    step_modes: frozenset[StepMode]
    """The step modes that the backend declares as correct."""
    dtype: torch.dtype
    """Dtype of the weights."""
    context: int
    """Maximum number of tokens of a request that the model supports."""
    slots: int
    """Cache slots after the cached tokens that an iteration may write."""
    token_bytes: int
    """Bytes per token in all KV caches."""
    prompt_token_bytes: int = 0
    """Maximum bytes of a forward pass per prompt token."""
    drafted_token_bytes: int = 0
    """Maximum bytes of a forward pass per verified token."""
    request_bytes: int = 0
    """Bytes of device memory per request, besides its KV pages and states."""
    fixed_bytes: int = 0
    """Bytes of the engine that do not depend on its requests."""
    memory: CacheMemory | None = None
    """Memory of the KV cache; None if it is unknown."""
    weight_bytes: int = 0
    """Bytes of weights that aren't loaded yet. The free memory is without them, so it can be negative."""
    no_fused: str = ""
    """Reason against fused mode; empty if it may be chosen."""
    no_graphs: str = ""
    """Reason against graphs; empty if they may be chosen."""
    no_overlap_fused: bool = False
    cache_dtype: torch.dtype | None = None
    cached_bytes: int = 0
    state_bytes: int = 0
    """Bytes of one request's recurrent states."""
    window_bytes: int = 0
    """Bytes of the verified tokens that the states of one request lack."""


def max_graph_tokens(capabilities: Capabilities) -> int:
    """Return the number of tokens of the largest chunk of prompts that is replayed from a graph, which holds memory for them;
    0 if each chunk is called.

    Tests and proofs replace this function in :mod:`outrider.engine.prefill`, to replay chunks of few tokens and to replay on
    a device without graphs.
    """
    return MAX_GRAPH_TOKENS if capabilities.captures_graphs else 0


def collect_facts(
    backend: Backend, model: LanguageModel | DecoderPlan, proposer: Proposer, *, unloaded_bytes: int = 0
) -> DeviceModelFacts:
    """Collect the facts for an engine of this model on this backend.

    ``unloaded_bytes``: weights that the memory is still to hold.
    """
    config, sync = model.config, backend.speculative_sync
    memory = find_cache_memory(backend)
    if memory is not None:
        memory = replace(memory, free=memory.free - unloaded_bytes)
    kept = KVCache.page_bytes(config, page_size=1, dtype=model.cache_dtype)
    inner = _INNER_ROWS * config.inner_width
    if config.recurrent is not None:
        inner = max(inner, config.recurrent.prompt_values)
    if config.latent is not None:
        inner = max(inner, config.latent.prompt_values(config.num_heads))
    # While per-layer inputs are made, there are three tensors of their width; afterwards one, for the whole pass.
    inner = config.per_layer_width + max(inner, 2 * config.per_layer_width)
    window = 0
    if config.recurrent is not None and proposer.depth:
        window = (proposer.depth + 1) * config.recurrent.window_bytes(model.dtype)
    no_fused, no_graphs = _reasons_against_graphs(backend, model)
    captures = backend.capabilities.captures_graphs
    return DeviceModelFacts(
        capabilities=backend.capabilities,
        step_modes=sync.step_modes,
        dtype=model.dtype,
        cache_dtype=model.cache_dtype,
        cached_bytes=kept,
        state_bytes=proposer.state_bytes + (config.recurrent.state_bytes(model.dtype) if config.recurrent else 0),
        window_bytes=window,
        context=config.max_context,
        slots=proposer.slots,
        token_bytes=kept + proposer.token_bytes,
        prompt_token_bytes=model.dtype.itemsize * (_HIDDEN_ROWS * config.hidden_size + inner),
        drafted_token_bytes=_LOGITS_COPIES * torch.float32.itemsize * config.vocab_size,
        # counts for penalties
        request_bytes=torch.int32.itemsize * config.vocab_size
        + (_GRAPHS_REQUEST_BYTES if captures else 0)
        + proposer.request_bytes
        + sync.bytes_per_request,
        fixed_bytes=_GRAPHS_BYTES if captures else 0,
        memory=memory,
        weight_bytes=unloaded_bytes,
        no_fused=no_fused,
        no_graphs=no_graphs,
        no_overlap_fused=sync.fused_host_wait,
    )


def _reasons_against_graphs(backend: Backend, model: LanguageModel | DecoderPlan) -> tuple[str, str]:
    """Return the reason against fused mode and the one against graphs in staged mode; each is empty if there is none."""
    capabilities, sync = backend.capabilities, backend.speculative_sync
    if not model.ranks.is_single and not capabilities.captures_collectives:
        reason = "the device captures no collectives, and several ranks have some in every stage"
        return reason, reason
    if capabilities.captures_in_part:
        reason = "the device's graphs can't hold every operator of a model"
        return reason, reason
    if not model.native:
        reason = "the code of transformers may wait for the device"
        return reason, reason
    no_fused = no_graphs = ""
    if model.kernels.plans_on_host:
        no_fused = f"the kernels {model.kernels.name!r} plan each batch on the host"
    if sync.exact_host_lengths and not (sync.rebind_params and capabilities.updates_graph_params):
        no_graphs = "attention takes lengths of the host, which the device can't rebind in a graph"
    return no_fused, no_graphs


def find_cache_memory(backend: Backend) -> CacheMemory | None:
    """Return the memory that a KV cache on this backend occupies: the device's if it reports one, else the host's if tensors
    of the device lie there. None if neither is known.
    """
    if backend.capabilities.memory_limit:
        info = backend.memory_info()
        return CacheMemory(info.total, info.free)
    if torch.empty(0, device=backend.device).untyped_storage().device == torch.empty(0).untyped_storage().device:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit, free = _container_memory()
        return CacheMemory(min(total, limit), min(_available_bytes(total), total, limit, free), shared=True)
    return None


def _available_bytes(otherwise: int) -> int:
    """Return the bytes of host memory that Linux reports as available without swapping; ``otherwise`` if no report can be
    read.
    """
    try:
        lines = _HOST_MEMORY.read_text().splitlines()
    except OSError:
        return otherwise
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), ())
    return int(found[1]) * 1024 if len(found) == 3 and found[1].isdecimal() else otherwise


def _container_memory() -> tuple[int, int]:
    """Return the smallest memory limit of this process's control groups (such as a container), and the smallest number of
    bytes that they leave free.

    The limit is a large number if no group is limited.
    """
    limits, free = [sys.maxsize], [sys.maxsize]
    for directory, (limit_file, usage_file, reclaimable_row) in _control_groups():
        try:
            limit = int((directory / limit_file).read_text())
            used = int((directory / usage_file).read_text())
            rows = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
            reclaimable = next((int(words[1]) for words in rows if words[:1] == [reclaimable_row]), 0)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        limits.append(limit)
        free.append(max(0, limit - max(0, used - reclaimable)))
    return min(limits), min(free)


def _control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the directory of each control group that limits this process's memory and of its parents, with the names of the
    limit file, the usage file and the reclaimable row.
    """
    try:
        lines = _GROUP_LIST.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, fields = (_GROUP_FILES / "memory", _GROUP_FIELDS_V1) if controllers else (_GROUP_FILES, _GROUP_FIELDS)
        own = root / path.lstrip("/")
        yield from ((each, fields) for each in (own, *own.parents) if each.is_relative_to(root))
