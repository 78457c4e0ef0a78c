"""One engine for many tasks, loops and threads: the same tokens, and clean ends of every kind."""

import asyncio
import itertools
import threading
import time

import pytest

from outrider import AsyncEngine, SamplingParams
from outrider.device import ConfigError, DeviceFault, DeviceLost
from outrider.engine.async_engine import AsyncEngineClosed
from outrider.engine.session import WrongThread
from outrider.errors import RequestError
from outrider.speculative.eagle import EagleProposer
from outrider_proof import tiny

PROMPTS = [(3,), (1, 2, 3, 4, 5), (7, 7), (9, 2, 4)]
PARAMS = SamplingParams(max_tokens=10)


def make():
    return tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), overlap=True, max_requests=2)


def run(main, source=make):
    """Run ``main(engine)`` in a loop; afterwards the engine's thread is gone, and nothing is held."""

    async def with_engine():
        async with AsyncEngine(source) as engine:
            inner = engine.engine
            result = await asyncio.wait_for(main(engine), 60)
        assert not engine._thread.is_alive()
        inner.adopt()
        if engine.error is None:
            inner.drain()
            assert inner.open_requests == {}
            assert inner.free_rows == inner.config.max_requests
        return result

    return asyncio.run(with_engine())


def test_many_tasks():
    async def main(engine):
        return await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in PROMPTS * 3))

    assert [tokens for (tokens,) in run(main)] == [tiny.plain(prompt, 10) for prompt in PROMPTS] * 3


def test_several_loops_in_several_threads():
    async def main(engine):
        found = {}

        def elsewhere(index):
            found[index] = asyncio.run(engine.generate(PROMPTS[index], PARAMS))

        threads = [threading.Thread(target=elsewhere, args=(index,)) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.01)
        return found

    found = run(main)
    assert {index: tokens for index, (tokens,) in found.items()} == {i: tiny.plain(p, 10) for i, p in enumerate(PROMPTS)}


def test_samples_come_side_by_side():
    async def main(engine):
        return await engine.generate(PROMPTS[0], SamplingParams(max_tokens=5, temperature=1.0, n=3))

    assert [len(tokens) <= 5 for tokens in run(main)] == [True] * 3


def test_a_bad_request_harms_only_itself():
    async def main(engine):
        good = asyncio.create_task(engine.generate(PROMPTS[1], PARAMS))
        for bad in ("123", [1.5], [], [10**6]):  # text needs a tokenizer, which this engine lacks
            with pytest.raises((RequestError, ConfigError)):
                await engine.generate(bad, PARAMS)
        return await good

    assert run(main) == (tiny.plain(PROMPTS[1], 10),)


@pytest.mark.parametrize("when", range(4))
def test_a_task_that_is_cancelled_aborts_its_request(when):
    async def main(engine):
        under_way, cancelled = asyncio.Event(), threading.Event()
        loop, steps, step = asyncio.get_running_loop(), itertools.count(1), engine.engine.step

        def held():
            """The third step ends when the task is cancelled: until then the request can't end."""
            outputs = step()
            if next(steps) == 3:
                loop.call_soon_threadsafe(under_way.set)
                assert cancelled.wait(60)
            return outputs

        engine.engine.step = held
        task = asyncio.create_task(engine.generate(PROMPTS[1], SamplingParams(max_tokens=50, ignore_eos=True)))
        for _ in range(when):
            await asyncio.sleep(0)
        if when == 3:
            await under_way.wait()
        task.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await engine.generate(PROMPTS[0], PARAMS) == (tiny.plain(PROMPTS[0], 10),)
        assert await engine.call(lambda inner: inner.open_requests) == {}

    run(main)


def test_abort_ends_the_stream():
    async def main(engine):
        outputs = []
        async for output in engine.stream(PROMPTS[1], SamplingParams(max_tokens=50, ignore_eos=True)):
            outputs.append(output)
            if len(outputs) == 1:
                await engine.abort(output.request_id)
        assert outputs[-1].finish_reason == "abort"
        with pytest.raises(RequestError, match="isn't waiting or running"):
            await engine.abort(10**6)

    run(main)


def failing(error, times):
    def source():
        engine = make()
        honest, left = engine.model.logits, [times]

        def forward(*arguments, **named):
            if left[0]:
                left[0] -= 1
                raise error
            return honest(*arguments, **named)

        object.__setattr__(engine.model, "logits", forward)
        return engine

    return source


@pytest.fixture
def _own_model():
    yield
    tiny.target().__dict__.pop("logits", None)


@pytest.mark.usefixtures("_own_model")
def test_a_recoverable_fault_is_retried():
    async def main(engine):
        return await engine.generate(PROMPTS[1], PARAMS)

    assert run(main, failing(DeviceFault("put in the way"), 3)) == (tiny.plain(PROMPTS[1], 10),)


@pytest.mark.usefixtures("_own_model")
@pytest.mark.parametrize("error", [DeviceLost("gone"), ZeroDivisionError("a bug"), DeviceFault("again and again")])
def test_what_ends_the_engine_reaches_everybody(error):
    async def main(engine):
        found = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in PROMPTS), return_exceptions=True)
        assert {type(each) for each in found} == {type(error)}
        with pytest.raises(type(error)):
            await engine.generate(PROMPTS[0], PARAMS)

    run(main, failing(error, 10**6))


def test_closing_drains_or_aborts():
    async def main(drain):
        engine = AsyncEngine(make())
        await engine.start()
        task = asyncio.create_task(engine.generate(PROMPTS[1], PARAMS))
        await asyncio.sleep(0.02)
        await engine.close(drain=drain)
        with pytest.raises(AsyncEngineClosed):
            await engine.generate(PROMPTS[0], PARAMS)
        await engine.close()
        return await asyncio.gather(task, return_exceptions=True)

    assert asyncio.run(main(True)) == [(tiny.plain(PROMPTS[1], 10),)]
    (ended,) = asyncio.run(main(False))
    assert isinstance(ended, AsyncEngineClosed) or ended == (tiny.plain(PROMPTS[1], 10),)


@pytest.mark.parametrize(
    ("closes", "error", "said"),
    [(True, AsyncEngineClosed, "the engine was closed; close"), (False, RequestError, "stream.. gives")],
)
def test_what_was_aborted_is_no_output(closes, error, said):
    """Its caller would take a part of the tokens, or none, for all of them."""

    async def main():
        engine = AsyncEngine(make())
        await engine.start()
        step = engine.engine.step
        engine.engine.step = lambda: time.sleep(0.02) or step()  # it can't have ended by then
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        task = asyncio.create_task(engine.generate(PROMPTS[1], params))
        while not (ids := list(await engine.call(lambda inner: inner.open_requests))):
            await asyncio.sleep(0)
        # In the engine's thread, so that no iteration comes between.
        await (engine.close() if closes else engine.call(lambda inner: inner.abort(ids[0])))
        with pytest.raises(error, match=rf"request {ids[0]} was aborted after \d+ tokens.*{said}"):
            await task
        await engine.close()

    asyncio.run(main())


def test_a_failure_while_closing_reaches_open_streams():
    async def main():
        engine = AsyncEngine(make())
        await engine.start()
        step = engine.engine.step

        def step_until_closed():
            if engine._stop:
                raise DeviceLost("gone")
            time.sleep(0.02)
            return step()

        engine.engine.step = step_until_closed
        task = asyncio.create_task(engine.generate(PROMPTS[1], SamplingParams(max_tokens=50, ignore_eos=True)))
        while not await engine.call(lambda inner: inner.open_requests):
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(DeviceLost):
            await asyncio.wait_for(task, 10)

    asyncio.run(main())


def test_what_making_raises_comes_out_of_start():
    def broken():
        raise ValueError("no model")

    async def main():
        with pytest.raises(ValueError, match="no model"):
            await AsyncEngine(broken).start()

    asyncio.run(main())


def held_back():
    """An engine's maker that waits, and the event that lets it go on."""
    release = threading.Event()
    return lambda: release.wait(60) and make(), release


def test_a_start_that_is_cancelled_may_be_repeated():
    async def main():
        source, release = held_back()
        engine = AsyncEngine(source)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.start(), 0.01)
        release.set()
        await engine.start()
        await engine.start()
        assert await engine.generate(PROMPTS[0], PARAMS) == (tiny.plain(PROMPTS[0], 10),)
        await engine.close()
        with pytest.raises(AsyncEngineClosed, match="make a new one"):
            await engine.start()

    asyncio.run(main())


def test_a_cancelled_entry_leaves_no_thread():
    async def main():
        source, release = held_back()
        engine = AsyncEngine(source)
        task = asyncio.create_task(engine.__aenter__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        await asyncio.to_thread(engine._thread.join, 60)
        assert not engine._thread.is_alive()

    asyncio.run(main())


def test_a_request_before_the_end_of_a_start_that_fails():
    async def main():
        release = threading.Event()

        def broken():
            release.wait(60)
            raise ValueError("no model")

        engine = AsyncEngine(broken)
        tasks = [asyncio.create_task(each) for each in (engine.start(), engine.generate(PROMPTS[0], PARAMS))]
        await asyncio.sleep(0.01)
        release.set()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert [str(each) for each in ended] == ["no model"] * 2

    asyncio.run(main())


def test_closing_hands_out_what_has_ended():
    """A request may have ended without a step that returns its last output, for example by drain."""

    async def main():
        engine = AsyncEngine(make())
        await engine.start()
        task = asyncio.create_task(engine.generate(PROMPTS[1], PARAMS))

        def end_all(inner):
            while inner.open_requests:
                inner._iterate()
            engine._request_stop(drain=False)

        while not engine.open_requests:
            await asyncio.sleep(0)
        await engine.call(end_all)
        assert await asyncio.wait_for(task, 60) == (tiny.plain(PROMPTS[1], 10),)
        await engine.close()

    asyncio.run(main())


def test_a_task_that_is_cancelled_during_a_drain_aborts_its_request():
    async def main():
        engine = AsyncEngine(make())
        await engine.start()
        loop, launched, cancelled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        step, reasons = engine.engine.step, []

        def held():
            outputs = step()
            reasons.extend(output.finish_reason for output in outputs)
            loop.call_soon_threadsafe(launched.set)
            assert cancelled.wait(60)
            return outputs

        engine.engine.step = held
        task = asyncio.create_task(engine.generate(PROMPTS[1], SamplingParams(max_tokens=50, ignore_eos=True)))
        await launched.wait()
        closing = asyncio.create_task(engine.close(drain=True))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        cancelled.set()
        await closing
        assert "length" not in reasons
        assert "abort" in reasons

    asyncio.run(main())


def test_the_engine_itself_belongs_to_its_thread():
    async def main(engine):
        with pytest.raises(WrongThread, match="AsyncEngine"):
            engine.engine.add_request((1,))

    run(main)
