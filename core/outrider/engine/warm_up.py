"""Warm-up: kernels that are compiled when they're first used are used before the first request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.engine.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up took. ``compiled``: variants of each kernel that were compiled, or loaded from a cache of compiled
    ones; empty where the kernels don't say.
    """

    seconds: float
    compiled: Mapping[str, int]

    def __str__(self) -> str:
        named = ", ".join(f"{name} {count}" for name, count in sorted(self.compiled.items()))
        return f"{sum(self.compiled.values())} kernels compiled or loaded in {self.seconds:.1f} s" + (
            f" ({named})" if named else ""
        )


def warm_up(engine: Engine, *, room: int) -> WarmUp:
    """Serve requests of its own that need everything which a request may ask for; a prompt that takes two chunks, and then
    iterations that draft, verify and extend. The engine forgets them afterwards. ``room``: tokens that a request may have.
    """
    config, kernels, model = engine.config, engine.model.kernels, engine.model.config
    before, began = kernels.compiled(), time.perf_counter()
    most = max(1, min(2 * engine.proposer.depth + 3, room - 1))
    length = max(1, min(config.prefill_chunk + 2, room - most))
    pictures = () if model.vision is None else (model.vision.image_token, model.vision.video_token)
    word = next(token for token in range(model.vocab_size) if token not in pictures)
    greedy = SamplingParams(max_tokens=most, ignore_eos=True)
    everything = replace(
        greedy,
        temperature=1.0,
        top_k=2,
        top_p=0.9,
        min_p=0.1,
        logit_bias={word: 1.0},
        presence_penalty=1.0 if config.penalties else 0.0,
        logprobs=min(config.max_logprobs, model.vocab_size),
    )
    for params in (greedy, replace(greedy, temperature=1.0), everything):
        engine.generate([[word] * length], params)
    engine.backend.synchronize()
    after = kernels.compiled()
    new = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    return WarmUp(time.perf_counter() - began, new)
