"""What one rank's host alone comes to: the others take it over, or say that they can't go on."""

import threading
from dataclasses import replace

import pytest
import torch
from threads import failing, run, run_bodies

from outrider import Engine, SamplingParams
from outrider.engine.guides.grammars import Guidance
from outrider.engine.guides.guides import Regex
from outrider.engine.ranks.heartbeats import RankWatch
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.ranks.records import RanksDiffer, RanksFailed
from outrider.model import load_decoder, load_vision
from outrider.speculative.lookup import NgramProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof import proposers, tiny
from outrider_proof.checkpoints import IMAGE
from outrider_proof.decode_program import ResidueGrammars, Residues
from outrider_proof.engine_setups import pictures, vision_checkpoint
from outrider_proof.tiny import plain_config

TENSOR, DATA = ParallelConfig(tensor=2), ParallelConfig(data=2)
PROMPTS = [(3,), (1, 2, 3, 4, 5), (7, 8, 9)]
PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)
GUIDED = replace(PLAIN, guide=Regex("residues"))


class Slow(Guidance):
    """A grammar whose walk along a draft takes too long, behind a few tokens."""

    def fill_draft_masks(self, tokens, parents, words):
        super().fill_draft_masks(tokens, parents, words)
        self._late = self._output_length >= 3


class SlowGrammars(ResidueGrammars):
    def guidance(self, params, stops):
        del params, stops
        return Slow(Residues(tiny.VOCABULARY), vocabulary=tiny.VOCABULARY)


def engine_of(ranks, *, slow=None, **config):
    """An EAGLE engine of the tiny target, whose guides rank ``slow`` walks too slowly."""
    backend = CpuBackend() if ranks is None else ranks.backend
    target = proposers.decoder(tiny.target(), backend, None if ranks is None else ranks.model)
    made = {"max_context": 40, "max_requests": 3, "page_size": 4, "prefill_chunk": 4} | config
    proposer = proposers.MAKERS["eagle"](target, backend)
    engine = Engine(target, backend, proposer=proposer, config=plain_config(dtype="float64", **made), ranks=ranks)
    grammars = SlowGrammars if ranks is not None and ranks.rank == slow else ResidueGrammars
    grammars.into(engine)
    return engine


def answers(engine, params=(GUIDED, GUIDED, PLAIN)):
    return [(each.token_ids, each.error) for each in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize(("layout", "slow", "hit"), [(TENSOR, 0, {0, 1}), (DATA, 1, {1})])
def test_a_guide_that_one_rank_walks_too_slowly_ends_its_requests_on_all(layout, slow, hit):
    right = answers(engine_of(None))
    found = run(layout, lambda ranks: engine_of(ranks, slow=slow), answers)
    for index, ((tokens, error), (wanted, _)) in enumerate(zip(found, right, strict=True)):
        if index not in hit:
            assert (tokens, error) == (wanted, None)
        else:
            assert len(tokens) < len(wanted)
            assert tokens == wanted[: len(tokens)]
            assert "finding what its guide allows took more than 1 s" in error


def test_a_rank_that_decides_no_token_walks_no_grammar():
    found = run(TENSOR, lambda ranks: engine_of(ranks, slow=1), answers)
    assert found == answers(engine_of(None))


def test_the_first_rank_compiles_in_less_time_than_others_wait_for_it_and_these_take_whatever_it_takes():
    def body(ranks):
        engine = engine_of(ranks)
        if ranks.leads:
            engine.close()
        return engine._grammars._time_limit_s

    assert run_bodies(TENSOR, body) == [TENSOR.timeout_s / 4, None]


def test_a_rank_that_refuses_what_the_first_one_took_is_named():
    def body(ranks):
        engine = engine_of(ranks)
        if ranks.rank:
            engine._admission.config = replace(engine._admission.config, max_context=4)
            return engine.follow()
        return answers(engine)

    _, errors = failing(TENSOR, body)
    assert isinstance(errors[1], RanksDiffer)
    assert "rank 1 refuses a call 'generate' that rank 0 took" in str(errors[1])
    assert isinstance(errors[0], RanksFailed)


def test_a_rank_that_takes_another_bucket_is_named_before_it_launches():
    def body(ranks):
        engine = engine_of(ranks, graphs=True)
        if ranks.rank:
            honest = engine._step.shape
            engine._step.shape = lambda batch: {**honest(batch), "bucket": 64}
            return engine.follow()
        return answers(engine, PLAIN)

    _, errors = failing(TENSOR, body)
    assert isinstance(errors[1], RanksDiffer)
    assert "rank 1 comes to bucket = 64, and rank 0 decided" in str(errors[1])


def test_a_rank_that_is_slower_than_the_limit_ends_the_others_and_is_named():
    layout, over = ParallelConfig(tensor=2, timeout_s=3.0), threading.Event()

    def body(ranks):
        engine = engine_of(ranks)
        if ranks.leads:
            try:
                return answers(engine, PLAIN)
            finally:
                over.set()
        honest = engine._step.launch

        def launch(batch):
            over.wait(30)
            return honest(batch)

        engine._step.launch = launch
        watch = RankWatch(ranks, ranks.key_value_store, speaks=False)
        watch._end_process = lambda failure: over.set()
        watch.start()
        try:
            return engine.follow()
        finally:
            watch.stop()

    _, errors = failing(layout, body)
    assert isinstance(errors[0], RanksFailed)
    assert str(errors[0]).startswith("rank 1 hangs: it lives, and didn't make the call that rank 0 waited for (limit 3 s)")


def seeing(ranks, *, broken=()):
    """An engine that reads images; the towers of the ranks ``broken`` can't read the second of the two pictures."""
    backend, directory, dtype = ranks.backend, vision_checkpoint(), torch.float64
    target = load_decoder(directory, backend=backend, dtype=dtype, ranks=ranks.model)
    vision = load_vision(directory, backend=backend, dtype=dtype)
    if ranks.rank in broken:
        honest = vision.encode

        def encode(media):
            if media[0].digest == pictures()[1].digest:
                raise ValueError("no such picture")
            return honest(media)

        vision.encode = encode
    config = plain_config(dtype="float64", max_context=64, max_requests=3, page_size=4)
    proposer = NgramProposer(vocab_size=target.config.vocab_size, draft_tokens=3)
    return Engine(target, backend, proposer=proposer, config=config, ranks=ranks, vision=vision)


def looked(engine):
    prompts = [(1, *IMAGE, 7), (1, *IMAGE, 9), (1, 8)]
    media = [(pictures()[0],), (pictures()[1],), ()]
    return [(each.token_ids, each.error) for each in engine.generate(prompts, PLAIN, media=media)]


@pytest.fixture(scope="module")
def _written():
    """The checkpoint that all ranks read: not by two of them at a time."""
    vision_checkpoint()


@pytest.mark.slow  # a tower takes seconds to import
@pytest.mark.usefixtures("_written")
@pytest.mark.parametrize(("layout", "broken"), [(TENSOR, {0, 1}), (DATA, {1})])
def test_an_image_that_a_rank_cannot_read_ends_its_request_and_no_other(layout, broken):
    right = run(layout, seeing, looked)
    found = run(layout, lambda ranks: seeing(ranks, broken=broken), looked)
    assert found[0] == right[0]
    assert found[2] == right[2]
    tokens, error = found[1]
    assert tokens == ()
    assert ("ValueError: no such picture" if 0 in broken else "its media can't be read") in error


@pytest.mark.slow
@pytest.mark.usefixtures("_written")
def test_an_image_that_only_a_rank_that_follows_cannot_read_ends_the_ranks():
    def body(ranks):
        engine = seeing(ranks, broken={1})
        return looked(engine) if ranks.leads else engine.follow()

    _, errors = failing(TENSOR, body)
    assert isinstance(errors[1], RanksDiffer)
    assert "failed on this rank, and not on the first of its group: ValueError: no such picture" in str(errors[1])
