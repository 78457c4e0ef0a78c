"""Run the engine with the bundled model, on the backend under test and on the reference backend."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from unittest.mock import patch

import torch

from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import bundled
from outrider.device import Backend, Fence, SpeculativeSync, Stream
from outrider.engine.config import DtypeName
from outrider.registry import get_backend

PROMPTS = (
    "def read(self, size=-1):\n",
    "import os\nimport sys\n\n\ndef main(",
    'class Error(Exception):\n    """Base class',
)
MAX_TOKENS = 24
MAX_REQUESTS = 3
DRAFT_TOKENS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MODES = ("staged", "graphs", "fused")
REFERENCE = "cpu"


_MAX_ROUNDING_GAP = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 0.2}
"""The largest log-probability gap between the likeliest token and a token that rounding may put first, by dtype."""
_TOP_LOGPROBS = 4
_DELAYED_SHARE = 0.25
"""Fraction of the signals and waits of a jittered fence that delay the stream."""


@dataclass(frozen=True)
class EngineRun:
    """The results of one run of the engine."""

    tokens: tuple[tuple[int, ...], ...]
    """Generated tokens of each prompt."""
    acceptance: float
    """Mean number of tokens per verification."""
    likeliest: tuple[tuple[Mapping[int, float], ...], ...] = ()
    """For each token of each prompt, the likeliest tokens at that position with their log-probabilities."""


def engine_on(
    backend: Backend,
    *,
    speculate: str,
    overlap: bool = False,
    dtype: str = "float32",
    page_size: int = 8,
    mode: str = "staged",
    buckets: tuple[int, ...] | None = None,
    draft_tokens: int = DRAFT_TOKENS,
) -> Engine:
    """Return an engine with the bundled model on ``backend``.

    ``mode`` is staged, graphs (staged, with stages replayed from graphs) or fused. ``buckets`` are the batch sizes for which
    graphs are captured. ``speculate`` names the proposer. The other arguments are fields of :class:`EngineConfig`.
    """
    config = EngineConfig(
        max_requests=MAX_REQUESTS,
        page_size=page_size,
        max_context=max(96, 2 * page_size),
        prefill_chunk=256,
        draft_tokens=draft_tokens,
        draft_length="fixed",
        overlap=overlap,
        dtype=cast("DtypeName", dtype),
        mode="fused" if mode == "fused" else "staged",
        graphs=mode == "graphs",
        buckets=buckets,
    )
    return Engine.from_checkpoint(bundled("target"), backend, draft_dir=bundled("eagle"), speculate=speculate, config=config)


def preferred(backend: Backend) -> str:
    """Return the name of the dtype, as the engine's config spells it, in which the backend's own kernels run."""
    has = backend.capabilities
    best = (*has.preferred_dtypes, torch.bfloat16, *DTYPES.values())
    return next(str(dtype).removeprefix("torch.") for dtype in best if dtype in has.dtypes)


def run(
    engine: Engine, prompts: Sequence[str] = PROMPTS, max_tokens: int = MAX_TOKENS, logprobs: int | None = None
) -> EngineRun:
    """Generate greedily with ``engine`` for all prompts in one batch; ``logprobs`` is the number of likeliest tokens to
    return.
    """
    tokens = [engine.tokenizer.encode(text) for text in prompts]
    completions = engine.generate(tokens, SamplingParams(max_tokens=max_tokens, logprobs=logprobs))
    likeliest = tuple(tuple(dict(token.top) for token in c.logprobs) for c in completions)
    return EngineRun(tuple(tuple(c.token_ids) for c in completions), engine.stats.acceptance_length, likeliest)


@lru_cache(maxsize=8)
def reference(
    *,
    speculate: str,
    dtype: str = "float32",
    tokens: int = MAX_TOKENS,
    draft_tokens: int = DRAFT_TOKENS,
) -> EngineRun:
    """Return the results of :func:`run` on the reference backend."""
    engine = engine_on(get_backend(REFERENCE), speculate=speculate, dtype=dtype, draft_tokens=draft_tokens)
    return run(engine, max_tokens=tokens, logprobs=_TOP_LOGPROBS)


def first_wrong_token(found: EngineRun, wanted: EngineRun, dtype: str) -> str:
    """Return the first token of ``found`` that rounding doesn't explain, as text, or an empty string.

    ``found`` may hold fewer prompts than ``wanted``. A token may differ if the reference has both tokens about equally
    likely. The tokens after such a token aren't compared, since the two runs continue different texts.
    """
    for prompt, (made, right) in enumerate(zip(found.tokens, wanted.tokens, strict=False)):
        if len(made) != len(right):
            return f"prompt {prompt}: {len(made)} tokens where the reference has {len(right)}"
        for index, (token, best) in enumerate(zip(made, right, strict=True)):
            if token == best:
                continue
            near = wanted.likeliest[prompt][index]
            gap = near[best] - near.get(token, float("-inf"))
            if gap <= _MAX_ROUNDING_GAP[dtype]:
                break
            return (
                f"prompt {prompt}, token {index}: {token} where the reference has {best}, which is likelier by {gap:.3g} "
                f"(in {dtype}, rounding explains {_MAX_ROUNDING_GAP[dtype]:g})"
            )
    return ""


@contextmanager
def jittered(sync: SpeculativeSync, seed: int, cycles: int) -> Generator[None]:
    """In this scope, new fences delay their streams at random, by fewer than ``cycles`` device clocks, before a signal and
    after a wait, so that a missing order shows.
    """
    create = sync.create_fence

    def create_jittered(name: str) -> Fence:
        fence, dice = create(name), random.Random(f"{seed} {name}")
        signal, wait = fence.signal, fence.wait

        def delay_sometimes(stream: Stream) -> None:
            if dice.random() < _DELAYED_SHARE:
                sync.backend.delay(stream, dice.randrange(1, max(cycles, 2)))

        def signal_late(stream: Stream) -> None:
            delay_sometimes(stream)
            signal(stream)

        def wait_longer(stream: Stream) -> None:
            wait(stream)
            delay_sometimes(stream)

        fence.signal, fence.wait = signal_late, wait_longer  # type: ignore[method-assign]
        return fence

    with patch.object(sync, "create_fence", create_jittered):
        yield
