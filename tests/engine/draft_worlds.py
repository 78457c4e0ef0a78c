"""Drawn worlds for policies of draft lengths: what iterations take, what passes, and how fast a policy is there."""

import math
import random
from dataclasses import dataclass

from outrider.engine.requests.adaptive_length import Adaptive
from outrider.engine.requests.draft_length import DraftCosts, FixedLength, adaptive_lengths

SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class World:
    """What iterations take and what passes; ``first`` is what was measured before requests were served, wrongly."""

    seconds: dict
    first: DraftCosts
    shares: tuple
    spread: float
    seed: int
    thinking: float = 0.0
    """Seconds that the host takes longer in an iteration in which the policy thinks."""

    @classmethod
    def draw(cls, seed, wrong, *, host=0.0):
        """An iteration's fixed part, what a drafted token costs, arithmetic from some number of tokens on.

        ``host``: what the host takes for an iteration, relative to a device's plain one; no estimate knows of it.
        """
        rng = random.Random(seed)
        most = rng.choice([4, 7])
        fixed, drafting = rng.uniform(0.5, 4), rng.choice([0.01, 0.05, 0.12, 0.25, 0.5]) * rng.uniform(0.7, 1.3)
        token, free = rng.choice([0.002, 0.01, 0.04]) * rng.uniform(0.5, 2), rng.choice([1, 8, 32, 128])
        seconds = {
            (length, size): 1e-3 * (fixed * (1 + drafting * length) + token * max(0, size * (length + 1) - free))
            for size in SIZES
            for length in adaptive_lengths(most)
        }
        first = DraftCosts({key: value * rng.uniform(1 / wrong, wrong) for key, value in seconds.items()})
        slow = {(length, size): host * seconds[0, size] for length, size in seconds}
        seconds = {key: max(value, slow[key]) for key, value in seconds.items()}
        place, fall = rng.uniform(0.2, 0.95), rng.uniform(0.8, 1.02)
        shares, spread = tuple(min(0.98, place * fall**i) for i in range(most)), rng.choice([0, 0.1, 0.25])
        return cls(seconds, first, shares, spread, seed, 0.5 * min(seconds.values()) if host else 0.0)

    def request(self, number):
        rng = random.Random(self.seed * 1_000_003 + number)
        return [number, rng.gauss(0, self.spread), rng.randint(64, 256), rng]

    def rate(self, policy, batch, tokens, *, told=True):
        """Tokens a second of a policy, requests following each other. Told times have noise; one in fifty is far too long."""
        number, made, took = batch, 0, 0.0
        live, noise = [self.request(each) for each in range(batch)], random.Random(self.seed + 5)
        size = min(each for each in SIZES if each >= batch)
        while made < tokens:
            ids = [request[0] for request in live]
            length = policy.without_asking(batch)
            thinks = length is None
            if thinks:
                length = policy.choose_for(ids, 0)
            accepted = []
            for request in live:
                count = 0
                while count < length and request[3].random() < min(0.99, max(0.01, self.shares[count] + request[1])):
                    count += 1
                accepted.append(count)
                request[2] -= count + 1
            made += sum(accepted) + batch
            seconds = self.seconds[length, size]
            took += seconds  # but for thinking, whose share is what it is
            seconds += self.thinking * thinks
            if told and policy.listens and policy.takes_times:
                policy.observe_time(length, batch, 0, seconds * noise.gauss(1, 0.02) * (5 if noise.random() < 0.02 else 1))
            if policy.listens:
                policy.observe_each(length, ids, accepted)
            for index, request in enumerate(live):
                if request[2] <= 0:
                    live[index], number = self.request(number), number + 1
        return made / took

    def gap(self, batch, tokens, **options):
        """How much slower the policy is than the best fixed length."""
        best = max(self.rate(FixedLength(length), batch, tokens) for length in adaptive_lengths(len(self.shares)))
        return 1 - self.rate(Adaptive(self.first), batch, tokens, **options) / best


@dataclass
class Served:
    """A request that is served: what passes at each place, tokens that it still wants, and what an iteration yields."""

    id: int
    shares: list
    left: int
    draws: random.Random
    expected: list


class HostWorld:
    """Iterations are the host's: lengths differ by little, times by 10 to 20 % with a heavy tail, and drift; a change of
    length costs a part of an iteration, and so does thinking. Results are told one iteration late, as where
    the host runs ahead.

    What counts are expected tokens and times without noise, so that few iterations say much.
    """

    SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)

    def __init__(self, seed):
        rng = random.Random(seed)
        self.seed, self.most = seed, rng.choice([4, 7, 7])
        per_token, undrafted = rng.uniform(0.003, 0.025), rng.choice([0.0, 0.1])
        self.seconds = {
            (length, size): 2.4e-4
            * (1 + 0.055 * size)
            * (1 + per_token * length * (1 if size < 32 else rng.uniform(1, 1.5)) - undrafted * (length == 0))
            * rng.uniform(0.99, 1.01)
            for size in self.SIZES
            for length in adaptive_lengths(self.most)
        }
        wrong = rng.choice([0.05, 0.1, 0.15])
        self.first = DraftCosts({key: 0.9 * value * math.exp(rng.gauss(0, wrong)) for key, value in self.seconds.items()})
        place, fall = rng.uniform(0.25, 0.8), rng.uniform(0.85, 1.02)
        self.shares = [min(0.97, place * fall**i) for i in range(self.most)]
        self.spread, self.noise, self.change = rng.choice([0, 0.08, 0.15]), rng.uniform(0.1, 0.2), rng.choice([0.1, 0.3, 0.6])

    def request(self, number, tokens):
        rng = random.Random(self.seed * 1_000_003 + number)
        off = rng.gauss(0, self.spread)
        shares = [min(0.99, max(0.01, share + off)) for share in self.shares]
        expected, reached = [1.0], 1.0
        for share in shares:
            reached *= share
            expected.append(expected[-1] + reached)
        return Served(number, shares, tokens, rng, expected)

    def rate(self, policy, batch, iterations, *, thinking=0.0, groups=False):
        """Tokens a second. ``groups``: a batch is decoded to its end before the next one, and gets smaller; else a request
        that is over is followed by another one. ``thinking``: what a thought costs, in iterations.
        """
        noise, wanted = random.Random(self.seed + 5), random.Random(self.seed + 6)
        live, number, made, took, level, last, untold = [], 0, 0.0, 0.0, 0.0, None, None
        for _ in range(iterations):
            if groups and not live:
                untold = None
            for _ in range(0 if groups and live else batch - len(live)):
                live.append(self.request(number, 256 if groups else wanted.randint(64, 256)))
                number += 1
            ids, size = [each.id for each in live], min(size for size in self.SIZES if size >= len(live))
            length = policy.without_asking(len(live))
            thinks = length is None
            if thinks:
                length = policy.choose_for(ids, 0)
            seconds = self.seconds[length, size] * (1 + self.change * (last not in (None, length)) + thinking * thinks)
            took, last = took + seconds, length
            level = 0.995 * level + 0.01 * noise.gauss(0, 1)
            seconds *= math.exp(level + self.noise * noise.gauss(0, 1))
            seconds *= 1 + (noise.expovariate(1) if noise.random() < 0.05 else 0)
            accepted = []
            for each in live:
                count = 0
                while count < length and each.draws.random() < each.shares[count]:
                    count += 1
                accepted.append(count)
                each.left -= count + 1
                made += each.expected[length]
            if untold is not None and policy.listens:
                policy.observe_each(*untold[:3])
                if policy.takes_times:
                    policy.observe_time(untold[0], len(untold[1]), 0, untold[3])
            untold = length, ids, accepted, seconds
            live = [each for each in live if each.left > 0]
        return made / took

    def gaps(self, batch, iterations, *, policy=Adaptive, **options):
        """How much slower the policy is than the best fixed length: from the first iteration on, and the same once more."""
        best = max(self.rate(FixedLength(length), batch, iterations, **options) for length in adaptive_lengths(self.most))
        adapts = policy(self.first)
        return [1 - self.rate(adapts, batch, iterations, thinking=0.1, **options) / best for _ in range(2)]
