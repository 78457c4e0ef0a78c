"""What nobody reads of prompts isn't computed: which rows go through the last layers, and that nothing else changes by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import Tiny, replayed_prefill

from drawing import some_and_many
from model.test_kept_rows import Counting
from outrider import Engine, SamplingParams
from outrider.model import Decoder, KeptRows
from outrider.registry import get_backend
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS
from outrider_proof.tiny import plain_config

PROMPTS = [(3,), (1, 2, 3, 4, 5, 6), (7, 8, 9)]
READ_EVERY_STATE = {"eagle", "eagle-tree", "mtp", "mtp-tree", "suffix+eagle"}
"""The proposers whose heads read the target's final hidden states, as the papers have it."""


def drafting_layer(proposer):
    """The layer that a proposer's model or head ends with, and runs over prompts; None: it has none."""
    proposer = getattr(proposer, "_other", proposer)
    if hasattr(proposer, "_heads"):
        return proposer._heads[-1].weights.layers[-1]
    if hasattr(proposer, "_model"):
        return proposer._model.weights.layers[-1]
    weights = getattr(getattr(proposer, "_head", None), "weights", None)
    return None if weights is None or proposer.name == "dflash" else weights.layers[-1]


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_rows_that_go_through_the_last_layers(name):
    """The target's: every token where the proposer reads its states, else one of each prompt; those of what drafts: one."""
    kernels = Counting()
    target = tiny.decoder(kernels=kernels)
    proposer = MAKERS[name](target, tiny.BACKEND) or NonSpeculativeProposer()
    if hasattr(proposer, "_model"):
        model = proposer._model
        proposer._model = Decoder(model.config, model.weights, kernels)
    assert proposer.reads_hidden == (name in READ_EVERY_STATE)
    engine = Engine(target, tiny.BACKEND, proposer=proposer, config=plain_config(dtype="float64", max_context=64))
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    kernels.rows.clear()
    engine.step()
    tokens, requests = sum(len(prompt) for prompt in PROMPTS), len(PROMPTS)
    first = [rows[0] for rows in kernels.of(target.weights.layers[0])]
    last = [rows[0] for rows in kernels.of(target.weights.layers[-1])]
    assert first == [tokens] * 4
    assert last == (first if proposer.reads_hidden else [tokens, *[requests] * 3])
    own = drafting_layer(proposer)
    if own is not None:
        # Heads of multi-token prediction pad each prompt to the longest, and the last one has a token more for each before.
        passed = requests * (len(PROMPTS[1]) + len(proposer._heads) - 1) if hasattr(proposer, "_heads") else tokens
        assert [rows[0] for rows in kernels.of(own)] == [passed, *[requests] * 3]


@pytest.fixture(scope="module", params=["cpu", "sim"])
def world(request):
    """A backend with a target on it, and a stream to load on."""
    world = Tiny(get_backend(request.param))
    world.loading = world.backend.create_stream("load drafters")
    return world


def tokens_and_iterations(world, name, prompts, *, graphs, **config):
    with world.backend.on(world.loading):
        proposer = MAKERS[name](world.target, world.backend) or NonSpeculativeProposer()
    world.loading.synchronize()
    if graphs and (proposer.accepts_padding or not proposer.extends):
        config |= {"mode": "fused"}
    config = plain_config(dtype="float64", max_context=64, **config)
    with replayed_prefill(12):
        engine = Engine(world.target, world.backend, proposer=proposer, config=config)
    results = engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    return [result.token_ids for result in results], [result.iterations for result in results]


def same_drafts(world, name, prompts, **config):
    """The tokens are those of plain decoding, alone. That drafts are the same shows in how many iterations they take: as many
    as where every row goes through every layer.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KeptRows, "last_of_each", lambda *_: None)
        wanted = tokens_and_iterations(world, name, prompts, **config)
    assert tokens_and_iterations(world, name, prompts, **config) == wanted
    assert wanted[0] == [world.plain(prompt, 8).token_ids for prompt in prompts]


test_tokens_and_drafts_are_the_same, test_many_tokens_and_drafts_are_the_same = some_and_many(
    same_drafts,
    given(
        prompts=st.lists(
            st.lists(st.integers(0, tiny.VOCABULARY - 1), min_size=1, max_size=30).map(tuple), min_size=1, max_size=5
        ),
        prefill_chunk=st.integers(1, 40),
        page_size=st.sampled_from([1, 3, 16]),
        max_requests=st.integers(1, 5),
        overlap=st.booleans(),
        graphs=st.booleans(),
    ),
    pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle-tree", "mtp", "peagle", "draft-model", "suffix", "none"]),
    pytest.mark.sample(2),
    some=2,
    many=20,
)
