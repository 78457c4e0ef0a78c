"""The real engine with the bundled model, on the backend under test and on the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

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
REFERENCE = "cpu"


@dataclass(frozen=True)
class Outcome:
    """What a run gave: tokens of each prompt and how many a verification yielded."""

    tokens: tuple[tuple[int, ...], ...]
    acceptance: float


def engine_on(backend: Backend, *, speculate: str, overlap: bool = False, dtype: str = "float32") -> Engine:
    """The bundled model on ``backend``."""
    bundled = Path(str(files(outrider))) / "bundled"
    return Engine.from_checkpoint(
        bundled / "target",
        backend,
        draft_dir=bundled / "eagle",
        speculate=speculate,
        config=EngineConfig(
            max_requests=3,
            page_size=8,
            max_context=96,
            prefill_chunk=256,
            draft_tokens=3,
            dtype=dtype,
            mode="staged",
            graphs=False,
            overlap=overlap,
        ),
    )


def run(engine: Engine, prompts: Sequence[str] = PROMPTS, max_tokens: int = MAX_TOKENS) -> Outcome:
    """Greedy output of every prompt, in one batch."""
    tokens = [engine.tokenizer.encode(text) for text in prompts]
    completions = engine.generate(tokens, SamplingParams(max_tokens=max_tokens))
    return Outcome(tuple(tuple(c.token_ids) for c in completions), engine.stats.acceptance_length)


@lru_cache(maxsize=8)
def reference(*, speculate: str, dtype: str = "float32", prompts: tuple[str, ...] = PROMPTS) -> Outcome:
    """The same on the reference backend."""
    return run(engine_on(get_backend(REFERENCE), speculate=speculate, dtype=dtype), prompts)


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
