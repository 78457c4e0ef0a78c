"""How long iterations of each length take beside each other, from stretches of iterations that ran one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot, log, sqrt
from statistics import median, median_low

_FIRST_VARIANCE = 0.1  # of the logarithm of a time that was only estimated: a third either way
_NEAR_VARIANCE = 0.003  # more of it where it's known with a batch of another size
_DRIFT = 1e-8  # variance that an iteration adds to what is known
_NOISE = 0.01  # variance of an iteration's time, before any was seen
_WEIGHT = 0.2  # of what was seen last in that, at least
_CARE = 2.0  # how much more of that a stretch has: neighbours are slow together, and a median of few isn't the best
_OUTLIER = 2.5  # standard deviations: what is farther off says less than others do


class RelativeTimes:
    """Of iterations with a batch of one size: for each length the logarithm of the time taken to the time estimated, and how
    far that may be off.

    A host is faster at one moment than at another, so that times of different moments say little beside each other. What
    counts is the quotient of neighbours: a stretch of iterations of one length, and those around it of another. Only
    differences between lengths mean anything. It's a Kalman filter: what is seen counts the more, the less was known before,
    and the less iterations of the same length differ.
    """

    def __init__(self, count: int, like: RelativeTimes | None = None) -> None:
        """``count``: of lengths, by whose index all is told and asked. ``like``: those of another size, to begin with."""
        self._mean = [0.0] * count
        self._covariance = [[_FIRST_VARIANCE * (i == j) for j in range(count)] for i in range(count)]
        self._seen = 0
        self.noise = _NOISE
        """Variance of an iteration's time, relative to it."""
        if like is not None:
            self._mean, self._covariance = list(like._mean), [list(row) for row in like._covariance]
            self._seen, self.noise = like._seen, like.noise
            self._widen(_NEAR_VARIANCE)
        self.factors = [exp(each) for each in self._mean]
        """What iterations take, relative to what was estimated, but for a factor that they all have."""

    def spread(self, length: int, other: int) -> float:
        """How far the quotient of two lengths' times may be off: a standard deviation of its logarithm."""
        known = self._covariance
        return sqrt(known[length][length] + known[other][other] - 2 * known[length][other])

    def would_tell(self, length: int, other: int, iterations: int) -> float:
        """How far a stretch of so many iterations, between two as long of the other length, would move what is known of the
        quotient: a standard deviation of its logarithm.
        """
        spread = self.spread(length, other)
        return spread**2 / hypot(spread, sqrt(_CARE * self.noise * 1.5 / iterations))

    def age(self, iterations: int) -> None:
        """So many passed since the last time: what is known is worth less."""
        self._widen(iterations * _DRIFT)

    def observe_noise(self, seconds: Sequence[float]) -> None:
        """Iterations of one length, before and behind a stretch of another one, took so long."""
        middle = median(seconds)
        seen = (1.48 * median(abs(each / middle - 1.0) for each in seconds)) ** 2  # what interrupts one doesn't count
        self._seen += 1
        self.noise += max(_WEIGHT, 1 / (1 + self._seen)) * (min(seen, 9 * self.noise) - self.noise)

    def observe(self, length: int, seconds: Sequence[float], other: int, beside: Sequence[float]) -> None:
        """Iterations of ``length`` took so long, and those of the ``other`` length beside them, both relative to their
        estimates.
        """
        mean, known = self._mean, self._covariance
        off = log(median_low(seconds) / median_low(beside)) - mean[length] + mean[other]
        along = [row[length] - row[other] for row in known]
        variance = along[length] - along[other] + _CARE * self.noise * (1 / len(seconds) + 1 / len(beside))
        variance = max(variance, (off / _OUTLIER) ** 2)
        for at, (row, moved) in enumerate(zip(known, along, strict=True)):
            mean[at] += moved / variance * off
            for column, each in enumerate(along):
                row[column] -= moved * each / variance
        self.factors = [exp(each) for each in mean]

    def _widen(self, variance: float) -> None:
        for at, row in enumerate(self._covariance):
            row[at] += variance
