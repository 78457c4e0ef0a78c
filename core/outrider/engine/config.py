"""What an engine is built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.device import ConfigError, StepMode
from outrider.errors import shown

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

DRAFT_LENGTHS = ("fixed", "load")
"""How the length of drafts is decided."""

MAX_DRAFT_NODES = 4096
"""Nodes of a draft tree at most: its mask has a bit for each pair of them."""

SIZES = {
    "max_requests": (1, 4096),
    "page_size": (1, 65536),
    "prefill_chunk": (1, 2**20),
    "token_budget": (1, 2**24),
    "gather_iterations": (0, 1024),
    "draft_tokens": (1, 1024),
    "draft_topk": (1, 1024),
    "max_logprobs": (0, 2**20),
    "num_pages": (2, 2**31 - 1),
    "max_context": (2, 2**31 - 1),
    "draft_nodes": (1, MAX_DRAFT_NODES),
}
"""The least and the most that each size of an :class:`EngineConfig` can be. Slots of the cache are counted in 32 bits."""

_OPTIONAL = ("token_budget", "gather_iterations", "num_pages", "max_context", "draft_nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and choices of an engine, validated when made.

    ``max_requests``: requests that run at the same time. ``page_size``: tokens a KV page. ``num_pages``: pages in all,
    the reserved one included; None: enough for every request at full context. ``max_context``: tokens of prompt and
    output together; None: the model's, at most 4096. ``prefill_chunk``: prompt tokens processed in an iteration.
    ``draft_tokens``: length of a draft chain, or of a tree's longest path. ``draft_topk``: children of a node that a draft
    tree looks at; 1: a chain. ``draft_nodes``: tokens of a draft tree in all; None: ``draft_tokens * draft_topk``.
    ``dtype``: of weights, activations and cache. ``overlap``: the host plans
    an iteration while the previous one runs, and reads its results one iteration later. ``prefix_cache``: requests share
    the pages of a common prefix.

    ``token_budget``: tokens of an iteration in which requests decode: theirs and their drafts' first, then prompts, which
    get a quarter of it at least; None: all requests with their drafts, and the fewer of ``prefill_chunk`` and 2,048 for
    prompts. ``gather_iterations``: while half of the requests, and at least 8, decode, new prompts of less than 1,024 tokens
    together (or ``prefill_chunk``) wait for others to share a launch, so many iterations at most; None: 4.

    ``mode``: ``staged`` launches stages on their own streams, ``fused`` replays the whole iteration from one graph.
    ``graphs``: in staged mode too, stages are replayed from graphs, captured when the engine is made. ``buckets``: batch
    sizes that graphs are captured for, the largest being ``max_requests``; None: 1, 2, 4, every 8 to 32, every 16 to 96,
    every 32 to 192, every 64 behind that, and ``max_requests``; fewer for batches that sample.
    ``plan_stream``: staged mode plans beside the draft; without, on the forward stream.

    ``draft_length``: ``fixed``: every iteration drafts ``draft_tokens``; ``load``: iterations of greedy requests alone draft
    as many as make the batch fastest, none included, by what iterations were measured to take when the engine was made and by
    the acceptance so far. Tokens are the same. None: ``load`` where 64 or more requests run and stages are replayed from
    graphs on a device that works beside the host, except for trees and with ``batch_invariant``.

    ``penalties``: hold token counts for repetition, presence and frequency penalties, 4 bytes for each request row and
    token of the vocabulary. ``max_logprobs``: the most likeliest tokens that a request may ask for.
    ``batch_invariant``: a request's output is bit for bit the same whatever else runs, with kernels that are slower; it
    still depends on ``max_context`` and ``page_size``.

    ``device_timeout_s``: seconds that the host waits at a fence before it takes the device to be stuck
    (:class:`~outrider.device.DeviceStuck`); None: for ever. It must be more than the longest iteration takes.
    """

    max_requests: int = 8
    page_size: int = 16
    num_pages: int | None = None
    max_context: int | None = None
    prefill_chunk: int = 256
    token_budget: int | None = None
    gather_iterations: int | None = None
    draft_tokens: int = 4
    draft_topk: int = 1
    draft_nodes: int | None = None
    draft_length: str | None = None
    dtype: str = "float32"
    overlap: bool = False
    prefix_cache: bool = True
    penalties: bool = True
    max_logprobs: int = 20
    batch_invariant: bool = False
    mode: str = "staged"
    graphs: bool = False
    buckets: tuple[int, ...] | None = None
    plan_stream: bool = True
    device_timeout_s: float | None = 120.0

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                _check_int(name, getattr(self, name), least, most)
        nodes = self.draft_tokens * self.draft_topk
        if self.draft_topk > 1 and self.draft_nodes is None and nodes > MAX_DRAFT_NODES:
            raise ConfigError(
                f"draft_tokens is {self.draft_tokens} and draft_topk {self.draft_topk}: a tree of {nodes} nodes; expected at "
                f"most {MAX_DRAFT_NODES}: lower one of them, or give draft_nodes"
            )
        for name in ("overlap", "prefix_cache", "penalties", "batch_invariant", "graphs", "plan_stream"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; expected True or False")
        if self.mode not in tuple(StepMode):
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
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {shown(self.dtype)}; expected one of {', '.join(DTYPES)}")

    def _check_buckets(self, buckets: object) -> None:
        sizes = buckets if isinstance(buckets, tuple) else ()
        for size in sizes:
            _check_int("a size in buckets", size, 1, self.max_requests)
        if not sizes or max(sizes) != self.max_requests or len(set(sizes)) != len(sizes):
            raise ConfigError(
                f"buckets is {shown(buckets)}; expected a tuple of different batch sizes, the largest of them max_requests "
                f"({self.max_requests})"
            )

    @property
    def step_mode(self) -> StepMode:
        """``mode`` as the seam names it."""
        return StepMode(self.mode)

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch names it."""
        return DTYPES[self.dtype]


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {shown(value)}; expected a whole number of at least {least}")
    if value > most:
        raise ConfigError(f"{name} is {shown(value)}; expected a whole number of at most {most}")
