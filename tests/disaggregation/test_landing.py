"""Requests of a prefill engine land on the ranks of a data-parallel one; ranks are threads here."""

import pytest

from disaggregation.couple import Couple
from disaggregation.test_sides import NEW, prompts, state
from outrider import Engine
from outrider.device import ConfigError, EngineStopped
from outrider.disaggregation.page_landing import FollowerLinks
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.ranks.records import RanksFailed
from outrider.errors import RequestError
from outrider.transports.local_transport import LocalTransport
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS, decoder
from outrider_proof.tiny import plain_config
from ranks.threads import run_bodies

CONFIG = {"dtype": "float64", "max_context": 64, "page_size": 4, "max_requests": 3, "overlap": True, "num_pages": 40}


def made(name, ranks=None, **fields):
    backend = CpuBackend() if ranks is None else ranks.backend
    model = decoder(tiny.target(), backend, None if ranks is None else ranks.model)
    return Engine(model, backend, proposer=MAKERS[name](model, backend), config=plain_config(**CONFIG | fields), ranks=ranks)


def on_ranks(name, lead, data=2, **fields):
    """What ``lead`` returns for a prefill engine and a decode engine on several ranks; no rank keeps a page or a row."""
    transport = LocalTransport()

    def body(ranks):
        engine = made(name, ranks, **fields)
        before = engine.free_pages, engine.free_rows
        found = None
        if engine.follows:
            pages = FollowerLinks(engine, transport, rank=ranks.rank)
            engine.follow(pages.execute_query)
            assert not pages._links
        else:
            try:
                giver = made(name)
                sides = Couple(giver, engine, transport)
                free = giver.free_pages, giver.free_rows
                found = lead(sides)
                sides.rest()
                giver = sides.prefill.engine
                assert (giver.free_pages, giver.free_rows) == free
                sides.close()
            finally:
                engine.close()
        assert (engine.free_pages, engine.free_rows) == before
        return found

    return run_bodies(ParallelConfig(data=data, timeout_s=60), body)[0]


def groups_of(engine):
    return {request.group for request in engine._requests.values()}


@pytest.mark.parametrize("name", ["mtp", "none"])
def test_tokens_are_those_of_one_engine_on_every_group(name):
    given = prompts(name, 7)

    def lead(sides):
        seen = set()
        for prompt in given:
            sides.submit(state(prompt))

        def ended():
            seen.update(groups_of(sides.decode.engine))
            return len(sides.ended) == len(given)

        sides.run(ended)
        return seen, dict(sides.decode.counts), [sides.tokens(key) for key in range(len(given))]

    seen, counts, tokens = on_ranks(name, lead)
    assert tokens == [tiny.plain(prompt, NEW) for prompt in given]
    assert seen == {0, 1}
    assert counts["arrived"] == len(given) - counts["finished_there"] > 4


def test_a_prefill_side_dies():
    moment, given = 4, prompts(2, 6)

    def lead(sides):
        for prompt in given:
            sides.submit(state(prompt))
        for _ in range(moment):
            sides.turn()
        sides.lose("prefill")
        sides.prefill = type(sides.prefill)(made("eagle"))
        sides.connect()
        late = [sides.submit(state(prompt))[0] for prompt in given]
        sides.decode.abort(sides.submit(state(given[0]))[1])
        sides.ended.setdefault(len(sides.outputs) - 1, None)
        sides.run()
        return [sides.tokens(key) for key in (*range(len(given)), *late)]

    assert on_ranks("eagle", lead, num_pages=14) == [tiny.plain(prompt, NEW) for prompt in given] * 2


def test_what_is_shared_out_can_not_be_lent():
    def body(ranks):
        engine = made("none", ranks)
        if engine.follows:
            engine.follow()
            return
        try:
            with pytest.raises(ConfigError, match="takes requests, and lends none"):
                engine.resume(state((1, 2)), lend=True)
            with pytest.raises(RequestError, match="a token of output at least"):
                engine.lending.expect(state((1, 2)))
            assert engine.groups == 2
            assert engine.load.pages == engine.load.free_pages == 2 * (CONFIG["num_pages"] - 1)
        finally:
            engine.close()

    run_bodies(ParallelConfig(data=2, timeout_s=60), body)

    def shared(ranks):
        engine = made("none", ranks)
        if engine.follows:
            engine.follow()
            return
        try:
            with pytest.raises(ConfigError, match="a part of every page"):
                engine.lending.expect(state((1, 2)))
        finally:
            engine.close()

    run_bodies(ParallelConfig(tensor=2, timeout_s=60), shared)


def test_a_rank_that_has_no_answer_says_so():
    def body(ranks):
        engine = made("none", ranks)
        if engine.follows:
            with pytest.raises(RanksFailed, match=r"use follow\(answer=\.\.\.\)"):
                engine.follow()
            return
        with pytest.raises((RanksFailed, EngineStopped), match="rank 1 failed"):
            engine.ask_ranks("x")

    run_bodies(ParallelConfig(data=2, timeout_s=60), body)


def test_an_engine_that_is_alone_has_nobody_to_ask():
    with pytest.raises(ConfigError, match="no other ranks"):
        made("none").ask_ranks("x")
