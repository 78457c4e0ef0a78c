"""How many tokens an iteration drafts for each of its requests: one object decides, on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import maxsize

PRIOR = 0.7
"""How likely a drafted token passes, of which nothing is known yet."""

_PRIOR_WEIGHT = 8.0  # trials that the prior counts for
_DECAY = 0.98  # what an iteration leaves of the weight of those before it
_GAIN = 1.02  # how much faster another length must be: what was measured at start is a percent or two off
_STAY = 4  # iterations at least between two changes
_PROBE_EVERY = 256  # iterations with a shorter draft, behind which one with a longer one is run


class DraftLengthPolicy(ABC):
    """Decides how many tokens of a chain are drafted in each iteration. It sees nothing but what it's told, so the same
    calls give the same lengths.

    ``lengths``: those that it may choose, from the shortest; graphs are captured for them. 0 is plain decoding, during which
    the draft still takes in what the target decides, so that the next iteration can draft. Only batches that are greedy
    throughout are asked about; for the others it's the longest.
    """

    listens: bool = True
    """Whether it's of any use now to tell what became of an iteration. So a host needn't gather what nobody looks at."""

    @property
    def takes_times(self) -> bool:
        """Whether :meth:`observe_time` is of any use now; asked where it ``listens``."""
        return False

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(sorted(set(lengths)))

    def without_asking(self, requests: int) -> int | None:
        """The next iteration's length, where it depends on no more than the number of requests; else None, and
        :meth:`choose_for` is asked. So a host needn't gather in each iteration what is looked at in few.
        """
        del requests
        return None

    @abstractmethod
    def choose(self, requests: int, cached: int) -> int:
        """The length for the next iteration, of ``requests`` requests that have ``cached`` tokens together."""

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """What became of an iteration: of ``drafted`` tokens for each request, so many were ``accepted``."""
        del drafted, accepted

    def observe_time(self, drafted: int, requests: int, cached: int, seconds: float) -> None:
        """How long an iteration took that drafted for so many requests and did nothing else. Told where ``takes_times``."""
        del drafted, requests, cached, seconds

    def choose_for(self, requests: Sequence[int], cached: int) -> int:
        """The same as :meth:`choose`, of the requests by their ids; it's what a scheduler asks. The default counts them."""
        return self.choose(len(requests), cached)

    def observe_each(self, drafted: int, requests: Sequence[int], accepted: Sequence[int]) -> None:
        """The same as :meth:`observe`, with each request's id; it's what a scheduler tells. The default leaves ids out."""
        del requests
        self.observe(drafted, accepted)


class FixedLength(DraftLengthPolicy):
    """Always the same length. All of a tree's nodes count: trees have one shape."""

    listens = False

    def __init__(self, length: int) -> None:
        super().__init__((length,))

    def without_asking(self, requests: int) -> int | None:
        """The length."""
        del requests
        return self.lengths[0]

    def choose(self, requests: int, cached: int) -> int:
        """The length."""
        del requests, cached
        return self.lengths[0]


class LengthSchedule(DraftLengthPolicy):
    """Given lengths, one after the other and from the beginning again; for tests."""

    def __init__(self, schedule: Sequence[int]) -> None:
        super().__init__(schedule)
        self._schedule = tuple(schedule)
        self._chosen = 0

    def choose(self, requests: int, cached: int) -> int:
        """The next one."""
        del requests, cached
        self._chosen += 1
        return self._schedule[(self._chosen - 1) % len(self._schedule)]


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """What an iteration takes. ``base``: seconds by length and number of requests, with hardly a cached token.
    ``per_token``: seconds more for each cached token of the batch, by length.
    """

    base: Mapping[tuple[int, int], float]
    per_token: Mapping[int, float] = field(default_factory=dict)
    _sizes: Mapping[int, Sequence[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes: dict[int, list[int]] = {}
        for length, size in sorted(self.base):
            sizes.setdefault(length, []).append(size)
        object.__setattr__(self, "_sizes", sizes)

    def size(self, length: int, requests: int) -> int:
        """The least measured number of requests that holds so many, or the largest."""
        sizes = self._sizes[length]
        return sizes[min(bisect_left(sizes, requests), len(sizes) - 1)]

    def span(self, length: int, requests: int) -> tuple[int, int]:
        """Numbers of requests that have the same :meth:`size`: more than the first, up to the second."""
        sizes = self._sizes[length]
        at = min(bisect_left(sizes, requests), len(sizes) - 1)
        return sizes[at - 1] if at else 0, sizes[at] if at < len(sizes) - 1 else max(sizes[at], maxsize)

    def seconds(self, length: int, requests: int, cached: int) -> float:
        """An iteration of ``requests`` requests: that of the least measured number that holds them, or of the largest."""
        return self.base[length, self.size(length, requests)] + self.per_token.get(length, 0.0) * cached


class Acceptance:
    """How likely the token at each place of a chain passes, if those before it do: an average that forgets, from a prior.

    ``prior``: of each place, which counts for ``weight`` trials; None: :data:`PRIOR` everywhere. ``trials``: after so many
    at a place what was before counts a third; None, and where they are many: after 50 iterations.
    """

    def __init__(
        self,
        most: int,
        prior: Sequence[float] | None = None,
        weight: float = _PRIOR_WEIGHT,
        *,
        trials: float | None = None,
    ) -> None:
        self._passed = [share * weight for share in prior or [PRIOR] * most]
        self._tried = [weight] * most
        self._trials = trials

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """See :meth:`DraftLengthPolicy.observe`. Places that weren't drafted keep what is known of them."""
        counts = [0] * (drafted + 1)
        for count in accepted:
            counts[count] += 1
        self.observe_counts(counts)

    def observe_counts(self, counts: Sequence[int], iterations: int = 1) -> None:
        """The same of several iterations that drafted as much: how often 0, 1, … up to all tokens passed."""
        tried, decay = sum(counts), _DECAY**iterations
        for place, stopped in enumerate(counts[:-1]):
            if not tried:
                return
            left = decay if self._trials is None else max(decay, 1.0 - tried / self._trials)
            self._tried[place] = left * self._tried[place] + tried
            tried -= stopped
            self._passed[place] = left * self._passed[place] + tried

    def fade(self, place: int, left: float, least: float) -> None:
        """From ``place`` on nothing was drafted for a while: trials there count for so much of what they did, and for
        ``least`` ones at least. What is likely stays.
        """
        for index in range(place, len(self._tried)):
            kept = left * self._tried[index]
            if kept >= least:
                self._tried[index], self._passed[index] = kept, left * self._passed[index]

    @property
    def counts(self) -> tuple[tuple[float, float], ...]:
        """Of each place the tokens that passed and that were tried, as far as they count."""
        return tuple(zip(self._passed, self._tried, strict=True))

    @property
    def shares(self) -> tuple[float, ...]:
        """The likelihood of each place."""
        return tuple(passed / tried for passed, tried in zip(self._passed, self._tried, strict=True))

    def expected(self, length: int) -> float:
        """Tokens that an iteration with ``length`` drafted ones yields for a request."""
        total, reached = 1.0, 1.0
        for share in self.shares[:length]:
            reached *= share
            total += reached
        return total


class FollowLoad(DraftLengthPolicy):
    """The length with the most expected tokens a second, by what iterations cost and by the acceptance so far.

    It changes when another length is faster by 2 %, at most every fourth iteration. What a longer draft would accept is found
    out now and then: 256 iterations with less than the most tokens are followed by one with the next length.
    """

    def __init__(self, costs: DraftCosts) -> None:
        super().__init__([length for length, _ in costs.base])
        self.costs = costs
        self.acceptance = Acceptance(self.lengths[-1])
        self._length = self.lengths[-1]
        self._since_change = _STAY
        self._shorter = 0

    def choose(self, requests: int, cached: int) -> int:
        """The fastest, or the one in use where no other is much faster."""
        self._since_change += 1
        if self._since_change >= _STAY:
            best = self.preferred(requests, cached)
            if self.rate(best, requests, cached) > _GAIN * self.rate(self._length, requests, cached):
                self._length, self._since_change = best, 0
        if self._length == self.lengths[-1]:
            self._shorter = 0
            return self._length
        self._shorter += 1
        if self._shorter <= _PROBE_EVERY:
            return self._length
        self._shorter = 0
        return self.lengths[self.lengths.index(self._length) + 1]

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Into the average."""
        self.acceptance.observe(drafted, accepted)

    def rate(self, length: int, requests: int, cached: int) -> float:
        """Expected tokens a second."""
        return requests * self.acceptance.expected(length) / self.costs.seconds(length, requests, cached)

    def preferred(self, requests: int, cached: int) -> int:
        """The fastest length by what is known now; changes nothing."""
        return max(self.lengths, key=lambda length: self.rate(length, requests, cached))


def adaptive_lengths(draft_tokens: int) -> tuple[int, ...]:
    """Those among which acceptance by request chooses: none, one, two, half, all."""
    return tuple(sorted({0, 1, min(2, draft_tokens), -(-draft_tokens // 2), draft_tokens}))


def usual_lengths(draft_tokens: int) -> tuple[int, ...]:
    """The lengths among which load chooses, from a chain of ``draft_tokens``: none, one, two thirds, all."""
    return tuple(sorted({0, 1, -(-2 * draft_tokens // 3), draft_tokens}))
