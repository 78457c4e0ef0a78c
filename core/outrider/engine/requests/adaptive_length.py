"""The length of drafts by each request's acceptance, and by what iterations have turned out to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from outrider.engine.requests.draft_length import Acceptance, DraftCosts, DraftLengthPolicy

_GAIN = 1.005  # how much faster another length must be: a change costs nothing, and what is known of times is measured
_KEPT = 9  # times of a length that are kept
_ENOUGH = 3  # of them, to rely on their median: one may have been interrupted
_SHARE_NEW = 0.01  # of the time that finding out may cost, while a length was observed too little with a size of batch
_SHARE = 0.004  # the same once all were observed
_ALLOWANCE = 4.0  # iterations' worth of it that may be saved up
_FIRST = 3.0  # of them there are at first
_LEAST = 0.02  # iterations that a probe is taken to cost at least
_OWN_WEIGHT = 24.0  # trials that all requests' acceptance counts for in that of one, always
_OWN_TRIALS = 100.0  # trials after which what is known of one request is forgotten by two thirds
_ALL_TRIALS = 600.0  # the same of all requests together
_THINKS_EVERY = 8  # iterations, while the batch has the same size
_TIMED = 4  # iterations, behind one in which it thinks
_THINKS_EVERY_NEW = 4  # while too few with the length in use were observed
_FORGOTTEN = 64  # requests beyond those of the batch that are remembered at most


class MeasuredCosts:
    """Times of iterations: first estimates, put right by those that were observed.

    What is kept of an observed iteration is how much longer it took than estimated. The median of the last few counts for its
    length and size of batch. Where too few were observed, that of the nearest size counts, since a slow host is as slow
    there; and where there is none, the least that may be: that of the other lengths, what was seen, or the estimate.
    """

    def __init__(self, first: DraftCosts) -> None:
        self.first = first
        self._ratios: dict[tuple[int, int], deque[float]] = {}
        self._medians: dict[tuple[int, int], float] = {}  # of those that are enough, until there is another time

    def observe(self, length: int, requests: int, cached: int, seconds: float) -> None:
        """An iteration took so many ``seconds``."""
        key = length, self.first.size(length, requests)
        kept = self._ratios.get(key)
        if kept is None:
            kept = self._ratios[key] = deque(maxlen=_KEPT)
        kept.append(seconds / self.first.seconds(length, requests, cached))
        self._medians.pop(key, None)

    def known(self, length: int, requests: int) -> int:
        """How many iterations of the kind are kept."""
        return len(self._ratios.get((length, self.first.size(length, requests)), ()))

    def seconds(self, length: int, requests: int, cached: int) -> float:
        """What an iteration is expected to take."""
        return self.first.seconds(length, requests, cached) * self._ratio(length, requests)

    def _ratio(self, length: int, requests: int) -> float:
        size = self.first.size(length, requests)
        own = self._median(length, size)
        if own is not None:
            return own
        found = [(of, self._median(length, of)) for what, of in self._ratios if what == length]
        near = [(max(of, size) / min(of, size), ratio) for of, ratio in found if ratio is not None]
        if near:
            return min(near)[1]
        others = [self._median(what, of) for what, of in self._ratios if of == size]
        measured = [ratio for ratio in others if ratio is not None]
        # What interrupts an iteration makes it longer: few that took long are no reason to look no further.
        least: float = median(measured) if measured else 1.0
        return min(1.0, least, *self._ratios.get((length, size), ()))

    def _median(self, length: int, size: int) -> float | None:
        """None where too few were observed."""
        key = length, size
        known = self._medians.get(key)
        if known is None and len(self._ratios.get(key, ())) >= _ENOUGH:
            known = self._medians[key] = median(self._ratios[key])
        return known


class _Pending:
    """What iterations of one length accepted since it was last taken in: how many there were, and by request how often so
    many tokens passed.
    """

    def __init__(self) -> None:
        self.iterations = 0
        self.counts: dict[int, list[int]] = {}


class Adaptive(DraftLengthPolicy):
    """The length with the most expected tokens a second, by each request's acceptance and by observed times.

    Expected tokens are the sum over the batch's requests, each by its own acceptance so far beside that of all. Times are
    first estimates until iterations of a length and size were observed (:class:`MeasuredCosts`). What other lengths take, and
    what they accept, is found out by single iterations; by what is known, these cost 1 % of all at most, and 0.4 % once every
    length was observed with a size of batch. All requests of an iteration have one length.

    It thinks once in eight iterations, in four while the length in use is new, and when the batch has another size; in
    between it only notes what it is told, since a host that thinks longer than an iteration takes slows it down. For the same
    reason a single iteration of another length isn't the one in which it thinks: that one takes longer, whatever its length.
    """

    def __init__(self, costs: DraftCosts) -> None:
        super().__init__([length for length, _ in costs.base])
        self.costs = MeasuredCosts(costs)
        self.acceptance = Acceptance(self.lengths[-1], trials=_ALL_TRIALS)
        self._own: dict[int, Acceptance] = {}
        self._pending: dict[int, _Pending] = {}
        self._length = self.lengths[-1]
        self._iterations = 0
        self._counted = False  # the iteration that is asked about
        self._thought = 0  # the iteration in which it last thought
        self._size = 0  # of the batch then
        self._single: int | None = None  # the length of the next iteration alone
        self._allowance = _FIRST
        self._seen: dict[tuple[int, int], int] = {}

    @property
    def takes_times(self) -> bool:
        """Of the first iterations behind one in which it thought, which is over by then."""
        return 0 < self._iterations - self._thought <= _TIMED

    def without_asking(self, requests: int) -> int | None:
        """None where it's to think."""
        self._iterations, self._counted = self._iterations + 1, True
        size = self.costs.first.size(self._length, requests)
        if not self._thought or size != self._size:
            return None
        new = self.costs.known(self._length, requests) < _ENOUGH
        if self._iterations - self._thought >= (_THINKS_EVERY_NEW if new else _THINKS_EVERY):
            return None
        single, self._single = self._single, None
        return self._length if single is None else single

    def choose(self, requests: int, cached: int) -> int:
        """As :meth:`choose_for`, of requests of which nothing is known."""
        self._take_in()
        return self._choose([self.acceptance.expected(length) * requests for length in self.lengths], requests, cached)

    def choose_for(self, requests: Sequence[int], cached: int) -> int:
        """The fastest, or now and then one to find out about."""
        self._take_in()
        if len(self._own) > len(requests) + _FORGOTTEN:
            self._own = {request: self._own[request] for request in requests if request in self._own}
        return self._choose(self._expected(requests), len(requests), cached)

    def observe_each(self, drafted: int, requests: Sequence[int], accepted: Sequence[int]) -> None:
        """Noted, of each request."""
        if not drafted:
            return
        pending = self._pending.get(drafted)
        if pending is None:
            pending = self._pending[drafted] = _Pending()
        pending.iterations += 1
        counts = pending.counts
        for request, count in zip(requests, accepted, strict=True):
            if request not in counts:
                counts[request] = [0] * (drafted + 1)
            counts[request][count] += 1

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Into the acceptance of all."""
        self.acceptance.observe(drafted, accepted)

    def observe_time(self, drafted: int, requests: int, cached: int, seconds: float) -> None:
        """Into the costs."""
        self.costs.observe(drafted, requests, cached, seconds)

    def _take_in(self) -> None:
        """What was noted, into the acceptance of all and of each request."""
        for pending in self._pending.values():
            each = pending.counts
            self.acceptance.observe_counts([sum(counts) for counts in zip(*each.values(), strict=True)], pending.iterations)
            for request, counts in each.items():
                own = self._own.get(request)
                if own is None:
                    most = self.lengths[-1]
                    own = self._own[request] = Acceptance(most, [0.0] * most, 0.0, trials=_OWN_TRIALS)
                own.observe_counts(counts, pending.iterations)
        self._pending.clear()

    def _expected(self, requests: Sequence[int]) -> list[float]:
        """Tokens that an iteration of each length yields for these requests, each by its own trials beside those of all."""
        shares = [share * _OWN_WEIGHT for share in self.acceptance.shares]
        known = [self._own[request] for request in requests if request in self._own]
        new = len(requests) - len(known)
        expected = [float(len(known))] * (len(shares) + 1)
        for own in known:
            total, reached = 0.0, 1.0
            for place, (share, (passed, tried)) in enumerate(zip(shares, own.counts, strict=True), start=1):
                reached *= (passed + share) / (tried + _OWN_WEIGHT)
                total += reached
                expected[place] += total
        return [expected[length] + new * self.acceptance.expected(length) for length in self.lengths]

    def _choose(self, expected: Sequence[float], requests: int, cached: int) -> int:
        self._iterations += not self._counted
        self._counted = False
        seconds = {length: self.costs.seconds(length, requests, cached) for length in self.lengths}
        rates = {length: tokens / seconds[length] for length, tokens in zip(self.lengths, expected, strict=True)}
        self._seen[self._length, self.costs.first.size(self._length, requests)] = self._iterations
        best = max(self.lengths, key=rates.__getitem__)
        if rates[best] > _GAIN * rates[self._length]:
            self._length = best
        lost = {
            length: _LEAST + seconds[length] / seconds[best] * max(0.0, 1.0 - rates[length] / rates[best])
            for length in self.lengths
            if length != self._length
        }
        self._single = self._probe(lost, requests, self._iterations - self._thought)
        self._thought, self._size = self._iterations, self.costs.first.size(self._length, requests)
        if self._single is not None:
            self._seen[self._single, self.costs.first.size(self._single, requests)] = self._iterations
        return self._length

    def _probe(self, lost: Mapping[int, float], requests: int, passed: int) -> int | None:
        """Another length that is worth finding out about and affordable now, or None.

        ``lost``: of each other length, iterations of the fastest one that fit into the time that an iteration with it loses.
        ``passed``: iterations since the last time.
        """
        new = [length for length in lost if self.costs.known(length, requests) < _ENOUGH]
        self._allowance = min(self._allowance + passed * (_SHARE_NEW if new else _SHARE), _ALLOWANCE)
        if new:
            wanted = min(new, key=lambda length: (self.costs.known(length, requests), lost[length]))
        elif lost:
            # The longer ago, and the less it costs, the sooner.
            wanted = max(lost, key=lambda length: self._age(length, requests) / lost[length])
        else:
            return None
        if lost[wanted] > self._allowance:
            return None
        self._allowance -= lost[wanted]
        return wanted

    def _age(self, length: int, requests: int) -> int:
        """Iterations since the last one of the length with a batch of the size."""
        return self._iterations - self._seen.get((length, self.costs.first.size(length, requests)), 0)
