"""Suffix decoding and a head as one proposer."""

import pytest
import torch

from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.lookup import CombinedProposer, SuffixProposer
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider.speculative.tree import DynamicTree
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.checkpoints import write_eagle
from outrider_proof.proposers import untrained
from outrider_proof.tiny import plain_config
from tiny_checkpoints import write_checkpoint


def combined(other=None, least=2):
    return CombinedProposer(
        SuffixProposer.for_target(tiny.target(), 3), other or EagleProposer(tiny.eagle_head(), draft_tokens=3), least=least
    )


def test_each_request_is_drafted_for_by_the_one_that_has_something():
    """Every draft is the lookup's where a long enough suffix was found, the head's otherwise; both happen."""
    proposer = combined()
    lookup, other = proposer.parts
    engine = tiny.engine(proposer, max_requests=3)
    inner, seen = proposer.draft, {True: 0, False: 0}

    def draft(inputs):
        drafted, (found, lengths), head = inner(inputs), lookup.continuation(inputs), other.draft(inputs)
        for row, matched in enumerate(lengths.tolist()):
            expected = found[row] if matched >= 2 else head.tokens[row]
            assert torch.equal(drafted.tokens[row], expected)
            seen[matched >= 2] += 1
        return drafted

    proposer.draft = draft
    prompts = [(3, 1, 4), (2, 7), (3, 1, 4)]
    for prompt, result in zip(prompts, engine.generate(prompts, SamplingParams(max_tokens=20)), strict=True):
        assert result.token_ids == tiny.plain(prompt, 20)
    assert min(seen.values()) > 2


def test_the_lookup_helps_a_head_that_knows_nothing():
    def length(proposer):
        engine = tiny.engine(proposer)
        for _ in range(2):
            engine.generate([(3, 1, 4), (2, 7)], SamplingParams(max_tokens=24))
        return engine.stats.acceptance_length

    blind = EagleProposer(untrained(tiny.target()), draft_tokens=3)
    assert length(combined(blind)) > 1.3 * length(EagleProposer(untrained(tiny.target()), draft_tokens=3))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match="drafts trees; expected one that drafts chains"):
        combined(EagleTreeProposer(tiny.eagle_head(), DynamicTree(topk=2, depth=3)))
    with pytest.raises(ConfigError, match="'none' drafts nothing"):
        combined(NonSpeculativeProposer())
    with pytest.raises(ConfigError, match="'suffix' drafts 3 tokens and 'eagle' 2"):
        combined(EagleProposer(tiny.eagle_head(), draft_tokens=2))
    with pytest.raises(ConfigError, match="at least 9 tokens; expected 1 to 8"):
        combined(least=9)


def test_two_names_make_one(tmp_path):
    write_checkpoint(tmp_path / "target", "llama")
    write_eagle(tmp_path / "eagle")
    config = plain_config(draft_tokens=3, max_context=48)
    engine = Engine.from_checkpoint(
        tmp_path / "target", CpuBackend(), draft_dir=tmp_path / "eagle", speculate="suffix+eagle", config=config
    )
    assert engine.proposer.name == "suffix+eagle"
    prompts, greedy = [[1, 5, 9, 13], [7]], SamplingParams(max_tokens=12, ignore_eos=True)
    plain = Engine(engine.model, engine.backend, config=config)
    expected = [result.token_ids for result in plain.generate(prompts, greedy)]
    assert [result.token_ids for result in engine.generate(prompts, greedy)] == expected
