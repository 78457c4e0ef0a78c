"""Positions on three axes, on a device whose plan stream leaves others than it should: seen there, and imitated here."""

import emulation
import pytest
import torch

from engine.test_vision_requests import GREEDY, Checkpoint
from outrider import Engine
from outrider.model import load_decoder, load_vision
from outrider.speculative.ngram import NgramProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config

NAMES = ("image", "text", "video")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return Checkpoint(tmp_path_factory.mktemp("vision"), "qwen2_5_vl", CpuBackend())


def tokens_on(checkpoint, *, graphs, spoilt, recompute=True, refresh=True):
    """Greedy tokens of an image, a video and text. ``spoilt``: the plan's positions are others when it has joined."""
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
    proposer = NgramProposer(vocab_size=target.config.vocab_size, draft_tokens=3)
    engine = Engine(target, backend, proposer=proposer, config=config, vision=tower)
    prompts = [checkpoint.prompts[name] for name in NAMES]
    results = engine.generate([tokens for tokens, _ in prompts], GREEDY, media=[media for _, media in prompts])
    assert joins
    return [result.token_ids for result in results]


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
