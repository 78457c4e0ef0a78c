"""Every proposer, chain and tree: plain greedy tokens, real acceptance, lossless sampling."""

import pytest
import torch
from hypothesis import given, settings

from outrider import SamplingParams
from speculative import tiny
from speculative.programs import ENGINES, check, programs
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.ngram import NgramProposer
from outrider.speculative.tree import DynamicTree, FixedTree

PROPOSERS = {
    "eagle": lambda: EagleProposer(tiny.eagle_head(), draft_tokens=3),
    "eagle-tree": lambda: EagleTreeProposer(tiny.eagle_head(), DynamicTree(topk=3, depth=3)),
    "eagle-fixed-tree": lambda: EagleTreeProposer(tiny.eagle_head(), FixedTree.regular((3, 2, 1))),
    "eagle3": lambda: EagleProposer(tiny.eagle3_head(), draft_tokens=3),
    "eagle3-tree": lambda: EagleTreeProposer(tiny.eagle3_head(), DynamicTree(topk=3, depth=3)),
    "mtp": lambda: MtpProposer(tiny.mtp_heads()),
    "mtp-one": lambda: MtpProposer(tiny.mtp_heads(), draft_tokens=1),
    "mtp-tree": lambda: MtpProposer(tiny.mtp_heads(), branches=3),
    "draft-model": lambda: DraftModelProposer(tiny.draft_model(), target=tiny.target(), draft_tokens=3),
    "draft-model-tree": lambda: DraftModelTreeProposer(
        tiny.draft_model(), target=tiny.target(), shape=DynamicTree(topk=3, depth=3)
    ),
    "ngram": lambda: NgramProposer(vocab_size=tiny.VOCABULARY, draft_tokens=4),
    "ngram-tree": lambda: NgramProposer(vocab_size=tiny.VOCABULARY, draft_tokens=3, branches=3),
}


@pytest.mark.parametrize("name", PROPOSERS)
@given(program=programs(tiny.VOCABULARY), **ENGINES)
@settings(max_examples=15, deadline=None)
def test_any_program_gives_plain_greedy_tokens(name, program, **config):
    check(tiny.engine(PROPOSERS[name](), **config), program, tiny.plain)


def acceptance(proposer, **config):
    engine = tiny.engine(proposer, max_requests=8, **config)
    engine.generate([(i, (i * 5 + 1) % 24) for i in range(20)], SamplingParams(max_tokens=40, ignore_eos=True))
    return engine.stats.acceptance_length


@pytest.mark.parametrize("name", PROPOSERS)
def test_drafts_are_really_accepted(name):
    found = acceptance(PROPOSERS[name]())
    print(name, found)
    assert found >= (1.5 if name == "mtp-one" else 2)
