"""Runs of the phases of ``outrider bench peers`` on one engine: the same clock and the same sums for all engines."""

from __future__ import annotations

import json
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.device.errors import OutriderError
from outrider_bench.child import BenchFailed
from outrider_bench.load import StreamedAnswer, latencies, token_ids
from outrider_bench.peers.work import PeerWork

_WARM_TOKENS = 16
_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "vllm", "outrider")
"""Packages whose versions a report names for each engine's process."""
_SETTLE_S = 0.2
"""Seconds of pause before each run, until work that the last run has left on the device has ended, such as an extra
iteration.
"""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Totals of an engine's drafts since its start: drafted and accepted tokens."""

    verified: float
    """Number of verifications, one for each request of an iteration."""
    drafted: float
    """Number of draft tokens that were verified."""
    passed: float
    """Number of accepted draft tokens."""


class Peer(ABC):
    """An engine that is ready to be measured. It returns exactly the requested number of tokens and reuses no prefix."""

    version: str
    settings: str
    tuned_s: float = 0.0
    """Part of the start in which the engine tuned kernels on request, in seconds."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
        """Generate ``counts[i]`` new tokens for prompt i, all prompts at once, and return the number of new tokens
        of each.
        """

    def draft_counts(self) -> DraftCounts | None:
        """Return the totals of draft tokens so far; None without drafts."""
        return None

    def stream(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[StreamedAnswer]:
        """Generate ``counts[i]`` tokens for prompt i, all prompts at once, and return the answers.

        Raises :class:`BenchFailed` for an engine without streams.
        """
        del prompts, counts
        raise BenchFailed(f"times between tokens aren't measured with {type(self).__name__}")

    def limit_ms(self, batch: int, context: float) -> float | None:
        """Return the lower limit of an iteration's time in milliseconds for this batch and context; None if it
        isn't known.
        """
        del batch, context
        return None


class PeerRuns:
    """The measured runs of one engine. The first run of each case follows a short run that isn't measured."""

    def __init__(self, peer: Peer, work: PeerWork) -> None:
        self._peer = peer
        self._work = work
        self._warm: set[str] = set()
        self._number = 0
        self._vocabulary = work.vocabulary

    def measure(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Run a phase (``request["phase"]``) and return its figures.

        ``request["case"]`` is the batch size of ``decode``, the prompt length of ``prefill`` and ``context``, or the numbers
        of prompts and tokens of ``batch-prefill``. For ``mixed`` the case is ``seconds`` (throughput) or ``latency`` (first
        tokens and gaps).
        """
        phase, case = request["phase"], request["case"]
        requests = self._work.requests(phase, case)
        key = phase if phase == "mixed" else f"{phase} {case}"
        if key not in self._warm:
            self._warm.add(key)
            self._warm_up(phase, requests)
        prompts, counts = [self._prompt(tokens) for tokens, _ in requests], [count for _, count in requests]
        if phase in ("decode", "context"):
            return self._decode(prompts, counts)
        if case == "latency":
            return self._latency(prompts, counts)
        seconds, counted = self._timed(prompts, counts)
        if phase == "prefill":
            return {"first_token_ms": 1e3 * seconds}
        if phase == "batch-prefill":
            return {"seconds": seconds, "prompt_tokens_per_s": sum(map(len, prompts)) / seconds}
        return {"seconds": seconds, "tokens_per_s": sum(counts) / seconds, **(counted or {"acceptance_length": 1.0})}

    def _warm_up(self, phase: str, requests: Sequence[tuple[int, int]]) -> None:
        """Run the case in short: all requests with few tokens each, or an eighth of a load."""
        few = _WARM_TOKENS
        if phase == "mixed":
            requests, few = requests[: -(-len(requests) // 8)], max(count for _, count in requests)
        self._timed([self._prompt(tokens) for tokens, _ in requests], [min(few, count) for _, count in requests])

    def _decode(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> dict[str, object]:
        """Return the figures of all iterations but the first: the time of all new tokens less that of two tokens.

        An engine may return a first token before its draft has read the prompt. The second token includes that work.
        """
        batch, new = len(prompts), counts[0]
        first, _ = self._timed(prompts, [min(2, new)] * batch)
        whole, counted = self._timed(prompts, counts)
        seconds = whole - first
        accepted = 1.0 if counted is None else counted["acceptance_length"]
        iterations = (new - 1) / accepted - 1
        if seconds <= 0 or iterations <= 0:
            raise BenchFailed(f"{new} new tokens took no longer than the first two; ask for more")
        found: dict[str, object] = {
            "iteration_ms": 1e3 * seconds / iterations,
            "tokens_per_s": batch * accepted * iterations / seconds,
            **(counted or {"acceptance_length": accepted}),
        }
        limit = self._peer.limit_ms(batch, len(prompts[0]) + new / 2)
        return found if limit is None else found | {"limit_ms": limit}

    def _latency(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> dict[str, object]:
        answers = self._peer.stream(prompts, counts)
        found = sum(sum(each.tokens) for each in answers)
        if found != sum(counts):
            raise BenchFailed(f"asked for {sum(counts)} new tokens, got {found}: that isn't the same work")
        return latencies(answers)

    def _prompt(self, tokens: int) -> list[int]:
        self._number += 1
        return token_ids(self._number, tokens, self._vocabulary)

    def _timed(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> tuple[float, dict[str, float] | None]:
        """Return the seconds, and for an engine with drafts the accepted and drafted tokens of an iteration."""
        time.sleep(_SETTLE_S)
        before = self._peer.draft_counts()
        began = time.perf_counter()
        lengths = self._peer.generate(prompts, counts)
        seconds = time.perf_counter() - began
        for length, wanted in zip(lengths, counts, strict=True):
            if length != wanted:
                raise BenchFailed(f"asked for {wanted} new tokens, a request got {length}: that isn't the same work")
        after = self._peer.draft_counts()
        if before is None or after is None or after.verified == before.verified:
            return seconds, None
        verified = after.verified - before.verified
        return seconds, {
            "acceptance_length": 1 + (after.passed - before.passed) / verified,
            "drafted": (after.drafted - before.drafted) / verified,
        }


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that an engine's speed depends on, as installed for this process."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# -- the child process -------------------------------------------------------------------------------------------------


def serve_runs(given: Mapping[str, Any], open_peer: Callable[[PeerWork, Path], Peer]) -> Iterator[Mapping[str, object]]:
    """Yield the description of an engine, then the figures of the run that each line of standard input asks for.

    ``given`` has the work that the parent sent. ``open_peer`` gets the work and a directory for checkpoints.
    """
    began = time.perf_counter()
    work = PeerWork.from_json(given)
    peer = open_peer(work, Path(work.keep or given["scratch"]))
    runs = PeerRuns(peer, work)
    taken = {"start_s": time.perf_counter() - began - peer.tuned_s, "tuned_s": peer.tuned_s}
    yield {"version": peer.version, "settings": peer.settings, "versions": installed_versions(), **taken}
    for line in sys.stdin:
        yield _measure(runs, json.loads(line))


def _measure(runs: PeerRuns, request: Mapping[str, Any]) -> dict[str, object]:
    """Return the figures of a run, or the reason of its failure. The engine can then take the next run."""
    try:
        return runs.measure(request)
    except OutriderError as error:
        return {"failed": str(error)}
