"""The configuration of an engine: sizes and choices, validated at creation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from outrider.device import CACHE_FORMATS, ConfigError, StepMode
from outrider.errors import shown
from outrider.speculative.proposer import MAX_BATCH_REQUESTS

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
KvDtype = Literal["auto", "plain", "fp8"]
DraftLengthName = Literal["fixed", "load", "request"]
ModeName = Literal["staged", "fused"]

KV_DTYPES = ("auto", "plain", *CACHE_FORMATS)
"""Values of :attr:`EngineConfig.kv_dtype`, the format of the target's KV cache."""

DRAFT_LENGTHS = ("fixed", "load", "request")
"""Values of :attr:`EngineConfig.draft_length`, the policy that chooses the number of draft tokens of an iteration."""

MAX_DRAFT_NODES = 4096
"""Maximum number of nodes of a draft tree. The tree mask has a bit for each pair of nodes."""

MAX_LOGPROBS = 20
"""Maximum number of the likeliest tokens that a request may ask for, with a log-probability each."""

SIZES = {
    "max_requests": (1, MAX_BATCH_REQUESTS),
    "page_size": (1, 65536),
    "prefill_chunk": (1, 2**20),
    "token_budget": (1, 2**24),
    "draft_tokens": (1, 1024),
    "draft_topk": (1, 1024),
    "num_pages": (2, 2**31 - 1),
    "max_context": (2, 2**31 - 1),
    "state_checkpoints": (0, 2**20),
}
"""Minimum and maximum (both included) of each size of an :class:`EngineConfig`, by field name. Cache slots are counted in 32
bits.
"""

_REQUIRED = ("draft_tokens", "draft_topk")
"""The sizes that the engine doesn't choose if they are None."""
_SWITCHES = ("overlap", "graphs", "prefix_cache", "batch_invariant", "plan_stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and choices of an engine, validated at creation.

    The engine chooses each field that is None, from the declarations of its backend and from the model
    (:mod:`outrider.engine.setup.resolve`). ``Engine.chosen`` lists the choices and their reasons.
    """

    max_requests: int | None = None
    """Maximum number of requests that run at the same time."""
    page_size: int | None = None
    """Tokens per KV page."""
    num_pages: int | None = None
    """Number of KV pages, with the reserved one. Excludes ``kv_memory``."""
    kv_memory: float | None = None
    """Fraction of the memory that is free after the weights, which the KV cache takes: above 0 and at most 1."""
    max_context: int | None = None
    """Maximum number of tokens of prompt and output together."""
    prefill_chunk: int | None = None
    """Maximum number of prompt tokens per iteration."""
    token_budget: int | None = None
    """Maximum number of tokens of an iteration in which requests decode.

    Decoding requests and their drafts come first; prompts get at least a quarter. None: all requests with their drafts, and
    ``prefill_chunk`` for prompts.
    """
    draft_tokens: int = 4
    """Length in tokens of a draft chain, or of the longest path of a draft tree."""
    draft_topk: int = 1
    """Children per node of a draft tree; 1 drafts a chain. A tree has ``draft_tokens * draft_topk`` tokens."""
    draft_length: DraftLengthName | None = None
    """``fixed`` drafts ``draft_tokens`` in every iteration. ``load`` drafts as many tokens as make a greedy batch fastest, or
    none.

    ``load`` uses iteration times measured when the engine was created, and the acceptance so far; tokens are the same.
    ``request`` also verifies fewer drafts of requests whose own acceptance is poor.

    None selects ``load`` if at least 64 requests run and graphs are replayed concurrently with the host, except for trees and
    with ``batch_invariant``.
    """
    dtype: DtypeName | None = None
    """Dtype of weights, activations and KV cache."""
    kv_dtype: KvDtype = "auto"
    """Format of the target's KV cache, not of the draft's caches.

    ``auto`` follows the checkpoint's ``kv_cache_scheme``, else ``dtype``. ``plain`` is ``dtype``. ``fp8`` is 8 bits with the
    checkpoint's scales, or a scale of 1.
    """
    overlap: bool | None = None
    """Plan an iteration on the host while the device runs the previous one. :meth:`Engine.step` then returns the previous
    results.
    """
    prefix_cache: bool = True
    """Share KV pages between requests whose prompts begin with the same tokens, so that the shared tokens are prefilled once.
    """
    state_checkpoints: int | None = None
    """Number of prefixes whose recurrent states are kept for the prefix cache, apart from the states of requests.

    Only targets and draft models with recurrent layers have such states. A prefix without its state can't be shared.
    """
    batch_invariant: bool = False
    """Each sum of a token has one order: output is equal in every bit alone and in any batch, with and without speculation on
    a chain.

    Kernels are slower. Without exact kernels of the device, output still depends on ``max_context`` and ``page_size``.
    """
    mode: ModeName | None = None
    """``staged`` launches stages on their own streams; ``fused`` replays the whole iteration from one graph."""
    graphs: bool | None = None
    """In staged mode, replay stages from graphs that are captured when the engine is created."""
    buckets: tuple[int, ...] | None = None
    """Batch sizes for which graphs are captured; the largest is ``max_requests``.

    None: 1, 2, 4, every 8 to 32, every 16 to 96, every 32 to 192, every 64 above, and ``max_requests``; fewer sizes for
    batches that sample.
    """
    plan_stream: bool = True
    """Staged mode plans on a stream of its own, concurrently with the draft. Otherwise it plans on the forward stream."""
    device_timeout_s: float | None = 120.0
    """Seconds that the host waits at a fence before it raises :class:`~outrider.device.DeviceStuck`; None waits without
    limit.

    The limit must exceed the time of the longest iteration.
    """

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            if getattr(self, name) is not None or name in _REQUIRED:
                _check_int(name, getattr(self, name), least, most)
        nodes = self.draft_tokens * self.draft_topk
        if self.draft_topk > 1 and nodes > MAX_DRAFT_NODES:
            raise ConfigError(
                f"draft_tokens is {self.draft_tokens} and draft_topk {self.draft_topk}: a tree of {nodes} nodes; expected at "
                f"most {MAX_DRAFT_NODES}; lower one of them"
            )
        for name in _SWITCHES:
            given = getattr(self, name)
            if not isinstance(given, bool) and not (given is None and name in ("overlap", "graphs")):
                raise ConfigError(f"{name} is {shown(given)}; expected True or False")
        if self.kv_memory is not None:
            self._check_kv_memory(self.kv_memory)
        if self.mode is not None and self.mode not in tuple(StepMode):
            raise ConfigError(f"mode is {shown(self.mode)}; expected one of {', '.join(StepMode)}")
        if self.draft_length not in (None, *DRAFT_LENGTHS):
            raise ConfigError(
                f"draft_length is {shown(self.draft_length)}; expected one of {', '.join(DRAFT_LENGTHS)}, or None to choose"
            )
        if self.buckets is not None:
            self._check_buckets(self.buckets)
        seconds = self.device_timeout_s
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf")
        ):
            raise ConfigError(
                f"device_timeout_s is {shown(seconds)}; expected a positive number of seconds, or None for no limit"
            )
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype is {shown(self.kv_dtype)}; expected one of {', '.join(KV_DTYPES)}")
        if self.dtype is not None and self.dtype not in tuple(DTYPES):
            raise ConfigError(f"dtype is {shown(self.dtype)}; expected one of {', '.join(DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The setting ``dtype`` as a torch dtype. Raises :class:`ConfigError` if ``dtype`` is None, because nothing has
        chosen it.
        """
        if self.dtype is None:
            raise ConfigError("this config leaves its dtype open; name one, or take that of a model")
        return DTYPES[self.dtype]

    def _check_kv_memory(self, share: object) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"kv_memory is {shown(share)}; expected a share of the free memory, above 0 and at most 1")
        if self.num_pages is not None:
            raise ConfigError(f"kv_memory is {share:g} and num_pages {self.num_pages}: both size the KV cache; give one")

    def _check_buckets(self, buckets: object) -> None:
        sizes = buckets if isinstance(buckets, tuple) else ()
        for size in sizes:
            _check_int("a size in buckets", size, 1, self.max_requests or SIZES["max_requests"][1])
        most = self.max_requests or max(sizes, default=0)
        if not sizes or max(sizes) != most or len(set(sizes)) != len(sizes):
            raise ConfigError(
                f"buckets is {shown(buckets)}; expected a tuple of different batch sizes, the largest of them max_requests "
                f"({self.max_requests})"
            )


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting that the engine chose for the user: its name, its value, and the reason."""

    name: str
    value: object
    why: str

    def __str__(self) -> str:
        value = {True: "on", False: "off"}[self.value] if isinstance(self.value, bool) else self.value
        return f"{self.name} {value} ({self.why})"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecidedConfig(EngineConfig):
    """A config in which every setting has a value. ``chosen`` lists the settings that the engine chose, with reasons."""

    max_requests: int
    page_size: int
    num_pages: int
    max_context: int
    prefill_chunk: int
    state_checkpoints: int
    dtype: DtypeName
    overlap: bool
    mode: ModeName
    graphs: bool
    chosen: tuple[Choice, ...] = ()

    @property
    def step_mode(self) -> StepMode:
        """The setting ``mode`` as a :class:`StepMode` of the backend interface."""
        return StepMode(self.mode)


def state_rows(requests: int, checkpoints: int) -> int:
    """Return the number of rows of recurrent states: the padding row, and those of requests and of the prefix cache."""
    return 1 + requests + checkpoints


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {shown(value)}; expected a whole number of at least {least}")
    if value > most:
        raise ConfigError(f"{name} is {shown(value)}; expected a whole number of at most {most}")
