"""Suffix decoding: what past outputs are remembered, and that nothing but speed depends on them."""

import random

import pytest
import torch

from outrider import SamplingParams
from outrider.device import ConfigError
from outrider.speculative.lookup import NgramProposer, SuffixProposer, SuffixTable
from outrider_proof import tiny

LENGTHS = (1, 2, 4)


def learnt(table, text):
    """The text, a token a call, each behind those before it."""
    for at in range(1, len(text)):
        context = [text[at - 1 - back] if at - 1 - back >= 0 else 0 for back in range(table.longest)]
        table.learn(torch.tensor([context]), torch.tensor([at]), torch.tensor([text[at]]), torch.tensor([True]))


def looked_up(table, context):
    """Token and length behind a context, whose last token comes last."""
    ahead = [*reversed(context)][: table.longest]
    ahead += [0] * (table.longest - len(ahead))
    token, length = table.most_likely_token(torch.tensor([ahead]), torch.tensor([len(context)]))
    return int(token), int(length)


def test_the_longest_context_that_was_seen_decides():
    """Against a plain dictionary, over a drawn text; the table is large, so that contexts don't collide."""
    rng = random.Random(7)
    text = [rng.randrange(6) for _ in range(300)]
    table = SuffixTable(slots=1 << 16, lengths=LENGTHS, device=torch.device("cpu"))
    learnt(table, text)
    votes = {}
    for at in range(1, len(text)):
        for length in (n for n in LENGTHS if n <= at):
            context = tuple(text[at - length : at])
            token, firm = votes.get(context, (text[at], 0))
            votes[context] = (token, firm + 1) if token == text[at] else (token, firm - 1) if firm > 1 else (text[at], 1)
    checked = 0
    for _ in range(200):
        context = tuple(rng.randrange(6) for _ in range(5))
        known = [n for n in LENGTHS if context[-n:] in votes]
        expected = (votes[context[-known[-1] :]][0], known[-1]) if known else None
        found = looked_up(table, context)
        assert found == expected if expected else found[1] == 0
        checked += known[-1:] == [4]
    assert checked > 10


def test_what_was_never_seen_is_not_found():
    table = SuffixTable(slots=64, lengths=LENGTHS, device=torch.device("cpu"))
    assert looked_up(table, (1, 2, 3, 4))[1] == 0
    learnt(table, [1, 2, 3])
    assert looked_up(table, (9, 9, 9, 2)) == (3, 1)
    assert looked_up(table, (9, 9, 9, 9))[1] == 0


def test_a_small_table_forgets_and_stays_right():
    """A slot that was taken over doesn't answer for the context that had it."""
    table = SuffixTable(slots=8, lengths=LENGTHS, device=torch.device("cpu"))
    rng = random.Random(3)
    text = list(range(50)) + [rng.randrange(50) for _ in range(50)]
    learnt(table, text)
    seen = {tuple(text[at - n : at + 1]) for n in LENGTHS for at in range(n, len(text))}
    hits = 0
    for at in range(4, len(text)):
        token, length = looked_up(table, text[:at])
        hits += length > 0
        assert length == 0 or (*text[at - length : at], token) in seen
    assert 0 < hits < len(text) - 4


def test_several_writes_to_one_slot_leave_one_of_them_whole():
    table = SuffixTable(slots=1 << 10, lengths=(1,), device=torch.device("cpu"))
    for order in ((5, 6, 7), (7, 6, 5)):
        table.learn(torch.tensor([[1]] * 3), torch.ones(3).long(), torch.tensor(order), torch.ones(3).bool())
        assert looked_up(table, (1,)) == (7, 1)


def iterations(proposer, prompts, rounds, params=None):
    """Iterations of each of so many rounds of the same prompts."""
    engine = tiny.engine(proposer, max_requests=2, overlap=True)
    took, texts = [], []
    for _ in range(rounds):
        before = engine.stats.iterations
        texts.append([r.token_ids for r in engine.generate(prompts, params or SamplingParams(max_tokens=24))])
        took.append(engine.stats.iterations - before)
    return took, texts


def test_past_outputs_are_drafted_again():
    """The same request a second time takes far fewer iterations than the first; the own text alone can't do that."""
    prompts = [(3, 1, 4), (2, 7, 1, 8)]
    (first, second), texts = iterations(SuffixProposer(vocab_size=tiny.VOCABULARY, draft_tokens=4), prompts, 2)
    assert second <= 0.7 * first
    assert texts[0] == texts[1] == [tiny.plain(prompt, 24) for prompt in prompts]
    (first, second), _ = iterations(NgramProposer(vocab_size=tiny.VOCABULARY, draft_tokens=4), prompts, 2)
    assert second == first


def test_what_a_request_draws_does_not_depend_on_past_outputs():
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=11, ignore_eos=True)
    _, texts = iterations(SuffixProposer(vocab_size=tiny.VOCABULARY, draft_tokens=4), [(3, 1, 4), (2, 7)], 3, params)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("wrong", [{"draft_tokens": 0}, {"vocab_size": 1 << 25}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected"):
        SuffixProposer(**{"vocab_size": 96, "draft_tokens": 3} | wrong)
