"""A batch that decodes, for measurements: its prompts, the time of its iterations, and what its device did meanwhile."""

from __future__ import annotations

import statistics
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider_bench.device_profile import DeviceProfile

_PROFILED = 12
_PROFILE_WARM_UP = 2
_PROFILE_LEAD = 2
"""Iterations that are profiled and left out: the host isn't ahead of the device yet, which waits for it."""


@dataclass(frozen=True, slots=True)
class Iterations:
    """The iterations in which every request of a batch decodes.

    ``seconds`` of each on the host, results read back included; ``host_seconds``: of that, those in which the host wasn't
    blocked waiting for the device. ``tokens``: what all of them gave. ``context``: the requests' mean context in tokens.
    """

    seconds: list[float]
    host_seconds: list[float]
    tokens: int
    context: float


def run_batch(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> Iterations:
    """Decode ``batch`` requests to their ends, timing the iterations in which all of them decode: behind the last prompt and
    before the first end. None are where the first request ends before the last prompt does.
    """
    from outrider.engine.requests.sampling import SamplingParams

    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    lengths = {engine.add_request(prompt, params): prompt_tokens for prompt in prompts_for(engine, batch, prompt_tokens)}
    started: set[int] = set()
    seconds: list[float] = []
    host_seconds: list[float] = []
    contexts: list[float] = []
    counted, none_ended = 0, True
    while engine.has_unfinished:
        decoding = len(started) == batch
        context = sum(lengths.values()) / batch
        blocked = engine.stats.blocked_s
        began = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - began
        none_ended = none_ended and not any(output.finish_reason for output in outputs)
        for output in outputs:
            started.add(output.request_id)
            lengths[output.request_id] += len(output.tokens)
        if decoding and none_ended:
            seconds.append(elapsed)
            host_seconds.append(elapsed - (engine.stats.blocked_s - blocked))
            contexts.append(context)
            counted += sum(len(output.tokens) for output in outputs)
    return Iterations(seconds, host_seconds, counted, statistics.fmean(contexts) if contexts else 0.0)


def too_few(new_tokens: int, batch: int, prompt_tokens: int) -> str:
    """The message where :func:`run_batch` timed nothing."""
    return (
        f"--new-tokens {new_tokens} is too few for batch {batch} with prompts of {prompt_tokens}: no iteration had the whole "
        "batch decoding"
    )


def profile_batch(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[DeviceProfile, float] | None:
    """What the device did over a few iterations of such a batch, and how many those were; None where it can't say.

    They are decoded apart from timed ones, since observing slows them down; as many as ``new_tokens`` leave room for. None
    too where a request ends before all of them have been decoded.
    """
    from outrider_bench.device_profile import of_timeline, profiled
    from outrider_trace.timeline import record

    growth = engine.proposer.depth + 1
    most = (new_tokens - 2) // growth
    warm_up = max(0, min(_PROFILE_WARM_UP, most - 1))
    traced = engine.backend.control is None
    beside = traced and engine.backend.capabilities.asynchronous
    lead = max(0, min(_PROFILE_LEAD, most - warm_up - 1)) if beside else 0
    count = min(_PROFILED, most - warm_up - lead)
    if count < 1:
        return None
    if traced:
        decoding = _Decoding(engine, batch, prompt_tokens, new_tokens)
        profile = profiled(
            engine.backend,
            lambda: decoding.steps(lead + count),
            warm_up=lambda: decoding.steps(warm_up),
            lead=lead / (lead + count),
        )
        whole = decoding.whole
        decoding.end()
        return (profile, profile.share * (lead + count)) if profile is not None and whole else None
    # What a graph holds is known by name only where its capture was watched.
    with record(engine.backend) as timeline:
        decoding = _Decoding(_again(engine), batch, prompt_tokens, new_tokens)
        decoding.steps(warm_up)
        begin = timeline.end
        decoding.steps(count)
        end, whole = timeline.end, decoding.whole
        decoding.end()
    profile = of_timeline(timeline.between(begin, end))
    return (profile, count) if profile is not None and whole else None


class _Decoding:
    """A batch past its prompts that can be stepped."""

    def __init__(self, engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> None:
        from outrider.engine.requests.sampling import SamplingParams

        self._engine = engine
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        self._ids = [engine.add_request(prompt, params) for prompt in prompts_for(engine, batch, prompt_tokens)]
        started: set[int] = set()
        while engine.has_unfinished and len(started) < batch:
            started |= {output.request_id for output in engine.step()}
        engine.drain()

    @property
    def whole(self) -> bool:
        """Whether every request still decodes."""
        return all(request in self._engine.open_requests for request in self._ids)

    def steps(self, count: int) -> None:
        """Run so many iterations to their ends."""
        for _ in range(count):
            self._engine.step()
        self._engine.drain()

    def end(self) -> None:
        """Abort the requests."""
        for request in self._ids:
            if request in self._engine.open_requests:
                self._engine.abort(request)
        while self._engine.has_unfinished:
            self._engine.step()


def _again(engine: Engine) -> Engine:
    """An engine of the same parts, which takes the draft's caches over."""
    from outrider.engine.engine import Engine

    tokenizer = engine.tokenizer if engine.has_tokenizer else None
    return Engine(engine.model, engine.backend, proposer=engine.proposer, config=engine.config, tokenizer=tokenizer)


def prompts_for(engine: Engine, batch: int, prompt_tokens: int) -> list[list[int]]:
    """Different parts of real text: for text unlike its training data a model accepts few drafts.

    An engine without a tokenizer has random weights, to which every token is alike.
    """
    if not engine.has_tokenizer:
        vocabulary = engine.model.config.vocab_size
        return [[(97 * i + 31 * j) % vocabulary for j in range(prompt_tokens)] for i in range(batch)]
    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    tokens = engine.tokenizer.encode(text, special_tokens=False)
    tokens = tokens * (1 + (prompt_tokens + batch * 97) // len(tokens))
    return [tokens[97 * i : 97 * i + prompt_tokens] for i in range(batch)]
