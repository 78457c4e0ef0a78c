"""Histories of an engine's callers, drawn: streams read in turn, closed and dropped, ``generate`` beside them, requests that
are wrong in every way, interrupts, faults, other threads and forks. Whatever happens, nobody gets a wrong token and nothing
is lost.
"""

import os
import random
import threading
import warnings

import numpy as np

from outrider import SamplingParams
from outrider.device import ConfigError, DeviceFault
from outrider.engine.session import WrongThread
from outrider.errors import RequestError
from outrider_proof import tiny

PROMPTS = tuple(tuple(random.Random(f"prompt {i}").choices(range(tiny.VOCABULARY), k=3 + 4 * i)) for i in range(5))
LONGEST = 12


class Interrupt(BaseException):
    """As Ctrl-C: no Exception."""


class StageFailed(Exception):
    """As an error of a library that a stage calls."""


BAD_REQUESTS = (
    lambda engine: engine.add_request("123"),
    lambda engine: engine.add_request([1.7]),
    lambda engine: engine.add_request([True]),
    lambda engine: engine.add_request({1: 2}),
    lambda engine: engine.add_request([]),
    lambda engine: engine.add_request([tiny.VOCABULARY]),
    lambda engine: engine.add_request([1] * 10_000),
    lambda engine: engine.add_request([1], priority="high"),
    lambda engine: engine.add_request([1], priority=2**70),
    lambda engine: engine.add_request([1], SamplingParams(max_tokens=10_000)),
    lambda engine: engine.add_request([1], {"max_tokens": 3}),
    lambda engine: engine.add_request([1], SamplingParams(logit_bias={tiny.VOCABULARY: 1.0})),
    lambda engine: engine.add_request([1], media=["picture.png"]),
    lambda engine: engine.add_request([1], SamplingParams(temperature=1e39)),
    lambda engine: engine.generate([PROMPTS[0], "bad"], SamplingParams(max_tokens=2)),
    lambda engine: engine.generate([PROMPTS[0]], [SamplingParams()] * 2),
    lambda engine: engine.generate([PROMPTS[0], PROMPTS[1]], [SamplingParams(), None, 3]),
    lambda engine: engine.stream([1], SamplingParams(n=2, temperature=1.0)),
    lambda engine: engine.stream(np.array([[1, 2]])),
    lambda engine: engine.abort(10**9),
    lambda engine: engine.hand_over(10**9),
)


class History:
    """One engine and what its callers did with it. ``engine`` is idle before, and must be idle after :meth:`finish`."""

    def __init__(self, engine, seed, steps=25):
        self.engine, self.rng, self.steps = engine, random.Random(seed), steps
        self.rows, self.pages = engine.free_rows, engine.free_pages
        self.streams = []  # [stream, prompt, max_tokens, tokens so far]
        self.added = {}  # id → (prompt, max_tokens, tokens so far)
        self._orphans = frozenset()  # what ``generate`` left when it failed: nobody asks for them, they come to their ends
        self.done = []  # what was done, to be shown where it fails
        self.faulty = 0
        self._logits = type(engine.model).logits

    def run(self):
        actions = (
            [self.open] * 4 + [self.read] * 10 + [self.close, self.drop, self.generate] * 2 + [self.add, self.step] * 2
        ) + [self.abort, self.bad, self.fail, self.thread]
        for _ in range(self.steps):
            self.attempt(self.rng.choice(actions))
        self.finish()

    def attempt(self, action):
        """An action may meet the failure that was put into the device's way; nothing else."""
        self.done.append(action.__name__)
        try:
            action()
        except (Interrupt, DeviceFault, StageFailed):
            assert self.faulty, "nothing was put in the way"
            self.faulty = 0

    # -- actions ---------------------------------------------------------------------------------------------------

    def drawn(self):
        return self.rng.choice(PROMPTS), SamplingParams(max_tokens=self.rng.randint(1, LONGEST))

    def open(self):
        prompt, params = self.drawn()
        self.streams.append([self.engine.stream(prompt, params), prompt, params.max_tokens, []])

    def read(self):
        if not self.streams:
            return
        entry = self.rng.choice(self.streams)
        for _ in range(self.rng.randint(1, 4)):
            output = next(entry[0], None)
            if output is None:
                self.streams.remove(entry)
                self.check(*entry[1:], ended=not getattr(entry[0], "aborted", False))
                return
            entry[0].aborted = output.finish_reason == "abort"
            entry[3].extend(output.tokens)

    def close(self):
        if self.streams:
            entry = self.streams.pop(self.rng.randrange(len(self.streams)))
            self.check(*entry[1:])
            entry[0].close()
            assert next(entry[0], None) is None

    def drop(self):
        if self.streams:
            self.check(*self.streams.pop(self.rng.randrange(len(self.streams)))[1:])

    def generate(self):
        requests = [self.drawn() for _ in range(self.rng.randint(1, 2))]
        first = self.engine._session.next_id
        try:
            results = self.engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
        except BaseException:
            self._orphans = self._orphans | set(range(first, first + len(requests)))
            raise
        for (prompt, params), result in zip(requests, results, strict=True):
            self.check(prompt, params.max_tokens, result.token_ids, ended=True)

    def add(self):
        prompt, params = self.drawn()
        self.added[self.engine.add_request(prompt, params)] = (prompt, params.max_tokens, [])

    def step(self):
        for output in self.engine.step():
            if output.request_id in self._orphans:
                continue
            prompt, most, tokens = self.added[output.request_id]
            tokens.extend(output.tokens)
            if output.finish_reason is not None:
                del self.added[output.request_id]
                self.check(prompt, most, tokens, ended=output.finish_reason in ("stop", "length"))

    def abort(self):
        running = sorted(self.added.keys() & self.engine.open_requests)
        if running and self.rng.random() < 0.7:
            self.engine.abort(self.rng.choice(running))
        elif self.streams:
            stream = self.rng.choice(self.streams)[0]
            if stream.request_id in self.engine.open_requests:
                self.engine.abort(stream.request_id)

    def bad(self):
        before = self.engine.open_requests
        request = self.rng.choice(BAD_REQUESTS)
        try:
            request(self.engine)
        except (RequestError, ConfigError):
            pass
        else:
            raise AssertionError("a bad request was taken")
        assert self.engine.open_requests == before

    def fail(self):
        """The model's next forward, or one of the next, fails."""
        self.faulty = self.rng.randint(1, 6)
        error = self.rng.choice((Interrupt, DeviceFault, StageFailed))
        model, honest = self.engine.model, self._logits

        def logits(*arguments, **named):
            if self.faulty:
                self.faulty -= 1
                if not self.faulty:
                    self.faulty = -1
                    del model.logits
                    raise error("put in the way")
            return honest(model, *arguments, **named)

        model.logits = logits

    def thread(self):
        found = []

        def elsewhere():
            for call in (self.engine.step, lambda: self.engine.add_request((1,)), self.engine.drain):
                try:
                    call()
                except WrongThread as error:
                    found.append(error)

        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        assert len(found) == 3

    def fork(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            code = 1
            try:
                self.engine.step()
            except WrongThread:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0

    # -- judging ---------------------------------------------------------------------------------------------------

    def check(self, prompt, most, tokens, *, ended=False):
        expected = tiny.plain(prompt, LONGEST)[:most]
        if ended:
            assert tuple(tokens) == expected
        else:
            assert tuple(tokens) == expected[: len(tokens)]

    def finish(self):
        """Everybody reads to the end; then nothing may be left."""
        self.engine.model.__dict__.pop("logits", None)
        self.faulty = 0
        while self.streams:
            self.read()
        while self.engine.has_unfinished:
            self.step()
        self.engine.drain()
        assert not self.added
        assert self.engine.open_requests == {}
        assert (self.engine.free_rows, self.engine.free_pages) == (self.rows, self.pages)
