"""Host programs whose requests have sampling options, log-probabilities and stop conditions."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

from outrider import Engine, SamplingParams
from outrider_proof.decode_program import CONTEXT, Arrival
from outrider_proof.engine_setups import Models, prompt_and_media, random_host_program, without_schedule
from outrider_proof.tiny import VOCABULARY, plain_config
from proof.setups import EngineSetup, models

OPTIONED = (
    (EngineSetup("none", "staged", "cuda"), 20),
    (EngineSetup("none", "fused", "rocm"), 22),
    (EngineSetup("none", "graphs", "npu"), 24),
    (EngineSetup("eagle", "graphs", "cuda"), 20),
    (EngineSetup("ngram-tree", "staged", "npu"), 22),
    (EngineSetup("draft-model", "fused", "cuda"), 24),
)
"""Setups and numbers of programs. What is drawn is the same with and without a draft only where nothing is drafted: there
requests have temperatures. With a draft they are greedy."""

_LOGPROBS = 3


def drawn_params(setup: EngineSetup, number: int) -> tuple[tuple[Arrival, SamplingParams], ...]:
    """Each request of the program, plain of guides, aborts and moves, with options of its own; one in four has none."""
    dice = random.Random(f"options {setup.name} {number}")
    found = []
    for arrival in random_host_program(number).arrivals:
        params = SamplingParams(max_tokens=arrival.max_tokens)
        if dice.random() < 0.75:
            params = replace(params, **_options(dice, sampled=setup.proposer == "none", tokens=arrival.max_tokens))
        found.append((replace(without_schedule(arrival), guided=False), params))
    return tuple(found)


def _options(dice: random.Random, *, sampled: bool, tokens: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": dice.choice((0.5, 1.5, 3.0))},
        {"presence_penalty": dice.choice((-2.0, 1.0, 2.0)), "frequency_penalty": dice.choice((0.0, 0.5, -1.0))},
        {"logit_bias": {dice.randrange(VOCABULARY): dice.choice((-50.0, 4.0, 2.0)) for _ in range(4)}},
        {"logprobs": dice.randint(0, _LOGPROBS)},
        {"stop_token_ids": tuple(dice.sample(range(VOCABULARY), 3)), "min_tokens": dice.randint(0, tokens)},
    ]
    if sampled:
        hot: dict[str, Any] = {"temperature": dice.choice((0.3, 1.0, 2.0)), "seed": dice.randrange(2**40)}
        shares: list[dict[str, Any]] = [
            {"top_k": dice.randint(1, 6)},
            {"top_p": dice.choice((0.3, 0.9))},
            {"min_p": dice.choice((0.05, 0.5))},
        ]
        kinds += [hot | share for share in shares] * 2
    found: dict[str, Any] = {}
    for kind in dice.sample(kinds, dice.randint(1, 3)):
        found |= kind
    return found


def judged(setup: EngineSetup, number: int) -> str:
    """All requests together on the imitated device, against each alone on the host: tokens, log-probabilities and endings."""
    asked = drawn_params(setup, number)
    loaded = models(setup.proposer, setup.like)
    engine = loaded.engine(random_host_program(number), mode=setup.mode)
    free = engine.free_pages, engine.free_rows
    ids = [engine.add_request(prompt_and_media(setup.proposer, arrival)[0], params) for arrival, params in asked]
    got = _outputs(engine)
    if (engine.free_pages, engine.free_rows) != free:
        return "Leak"
    for request, each in zip(ids, asked, strict=True):
        if not _same(got[request], _alone(setup.proposer, *each)):
            return "WrongTokens"
    return ""


Said = tuple[list[int], list[tuple[float, list[tuple[int, float]]]], str]
"""Tokens, log-probabilities of them and of the likeliest, and how the request ended."""


def _outputs(engine: Engine) -> dict[int, Said]:
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[tuple[float, list[tuple[int, float]]]]] = {}
    ended: dict[int, str] = {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            kept = logprobs.setdefault(output.request_id, [])
            kept += [(each.logprob, list(each.top)) for each in output.logprobs or ()]
            if output.finish_reason is not None:
                ended[output.request_id] = str(output.finish_reason)
    engine.drain()
    return {request: (tokens[request], logprobs[request], ended.get(request, "")) for request in tokens}


def _same(ours: Said, theirs: Said) -> bool:
    if (ours[0], ours[2], len(ours[1])) != (theirs[0], theirs[2], len(theirs[1])):
        return False
    for (mine, tops), (other, wanted) in zip(ours[1], theirs[1], strict=True):
        if abs(mine - other) > 1e-4 or [token for token, _ in tops] != [token for token, _ in wanted]:
            return False
        if any(abs(a - b) > 1e-4 for (_, a), (_, b) in zip(tops, wanted, strict=True)):
            return False
    return True


@functools.cache
def _alone(proposer: str, arrival: Arrival, params: SamplingParams) -> Said:
    host: Models = models(proposer, None)
    config = plain_config(max_requests=1, max_context=CONTEXT, dtype="float64")
    engine = Engine(host.target, host.backend, config=config, vision=host.vision)
    request = engine.add_request(prompt_and_media(proposer, arrival)[0], params)
    return _outputs(engine)[request]
