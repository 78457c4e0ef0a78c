"""A server's engine on several ranks: the same tokens, and no process left, however it ends."""

import asyncio
import functools
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="not run: the extra serve isn't installed")

from outrider import SamplingParams
from outrider.cli.options.models import Speculation, load
from outrider.device import ConfigError
from outrider.serve.connection.engine_client import EngineGone, Inbox
from outrider.serve.connection.engine_process import EngineProcess
from processes import gone

PARAMS = SamplingParams(max_tokens=16)
PROMPT = [521, 1019, 9, 66, 13, 309]


def make():
    speculation = Speculation.with_defaults(None, model=None, draft=None, draft_tokens=3)
    return functools.partial(load, "cpu", speculation, max_requests=2, dtype="float64", settings={"max_context": 128})


async def tokens_of(client):
    inbox, found = Inbox(), []
    client.submit(inbox, PROMPT, PARAMS)
    while True:
        for sample in await inbox.receive_outputs():
            output = sample.output
            found += output.tokens
            if output.finish_reason is not None:
                return found


def ranks_of(client):
    """The processes of both ranks: the second is a child of the first."""
    (second,) = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text(encoding="ascii").split()
    return [client.pid, int(second)]


def test_one_rank_divides_no_experts():
    with pytest.raises(ConfigError, match="--expert-parallel divides experts among ranks, and there is one rank"):
        EngineProcess(make(), expert=True)


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_and_end_together():
    async def main():
        client = EngineProcess(make(), tensor=2)
        await client.start()
        try:
            pids = ranks_of(client)
            assert len(pids) == 2
            found = await tokens_of(client)
        finally:
            await client.close()
        return found, pids

    found, pids = asyncio.run(main())
    assert all(gone(pid, seconds=0) for pid in pids)
    (alone,) = make()().generate([PROMPT], PARAMS)
    assert tuple(found) == alone.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_takes_the_engine_with_it(victim):
    async def main():
        client = EngineProcess(make(), tensor=2)
        await client.start()
        try:
            pids = ranks_of(client)
            reading = asyncio.ensure_future(tokens_of(client))
            os.kill(pids[victim], signal.SIGKILL)
            with pytest.raises(EngineGone):
                await asyncio.wait_for(reading, 60)
            assert isinstance(client.error, EngineGone)
        finally:
            await client.close()
        return pids

    assert all(gone(pid, seconds=10) for pid in asyncio.run(main()))
