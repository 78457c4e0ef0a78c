"""A batch that decodes, for measurements: its prompts, the times of its iterations, and the profile of its device."""

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

_PROFILED_ITERATIONS = 12
_PROFILE_WARM_UP = 2
_PROFILE_LEAD = 2
"""Number of profiled iterations that are left out, because the device still waits for the host."""


@dataclass(frozen=True, slots=True)
class DecodeIterations:
    """Times of the decode iterations in which every request of a batch decodes."""

    seconds: list[float]
    """Host time of each iteration, with reading results back."""
    host_seconds: list[float]
    """Part of ``seconds`` in which the host wasn't blocked by the device."""
    tokens: int
    """Number of tokens that all of these iterations yielded."""
    context: float
    """Mean number of tokens in the context of a request."""


def run_batch(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> DecodeIterations:
    """Decode ``batch`` requests to their ends and return the iterations in which all of them decode.

    These follow the last prompt and precede the first end. There are none if the first request ends before the last prompt.
    """
    from outrider.engine.requests.sampling import SamplingParams

    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    lengths = {engine.add_request(prompt, params): prompt_tokens for prompt in prompts_for(engine, batch, prompt_tokens)}
    started: set[int] = set()
    seconds: list[float] = []
    host_seconds: list[float] = []
    contexts: list[float] = []
    tokens, none_ended = 0, True
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
            tokens += sum(len(output.tokens) for output in outputs)
    return DecodeIterations(seconds, host_seconds, tokens, statistics.fmean(contexts) if contexts else 0.0)


def too_few_tokens(new_tokens: int, batch: int, prompt_tokens: int) -> str:
    """Return the message for a batch of which :func:`run_batch` timed no iteration."""
    return (
        f"--new-tokens {new_tokens} is too few for batch {batch} with prompts of {prompt_tokens}: no iteration had the whole "
        "batch decoding"
    )


def profile_batch(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[DeviceProfile, float] | None:
    """Return the profile of a few iterations of a batch, and their number; None if the device has no profile.

    These iterations aren't timed, since observing slows them down. ``new_tokens`` limits their number. The result is None too
    if a request ends before all iterations have run.
    """
    from outrider_bench.device_profile import profile_timeline, profiled
    from outrider_trace.timeline import record_timeline

    growth = engine.proposer.depth + 1
    most = (new_tokens - 2) // growth
    warm_up = max(0, min(_PROFILE_WARM_UP, most - 1))
    traced = engine.backend.control is None
    asynchronous = traced and engine.backend.capabilities.asynchronous
    lead = max(0, min(_PROFILE_LEAD, most - warm_up - 1)) if asynchronous else 0
    count = min(_PROFILED_ITERATIONS, most - warm_up - lead)
    if count < 1:
        return None
    if traced:
        decoding = _DecodingBatch(engine, batch, prompt_tokens, new_tokens)
        profile = profiled(
            engine.backend,
            lambda: decoding.run_iterations(lead + count),
            warm_up=lambda: decoding.run_iterations(warm_up),
            lead=lead / (lead + count),
        )
        whole = decoding.is_whole
        decoding.abort_requests()
        return (profile, profile.share * (lead + count)) if profile is not None and whole else None
    # The operations of a graph have names only if its capture was observed.
    with record_timeline(engine.backend) as timeline:
        decoding = _DecodingBatch(_copy_engine(engine), batch, prompt_tokens, new_tokens)
        decoding.run_iterations(warm_up)
        begin = timeline.end_time
        decoding.run_iterations(count)
        end, whole = timeline.end_time, decoding.is_whole
        decoding.abort_requests()
    profile = profile_timeline(timeline.part_between(begin, end))
    return (profile, count) if profile is not None and whole else None


class _DecodingBatch:
    """A batch of an engine whose requests all decode."""

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
    def is_whole(self) -> bool:
        """True while every request of the batch decodes."""
        return all(request in self._engine.open_requests for request in self._ids)

    def run_iterations(self, count: int) -> None:
        """Run ``count`` decode iterations and wait until the device has finished them."""
        for _ in range(count):
            self._engine.step()
        self._engine.drain()

    def abort_requests(self) -> None:
        """Abort the requests and run the engine until it is idle."""
        for request in self._ids:
            if request in self._engine.open_requests:
                self._engine.abort(request)
        while self._engine.has_unfinished:
            self._engine.step()


def _copy_engine(engine: Engine) -> Engine:
    """Return an engine with the same model and proposer; it takes over the draft's caches."""
    from outrider.engine.engine import Engine

    tokenizer = engine.tokenizer if engine.has_tokenizer else None
    return Engine(engine.model, engine.backend, proposer=engine.proposer, config=engine.config, tokenizer=tokenizer)


def prompts_for(engine: Engine, batch: int, prompt_tokens: int) -> list[list[int]]:
    """Return prompts from different parts of a source file, as in the training data of the bundled model.

    An engine without a tokenizer has random weights and gets arbitrary token ids.
    """
    if not engine.has_tokenizer:
        vocabulary = engine.model.config.vocab_size
        return [[(97 * i + 31 * j) % vocabulary for j in range(prompt_tokens)] for i in range(batch)]
    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    tokens = engine.tokenizer.encode(text, special_tokens=False)
    tokens = tokens * (1 + (prompt_tokens + batch * 97) // len(tokens))
    return [tokens[97 * i : 97 * i + prompt_tokens] for i in range(batch)]
