"""The real engine with the bundled model, on the backend under test and on the reference."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import torch

import outrider
from outrider import Engine, EngineConfig, SamplingParams
from outrider.device import Backend, Fence, Stream
from outrider.registry import get_backend

PROMPTS = (
    "def read(self, size=-1):\n",
    "import os\nimport sys\n\n\ndef main(",
    'class Error(Exception):\n    """Base class',
)
MAX_TOKENS = 24
MAX_REQUESTS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MODES = ("staged", "graphs", "fused")
REFERENCE = "cpu"


_GAP = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 0.2}
"""How much less likely, in log-probability, another token may be that rounding put in the place of the likeliest."""
_CLOSEST = 4


@dataclass(frozen=True)
class Outcome:
    """What a run gave: tokens of each prompt and how many a verification yielded. ``likeliest``: of each token of the
    reference, the likeliest ones there with their log-probabilities.
    """

    tokens: tuple[tuple[int, ...], ...]
    acceptance: float
    likeliest: tuple[tuple[Mapping[int, float], ...], ...] = ()


def engine_on(
    backend: Backend,
    *,
    speculate: str,
    overlap: bool = False,
    dtype: str = "float32",
    page_size: int = 8,
    mode: str = "staged",
    buckets: tuple[int, ...] | None = None,
) -> Engine:
    """The bundled model on ``backend``. ``mode``: staged, graphs (staged, its stages replayed from graphs), or fused;
    ``buckets``: sizes of the batches that graphs are captured for.
    """
    bundled = Path(str(files(outrider))) / "bundled"
    config = EngineConfig(
        max_requests=MAX_REQUESTS,
        page_size=page_size,
        max_context=max(96, 2 * page_size),
        prefill_chunk=256,
        draft_tokens=3,
        draft_length="fixed",
        overlap=overlap,
        dtype=dtype,
        mode="fused" if mode == "fused" else "staged",
        graphs=mode == "graphs",
        buckets=buckets,
    )
    return Engine.from_checkpoint(
        bundled / "target", backend, draft_dir=bundled / "eagle", speculate=speculate, config=config
    )


def preferred(backend: Backend) -> str:
    """The dtype in which the backend's own kernels run, as an engine names it."""
    has = backend.capabilities
    best = (*has.preferred_dtypes, torch.bfloat16, *DTYPES.values())
    return next(str(dtype).removeprefix("torch.") for dtype in best if dtype in has.dtypes)


def run(
    engine: Engine, prompts: Sequence[str] = PROMPTS, max_tokens: int = MAX_TOKENS, logprobs: int | None = None
) -> Outcome:
    """Greedy output of every prompt, in one batch. ``logprobs``: how many of the likeliest tokens to note."""
    tokens = [engine.tokenizer.encode(text) for text in prompts]
    completions = engine.generate(tokens, SamplingParams(max_tokens=max_tokens, logprobs=logprobs))
    likeliest = tuple(tuple(dict(token.top) for token in c.logprobs) for c in completions)
    return Outcome(tuple(tuple(c.token_ids) for c in completions), engine.stats.acceptance_length, likeliest)


@lru_cache(maxsize=8)
def reference(
    *, speculate: str, dtype: str = "float32", prompts: tuple[str, ...] = PROMPTS, tokens: int = MAX_TOKENS
) -> Outcome:
    """The same on the reference backend."""
    return run(engine_on(get_backend(REFERENCE), speculate=speculate, dtype=dtype), prompts, tokens, logprobs=_CLOSEST)


def first_wrong_token(found: Outcome, wanted: Outcome, dtype: str) -> str:
    """Where ``found`` leaves the reference's tokens though rounding can't be the reason; empty where it doesn't.

    ``found`` may be of the first prompts alone. A token may be another one where the reference has the two about equally
    likely. What comes after it isn't compared: the two go on with different texts.
    """
    for prompt, (made, right) in enumerate(zip(found.tokens, wanted.tokens, strict=False)):
        if len(made) != len(right):
            return f"prompt {prompt}: {len(made)} tokens where the reference has {len(right)}"
        for index, (token, best) in enumerate(zip(made, right, strict=True)):
            if token == best:
                continue
            near = wanted.likeliest[prompt][index]
            gap = near[best] - near.get(token, float("-inf"))
            if gap <= _GAP[dtype]:
                break
            return (
                f"prompt {prompt}, token {index}: {token} where the reference has {best}, which is likelier by {gap:.3g} "
                f"(in {dtype}, rounding explains {_GAP[dtype]:g})"
            )
    return ""


class JitteredFence(Fence):
    """A fence whose streams are slowed at random around it, so that whatever it doesn't order comes apart."""

    def __init__(self, inner: Fence, backend: Backend, seed: int, cycles: int) -> None:
        super().__init__(inner.name)
        self._inner = inner
        self._backend = backend
        self._random = random.Random(f"{seed} {inner.name}")
        self._cycles = cycles

    @property
    def mechanism(self) -> str:
        """The inner fence's."""
        return self._inner.mechanism

    def signal(self, stream: Stream) -> None:
        """Late, sometimes."""
        self._dawdle(stream)
        self._inner.signal(stream)

    def wait(self, stream: Stream) -> None:
        """What follows is late, sometimes."""
        self._inner.wait(stream)
        self._dawdle(stream)

    def wait_host(self) -> None:
        """As it is."""
        self._inner.wait_host()

    def wait_host_within(self, seconds: float) -> bool:
        """As it is."""
        return self._inner.wait_host_within(seconds)

    def done(self) -> bool:
        """As it is."""
        return self._inner.done()

    def _dawdle(self, stream: Stream) -> None:
        if self._random.random() < 0.25:
            self._backend.delay(stream, self._random.randrange(1, self._cycles))
