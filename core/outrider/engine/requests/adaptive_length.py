"""The length of drafts by each request's acceptance, and by what iterations have turned out to take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import erfc, exp, hypot, log, pi, sqrt

from outrider.engine.requests.draft_length import DraftCosts, DraftLengthPolicy
from outrider.engine.requests.expected_tokens import ExpectedTokens
from outrider.engine.requests.relative_times import RelativeTimes

_GAIN = 0.01  # how much faster another length must be, for a change
_HORIZON = 2000.0  # iterations for which what is found out is taken to be of use
_STALE = 2500.0  # iterations after which a length may be as much again off what's known: one bad try mustn't count for ever
_TOLD = 0.7  # of the doubt about tokens, what a try takes away
_SHARE = 0.01  # of all iterations, which trying lengths may cost
_SAVED = 6.0  # iterations' worth of it that may be saved up, and that there are at first
_CHANGE = 1.0  # iterations that a try costs, whatever the length: two changes, and a host that looks at it
_SHORTEST, _LONGEST = 3, 15  # iterations of a try that are counted; the one behind a change isn't
_FEW, _REST = 8, 48  # iterations between two thoughts: at first, and later
_ENTERED = 8  # times that a batch gets a size, one of which it thinks at once
_TRIALS = 32  # of all requests of a batch, which are listened to between two thoughts


class _Load:
    """What is known of batches of one size.

    ``estimates``: seconds by length, with hardly a token cached. ``used``: the index of the length in use. ``rest``:
    iterations until the next thought, where nothing is tried. ``thought``: the iteration of the last one, 0 before;
    ``until``: that of the next one. ``tried``: that in which a try of each length began. ``entered``: how often a batch
    got this size.
    """

    def __init__(self, now: int, estimates: Sequence[float], times: RelativeTimes, used: int) -> None:
        self.estimates = estimates
        self.times = times
        self.used = used
        self.rest = _FEW
        self.thought = 0
        self.until = 0
        self.entered = 0
        self.tried = [now] * len(estimates)


class Adaptive(DraftLengthPolicy):
    """The length with the most expected tokens a second, by each request's acceptance and by observed times.

    Expected tokens: :class:`ExpectedTokens`. Times are first estimates, put right by :class:`RelativeTimes`, of each size of
    batch. All requests of an iteration have one length.

    It thinks rarely, once in 48 iterations, since a host that thinks longer than an iteration takes slows it down. In between
    it gives the same length without looking at anything, and soon doesn't even listen. Where another length may be faster, a
    stretch of iterations with it is run between two of the length in use, and only then are times taken. By what is known,
    tries cost 1 % of all iterations at most, and much less once none seems worth it.
    """

    def __init__(self, costs: DraftCosts) -> None:
        super().__init__([length for length, _ in costs.base])
        self.costs = costs
        self.tokens = ExpectedTokens(self.lengths)
        self._per_token = [costs.per_token.get(length, 0.0) for length in self.lengths]
        self.listens = True
        self._loads: dict[int, _Load] = {}
        self._load: _Load | None = None
        self._low = self._high = 0  # of the load
        self._iterations = 0
        self._thought = 0  # the iteration of the last thought, of any size
        self._saved = _SAVED
        self._drafted = self.lengths[-1]
        self._until = 0  # the iteration in which something else begins
        self._next: list[tuple[int, int, bool]] = []  # the last one next: length, iterations, whether they're looked at
        self._times_from: int | None = None  # the first iteration at whose end times are taken
        self._times: list[tuple[int, float]] = []

    @property
    def takes_times(self) -> bool:
        """While a length is tried. The time in which it thought isn't one of an iteration."""
        return self._times_from is not None and self._iterations >= self._times_from

    def without_asking(self, requests: int) -> int | None:
        """None where it's to think."""
        self._iterations += 1
        if self._iterations < self._until and self._low < requests <= self._high:
            return self._drafted
        return self._turn(requests)

    def choose(self, requests: int, cached: int) -> int:
        """As :meth:`choose_for`, of requests of which nothing is known."""
        return self._choose(self.tokens.of_any(requests), requests, cached)

    def choose_for(self, requests: Sequence[int], cached: int) -> int:
        """The fastest, by what is known; plans what is tried, and when it thinks again."""
        return self._choose(self.tokens.of(requests), len(requests), cached)

    def observe_each(self, drafted: int, requests: Sequence[int], accepted: Sequence[int]) -> None:
        """Noted, of each request."""
        self.tokens.note(drafted, requests, accepted)

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Into the acceptance of all."""
        self.tokens.all.observe(drafted, accepted)

    def observe_time(self, drafted: int, requests: int, cached: int, seconds: float) -> None:
        """Noted, as a multiple of what was estimated."""
        self._times.append((drafted, seconds / self.costs.seconds(drafted, requests, cached)))

    # -- from one thought to the next ------------------------------------------------------------------------------

    def _turn(self, requests: int) -> int | None:
        """A stretch is over, or the batch has another size. None where it's to think."""
        if not self._low < requests <= self._high:
            load = self._enter(requests)
            load.entered += 1
            if self._iterations >= load.until:
                if load.entered % _ENTERED == 0 or not load.thought:
                    return None
                load.until = self._iterations + _FEW  # a size that is gone soon isn't worth a thought
            self._go_on(self.lengths[load.used], load.until - self._iterations, requests)
        elif self._next:
            self._begin(*self._next.pop())
        else:
            return None
        return self._drafted

    def _begin(self, length: int, iterations: int, looked_at: bool) -> None:
        self._drafted, self._until = length, self._iterations + iterations
        self.listens = looked_at

    def _go_on(self, length: int, iterations: int, requests: int) -> None:
        """With one length. The first iterations say enough of what passes, the fewer the more requests there are."""
        heard = min(iterations, -(-_TRIALS // requests))
        self._times_from = None
        self._next = [(length, iterations - heard, False)] if heard < iterations else []
        self._begin(length, heard, True)

    def _try(self, length: int, used: int, stretch: int) -> None:
        """A stretch of the length between two of the one in use."""
        self._times_from = self._iterations + 1
        self._next = [(used, stretch, True), (length, stretch, True)]
        self._begin(used, stretch, True)

    def _enter(self, requests: int) -> _Load:
        """The batch has another size. What was known of the nearest one is where that begins."""
        self._weigh()
        low, high = self.costs.span(self.lengths[-1], requests)
        load = self._loads.get(high)
        if load is None:
            near = min(self._loads, key=lambda size: max(size, high) / min(size, high), default=None)
            times = RelativeTimes(len(self.lengths), None if near is None else self._loads[near].times)
            used = len(self.lengths) - 1 if self._load is None else self._load.used
            estimates = [self.costs.seconds(length, requests, 0) for length in self.lengths]
            load = self._loads[high] = _Load(self._iterations, estimates, times, used)
        self._load, self._low, self._high = load, low, high
        return load

    # -- thinking --------------------------------------------------------------------------------------------------

    def _choose(self, expected: Sequence[float], requests: int, cached: int) -> int:
        load = self._load
        if load is None or not self._low < requests <= self._high:
            load = self._enter(requests)
        self._weigh()
        now = self._iterations
        self._saved = min(_SAVED, self._saved + _SHARE * (now - self._thought))
        load.times.age(now - load.thought)
        self._thought = load.thought = now
        seconds = [
            (estimate + per_token * cached) * factor
            for estimate, per_token, factor in zip(load.estimates, self._per_token, load.times.factors, strict=True)
        ]
        rates = [tokens / each for tokens, each in zip(expected, seconds, strict=True)]
        best = max(rates)
        if best > (1 + _GAIN) * rates[load.used]:
            load.used, load.rest = rates.index(best), _FEW
        tried = self._worth_trying(load, rates, seconds)
        if tried is None:
            iterations = load.rest
            load.rest = min(2 * load.rest, _REST)
            self._go_on(self.lengths[load.used], iterations, requests)
        else:
            length, iterations = tried
            self._try(self.lengths[length], self.lengths[load.used], iterations)
            iterations *= 3
        load.until = now + iterations
        return self._drafted

    def _worth_trying(self, load: _Load, rates: Sequence[float], seconds: Sequence[float]) -> tuple[int, int] | None:
        """The index of the length whose try brings most beyond what it costs, and the iterations of a stretch; or None."""
        used, times, most, found = load.used, load.times, 0.0, None
        for length, rate in enumerate(rates):
            if length == used:
                continue
            # As many as halve what isn't known.
            counted = min(_LONGEST, max(_SHORTEST, round(4 * times.noise / times.spread(length, used) ** 2)))
            doubt = self.tokens.doubt(self.lengths[length], self.lengths[used])
            told = hypot(times.would_tell(length, used, counted), _TOLD * doubt)
            told *= 1 + (self._iterations - load.tried[length]) / _STALE
            lost = _CHANGE + (1 + counted) * seconds[length] / seconds[used] * max(0.0, 1 - rate / rates[used])
            worth = _HORIZON * _hoped(log(rate / rates[used]), told) - lost
            if worth > most and lost <= self._saved:
                most, found = worth, (length, 1 + counted, lost)
        if found is None:
            return None
        self._saved -= found[2]
        load.tried[found[0]] = self._iterations
        return found[:2]

    def _weigh(self) -> None:
        """Take in what neighbouring stretches of different lengths took."""
        self._times_from, self._next = None, []
        times, self._times = self._times, []
        if self._load is None or not times:
            return
        runs = [(length, [seconds for _, seconds in run]) for length, run in groupby(times, key=lambda each: each[0])]
        # What a change costs lies in the first iteration behind it.
        runs = [(length, run[1:] if index else run) for index, (length, run) in enumerate(runs)]
        runs = [(self.lengths.index(length), run) for length, run in runs if run]
        known = self._load.times
        if len(runs) == 3 and runs[0][0] == runs[2][0]:
            (used, before), (length, between), (_, behind) = runs
            known.observe_noise([*before, *behind])
            known.observe(length, between, used, [*before, *behind])
        elif len(runs) == 2 and runs[0][0] != runs[1][0]:
            known.observe(*runs[1], *runs[0])


def _hoped(gain: float, told: float) -> float:
    """What finding out about something may bring in the mean: as far as is known it's ``gain`` better than what there is, and
    it will turn out to be more or less by a standard deviation of ``told``. It's only taken if it's better.
    """
    if told <= 0:
        return 0.0
    off = abs(gain) / told
    return told * exp(-off * off / 2) / sqrt(2 * pi) - abs(gain) * erfc(off / sqrt(2)) / 2
