"""Warm-up: serve internal requests before the first user request, so that all kernels are compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from outrider.device import Backend
from outrider.engine.config import MAX_LOGPROBS, DecidedConfig
from outrider.engine.guides.guidance import Guidance, UnrestrictedMatcher
from outrider.engine.loop import Loop
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import LanguageModel
from outrider.speculative.proposer import Proposer

_CHUNKS = 2
"""Number of chunks of a warm-up prompt; its second chunk continues the first one's cache."""
_ITERATIONS = 3
"""Minimum number of decode iterations after a prompt: the first one, the next one, and one whose inputs come from an
iteration in flight.
"""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The result of a warm-up. ``compiled`` counts the variants of each kernel that were compiled or loaded from a cache;
    empty if the kernels do not report it. ``chosen`` has the implementations that were chosen by measurement, by purpose.
    """

    seconds: float
    compiled: Mapping[str, int]
    chosen: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        named = ", ".join(f"{name} {count}" for name, count in sorted(self.compiled.items()))
        said = f"{sum(self.compiled.values())} kernels compiled or loaded in {self.seconds:.1f} s"
        return said + (f" ({named})" if named else "") + "".join(f"; {what}: {which}" for what, which in self.chosen.items())


def warm_up(
    loop: Loop,
    backend: Backend,
    model: LanguageModel,
    proposer: Proposer,
    config: DecidedConfig,
    *,
    compile_ahead: Callable[[], None],
    room: int,
    lengths: int,
) -> WarmUp:
    """Serve internal requests that use every feature: a prompt of two chunks, then iterations that draft, verify and extend.

    ``loop`` is created for this and dropped afterwards. ``compile_ahead`` starts the compilation of kernels. ``room`` is the
    number of tokens that a request may have. ``lengths`` is the number of draft lengths, used in turn.
    """
    kernels = model.kernels
    before, began = kernels.compiled(), time.perf_counter()
    compile_ahead()
    most = max(1, min(2 * proposer.depth + 3, room - 1))
    length = max(1, min(config.prefill_chunk + 2, room - most))
    vision = model.config.vision
    pictures = () if vision is None else (vision.image_token, vision.video_token)
    word = next(token for token in range(model.config.vocab_size) if token not in pictures)
    greedy = SamplingParams(max_tokens=most, ignore_eos=True)
    everything = replace(
        greedy,
        temperature=1.0,
        top_k=2,
        top_p=0.9,
        min_p=0.1,
        logit_bias={word: 1.0},
        presence_penalty=1.0,
        logprobs=min(MAX_LOGPROBS, model.config.vocab_size),
    )
    rope_key = model.config.rope.sharing_key(length)
    rounds = _CHUNKS + max(_ITERATIONS, lengths + 1)
    for number, params in enumerate((greedy, replace(greedy, temperature=1.0), everything)):
        request = Request(number, (word,) * length, params.sample(0), frozenset(), rope_key=rope_key)
        if params is everything:
            request.guidance = Guidance(UnrestrictedMatcher(), vocabulary=model.config.vocab_size)
        loop.add(request)
        for _ in range(rounds):
            if not request.finished:
                loop.iterate()
        loop.drop_requests([request])
        loop.drain()
    backend.synchronize()
    after = kernels.compiled()
    new = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    return WarmUp(time.perf_counter() - began, new, kernels.chosen())
