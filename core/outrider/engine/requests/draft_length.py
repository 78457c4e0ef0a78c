"""Host policies for the draft length: how many tokens an iteration drafts for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

_PRIOR_ACCEPTANCE = 0.7  # assumed probability that a draft token is accepted, before any observation
_PRIOR_TRIALS = 8.0  # number of trials that the prior counts for
_DECAY_PER_ITERATION = 0.98  # factor on the weight of earlier observations
_MIN_SPEEDUP = 1.02  # another length must be faster by this factor: measured costs are off by 1 or 2 percent
_MIN_ITERATIONS_BETWEEN_CHANGES = 4
_MAX_SHORT_LOOKUPS = 64  # consecutive iterations in which a class of repeats isn't drafted for in full
_PRIOR_OF_REPEATS = (0.3, 0.3, 0.6, 0.8, 0.95)  # assumed acceptance by class of repeats
_HOPED_ACCEPTANCE = 0.8  # assumed for a request without observations; high, so that it gets drafts to observe
_HOPED_TRIALS = 4.0  # number of trials that this assumption counts for
MAX_REPEATS = 8
"""Maximum number of repeated tokens that the host counts."""
_MAX_SHORT_ITERATIONS = 256  # consecutive iterations with a shorter draft before one tries the next longer length


class DraftLengthPolicy(ABC):
    """A policy that chooses the draft length of each iteration. The same calls give the same lengths on every rank.

    The scheduler asks the policy only about batches in which all requests are greedy. Other batches draft the longest length.
    """

    needs_acceptance: bool = True
    """True if the policy reads acceptance counts, so that the scheduler calls :meth:`observe` after each iteration."""

    context: int | None = None
    """The draft's context in tokens: nothing is drafted for a batch whose requests all exceed it. None: the target's."""

    reads_load: bool = True
    """True if :meth:`choose` reads its arguments. Otherwise the scheduler does not count cached tokens."""

    widths: tuple[int, ...] = ()
    """Mean numbers of tokens of a request that the target can verify if requests have different draft lengths, in ascending
    order; the engine captures graphs for each. Empty: all requests of a batch have one length. Otherwise the scheduler calls
    :meth:`choose_each` in place of :meth:`choose`.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(sorted(set(lengths)))
        """The lengths that the policy can choose, in ascending order; the engine captures graphs for each.

        An iteration of length 0 drafts nothing. Its draft-extend stage still processes the target's tokens, so that the
        following iteration can draft.
        """

    reads_repeats: bool = False
    """True if the scheduler passes ``repeats``: for each request, how many of its last tokens occurred before in its text, as
    far as the host has read it. Otherwise ``repeats`` is empty.
    """

    @abstractmethod
    def choose(self, requests: int, cached: int, repeats: Sequence[int] = ()) -> int:
        """Return the length for the next iteration of ``requests`` requests with ``cached`` KV tokens in total."""

    def choose_each(self, requests: Sequence[RequestAcceptance], cached: int) -> tuple[int, tuple[int, ...]]:
        """Return the length for the next iteration, and for each request how many of these draft tokens the target verifies;
        no numbers if it verifies all. ``requests``: the acceptance of each request so far.

        The numbers, plus 1 for each request, add up to at most the largest of :attr:`widths` times the number of requests.
        The default chooses one length.
        """
        return self.choose(len(requests), cached), ()

    def observe(self, drafted: int, accepted: Sequence[int], repeats: Sequence[int] = ()) -> None:
        """Record, for each request of one iteration, how many of its ``drafted`` draft tokens the target accepted. Called
        once the host has read the results. ``repeats`` are those of :meth:`choose`.
        """
        del drafted, accepted, repeats


class LengthSchedule(DraftLengthPolicy):
    """A policy that repeats a given sequence of lengths; a sequence of one is a fixed length. For trees, whose shape never
    changes, the length counts all nodes.

    With a ``context``, longer requests are not drafted for. With ``widths``, each request gets the next length of the
    sequence.
    """

    needs_acceptance = reads_load = False

    def __init__(self, schedule: Sequence[int], widths: tuple[int, ...] = (), *, context: int | None = None) -> None:
        super().__init__(schedule if context is None else (0, *schedule))
        self.widths, self.context = widths, context
        self._schedule = tuple(schedule)
        self._num_chosen = 0

    def choose_each(self, requests: Sequence[RequestAcceptance], cached: int) -> tuple[int, tuple[int, ...]]:
        """Return the next lengths of the sequence: one length if they are equal and not the longest of all."""
        verified = tuple(self.choose(1, cached) for _ in requests)
        if len(set(verified)) == 1 and verified[0] < self.lengths[-1]:
            return verified[0], ()
        return self.lengths[-1], verified

    def choose(self, requests: int, cached: int, repeats: Sequence[int] = ()) -> int:
        """Return the next draft length of the sequence."""
        del requests, cached, repeats
        self._num_chosen += 1
        return self._schedule[(self._num_chosen - 1) % len(self._schedule)]


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Measured durations of iterations by draft length and batch size."""

    base: Mapping[tuple[int, int], float]
    """Seconds of an iteration by (draft length, number of requests), measured with a nearly empty KV cache."""
    per_token: Mapping[int, float] = field(default_factory=dict)
    """Additional seconds for each cached token of the batch, by draft length."""
    _sizes: Mapping[int, Sequence[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes: dict[int, list[int]] = {}
        for length, size in sorted(self.base):
            sizes.setdefault(length, []).append(size)
        object.__setattr__(self, "_sizes", sizes)

    def size(self, length: int, requests: int) -> int:
        """Return the smallest measured batch size of at least ``requests``, or else the largest one."""
        sizes = self._sizes[length]
        return sizes[min(bisect_left(sizes, requests), len(sizes) - 1)]

    def seconds(self, length: int, requests: int, cached: int) -> float:
        """Return the estimated duration of an iteration, by the measured batch size of :meth:`size`."""
        return self.base[length, self.size(length, requests)] + self.per_token.get(length, 0.0) * cached

    def in_ms(self) -> tuple[tuple[int, int, float], ...]:
        """Return the entries of ``base`` for a report, as (draft length, number of requests, milliseconds)."""
        return tuple((length, size, 1e3 * seconds) for (length, size), seconds in sorted(self.base.items()))


class AcceptanceEstimate:
    """Estimated acceptance of each position of a chain: an exponential moving average that starts from a prior.

    The acceptance of a position is the probability that its token is accepted if all tokens before it are.
    """

    def __init__(self, positions: int, prior: float = _PRIOR_ACCEPTANCE) -> None:
        self._accepted = [prior * _PRIOR_TRIALS] * positions
        self._tried = [_PRIOR_TRIALS] * positions

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Update the positions that the iteration drafted, see :meth:`DraftLengthPolicy.observe`."""
        counts = [0] * (drafted + 1)
        for count in accepted:
            counts[count] += 1
        tried = sum(counts)
        for position, rejected in enumerate(counts[:-1]):
            if not tried:
                return
            self._tried[position] = _DECAY_PER_ITERATION * self._tried[position] + tried
            tried -= rejected
            self._accepted[position] = _DECAY_PER_ITERATION * self._accepted[position] + tried

    @property
    def shares(self) -> tuple[float, ...]:
        """The acceptance probability of each position."""
        return tuple(accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True))

    def expected(self, length: int) -> float:
        """Return the expected number of tokens of a request in an iteration that drafts ``length`` tokens."""
        total, all_accepted = 1.0, 1.0
        for probability in self.shares[:length]:
            all_accepted *= probability
            total += all_accepted
        return total


class RequestAcceptance:
    """The estimated acceptance of one request's draft tokens: a moving average that returns to an assumption.

    The estimate of a request whose drafts are not verified rises again, so that they are verified at times.
    """

    def __init__(self) -> None:
        self._accepted = self._tried = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Update the estimate with one iteration, in which the target verified ``drafted`` tokens and accepted some."""
        self._accepted = _DECAY_PER_ITERATION * self._accepted + accepted
        self._tried = _DECAY_PER_ITERATION * self._tried + min(accepted + 1, drafted)

    @property
    def share(self) -> float:
        """The probability, above 0 and below 1, that a draft token is accepted if all tokens before it are."""
        return (_HOPED_ACCEPTANCE * _HOPED_TRIALS + self._accepted) / (_HOPED_TRIALS + self._tried)


class LoadDraftLength(DraftLengthPolicy):
    """A policy that maximizes the expected tokens per second, from iteration costs and the acceptance so far.

    The length changes if another one is at least 2 % faster, at most every fourth iteration. After 256 iterations below the
    longest length, one iteration drafts the next longer length to measure its acceptance.
    """

    def __init__(self, costs: DraftCosts) -> None:
        super().__init__([length for length, _ in costs.base])
        self.costs = costs
        self.acceptance = AcceptanceEstimate(self.lengths[-1])
        self._length = self.lengths[-1]
        self._since_change = _MIN_ITERATIONS_BETWEEN_CHANGES
        self._short_iterations = 0

    def choose(self, requests: int, cached: int, repeats: Sequence[int] = ()) -> int:
        """Return the current draft length, after a change to another length that is at least 2 % faster."""
        del repeats
        self._since_change += 1
        if self._since_change >= _MIN_ITERATIONS_BETWEEN_CHANGES:
            best = self.preferred(requests, cached)
            if self.rate(best, requests, cached) > _MIN_SPEEDUP * self.rate(self._length, requests, cached):
                self._length, self._since_change = best, 0
        if self._length == self.lengths[-1]:
            self._short_iterations = 0
            return self._length
        self._short_iterations += 1
        if self._short_iterations <= _MAX_SHORT_ITERATIONS:
            return self._length
        self._short_iterations = 0
        return self.lengths[self.lengths.index(self._length) + 1]

    def observe(self, drafted: int, accepted: Sequence[int], repeats: Sequence[int] = ()) -> None:
        """Update the acceptance estimate with the accepted draft tokens of one iteration."""
        del repeats
        self.acceptance.observe(drafted, accepted)

    def rate(self, length: int, requests: int, cached: int) -> float:
        """Return the expected tokens per second of the whole batch at draft length ``length``."""
        return requests * self.acceptance.expected(length) / self.costs.seconds(length, requests, cached)

    def preferred(self, requests: int, cached: int) -> int:
        """Return the fastest length by the current estimates, without changing the length in use."""
        return max(self.lengths, key=lambda length: self.rate(length, requests, cached))


class RequestDraftLength(DraftLengthPolicy):
    """A policy that maximizes the expected tokens per second with a draft length for each request, from its own acceptance.

    It compares one length for all requests with the longest draft, of which the target verifies only the likeliest tokens of
    all requests: as many as one of the widths allows.
    """

    def __init__(self, costs: DraftCosts, packed: DraftCosts) -> None:
        """``costs``: iterations with one length. ``packed``: iterations of the longest draft, with widths as lengths."""
        super().__init__([length for length, _ in costs.base])
        self.widths = tuple(sorted({width for width, _ in packed.base}))
        self.costs, self.packed = costs, packed

    def choose(self, requests: int, cached: int, repeats: Sequence[int] = ()) -> int:
        """Return the length for requests without observations."""
        del repeats
        return self.choose_each([RequestAcceptance()] * requests, cached)[0]

    def choose_each(self, requests: Sequence[RequestAcceptance], cached: int) -> tuple[int, tuple[int, ...]]:
        """Return the fastest of the lengths for all requests and of the widths. Drafts of a width are those that are
        accepted with the highest probabilities.
        """
        count, longest = len(requests), self.lengths[-1]
        shares = [request.share for request in requests]
        chances = [share**number for number in range(1, longest + 1) for share in shares]  # first tokens first
        likeliest = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
        in_order = [0.0, *accumulate(chances)]
        by_chance = [0.0, *accumulate(chances[index] for index in likeliest)]

        def rate(length: int) -> float:
            return (count + in_order[count * length]) / self.costs.seconds(length, count, cached)

        def packed_rate(width: int) -> float:
            return (count + by_chance[count * (width - 1)]) / self.packed.seconds(width, count, cached)

        length, width = max(self.lengths, key=rate), max(self.widths, key=packed_rate)
        if packed_rate(width) <= _MIN_SPEEDUP * rate(length):
            return length, ()
        verified = [0] * count
        for index in likeliest[: count * (width - 1)]:
            verified[index % count] += 1
        return longest, tuple(verified)


class LookupDraftLength(DraftLengthPolicy):
    """A policy for drafts that are looked up in a request's own text: it maximizes the expected tokens per second.

    The more of a request's last tokens occurred before, the likelier its drafts are accepted. So each class of repeats has an
    acceptance estimate of its own: quoted text is drafted for, and new text is not. After 64 shorter drafts in a row, a class
    gets the longest one once, to measure its acceptance.
    """

    reads_repeats = True

    def __init__(self, costs: DraftCosts) -> None:
        super().__init__([length for length, _ in costs.base])
        self.costs = costs
        self.acceptance = [AcceptanceEstimate(self.lengths[-1], prior) for prior in _PRIOR_OF_REPEATS]
        """Estimated acceptance by class of repeats."""
        self._short_iterations = [0] * len(self.acceptance)

    def choose(self, requests: int, cached: int, repeats: Sequence[int] = ()) -> int:
        """Return the length with the most expected tokens per second for requests with these repeats."""
        classes = [_repeat_class(count) for count in repeats]

        def rate(length: int) -> float:
            expected = sum(self.acceptance[each].expected(length) for each in classes)
            return expected / self.costs.seconds(length, requests, cached)

        chosen, longest = max(self.lengths, key=rate), self.lengths[-1]
        for each in set(classes):
            self._short_iterations[each] = 0 if chosen == longest else self._short_iterations[each] + 1
            if self._short_iterations[each] > _MAX_SHORT_LOOKUPS:
                self._short_iterations[each], chosen = 0, longest
        return chosen

    def observe(self, drafted: int, accepted: Sequence[int], repeats: Sequence[int] = ()) -> None:
        """Update the estimate of each request's class with its accepted draft tokens."""
        for count, repeated in zip(accepted, repeats, strict=True):
            self.acceptance[_repeat_class(repeated)].observe(drafted, (count,))


def _repeat_class(count: int) -> int:
    """Return the class of ``count`` repeated tokens: 0, 1, 2 and 3, 4 to 7, 8."""
    return count.bit_length()


class RepeatedSuffix:
    """The number of a text's last tokens that occurred before, in the same order. Updated with each new token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last_ends: dict[tuple[int, int], int] = {}  # index of the second token of each pair's last occurrence
        self._count = 0

    def update(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Read the tokens of ``prompt`` and ``output`` that are new, and return the number for the whole text: 0, or 2 to
        :data:`MAX_REPEATS`.
        """
        tokens, read = self._tokens, len(self._tokens)
        tokens += prompt[read:]
        tokens += output[max(0, read - len(prompt)) :]
        for index in range(max(1, read), len(tokens)):
            pair = tokens[index - 1], tokens[index]
            end = self._last_ends.get(pair)
            self._last_ends[pair] = index
            self._count = 0 if end is None or index + 1 < len(tokens) else self._common_suffix(end)
        return self._count

    def _common_suffix(self, end: int) -> int:
        """Return how many tokens up to index ``end`` equal those up to the last one."""
        tokens, count = self._tokens, 0
        while count < MAX_REPEATS and count <= end and tokens[end - count] == tokens[-1 - count]:
            count += 1
        return count


def default_widths(draft_tokens: int) -> tuple[int, ...]:
    """Return the widths of :class:`RequestDraftLength`: a half and three quarters of the tokens that a whole draft of
    ``draft_tokens`` verifies, without those that one draft length for all requests has anyway.
    """
    whole = draft_tokens + 1
    return tuple(sorted({-(-whole // 2), -(-3 * whole // 4)} - {1, whole}))


def default_draft_lengths(draft_tokens: int) -> tuple[int, ...]:
    """Return the lengths that :class:`LoadDraftLength` chooses from: 0, 1, two thirds of ``draft_tokens``, and all of
    them.
    """
    return tuple(sorted({0, 1, -(-2 * draft_tokens // 3), draft_tokens}))
