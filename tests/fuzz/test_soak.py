"""Everything for an hour: callers, faults, forks, threads, event loops. Tokens stay right, memory flat: `make soak`."""

import asyncio
import gc
import os
import random
import threading
import time

import pytest

from fuzz.histories import LONGEST, PROMPTS, History
from fuzz.test_histories import SETUPS
from outrider import AsyncEngine, SamplingParams
from outrider_proof import tiny

GROWTH = 48 * 2**20
"""Bytes that the process may grow by after its first tenth: allocators keep some, a leak of a request keeps much more."""


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def crowd(seed):
    """Tasks in several event loops of several threads on one engine, some cancelled: everybody else's tokens are right."""

    async def ask(engine, rng):
        prompt, most = rng.choice(PROMPTS), rng.randint(1, LONGEST)
        task = asyncio.ensure_future(engine.generate(prompt, SamplingParams(max_tokens=most)))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
        try:
            (tokens,) = await task
        except asyncio.CancelledError:
            return
        assert tokens == tiny.plain(prompt, LONGEST)[:most]

    async def several(engine, rng):
        await asyncio.gather(*(ask(engine, rng) for _ in range(6)))

    async def main():
        failed = []
        make, config = SETUPS["eagle, overlapped"]
        async with AsyncEngine(lambda: tiny.engine(make(), max_requests=3, page_size=4, **config)) as engine:

            def elsewhere(index):
                try:
                    asyncio.run(several(engine, random.Random(f"{seed} {index}")))
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=elsewhere, args=(index,)) for index in range(3)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                await asyncio.sleep(0.005)
            assert not failed, failed
            assert await engine.call(lambda inner: inner.open_requests) == {}

    asyncio.run(main())


def soak(seconds, say=lambda text: None, least=0):
    """Run until ``seconds`` have passed and for at least so many histories; return (histories, crowds, grown bytes)."""
    engines = {}
    for name, (make, config) in SETUPS.items():
        engines[name] = tiny.engine(make(), **{"max_requests": 3, "page_size": 4, "prefill_chunk": 6} | config)
    rng, began, base, said = random.Random(seconds), time.monotonic(), 0, 0.0
    histories = crowds = 0
    while (spent := time.monotonic() - began) < seconds or histories < least:
        name = rng.choice(sorted(engines))
        history = History(engines[name], f"soak {seconds} {histories}")
        history.run()
        if histories % 50 == 0:
            history.fork()
        if histories % 40 == 0:
            crowd(crowds)
            crowds += 1
        histories += 1
        if not base and spent > seconds / 10:
            base = resident()
        if spent - said > 60:
            said = spent
            say(f"{spent:.0f} s: {histories} histories, {crowds} crowds, {resident() / 2**20:.0f} MiB")
    return histories, crowds, resident() - base


@pytest.mark.soak
def test_an_hour():
    histories, crowds, grown = soak(3600, print)
    print(f"{histories} histories, {crowds} crowds, grown by {grown / 2**20:.1f} MiB")
    assert grown < GROWTH


def test_a_short_soak_would_show_a_wrong_token(collects_little):
    histories, crowds, _ = soak(0.2, least=40)
    assert histories >= 40
    assert crowds > 0
