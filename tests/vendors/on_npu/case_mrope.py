"""Positions on three axes, on a device whose plan stream leaves others than it should: seen there, and imitated here."""

import emulation
import pytest
import torch

from engine.test_vision_requests import GREEDY, Checkpoint
from outrider import Engine
from outrider.model import load_decoder, load_eagle, load_vision, open_head
from outrider.speculative.eagle import EagleProposer
from outrider.speculative.lookup import NgramProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config

NAMES = ("image", "text", "video")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return Checkpoint(tmp_path_factory.mktemp("vision"), "qwen2_5_vl", CpuBackend())


def ngrams(target, checkpoint, backend):
    return NgramProposer(vocab_size=target.config.vocab_size, draft_tokens=3)


def eagle(target, checkpoint, backend):
    head = load_eagle(open_head(checkpoint.directory / "eagle", target=target, backend=backend, dtype=torch.float32))
    return EagleProposer(head, draft_tokens=3)


def tokens_on(checkpoint, **options):
    """Greedy tokens of an image, a video and text."""
    return [result.token_ids for result in served_on(checkpoint, NAMES, **options)[0]]


def served_on(checkpoint, names, *, graphs, spoilt, recompute=True, refresh=True, proposer=ngrams):
    """Results of prompts, and the engine. ``spoilt``: the plan's positions are others when it has joined."""
    backend = emulation.make()
    backend.control.reset()
    sync = backend.speculative_sync
    if not recompute:
        sync.recompute_after_join = frozenset()
    if not refresh:
        sync.refresh_before_replay = frozenset()
    own = sync.after_join
    joins = []

    def after_join(plan):
        joins.append(1)
        if spoilt:
            for positions in (plan.verify.rope_positions, plan.verify.static_rope_positions):
                positions.fill_(1)
        own(plan)
        own(plan)  # from source, so that a second time changes nothing

    sync.after_join = after_join
    target = load_decoder(checkpoint.directory, backend=backend, dtype=torch.float32)
    tower = load_vision(checkpoint.directory, backend=backend, dtype=torch.float32)
    config = plain_config(page_size=4, max_context=128, prefill_chunk=64, overlap=True, graphs=graphs, max_requests=3)
    engine = Engine(target, backend, proposer=proposer(target, checkpoint, backend), config=config, vision=tower)
    prompts = [checkpoint.prompts[name] for name in names]
    results = engine.generate([tokens for tokens, _ in prompts], GREEDY, media=[media for _, media in prompts])
    assert joins
    return results, engine


@pytest.fixture(scope="module")
def wanted(checkpoint):
    return [checkpoint.expected(name) for name in NAMES]


@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
@pytest.mark.parametrize("spoilt", [False, True], ids=["sound", "spoilt"])
def test_tokens_are_those_of_transformers(checkpoint, wanted, graphs, spoilt):
    assert tokens_on(checkpoint, graphs=graphs, spoilt=spoilt) == wanted


@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
def test_a_missing_recompute_shows(checkpoint, wanted, graphs):
    assert tokens_on(checkpoint, graphs=graphs, spoilt=True, recompute=False) != wanted


def test_a_missing_refresh_of_the_graphs_buffer_shows(checkpoint, wanted):
    assert tokens_on(checkpoint, graphs=True, spoilt=True, refresh=False) != wanted


def last_drafts(engine):
    """What EAGLE relayed of the only request: its state hangs on each position that it saw."""
    relay = engine._parts.future.relay
    return relay["hidden"][1].cpu(), int(relay["token"][1].cpu())


@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
@pytest.mark.parametrize("name", NAMES)
def test_eagle_drafts_as_it_does_on_the_reference(checkpoint, wanted, graphs, name):
    """Wrong positions of a draft change no token: its states must be those of the reference, too."""
    (result,), engine = served_on(checkpoint, (name,), graphs=graphs, spoilt=True, proposer=eagle)
    assert result.token_ids == wanted[NAMES.index(name)]
    alone = checkpoint.engine(EagleProposer(checkpoint.head, draft_tokens=3), max_requests=3)
    checkpoint.check(alone, (name,))
    (hidden, token), (right, same) = last_drafts(engine), last_drafts(alone)
    assert token == same
    assert torch.allclose(hidden, right, atol=1e-3)


def test_eagle_on_positions_that_were_not_recomputed_drafts_otherwise(checkpoint):
    _, engine = served_on(checkpoint, ("image",), graphs=True, spoilt=True, recompute=False, proposer=eagle)
    _, sound = served_on(checkpoint, ("image",), graphs=True, spoilt=True, proposer=eagle)
    assert not torch.allclose(last_drafts(engine)[0], last_drafts(sound)[0], atol=1e-3)
