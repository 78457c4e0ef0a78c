"""Requests of a prefill engine land on the ranks of a data-parallel one; ranks are threads here."""

from dataclasses import replace

import pytest

from disaggregation import couple
from disaggregation.test_sides import NEW, prompts, state
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, EngineStopped
from outrider.disaggregation import page_landing
from outrider.disaggregation.codec import server_fit
from outrider.disaggregation.connections import WireError, WireMessage
from outrider.disaggregation.server import _layout_of
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.ranks.records import RanksFailed
from outrider.errors import RequestError
from outrider.model import Shard
from outrider.transports import LinkDown
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS, decoder
from outrider_proof.tiny import plain_config
from outrider_sim.exploration import run_once
from outrider_sim.strategies import make_strategy
from proof import rank_landing
from ranks.threads import run_bodies

CONFIG = {"dtype": "float64", "max_context": 64, "page_size": 4, "max_requests": 3, "overlap": True, "num_pages": 40}

LANDED_PROMPTS, LANDED_TOKENS = 5, 12
"""Enough for tokens that depend on every head, see ``test_heads_of_another_rank_are_found``."""


def made(name, ranks=None, **fields):
    backend = CpuBackend() if ranks is None else ranks.backend
    model = decoder(tiny.target(), backend, None if ranks is None else ranks.model)
    return Engine(model, backend, proposer=MAKERS[name](model, backend), config=plain_config(**CONFIG | fields), ranks=ranks)


def on_ranks(name, lead, data=2, tensor=1, **fields):
    layout = ParallelConfig(data=data, tensor=tensor, timeout_s=60)
    return couple.on_ranks(layout, lambda ranks: made(name, ranks, **fields), lambda: made(name), lead)


def groups_of(engine):
    return {request.group for request in engine._requests.values()}


def plain_tokens(name):
    """The tokens of one engine."""
    made_alone = made("none")
    params = SamplingParams(max_tokens=LANDED_TOKENS, ignore_eos=True)
    return [each.token_ids for each in made_alone.generate(prompts(name, LANDED_PROMPTS), params)]


def served(name, layout):
    """The groups that had requests, counts, and the tokens of each prompt: long enough to depend on every head."""
    given, (tensor, data) = prompts(name, LANDED_PROMPTS), layout

    def lead(sides):
        seen = set()
        for prompt in given:
            sides.submit(state(prompt, max_tokens=LANDED_TOKENS, ignore_eos=True))

        def ended():
            seen.update(groups_of(sides.decode.engine))
            return len(sides.ended) == len(given)

        sides.run(ended)
        return seen, [sides.tokens(key) for key in range(len(given))], dict(sides.decode.counts)

    return on_ranks(name, lead, data=data, tensor=tensor)


@pytest.mark.sample(1, per="layout")
@pytest.mark.parametrize("name", ["mtp", "none", "ngram", "eagle-tree", "suffix+eagle"])
@pytest.mark.parametrize(
    "layout",
    [(1, 2), (2, 1), (4, 1), pytest.param((2, 2), marks=pytest.mark.slow)],
    ids=["data2", "tensor2", "tensor4", "tensor2-data2"],
)
def test_tokens_are_those_of_one_engine_on_every_rank(layout, name):
    """On four tensor-parallel ranks two ranks hold the same KV head."""
    seen, tokens, counts = served(name, layout)
    assert tokens == plain_tokens(name)
    assert seen == set(range(layout[1]))
    assert counts["arrived"] == LANDED_PROMPTS


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


@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2}], ids=["data", "tensor"])
def test_several_ranks_lend_nothing(layout):
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
            groups = layout.get("data", 1)
            assert engine.groups == groups
            assert engine.load.pages == engine.load.free_pages == groups * (CONFIG["num_pages"] - 1)
        finally:
            engine.close()

    run_bodies(ParallelConfig(**layout, timeout_s=60), body)


def test_heads_of_another_rank_are_found(monkeypatch):
    """The fault that parts of pages can have: each rank gets the heads of the first rank."""
    real = page_landing.slots_of_part
    monkeypatch.setattr(page_landing, "slots_of_part", lambda caches, part: real(caches, replace(part, rank=0)))
    assert served("none", (2, 1))[1] != plain_tokens("none")


@pytest.mark.parametrize(("side", "named"), [("prefill", "link to rank 3 of the decode server"), ("decode", "rank 3: ")])
@pytest.mark.slow
def test_a_link_that_fails_is_named_and_its_requests_start_again(side, named):
    """The link of one rank of a group fails; the other ranks' links of the request are closed, too."""
    given, broken = prompts(3, 5), 3

    def lead(sides):
        for prompt in given:
            sides.submit(state(prompt))
        sides.run(lambda: any(job.is_announced for job in sides.prefill._prefilled))
        worker = getattr(sides, side)

        def fail(*arguments, **named):
            raise LinkDown("the cable was pulled")

        if side == "prefill":
            sides.links[broken].start_write = fail
        else:
            sides.links[broken].close()
        sides.run(lambda: worker.broken_peers)
        (why,) = worker.broken_peers.values()
        assert named in why, why
        sides.lose("prefill")
        sides.prefill = type(sides.prefill)(made("eagle"))
        sides.connect()
        sides.run()
        return [sides.tokens(key) for key in range(len(given))]

    assert on_ranks("eagle", lead, data=2, tensor=2, num_pages=40) == [tiny.plain(prompt, NEW) for prompt in given]


@pytest.mark.parametrize(
    ("tensor", "data", "seed"),
    [(2, 1, 3), pytest.param(2, 2, 24, marks=pytest.mark.slow), pytest.param(4, 1, 4, marks=pytest.mark.slow)],
)
def test_pages_land_on_simulated_ranks_without_a_race(tensor, data, seed):
    devices, layout = rank_landing.SimulatedDevices(), ParallelConfig(tensor=tensor, data=data)
    counts = {}
    error = run_once(
        devices.backends[0],
        lambda _: counts.update(rank_landing.run(devices, seed, layout)),
        make_strategy("mixed", seed, {}),
    )
    assert error is None, str(error)
    assert counts["arrived"] > 0


@pytest.mark.parametrize("target", [tiny.target, tiny.mixture], ids=["dense", "experts"])
def test_a_prefill_engine_describes_itself_as_a_rank_would(target):
    """Sizes that ranks share out are compared as the first rank of the decode server has them."""
    whole = Engine(
        target(), tiny.BACKEND, proposer=MAKERS["suffix+eagle"](target(), tiny.BACKEND), config=plain_config(**CONFIG)
    )
    layout = ParallelConfig(tensor=2, data=2, timeout_s=60)

    def body(ranks):
        model = decoder(target(), ranks.backend, ranks.model)
        proposer = MAKERS["suffix+eagle"](model, ranks.backend)
        engine = Engine(model, ranks.backend, proposer=proposer, config=plain_config(**CONFIG), ranks=ranks)
        if engine.follows:
            engine.follow()
            return None
        engine.close()
        return server_fit(engine)

    found = run_bodies(layout, body)[0]
    assert found == server_fit(whole, layout.shards(0))
    assert found != server_fit(whole)


@pytest.mark.parametrize("ranks", [None, [], [2, 1], [1, 1, "x"], [2, 1, 1, 1], [True, 1, 0]])
def test_ranks_that_can_not_be_read_end_the_connection(ranks):
    with pytest.raises(WireError):
        _layout_of(WireMessage("engine", {"ranks": ranks}))


def test_heads_that_ranks_can_not_share_are_refused():
    with pytest.raises(ConfigError, match="6 KV heads can't be shared out among 4"):
        Shard(0, 4).kv_head_shard(6)
    with pytest.raises(ConfigError, match="tensor is 0"):
        _layout_of(WireMessage("engine", {"ranks": [0, 1, 0]}))


@pytest.mark.slow
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
