"""A program for the simulated accelerator that generates with one of the proof's tiny proposers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider import Engine, SamplingParams
from outrider.device import Backend
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS, decoder
from outrider_proof.tiny import plain_config

PROMPTS: list[tuple[int, ...]] = [(3,), (1, 2, 3, 4, 5)]
NEW_TOKENS = 10


def program(name: str, **config: Any) -> Callable[[Backend], None]:
    """Return a program that generates with one proposer, greedy and sampled, and checks the greedy tokens."""
    config = {"max_context": 32, "max_requests": 2, "page_size": 4, "prefill_chunk": 4, "overlap": True} | config

    def run(backend: Backend) -> None:
        loading = backend.create_stream("load")
        with backend.on(loading):
            target = decoder(tiny.target(), backend)
            proposer = MAKERS[name](target, backend)
        loading.synchronize()
        engine = Engine(target, backend, proposer=proposer, config=plain_config(dtype="float64", **config))
        results = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.token_ids == tiny.plain(prompt, NEW_TOKENS)
        engine.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=1.0))

    return run
