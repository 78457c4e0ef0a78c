"""What deciding on adaptive lengths of drafts costs the host in an iteration. No device takes part.

``python -m outrider_bench.programs.adaptive_host [--batches 1,8,64] [--noise 0.15]``

A scheduler decides batches and is told what became of them, one iteration behind, as an engine that runs ahead does it. What
passes and what iterations take is drawn, the same each time. Only the scheduler's own time counts. The same lengths once
more, from a list, are what a fixed length costs; what adaptive ones add is the difference.

Calls are those of Python functions and of built-in ones within the scheduler; they have no noise: two runs give the same
numbers. A batch is decoded to its end and followed by the next one, so that it gets smaller towards the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType

from outrider.engine.requests.adaptive_length import Adaptive
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.draft_length import DraftCosts, DraftLengthPolicy, FixedLength, adaptive_lengths
from outrider.engine.requests.pages import FreeList, PagePool
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.requests.scheduler import Scheduler, SchedulerLimits

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_LONGEST = 7
_SHARES = (0.70, 0.70, 0.65, 0.60, 0.55, 0.50, 0.45)  # of drafted tokens that pass, by place
_PROMPT, _OUTPUT = 64, 256


@dataclass(frozen=True)
class Cost:
    """Of an iteration, in the mean. ``calls`` of Python functions, ``builtins``: of functions in C."""

    calls: float
    builtins: float
    microseconds: float


def main() -> None:
    """Measure and print; one JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--iterations", type=int, default=4000, help="that count, of each batch")
    parser.add_argument("--behind", type=int, default=4000, help="iterations before them, in which much is tried")
    parser.add_argument("--noise", type=float, default=0.15, help="of the time of an iteration")
    parser.add_argument(
        "--repeat", type=int, default=5, help="times that microseconds are measured; the least of each part counts"
    )
    given = parser.parse_args()
    found: dict[int, dict[str, Cost]] = {}
    print("| batch | lengths | calls | built-in | us an iteration |\n|---|---|---|---|---|")
    for batch in (int(each) for each in given.batches.split(",")):
        adaptive, fixed = host_costs(batch, given.iterations, given.behind, noise=given.noise, repeat=given.repeat)
        found[batch] = {"adaptive": adaptive, "from a list": fixed}
        for name, cost in found[batch].items():
            print(f"| {batch} | {name} | {cost.calls:.1f} | {cost.builtins:.1f} | {cost.microseconds:.2f} |", flush=True)
        added = adaptive.calls - fixed.calls, adaptive.builtins - fixed.builtins, adaptive.microseconds - fixed.microseconds
        print(f"| {batch} | added | {added[0]:.1f} | {added[1]:.1f} | {added[2]:.2f} |", flush=True)
    print(json.dumps({batch: {name: asdict(cost) for name, cost in costs.items()} for batch, costs in found.items()}))


def device_costs() -> DraftCosts:
    """As a GPU has them for a model whose iterations are the host's: hardly longer with a longer draft."""
    return DraftCosts(
        {
            (length, size): 2e-4 * (1 + 0.06 * size) * (1 + 0.02 * length)
            for length in adaptive_lengths(_LONGEST)
            for size in _SIZES
        }
    )


class _Recorded(FixedLength):
    """Lengths from a list, at the cost of a fixed one."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(_LONGEST)
        self._recorded = iter(lengths)

    def without_asking(self, requests: int) -> int:
        """The next one."""
        del requests
        return next(self._recorded)


def host_costs(batch: int, iterations: int, behind: int, *, noise: float, repeat: int = 1) -> tuple[Cost, Cost]:
    """What iterations take ``behind`` the first ones, of a host with so much noise: adaptive, and the same from a list.

    With ``repeat`` 0 calls are counted, and nothing is timed.
    """
    lengths: list[int] = []

    def cost(make: Callable[[], DraftLengthPolicy]) -> Cost:
        counted, calls, builtins = _Host(make(), batch, noise), 0, 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls, builtins
            del frame, argument
            calls += event == "call"
            builtins += event == "c_call"

        counted.run(behind)
        counted.run(iterations, before=lambda: sys.setprofile(count), behind=lambda: sys.setprofile(None))
        lengths[:] = counted.lengths
        parts = []
        for _ in range(repeat):
            timed = _Host(make(), batch, noise)
            timed.run(behind)
            timed.parts.clear()
            timed.run(iterations)
            parts.append(timed.parts)
        # The same is done each time: of each part the least is what was interrupted least.
        seconds = sum(min(each) for each in zip(*parts, strict=True))
        # Each time that counting is ended is one built-in call.
        return Cost(calls / iterations, builtins / iterations - 2, 1e6 * seconds / iterations)

    return cost(lambda: Adaptive(device_costs())), cost(lambda: _Recorded(tuple(lengths)))


class _Host:
    """A scheduler, and what an engine does with it but for the device."""

    def __init__(self, policy: DraftLengthPolicy, batch: int, noise: float) -> None:
        limits = SchedulerLimits(growth=_LONGEST + 1, slots=_LONGEST + 2, spare=_LONGEST + 1, prefill_chunk=1 << 20)
        self._scheduler = Scheduler(
            rows=FreeList("request row", batch + 1),
            pages=PagePool(count=1 + batch * 32, page_size=16, ahead=1, share=False),
            limits=limits,
            draft_length=policy,
        )
        self._times, self._batch, self._noise = device_costs(), batch, noise
        self._random, self._next = random.Random(1), 0
        self._in_flight: Batch | None = None
        self.parts: list[float] = []
        self.lengths: list[int] = []

    def run(
        self, iterations: int, *, before: Callable[[], None] = lambda: None, behind: Callable[[], None] = lambda: None
    ) -> None:
        """So many iterations that decode; what isn't the scheduler's lies outside of ``before`` and ``behind``."""
        done, in_flight = 0, self._in_flight
        while done < iterations:
            if in_flight is None:
                self._add()
            began = time.perf_counter()
            before()
            batch = self._scheduler.next_batch()
            behind()
            self.parts.append(time.perf_counter() - began)
            if in_flight is not None:
                self._land(in_flight, before, behind)
            if batch is not None and batch.decode:
                done += 1
                self.lengths.append(batch.drafted or 0)
            in_flight = batch
        self._in_flight = in_flight

    def _add(self) -> None:
        for _ in range(self._batch):
            params = SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)
            self._scheduler.add(Request(self._next, (1,) * _PROMPT, params, frozenset()))
            self._next += 1

    def _land(self, batch: Batch, before: Callable[[], None], behind: Callable[[], None]) -> None:
        """What became of a batch, drawn."""
        drafted = batch.drafted or 0
        passed = [self._passed(drafted) for _ in batch.decode]
        accepted = [count for request, count in zip(batch.decode, passed, strict=True) if not request.finished]
        size = min(size for size in _SIZES if size >= max(1, len(batch.decode)))
        seconds = self._times.base[drafted, size] * max(0.5, self._random.gauss(1, self._noise))
        began = time.perf_counter()
        before()
        self._scheduler.landed(batch, accepted, seconds)
        behind()
        self.parts.append(time.perf_counter() - began)
        for request, count in zip(batch.decode, passed, strict=True):
            if not request.finished:
                request.take((2,) * (count + 1), ())
        for chunk in batch.prefill:
            chunk.request.take((2,), ())
        self._scheduler.retire()

    def _passed(self, drafted: int) -> int:
        for place in range(drafted):
            if self._random.random() >= _SHARES[place]:
                return place
        return drafted


if __name__ == "__main__":
    main()
