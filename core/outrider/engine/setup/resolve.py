"""The decisions that an engine makes for its user, from an open config, the declarations of the device, and the model.

The functions here read records only and never query a device. Given settings stay unchanged; each choice states its reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

import torch

from outrider.device import CACHE_FORMATS, Backend, Capabilities, ConfigError, OutOfDeviceMemory, StepMode
from outrider.engine.config import DTYPES, Choice, DecidedConfig, EngineConfig, state_rows
from outrider.model import DecoderPlan, KVCache, LanguageModel
from outrider.speculative.proposer import Proposer

GIB = 1 << 30
KV_SHARE = 0.9
"""Maximum fraction of the memory that is free after the weights, which the KV cache takes. The remainder covers what
estimates miss.
"""
HOST_KV_SHARE = 0.25
"""The same fraction for a device whose memory is the host's, which other processes also use."""
HOST_MOST = 0.9
"""Maximum fraction of the host's free memory for a cache of the size that the user requested, together with the other work of
the engine.
"""
STATES_SHARE = 0.25
"""Maximum fraction of the free memory for the recurrent states of requests, if the engine chooses the number of requests."""
CHECKPOINTS_SHARE = 0.1
"""Maximum fraction of the free memory for the recurrent states that the prefix cache keeps, if the engine chooses their
number.
"""
CHECKPOINTS_PER_REQUEST = 2
COMMON_CONTEXT = 4096
"""Tokens of a request's context if the memory is unknown, and the target for most requests if the memory is the host's."""

SIZES_BY_MEMORY = ((70, 8192, 256), (20, 2048, 64), (0, 512, 16))
"""Rows (GiB of device memory, prompt tokens of an iteration, concurrent requests). The engine uses the first row whose memory
the device has.
"""
SIZES_WITHOUT_LIMIT = (512, 8)
"""The same sizes (prompt tokens, requests) for a device that declares no limit of its memory."""

_WIDER: Mapping[torch.dtype, tuple[torch.dtype, ...]] = MappingProxyType(
    {
        torch.float64: (),
        torch.float32: (torch.float64,),
        torch.bfloat16: (torch.float32, torch.float64),
        torch.float16: (torch.float32, torch.float64),
    }
)
"""For each dtype, the dtypes that represent all its values, the nearest first."""
_OTHERS = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def choose_dtype(capabilities: Capabilities, checkpoint: torch.dtype | None) -> Choice:
    """Return the dtype in which a checkpoint of dtype ``checkpoint`` is loaded; None if the checkpoint names no dtype.

    Raises :class:`ConfigError` if the device computes in no such dtype.
    """
    own = checkpoint if checkpoint in _NAMES else torch.float32
    assert own is not None
    if checkpoint is None:
        says = "the checkpoint names no dtype"
    elif checkpoint in _NAMES:
        says = f"the checkpoint is in {_NAMES[own]}"
    else:
        says = f"the checkpoint is in {str(checkpoint).removeprefix('torch.')}, in which nothing is computed"
    preferred = tuple(dtype for dtype in capabilities.preferred_dtypes if dtype in _NAMES)
    if own in preferred or (not preferred and own in capabilities.dtypes):
        return Choice("dtype", _NAMES[own], "the checkpoint's" if checkpoint in _NAMES else says)
    candidates = preferred or tuple(dtype for dtype in _OTHERS if dtype in capabilities.dtypes)
    near = next((dtype for dtype in (*_WIDER[own], *candidates) if dtype in (preferred or capabilities.dtypes)), None)
    if preferred:
        assert near is not None
        return Choice("dtype", _NAMES[near], f"{says}, and the device's own kernels run in {_listed(preferred)}")
    if near is None:
        raise ConfigError(f"{says}, and the device computes in {_listed(capabilities.dtypes)}; name one of these as dtype")
    return Choice("dtype", _NAMES[near], f"{says}, in which the device doesn't compute")


def resolve(config: EngineConfig, known: DeviceModelFacts, before: tuple[Choice, ...] = ()) -> DecidedConfig:
    """Return ``config`` with every open setting decided. ``before`` are the choices that loading made already.

    Raises :class:`ConfigError` for an impossible request, and :class:`OutOfDeviceMemory` if the free memory after the weights
    holds no request.
    """
    if isinstance(config, DecidedConfig):
        return config
    choices = _Choices(config, before)
    choices.add("dtype", _NAMES[known.dtype], "the model's")
    _keeping(choices, known)
    _launching(choices, known)
    _sizes(choices, known)
    _cache(choices, known)
    given = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
    return DecidedConfig(**given | {"kv_memory": None} | choices.values, chosen=choices.made)


class _Choices:
    """The settings decided so far by name, and a :class:`Choice` for each that the engine made."""

    def __init__(self, config: EngineConfig, before: tuple[Choice, ...]) -> None:
        self.config = config
        self.values: dict[str, object] = {}
        self.made = before

    def add(self, name: str, value: object, why: str) -> None:
        """Decide a setting: use the user's value if one was given, else ``value``, and record the choice with its reason."""
        given = getattr(self.config, name)
        self.values[name] = value if given is None else given
        if given is None:
            self.made += (Choice(name, value, why),)

    def number(self, name: str) -> int:
        """Return the value of a decided setting as a whole number."""
        value = self.values[name]
        assert isinstance(value, int)
        return value


def _keeping(choices: _Choices, known: DeviceModelFacts) -> None:
    """Decide ``kv_dtype``, the format of KV pages. The model was loaded with the scales of this format."""
    asked = choices.config.kv_dtype
    format = next((name for name, dtype in CACHE_FORMATS.items() if dtype is known.cache_dtype), "plain")
    if asked not in ("auto", format):
        raise ConfigError(
            f"kv_dtype is {asked}, and the model was loaded for a {format} KV cache; use Engine.from_checkpoint, or load it "
            f"with kv_dtype={asked!r}"
        )
    choices.values["kv_dtype"] = format
    if format != "plain":
        plain = known.cached_bytes * known.dtype.itemsize
        whose = "as asked" if asked == format else "the checkpoint's kv_cache_scheme"
        why = f"{whose}: {known.cached_bytes} bytes a token in place of {plain}"
        choices.made += (Choice("kv_dtype", format, why),)


def _launching(choices: _Choices, known: DeviceModelFacts) -> None:
    """Decide the settings mode, graphs and overlap: the fastest that the backend declares."""
    captures, asked = known.capabilities.captures_graphs, choices.config.graphs
    if StepMode.FUSED not in known.step_modes:
        staged = "the backend declares no other"
    elif asked is False:
        staged = "fused mode is a graph, and graphs are off"
    elif not captures:
        staged = "the device captures no graphs"
    else:
        staged = known.no_fused
    if staged and StepMode.STAGED in known.step_modes:
        choices.add("mode", StepMode.STAGED.value, staged)
    else:
        choices.add("mode", StepMode.FUSED.value, "the backend declares it, and the device captures graphs")
    fused = choices.values["mode"] == StepMode.FUSED
    if fused and asked is None:
        choices.values["graphs"] = False  # they are for staged mode: here the whole iteration is one
    elif captures and known.no_graphs:
        choices.add("graphs", False, known.no_graphs)
    else:
        choices.add("graphs", captures, "the device captures them" if captures else "the device captures none")
    if not known.capabilities.asynchronous:
        choices.add("overlap", False, "the device has finished when a call returns")
    elif fused and known.no_overlap_fused:
        choices.add("overlap", False, "the backend's fused mode waits for the iteration before")
    else:
        choices.add("overlap", True, "the device runs beside the host")


def _sizes(choices: _Choices, known: DeviceModelFacts) -> None:
    """Decide ``page_size``, ``max_requests`` and ``prefill_chunk``."""
    choices.add("page_size", known.capabilities.page_size, "the backend's kernels run with it")
    if known.memory is None or known.memory.shared:
        (chunk, requests), why = SIZES_WITHOUT_LIMIT, "the device declares no limit of its memory"
    else:
        size = known.memory.total / GIB
        chunk, requests = next(sizes[1:] for sizes in SIZES_BY_MEMORY if size >= sizes[0])
        why = f"the device has {size:.0f} GiB"
    if choices.config.buckets is not None:
        choices.add("max_requests", max(choices.config.buckets), "the largest bucket")
    else:
        _requests(choices, known, requests, why)
    choices.add("prefill_chunk", chunk, why)
    _checkpoints(choices, known)


def _requests(choices: _Choices, known: DeviceModelFacts, requests: int, why: str) -> None:
    """Decide ``max_requests``: ``requests``, or fewer if their recurrent states would exceed :data:`STATES_SHARE` of the
    memory.
    """
    if known.state_bytes and known.memory is not None:
        held = max(1, int(known.memory.free * STATES_SHARE) // known.state_bytes - 1)
        if held < requests:
            requests, why = (
                held,
                f"recurrent states of {known.state_bytes / 2**20:.0f} MiB each, in a quarter of the memory",
            )
    choices.add("max_requests", requests, why)


def _checkpoints(choices: _Choices, known: DeviceModelFacts) -> None:
    """Decide ``state_checkpoints``, the number of recurrent states that the prefix cache keeps."""
    if not known.state_bytes:
        if choices.config.state_checkpoints:
            raise ConfigError(
                f"state_checkpoints is {choices.config.state_checkpoints}, and the model has no recurrent layers; leave "
                "it out"
            )
        choices.values["state_checkpoints"] = 0
        return
    count, why = CHECKPOINTS_PER_REQUEST * choices.number("max_requests"), f"{CHECKPOINTS_PER_REQUEST} for each request"
    if known.memory is not None and count * known.state_bytes > CHECKPOINTS_SHARE * known.memory.free:
        count = int(CHECKPOINTS_SHARE * known.memory.free) // known.state_bytes
        why = f"states of {known.state_bytes / 2**20:.0f} MiB in a tenth of the memory"
    if not choices.config.prefix_cache:
        count, why = 0, "the prefix cache is off"
    choices.add("state_checkpoints", count, why)


def _cache(choices: _Choices, known: DeviceModelFacts) -> None:
    """Decide ``max_context`` and ``num_pages``: as much as the model accepts and the memory holds."""
    config, limit = choices.config, known.context
    if config.max_context is not None and config.max_context > limit:
        raise ConfigError(f"max_context is {config.max_context}, the model was made for {limit} at most")
    if config.num_pages is not None:
        choices.add("max_context", limit, "the model's")
        choices.values["num_pages"] = config.num_pages
        return
    page_size, requests = choices.number("page_size"), choices.number("max_requests")
    page_bytes = page_size * known.token_bytes
    if known.memory is None:
        choices.add("max_context", min(limit, COMMON_CONTEXT), "nothing is known of the device's memory")
        pages = requests * _width(choices.number("max_context"), known.slots, page_size) + 1
        choices.add("num_pages", pages, f"each request at full context: {_holds(pages, page_size, page_bytes)}")
        return
    if known.memory.free <= 0 and known.weight_bytes:
        raise OutOfDeviceMemory(f"the weights leave no memory for a request; {_advice(choices, known)}")
    most, why = _most_pages(choices, known, page_bytes)
    holds = (most - 1) * page_size - known.slots
    if holds < 2:
        raise OutOfDeviceMemory(
            f"the KV cache may take {max(most, 0)} pages of {page_bytes} bytes, {why}: room for no request; free memory, or "
            f"{_advice(choices, known)}"
        )
    if holds < limit:
        choices.add("max_context", holds, f"the memory holds no more, the model's is {limit}")
    else:
        choices.add("max_context", limit, "the model's")
    context = choices.number("max_context")
    full = _width(context, known.slots, page_size)
    if config.max_context is not None and config.kv_memory is None and most <= full:  # it was asked for: the rest gives way
        most, why = full + 1, f"max_context {context} for one request"
        if most * page_bytes + _count_state_bytes(choices, known) > known.memory.free:
            raise OutOfDeviceMemory(
                f"max_context is {context}: {most * page_bytes / GIB:.1f} GiB of KV cache for one request, and "
                f"{known.memory.free / GIB:.1f} GiB are free; lower max_context"
            )
    if known.memory.shared:
        enough = full + (requests - 1) * _width(min(context, COMMON_CONTEXT), known.slots, page_size) + 1
        words = "a request at full context" + (f", the others at {COMMON_CONTEXT} tokens" if context > COMMON_CONTEXT else "")
    else:
        enough, words = requests * full + 1, "each request at full context"
    if most < enough or config.kv_memory is not None:
        pages = most
    else:
        pages, why = enough, words
    choices.add("num_pages", pages, f"{why}: {_holds(pages, page_size, page_bytes)}")


def _advice(choices: _Choices, known: DeviceModelFacts) -> str:
    """Return the advice which part of the memory to reduce so that one request fits: weights, recurrent states or the KV
    cache.
    """
    memory, states, share = known.memory, _count_state_bytes(choices, known), choices.config.kv_memory
    assert memory is not None
    if known.weight_bytes > HOST_MOST * (memory.free + known.weight_bytes):
        weights = f"the weights take {known.weight_bytes / GIB:.1f} of {(memory.free + known.weight_bytes) / GIB:.1f} GiB"
        return f"reduce the weights: {weights}; take a smaller or quantised model, or more tensor-parallel ranks"
    if states > (share or 1) * memory.free / 2:
        raised = "" if share is None else ", or raise kv_memory"
        return f"recurrent states take {states / GIB:.1f} GiB: lower max_requests or state_checkpoints{raised}"
    if share is not None:
        return "raise kv_memory, or take a smaller page_size"
    return "reduce the KV cache: take a smaller page_size, prefill_chunk or max_requests"


def _most_pages(choices: _Choices, known: DeviceModelFacts, page_bytes: int) -> tuple[int, str]:
    """Return the maximum number of pages that the memory holds, with the reason."""
    memory, share = known.memory, choices.config.kv_memory
    assert memory is not None
    free = f"{memory.free / GIB:.1f} GiB that are free"
    chunk, requests = choices.number("prefill_chunk"), choices.number("max_requests")
    work = known.fixed_bytes + chunk * known.prompt_token_bytes
    work += requests * (known.slots * known.drafted_token_bytes + known.request_bytes)
    states = _count_state_bytes(choices, known)
    if states:
        free += f", without {states / GIB:.1f} GiB of recurrent states"
    if share is not None:
        if memory.shared:
            _check_left(share, memory, work)
        return (int(memory.free * share) - states) // page_bytes, f"kv_memory {share:g} of the {free}"
    share = HOST_KV_SHARE if memory.shared else KV_SHARE
    room = int(memory.free * share) - states
    if memory.free - work - states < room:
        return (memory.free - work - states) // page_bytes, f"what {work / GIB:.1f} GiB of work leave of the {free}"
    return room // page_bytes, f"{share:g} of the {free}"


def _count_state_bytes(choices: _Choices, known: DeviceModelFacts) -> int:
    """Return the bytes of all rows of recurrent states: those of requests, of checkpoints, and the padding row."""
    return state_rows(choices.number("max_requests"), choices.number("state_checkpoints")) * known.state_bytes


def _check_left(share: float, memory: CacheMemory, work: int) -> None:
    """Raise :class:`OutOfDeviceMemory` if a cache of that share and the work around it leave the host too little memory. The
    host refuses no allocation; the system ends the next process that needs memory.
    """
    most = HOST_MOST - work / max(memory.free, 1)
    if share > most:
        advice = f"lower it to {max(0, int(100 * most)) / 100:g}" if most >= 0.01 else "leave it out, or free memory"
        raise OutOfDeviceMemory(
            f"kv_memory is {share:g} of the {memory.free / GIB:.1f} GiB that the host has free, and the work beside the "
            f"cache takes {work / GIB:.1f} GiB: that leaves less than a tenth to everything else on this machine; {advice}"
        )


def _width(context: int, slots: int, page_size: int) -> int:
    """Return the number of pages of a request with ``context`` tokens and ``slots`` further cache slots."""
    return -(-(context + slots) // page_size)


def _holds(pages: int, page_size: int, page_bytes: int) -> str:
    return f"{(pages - 1) * page_size} tokens in {pages * page_bytes / GIB:.2f} GiB"


def _listed(dtypes: frozenset[torch.dtype] | tuple[torch.dtype, ...]) -> str:
    names = [_NAMES[dtype] for dtype in dtypes if dtype in _NAMES]
    return ", ".join(names if isinstance(dtypes, tuple) else sorted(names)) or "none that is known"


_HOST_FIGURES = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"
_GROUPS = Path("/proc/self/cgroup")
_GROUP_FILES = Path("/sys/fs/cgroup")
_GROUP_NAMES = ("memory.max", "memory.current", "inactive_file")
_FIRST_GROUP_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""For control groups version 1: the files of the limit and of the usage in bytes, and the row of ``memory.stat`` with the
bytes that the kernel can reclaim.
"""
_LOGITS_AT_ONCE = 16
"""Number of float32 copies of a token's logits that option processing, sampling and verification hold at the same time."""
_GRAPHS_BYTES, _GRAPHS_REQUEST_BYTES = 3 << 28, 8 << 20
"""Estimated device memory of captured graphs in bytes: a fixed part, and a part for each request of the largest bucket."""
_HIDDEN_AT_ONCE = 6
_INNER_AT_ONCE = 3
"""Numbers of activation rows per token that a forward pass holds at the same time: ``_HIDDEN_AT_ONCE`` of the hidden size,
``_INNER_AT_ONCE`` of the MLP's inner size.
"""


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
    inner = _INNER_AT_ONCE * config.inner_width
    if config.recurrent is not None:
        inner = max(inner, config.recurrent.prompt_values)
    no_fused = no_graphs = "" if model.native else "the code of transformers may wait for the device"
    if model.kernels.plans_on_host:
        no_fused = no_fused or f"the kernels {model.kernels.name!r} plan each batch on the host"
    if sync.exact_host_lengths and not (sync.rebind_params and backend.capabilities.updates_graph_params):
        no_graphs = no_graphs or "attention takes lengths of the host, which the device can't rebind in a graph"
    captures = backend.capabilities.captures_graphs
    if backend.capabilities.captures_in_part:
        no_fused = no_graphs = "the device's graphs can't hold every operator of a model"
    if not model.ranks.is_single and not backend.capabilities.captures_collectives:
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
        prompt_token_bytes=model.dtype.itemsize * (_HIDDEN_AT_ONCE * config.hidden_size + inner),
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
    """Return the bytes of host memory that Linux reports as available without swapping; ``otherwise`` if no report can be
    read.
    """
    try:
        lines = _HOST_FIGURES.read_text().splitlines()
    except OSError:
        return otherwise
    found = next((line.split() for line in lines if line.startswith(_AVAILABLE)), ())
    return int(found[1]) * 1024 if len(found) == 3 and found[1].isdecimal() else otherwise


def _of_groups() -> tuple[int, int]:
    """Return the smallest memory limit of this process's control groups (such as a container), and the smallest number of
    bytes that they leave free.

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
    """Yield the directory of each control group that limits this process's memory and of its parents, with the names of the
    limit file, the usage file and the reclaimable row.
    """
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
