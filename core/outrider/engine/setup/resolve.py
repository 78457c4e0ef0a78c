"""The decisions that an engine makes for its user, from an open config, the declarations of the device, and the model.

The functions here read records only and never query a device. Given settings stay unchanged; each choice states its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

import torch

from outrider.device import CACHE_FORMATS, Capabilities, ConfigError, KernelSet, OutOfDeviceMemory, StepMode
from outrider.engine.config import DTYPES, Choice, DecidedConfig, EngineConfig, state_rows
from outrider.engine.setup.facts import CacheMemory, DeviceModelFacts, max_graph_tokens

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


_DRAFT_FORMATS = ("fp8", "int8")
"""Formats that the engine chooses for a draft's weights, the preferred one first."""
_DRAFT_DTYPE_BYTES = 2
"""Bytes of an element of the weights that are rounded to these formats."""


def choose_draft_weights(capabilities: Capabilities, kernels: KernelSet, dtype: torch.dtype) -> str | None:
    """Return the format to which the engine rounds the weights of a draft head; None if they stay as stored.

    Weights of 16 bits are rounded to 8 bits if the device's own kernels multiply these. Drafts then read half the bytes, and
    the output stays the same, since the target's own weights verify the drafts.
    """
    if dtype.itemsize != _DRAFT_DTYPE_BYTES or not kernels.is_native("linear_quantized"):
        return None
    return next((each for each in _DRAFT_FORMATS if each in capabilities.quantized_formats), None)


def draft_weights_choice(format: str, *, asked: bool) -> Choice:
    """Return the choice of a draft's weights for :attr:`Engine.chosen`. ``asked``: True if the user gave the format."""
    why = "as asked" if asked else "the device's kernels multiply it, and a draft reads half the bytes"
    return Choice("draft_weights", format, f"{why}; verification uses the target's own weights")


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
        return Choice("dtype", _NAMES[near], f"{says}, and the device's own kernels run in {_format_dtypes(preferred)}")
    if near is None:
        raise ConfigError(
            f"{says}, and the device computes in {_format_dtypes(capabilities.dtypes)}; name one of these as dtype"
        )
    return Choice("dtype", _NAMES[near], f"{says}, in which the device doesn't compute")


def resolve(config: EngineConfig, facts: DeviceModelFacts, before: tuple[Choice, ...] = ()) -> DecidedConfig:
    """Return ``config`` with every open setting decided; a :class:`DecidedConfig`, as loading returns it, stays unchanged.
    ``before`` are the choices that loading made already.

    Raises :class:`ConfigError` for an impossible request, and :class:`OutOfDeviceMemory` if the free memory after the weights
    holds no request.
    """
    if isinstance(config, DecidedConfig):
        return config
    decisions = _Decisions(config, facts, before)
    decisions.add("dtype", _NAMES[facts.dtype], "the model's")
    decisions.decide_cache_format()
    decisions.decide_launches()
    decisions.decide_sizes()
    decisions.decide_state_checkpoints()
    decisions.decide_context_and_pages()
    given = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
    return DecidedConfig(**given | {"kv_memory": None} | decisions.values, chosen=decisions.choices)


class _Decisions:
    """The settings decided so far by name, and a :class:`Choice` for each that the engine made."""

    def __init__(self, config: EngineConfig, facts: DeviceModelFacts, before: tuple[Choice, ...]) -> None:
        self._config = config
        self._facts = facts
        self.values: dict[str, object] = {}
        self.choices = before

    def add(self, name: str, value: object, why: str) -> None:
        """Decide a setting: use the user's value if one was given, else ``value``, and record the choice with its reason."""
        given = getattr(self._config, name)
        self.values[name] = value if given is None else given
        if given is None:
            self.choices += (Choice(name, value, why),)

    def decide_cache_format(self) -> None:
        """Decide ``kv_dtype``, the format of KV pages. The model was loaded with the scales of this format."""
        requested, facts = self._config.kv_dtype, self._facts
        format = next((name for name, dtype in CACHE_FORMATS.items() if dtype is facts.cache_dtype), "plain")
        if requested not in ("auto", format):
            raise ConfigError(
                f"kv_dtype is {requested}, and the model was loaded for a {format} KV cache; use Engine.from_checkpoint, or "
                f"load it with kv_dtype={requested!r}"
            )
        self.values["kv_dtype"] = format
        if format != "plain":
            plain = facts.cached_bytes * facts.dtype.itemsize
            whose = "as asked" if requested == format else "the checkpoint's kv_cache_scheme"
            why = f"{whose}: {facts.cached_bytes} bytes a token in place of {plain}"
            self.choices += (Choice("kv_dtype", format, why),)

    def decide_launches(self) -> None:
        """Decide ``mode``, ``graphs`` and ``overlap``: the fastest that the backend declares."""
        facts, graphs = self._facts, self._config.graphs
        captures = facts.capabilities.captures_graphs
        if StepMode.FUSED not in facts.step_modes:
            staged = "the backend declares no other"
        elif graphs is False:
            staged = "fused mode is a graph, and graphs are off"
        elif not captures:
            staged = "the device captures no graphs"
        else:
            staged = facts.no_fused
        if staged and StepMode.STAGED in facts.step_modes:
            self.add("mode", StepMode.STAGED.value, staged)
        else:
            self.add("mode", StepMode.FUSED.value, "the backend declares it, and the device captures graphs")
        fused = self.values["mode"] == StepMode.FUSED
        if fused and graphs is None:
            self.values["graphs"] = False  # they are for staged mode: here the whole iteration is one
        elif captures and facts.no_graphs:
            self.add("graphs", False, facts.no_graphs)
        else:
            self.add("graphs", captures, "the device captures them" if captures else "the device captures none")
        if not facts.capabilities.asynchronous:
            self.add("overlap", False, "the device has finished when a call returns")
        elif fused and facts.no_overlap_fused:
            self.add("overlap", False, "the backend's fused mode waits for the iteration before")
        else:
            self.add("overlap", True, "the device runs beside the host")

    def decide_sizes(self) -> None:
        """Decide ``page_size``, ``max_requests`` and ``prefill_chunk``."""
        facts = self._facts
        self.add("page_size", facts.capabilities.page_size, "the backend's kernels run with it")
        if facts.memory is None or facts.memory.shared:
            (chunk, requests), why = SIZES_WITHOUT_LIMIT, "the device declares no limit of its memory"
        else:
            size = facts.memory.total / GIB
            chunk, requests = next(sizes[1:] for sizes in SIZES_BY_MEMORY if size >= sizes[0])
            why = f"the device has {size:.0f} GiB"
        if self._config.buckets is not None:
            self.add("max_requests", max(self._config.buckets), "the largest bucket")
        else:
            self.add("max_requests", *self._with_states_in_memory(requests, why))
        self.add("prefill_chunk", chunk, why)

    def _with_states_in_memory(self, requests: int, why: str) -> tuple[int, str]:
        """Return ``requests``, or fewer if their recurrent states would exceed :data:`STATES_SHARE` of the memory, with the
        reason.
        """
        memory, state_bytes = self._facts.memory, self._facts.state_bytes + self._facts.window_bytes
        if state_bytes and memory is not None:
            held = max(1, int(memory.free * STATES_SHARE) // state_bytes - 1)
            if held < requests:
                return held, f"recurrent states of {state_bytes / 2**20:.0f} MiB each, in a quarter of the memory"
        return requests, why

    def decide_state_checkpoints(self) -> None:
        """Decide ``state_checkpoints``, the number of recurrent states that the prefix cache keeps."""
        config, memory, state_bytes = self._config, self._facts.memory, self._facts.state_bytes
        if not state_bytes:
            if config.state_checkpoints:
                raise ConfigError(
                    f"state_checkpoints is {config.state_checkpoints}, and the model has no recurrent layers; leave it out"
                )
            self.values["state_checkpoints"] = 0
            return
        count, why = CHECKPOINTS_PER_REQUEST * self._max_requests, f"{CHECKPOINTS_PER_REQUEST} for each request"
        if memory is not None and count * state_bytes > CHECKPOINTS_SHARE * memory.free:
            count = int(CHECKPOINTS_SHARE * memory.free) // state_bytes
            why = f"states of {state_bytes / 2**20:.0f} MiB in a tenth of the memory"
        if not config.prefix_cache:
            count, why = 0, "the prefix cache is off"
        self.add("state_checkpoints", count, why)

    def decide_context_and_pages(self) -> None:
        """Decide ``max_context`` and ``num_pages``: as much as the model accepts and the memory holds."""
        config, facts = self._config, self._facts
        if config.max_context is not None and config.max_context > facts.context:
            raise ConfigError(f"max_context is {config.max_context}, the model was made for {facts.context} at most")
        if config.num_pages is not None:
            self.add("max_context", facts.context, "the model's")
            self.values["num_pages"] = config.num_pages
        elif facts.memory is None:
            self.add("max_context", min(facts.context, COMMON_CONTEXT), "nothing is known of the device's memory")
            self._add_pages(
                self._max_requests * self._pages_of_request(self._max_context) + 1, "each request at full context"
            )
        else:
            self._decide_from_memory(facts.memory)

    def _decide_from_memory(self, memory: CacheMemory) -> None:
        """Decide ``max_context`` and ``num_pages`` for a cache in ``memory``."""
        config, limit, page_bytes = self._config, self._facts.context, self._page_bytes
        if memory.free <= 0 and self._facts.weight_bytes:
            raise OutOfDeviceMemory(f"the weights leave no memory for a request; {self._advice(memory)}")
        most, why = self._most_pages(memory)
        held_tokens = (most - 1) * self._page_size - self._facts.slots
        if held_tokens < 2:
            raise OutOfDeviceMemory(
                f"the KV cache may take {max(most, 0)} pages of {page_bytes} bytes, {why}: room for no request; free memory, "
                f"or {self._advice(memory)}"
            )
        if held_tokens < limit:
            self.add("max_context", held_tokens, f"the memory holds no more, the model's is {limit}")
        else:
            self.add("max_context", limit, "the model's")
        context = self._max_context
        full = self._pages_of_request(context)
        if config.max_context is not None and config.kv_memory is None and most <= full:
            # The user's context has priority over the engine's share of the memory.
            most, why = full + 1, f"max_context {context} for one request"
            if most * page_bytes + self._state_bytes > memory.free:
                states = f" and {self._state_bytes / GIB:.1f} GiB of recurrent states" if self._state_bytes else ""
                raise OutOfDeviceMemory(
                    f"max_context is {context}: {most * page_bytes / GIB:.1f} GiB of KV cache for one request{states}, and "
                    f"{memory.free / GIB:.1f} GiB are free; lower max_context"
                    f"{', max_requests or state_checkpoints' if states else ''}"
                )
        if config.kv_memory is None:
            enough, why_enough = self._enough_pages(context, shared=memory.shared)
            if enough <= most:
                most, why = enough, why_enough
        self._add_pages(most, why)

    def _enough_pages(self, context: int, *, shared: bool) -> tuple[int, str]:
        """Return the number of pages with which requests of ``context`` tokens rarely wait for each other, with the reason.
        In memory that is ``shared`` with other processes, only one request gets its full context.
        """
        full = self._pages_of_request(context)
        if not shared:
            return self._max_requests * full + 1, "each request at full context"
        common = self._pages_of_request(min(context, COMMON_CONTEXT))
        others = f", the others at {COMMON_CONTEXT} tokens" if context > COMMON_CONTEXT else ""
        return full + (self._max_requests - 1) * common + 1, f"a request at full context{others}"

    def _most_pages(self, memory: CacheMemory) -> tuple[int, str]:
        """Return the maximum number of pages that the memory holds, with the reason."""
        facts, share, states = self._facts, self._config.kv_memory, self._state_bytes
        free = f"{memory.free / GIB:.1f} GiB that are free"
        chunk = self._number("prefill_chunk")
        in_graphs = min(chunk, max_graph_tokens(facts.capabilities))
        work = facts.fixed_bytes + (chunk + in_graphs) * facts.prompt_token_bytes
        work += self._max_requests * (facts.slots * facts.drafted_token_bytes + facts.request_bytes)
        if states:
            free += f", without {states / GIB:.1f} GiB of recurrent states"
        if share is not None:
            if memory.shared:
                _check_rest_of_host(share, memory, work)
            return (int(memory.free * share) - states) // self._page_bytes, f"kv_memory {share:g} of the {free}"
        share = HOST_KV_SHARE if memory.shared else KV_SHARE
        room, rest = int(memory.free * share) - states, memory.free - work - states
        if rest < room:
            return rest // self._page_bytes, f"what {work / GIB:.1f} GiB of work leave of the {free}"
        return room // self._page_bytes, f"{share:g} of the {free}"

    def _advice(self, memory: CacheMemory) -> str:
        """Return the advice which part of the memory to reduce so that one request fits: weights, recurrent states or the KV
        cache.
        """
        weights, states, share = self._facts.weight_bytes, self._state_bytes, self._config.kv_memory
        before_loading = memory.free + weights
        if weights > HOST_MOST * before_loading:
            return (
                f"reduce the weights: the weights take {weights / GIB:.1f} of {before_loading / GIB:.1f} GiB; take a smaller "
                "or quantised model, or more tensor-parallel ranks"
            )
        if states > (share or 1) * memory.free / 2:
            raised = "" if share is None else ", or raise kv_memory"
            return f"recurrent states take {states / GIB:.1f} GiB: lower max_requests or state_checkpoints{raised}"
        if share is not None:
            return "raise kv_memory, or take a smaller page_size"
        return "reduce the KV cache: take a smaller page_size, prefill_chunk or max_requests"

    def _add_pages(self, pages: int, why: str) -> None:
        tokens = (pages - 1) * self._page_size
        self.add("num_pages", pages, f"{why}: {tokens} tokens in {pages * self._page_bytes / GIB:.2f} GiB")

    def _pages_of_request(self, context: int) -> int:
        """Return the number of pages of a request with ``context`` tokens and the slots that an iteration may write."""
        return -(-(context + self._facts.slots) // self._page_size)

    # -- decided settings --------------------------------------------------------------------------------------------

    @property
    def _page_size(self) -> int:
        return self._number("page_size")

    @property
    def _page_bytes(self) -> int:
        return self._page_size * self._facts.token_bytes

    @property
    def _max_requests(self) -> int:
        return self._number("max_requests")

    @property
    def _max_context(self) -> int:
        return self._number("max_context")

    @property
    def _state_bytes(self) -> int:
        """Bytes of all rows of recurrent states: those of requests, of checkpoints, and the padding row. Checkpoints have no
        windows.
        """
        requests, checkpoints, facts = self._max_requests, self._number("state_checkpoints"), self._facts
        return state_rows(requests, checkpoints) * facts.state_bytes + state_rows(requests, 0) * facts.window_bytes

    def _number(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int)
        return value


def _check_rest_of_host(share: float, memory: CacheMemory, work: int) -> None:
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


def _format_dtypes(dtypes: frozenset[torch.dtype] | tuple[torch.dtype, ...]) -> str:
    names = [_NAMES[dtype] for dtype in dtypes if dtype in _NAMES]
    return ", ".join(names if isinstance(dtypes, tuple) else sorted(names)) or "none that is known"
