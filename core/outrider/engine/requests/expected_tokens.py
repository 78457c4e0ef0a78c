"""How many tokens an iteration of each length yields, by what was accepted so far."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from outrider.engine.requests.draft_length import Acceptance

EACH = 4
"""Requests up to which each one's own acceptance counts. With more, theirs is that of all in the mean; and it takes long."""

_OWN_WEIGHT = 24.0  # trials that all requests' acceptance counts for in that of one, always
_OWN_TRIALS = 100.0  # trials after which what is known of one request is forgotten by two thirds
_ALL_TRIALS = 600.0  # the same of all requests together
_FADING, _LEAST_TRIALS = 0.95, 4.0  # what is left of trials of places that aren't drafted, each time; and at least
_FORGOTTEN = 64  # requests beyond those of the batch that are remembered at most
_NOTES = 64  # iterations that are noted at most before they're taken in


class ExpectedTokens:
    """Notes what iterations accepted, and takes it in when it's asked: a note costs the host next to nothing.

    Up to four requests each count by their own acceptance beside that of all; more by that of all.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self.all = Acceptance(lengths[-1], trials=_ALL_TRIALS)
        self.own: dict[int, Acceptance] = {}
        self._notes: list[tuple[int, Sequence[int], Sequence[int]]] = []

    def note(self, drafted: int, requests: Sequence[int], accepted: Sequence[int]) -> None:
        """An iteration that drafted so many tokens for these requests. Neither list may change behind it."""
        if len(self._notes) >= _NOTES:
            self._take_in()
        if drafted:
            self._notes.append((drafted, requests, accepted))

    def of(self, requests: Sequence[int]) -> list[float]:
        """Tokens of all ``requests`` in an iteration of each length."""
        self._take_in()
        if len(requests) > EACH:
            return self._of_any(len(requests))
        if len(self.own) > len(requests) + _FORGOTTEN:
            self.own = {request: self.own[request] for request in requests if request in self.own}
        known = [self.own[request] for request in requests if request in self.own]
        expected = [0.0] * len(self._lengths)
        shares = [share * _OWN_WEIGHT for share in self.all.shares]
        for own in known:
            yields, total, reached = [1.0], 1.0, 1.0
            for share, (passed, tried) in zip(shares, own.counts, strict=True):
                reached *= (passed + share) / (tried + _OWN_WEIGHT)
                total += reached
                yields.append(total)
            for at, length in enumerate(self._lengths):
                expected[at] += yields[length]
        if len(known) < len(requests):
            others = self._of_any(len(requests) - len(known))
            expected = [each + more for each, more in zip(expected, others, strict=True)]
        return expected

    def of_any(self, requests: int) -> list[float]:
        """The same of so many of which nothing is known."""
        self._take_in()
        return self._of_any(requests)

    def _of_any(self, requests: int) -> list[float]:
        reached = 1.0
        expected = [total := 1.0]
        for share in self.all.shares:
            reached *= share
            expected.append(total := total + reached)
        return [requests * expected[length] for length in self._lengths]

    def doubt(self, length: int, used: int) -> float:
        """How far the tokens of a ``length`` beyond the one in use may be off, relative to them: a standard deviation. Those
        of shorter ones are known by the same drafts.
        """
        if length <= used:
            return 0.0
        total, reached, beyond, variance = 1.0, 1.0, 0.0, 0.0
        for place, (passed, tried) in enumerate(self.all.counts[:length]):
            share = (passed + 0.5) / (tried + 1.0)
            reached *= share
            total += reached
            if place >= used:
                beyond += reached
                variance += (1.0 - share) / (share * (tried + 1.0))
        return beyond / total * sqrt(variance)

    def _take_in(self) -> None:
        """What was noted, into the acceptance of all and of each request."""
        notes, self._notes = self._notes, []
        # By length: iterations, how often so many tokens passed, and the same of each request.
        found: dict[int, tuple[list[int], dict[int, list[int]]]] = {}
        iterations: dict[int, int] = {}
        for drafted, requests, accepted in notes:
            if drafted not in found:
                found[drafted], iterations[drafted] = ([0] * (drafted + 1), {}), 0
            iterations[drafted] += 1
            counts, each = found[drafted]
            if len(requests) > EACH:
                for count in accepted:
                    counts[count] += 1
                continue
            for request, count in zip(requests, accepted, strict=True):
                if request not in each:
                    each[request] = [0] * (drafted + 1)
                each[request][count] += 1
        for drafted, (counts, each) in found.items():
            for request, passed in each.items():
                known = self.own.get(request)
                if known is None:
                    most = self._lengths[-1]
                    known = self.own[request] = Acceptance(most, [0.0] * most, 0.0, trials=_OWN_TRIALS)
                known.observe_counts(passed, iterations[drafted])
            self.all.observe_counts([sum(each) for each in zip(counts, *each.values(), strict=True)], iterations[drafted])
        # What longer drafts accepted once may have changed since; in time it's doubtful enough for another look.
        self.all.fade(max(found, default=0), _FADING, _LEAST_TRIALS)
