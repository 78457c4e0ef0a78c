"""Prefill and decode apart, of a model with recurrent layers: the states arrive with the pages, and tokens stay the same."""

import functools
from dataclasses import replace

import pytest
import torch

from disaggregation import couple, test_servers
from disaggregation.couple import Couple
from disaggregation.test_sides import free, prompts, state
from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.disaggregation import page_landing
from outrider.disaggregation.codec import server_fit
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.requests.hand_over import check_fit
from outrider.registry.engine_plugins import get_transport
from outrider.transports.link import LocalLink, LocalTransport, _LocalTransfer
from outrider_proof import tiny
from outrider_proof.engine_setups import HYBRID, WIDE_HYBRID, Models, host_models
from outrider_proof.tiny import plain_config
from outrider_sim.exploration import run_once
from outrider_sim.strategies import make_strategy
from proof import rank_landing

NEW = 10
CONFIG = {"dtype": "float64", "max_context": 64, "page_size": 4, "max_requests": 3, "num_pages": 60, "prefill_chunk": 8}
# One token, one page, one page and a token, the interval of checkpoints, several chunks.
PROMPTS = [(3,), (1, 4, 1, 5), (9, 2, 6, 5, 3), (5, 8, 9, 7, 9, 3, 2, 3), tuple(range(1, 22)), (3,)]


def made(proposer, ranks=None, **fields):
    kind = WIDE_HYBRID if ranks is not None or fields.pop("wide", False) else HYBRID
    loaded = host_models(proposer + kind) if ranks is None else Models(proposer + kind, ranks.backend, ranks)
    config = plain_config(**{**CONFIG, "overlap": True} | fields)
    return Engine(loaded.target, loaded.backend, proposer=loaded.make(), config=config, ranks=ranks)


@functools.cache
def _alone(given, wide):
    engine = made("none", wide=wide)
    return [each.token_ids for each in engine.generate(given, SamplingParams(max_tokens=NEW, ignore_eos=True))]


def alone(given, *, wide=False):
    """The tokens of one engine."""
    return _alone(tuple(given), wide)


def served(sides, given):
    """The tokens of each prompt; afterwards no side holds a page or a row."""
    before = free(sides)
    keys = [sides.submit(state(prompt, max_tokens=NEW, ignore_eos=True))[0] for prompt in given]
    sides.run()
    sides.rest()
    sides.run(lambda: not (sides.prefill.num_requests or sides.turn()))
    assert free(sides) == before
    return [sides.tokens(key) for key in keys]


@pytest.mark.parametrize("mode", [{}, {"overlap": False}, {"mode": "fused"}], ids=["overlap", "synchronous", "fused"])
@pytest.mark.parametrize("proposer", ["none", "ngram", "mtp-chain", "hybrid-draft"])
@pytest.mark.sample(3)
def test_tokens_are_those_of_one_engine(proposer, mode):
    sides = Couple(made(proposer, **mode), made(proposer, **mode), LocalTransport())
    assert served(sides, PROMPTS) == alone(PROMPTS)
    assert sides.decode.counts["arrived"] == len(PROMPTS)
    sides.close()


def test_a_request_that_decodes_is_lent_with_every_token_in_its_states():
    """Its last iteration left the accepted drafts out of the states."""
    engine, alone = made("ngram"), made("none")
    number = engine.add_request([5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(max_tokens=20, ignore_eos=True))
    while engine.stats.iterations < 6:
        engine.step()
    lent = engine.lending.lend(number)
    row, tokens = lent.pages[0] - engine.config.num_pages, (*lent.state.prompt, *lent.state.output)
    alone.generate([tokens[: lent.state.length]], SamplingParams(max_tokens=1))
    for ours, theirs in zip(engine.state_memory, alone.state_memory, strict=True):
        torch.testing.assert_close(ours[row], theirs[1])
    engine.lending.returned(lent)


@pytest.mark.parametrize("transport", ["torch", pytest.param("nixl", marks=pytest.mark.needs_nixl)])
def test_over_transports_of_processes(transport):
    sides = Couple(made("mtp-chain"), made("mtp-chain"), get_transport(transport))
    assert served(sides, PROMPTS) == alone(PROMPTS)
    sides.close()


def test_a_decode_side_short_of_pages_preempts():
    """A request that arrived prefills again where it decodes; others wait for rows and pages with their states held there."""
    given = prompts(5, 6)
    sides = Couple(made("mtp-chain"), made("mtp-chain", num_pages=16), LocalTransport())
    assert served(sides, given) == alone(given)
    assert sides.decode.engine.stats.preemptions > 0
    sides.close()


def test_a_decode_side_with_one_row_takes_requests_in_turn():
    """A row is reserved before the states are written, so that no second request can get it."""
    given = prompts(6, 4)
    sides = Couple(made("ngram"), made("ngram", max_requests=1), LocalTransport())
    assert served(sides, given) == alone(given)
    sides.close()


@pytest.fixture
def slow_card(monkeypatch):
    """A network card that reports no transfer as over until the list has an element."""
    finished, done, notices = [], _LocalTransfer.done, LocalLink.notices
    monkeypatch.setattr(_LocalTransfer, "done", lambda transfer: bool(finished) and done(transfer))
    monkeypatch.setattr(LocalLink, "notices", lambda link: notices(link) if finished else [])
    return finished


def test_a_request_that_ends_while_its_states_are_written_frees_its_row_afterwards(slow_card):
    sides = Couple(made("none"), made("none"), LocalTransport())
    before = free(sides)
    numbers = [sides.submit(state(prompt, max_tokens=NEW))[1] for prompt in PROMPTS[:3]]
    sides.run(lambda: len([job for job in sides.prefill._prefilled if job.transfers]) == 3)
    for number in numbers:
        sides.decode.abort(number)
    sides.turn()
    assert [rows for _, rows in free(sides)] == [0, 0]
    slow_card.append(True)
    sides.run(lambda: not (sides.prefill.num_requests or sides.turn()))
    assert free(sides) == before
    sides.outputs, sides.ended = {}, {}
    assert served(sides, PROMPTS) == alone(PROMPTS)
    sides.close()


def test_a_request_with_a_reserved_row_does_not_wait_for_a_more_urgent_one_without(slow_card):
    sides = Couple(made("none"), made("none", max_requests=1), LocalTransport())
    key, _ = sides.submit(state(PROMPTS[0], max_tokens=NEW, ignore_eos=True))
    sides.run(lambda: any(job.transfers for job in sides.prefill._prefilled))
    sides.decode.engine.add_request(PROMPTS[1], SamplingParams(max_tokens=2), priority=1)
    sides.turn()
    slow_card.append(True)
    sides.run()
    sides.rest()
    assert sides.tokens(key) == alone(PROMPTS)[0]
    sides.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_side_dies_while_states_are_written(side, slow_card):
    sides = Couple(made("none"), made("none"), LocalTransport())
    before = free(sides)
    numbers = [sides.submit(state(prompt, max_tokens=NEW, ignore_eos=True))[1] for prompt in PROMPTS]
    sides.run(lambda: any(job.transfers for job in sides.prefill._prefilled))
    slow_card.append(True)
    sides.lose(side)
    if side == "prefill":
        sides.prefill = type(sides.prefill)(made("none"))
        sides.connect()
        sides.run()
        assert [sides.tokens(key) for key in range(len(PROMPTS))] == alone(PROMPTS)
        assert sides.decode.counts["done_again"] > 0
    else:
        sides.decode = type(sides.decode)(made("none"))
        sides.prefill.engine.drain()
        assert sides.prefill.counts["lost_with_peers"] == len(numbers)
    assert free(sides) == before
    sides.close()


def test_each_side_keeps_the_prefixes_that_it_computed():
    """The decode side publishes the states that it decodes; the prompt's own checkpoints are on the prefill side."""
    sides = Couple(made("none"), made("none"), LocalTransport())
    (tokens,) = served(sides, PROMPTS[-2:-1])
    decode = sides.decode.engine
    assert decode.load.state_checkpoints > 0
    longer = (*PROMPTS[-2], *tokens, 7)
    (done,) = decode.generate([longer], SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert (decode.stats.prefix_hits, done.token_ids) == (28, alone([longer])[0])
    assert served(sides, [longer]) == alone([longer])
    assert sides.prefill.engine.stats.prefix_hits == 20
    sides.close()


def on_ranks(proposer, layout):
    """The tokens of each prompt of a decode engine on several ranks."""
    parallel = ParallelConfig(tensor=layout[0], data=layout[1], timeout_s=60)
    make, make_giver = (lambda ranks: made(proposer, ranks)), (lambda: made(proposer, wide=True))
    return couple.on_ranks(parallel, make, make_giver, lambda sides: served(sides, PROMPTS))


@pytest.mark.parametrize(
    "layout",
    [(2, 1), *(pytest.param(layout, marks=pytest.mark.slow) for layout in ((1, 2), (2, 2), (4, 1)))],
    ids=["tensor2", "data2", "tensor2-data2", "tensor4"],
)
@pytest.mark.sample(1)
@pytest.mark.parametrize("proposer", ["mtp-chain", "hybrid-draft, itself"])
def test_states_land_on_every_rank(layout, proposer):
    assert on_ranks(proposer, layout) == alone(PROMPTS, wide=True)


def test_the_states_of_another_rank_are_found(monkeypatch):
    """The fault that parts of states can have: each rank gets the heads and channels of the first rank."""
    real = page_landing.states_of_part
    monkeypatch.setattr(page_landing, "states_of_part", lambda *given: real(*given[:2], replace(given[2], rank=0)))
    assert on_ranks("none", (2, 1)) != alone(PROMPTS, wide=True)


@pytest.mark.parametrize(
    ("tensor", "data", "proposer"),
    [(2, 1, "none"), pytest.param(2, 2, "mtp-chain", marks=pytest.mark.slow)],
)
def test_states_land_on_simulated_ranks_without_a_race(tensor, data, proposer):
    devices, layout, counts, seed = rank_landing.SimulatedDevices(), ParallelConfig(tensor=tensor, data=data), {}, 3

    def once(_):
        counts.update(rank_landing.run(devices, seed, layout, proposer=proposer + WIDE_HYBRID))

    error = run_once(devices.backends[0], once, make_strategy("mixed", seed, {}))
    assert error is None, str(error)
    assert counts["arrived"] > 0


def test_servers_move_states_between_them(monkeypatch):
    monkeypatch.setattr(test_servers, "engine", made)
    house = test_servers.House(prefill="mtp-chain", decode="mtp-chain")
    house.until(house.is_linked)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    numbers = [house.client.submit(prompt, params)[0] for prompt in PROMPTS]
    house.until(lambda: not house.client.open_requests)
    assert [house.tokens(number) for number in numbers] == alone(PROMPTS)
    assert house.decode.counts["arrived"] == len(PROMPTS)
    house.close()


def other_states(**changes):
    """An engine of the same model with other recurrent layers."""
    target = tiny.hybrid(recurrent=replace(tiny.RECURRENT, **changes))
    return Engine(target, tiny.BACKEND, config=plain_config(**CONFIG))


@pytest.mark.parametrize("changes", [{"kernel_size": 3}, {"value_size": 8}], ids=str)
def test_engines_with_other_states_do_not_connect(changes):
    with pytest.raises(ConfigError, match="other side registers recurrent states of .* bytes a row, this one"):
        Couple(other_states(), other_states(**changes), LocalTransport())


def test_servers_name_the_states_that_differ():
    """The dtype of the states, too; the error comes before a link is connected."""
    ours, theirs = server_fit(other_states()), server_fit(other_states(kernel_size=3))
    with pytest.raises(ConfigError, match=r"model\.recurrent: .*kernel_size=3.* there, .*kernel_size=4.* here"):
        check_fit(ours, theirs)
    narrow = ours | {"model.recurrent": repr(replace(tiny.RECURRENT, state_dtype=torch.bfloat16))}
    with pytest.raises(ConfigError, match=r"state_dtype=torch\.bfloat16.* there, .*state_dtype=torch\.float32.* here"):
        check_fit(ours, narrow)
