"""One run of one phase on one engine: the same clock and the same sums for all."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_bench.child import ChildFailed
from outrider_bench.mixed_load import Arrivals, Arrived
from outrider_bench.peers.work import Work

_WARM_TOKENS = 16
_SETTLE_S = 0.2
"""Before each run: what the one before has left on its device, such as an iteration too many, is over then."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What an engine has ``verified`` so far, the draft of one request each time, the tokens that were ``drafted`` for that,
    and those that ``passed``.
    """

    verified: float
    drafted: float
    passed: float


class Peer(ABC):
    """An engine that is ready. Token counts are exact: an engine neither stops early nor reuses what it has computed."""

    version: str
    settings: str
    tuned_s: float = 0.0
    """Of its start, the seconds in which it measured kernels because it was asked to."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
        """So many new tokens for each prompt, all at once; returns how many each got."""

    def counted(self) -> Counted | None:
        """What became of drafts so far; None without any."""
        return None

    def stream(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], arrived: Arrived) -> None:
        """The same, telling of tokens as they come. Raises :class:`ChildFailed` where that isn't measured."""
        del prompts, counts, arrived
        raise ChildFailed(f"times between tokens aren't measured with {type(self).__name__}")

    def limit_ms(self, batch: int, context: float) -> float | None:
        """Least time of an iteration, where it's known."""
        del batch, context
        return None


class Runs:
    """The runs of one engine. What is run for the first time is run before, in short and unmeasured."""

    def __init__(self, peer: Peer, work: Work) -> None:
        self._peer = peer
        self._work = work
        self._warm: set[str] = set()
        self._number = 0
        self._vocabulary = work.vocabulary

    def run(self, request: Mapping[str, Any]) -> dict[str, object]:
        """``{"phase": "decode", "case": 8}``, ``{"phase": "prefill", "case": 512}``, ``{"phase": "context", "case":
        4096}``, ``{"phase": "mixed"}`` (its ``case`` says ``seconds`` or, for times of first tokens and between tokens,
        ``latency``).
        """
        phase, case = request["phase"], request["case"]
        key = phase if phase == "mixed" else f"{phase} {case}"
        if key not in self._warm:
            self._warm.add(key)
            self._warm_up(phase, case)
        if phase == "decode":
            return self._decode(case, self._work.prompt_tokens)
        if phase == "context":
            return self._decode(1, case)
        if phase == "prefill":
            return self._prefill(case)
        return self._latency() if case == "latency" else self._mixed()

    def _warm_up(self, phase: str, case: Any) -> None:
        """The same in short: as many requests, few tokens of each; an eighth of a load."""
        if phase in ("decode", "context"):
            few = min(_WARM_TOKENS, self._work.new_tokens)
            batch, tokens = (case, self._work.prompt_tokens) if phase == "decode" else (1, case)
            self._timed([self._prompt(tokens) for _ in range(batch)], [few] * batch)
        elif phase == "prefill":
            self._prefill(case)
        else:
            prompts, counts = self._load()
            some = -(-len(counts) // 8)
            self._timed(prompts[:some], counts[:some])

    def _decode(self, batch: int, tokens: int) -> dict[str, object]:
        """All iterations but the first one, behind prompts of so many ``tokens``: all new tokens, less a run of two each.

        A second token has a first iteration behind the prefill, and what an engine's draft makes of prompts: an engine may
        hand a first token out before that is done.
        """
        new = self._work.new_tokens
        prompts = [self._prompt(tokens) for _ in range(batch)]
        first, _ = self._timed(prompts, [min(2, new)] * batch)
        whole, counted = self._timed(prompts, [new] * batch)
        seconds = whole - first
        accepted = 1.0 if counted is None else counted["acceptance_length"]
        iterations = (new - 1) / accepted - 1
        if seconds <= 0 or iterations <= 0:
            raise ChildFailed(f"{new} new tokens took no longer than the first two; ask for more")
        found: dict[str, object] = {
            "iteration_ms": 1e3 * seconds / iterations,
            "tokens_per_s": batch * accepted * iterations / seconds,
            **(counted or {"acceptance_length": accepted}),
        }
        limit = self._peer.limit_ms(batch, tokens + new / 2)
        return found if limit is None else found | {"limit_ms": limit}

    def _prefill(self, tokens: int) -> dict[str, object]:
        seconds, _ = self._timed([self._prompt(tokens)], [1])
        return {"first_token_ms": 1e3 * seconds}

    def _mixed(self) -> dict[str, object]:
        prompts, counts = self._load()
        seconds, counted = self._timed(prompts, counts)
        return {"seconds": seconds, "tokens_per_s": sum(counts) / seconds, **(counted or {"acceptance_length": 1.0})}

    def _latency(self) -> dict[str, object]:
        prompts, counts = self._load()
        arrivals = Arrivals()
        self._peer.stream(prompts, counts, arrivals.note)
        if arrivals.tokens != sum(counts):
            raise ChildFailed(f"asked for {sum(counts)} new tokens, got {arrivals.tokens}: that isn't the same work")
        return arrivals.summary()

    def _load(self) -> tuple[list[list[int]], list[int]]:
        lengths = self._work.load.lengths
        return [self._prompt(prompt) for prompt, _ in lengths], [output for _, output in lengths]

    def _prompt(self, tokens: int) -> list[int]:
        self._number += 1
        return self._work.prompt(self._number, tokens, self._vocabulary)

    def _timed(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> tuple[float, dict[str, float] | None]:
        """Seconds, and where drafts are verified the tokens of an iteration, and those that were drafted for it."""
        time.sleep(_SETTLE_S)
        before = self._peer.counted()
        began = time.perf_counter()
        lengths = self._peer.generate(prompts, counts)
        seconds = time.perf_counter() - began
        for length, wanted in zip(lengths, counts, strict=True):
            if length != wanted:
                raise ChildFailed(f"asked for {wanted} new tokens, a request got {length}: that isn't the same work")
        after = self._peer.counted()
        if before is None or after is None or after.verified == before.verified:
            return seconds, None
        verified = after.verified - before.verified
        return seconds, {
            "acceptance_length": 1 + (after.passed - before.passed) / verified,
            "drafted": (after.drafted - before.drafted) / verified,
        }
