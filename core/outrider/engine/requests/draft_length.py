"""Policies that decide on the host how many tokens an iteration drafts for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_PRIOR = 0.7  # probability that a drafted token is accepted, before anything is known
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

    reads_load: bool = True
    """True if :meth:`choose` reads its arguments. Otherwise the scheduler does not count cached tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(sorted(set(lengths)))

    @abstractmethod
    def choose(self, requests: int, cached: int) -> int:
        """The length for the next iteration, of ``requests`` requests that have ``cached`` tokens together."""

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """What became of an iteration: of ``drafted`` tokens for each request, so many were ``accepted``."""
        del drafted, accepted


class FixedLength(DraftLengthPolicy):
    """Always the same length. All of a tree's nodes count: trees have one shape."""

    listens = reads_load = False

    def __init__(self, length: int) -> None:
        super().__init__((length,))

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

    def seconds(self, length: int, requests: int, cached: int) -> float:
        """An iteration of ``requests`` requests: that of the least measured number that holds them, or of the largest."""
        return self.base[length, self.size(length, requests)] + self.per_token.get(length, 0.0) * cached


class Acceptance:
    """How likely the token at each place of a chain passes, if those before it do: an average that forgets, from a prior.

    Each place starts at 0.7, which counts for 8 trials. An iteration leaves 98 % of the weight of earlier ones.
    """

    def __init__(self, places: int) -> None:
        self._passed = [_PRIOR * _PRIOR_WEIGHT] * places
        self._tried = [_PRIOR_WEIGHT] * places

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """See :meth:`DraftLengthPolicy.observe`. Places that weren't drafted keep what is known of them."""
        counts = [0] * (drafted + 1)
        for count in accepted:
            counts[count] += 1
        tried = sum(counts)
        for place, stopped in enumerate(counts[:-1]):
            if not tried:
                return
            self._tried[place] = _DECAY * self._tried[place] + tried
            tried -= stopped
            self._passed[place] = _DECAY * self._passed[place] + tried

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


def usual_lengths(draft_tokens: int) -> tuple[int, ...]:
    """The lengths among which load chooses, from a chain of ``draft_tokens``: none, one, two thirds, all."""
    return tuple(sorted({0, 1, -(-2 * draft_tokens // 3), draft_tokens}))
