"""verify_tree and move_cache against slow formulations; losslessness by chi-square, with wrong rules failing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.device import ROW_ACCESS, KernelSet

KERNELS = KernelSet()


@st.composite
def trees(draw):
    """(parents of each request's nodes, vocabulary, seed); unused nodes have parent -1."""
    nodes = draw(st.integers(1, 9))
    batch = draw(st.integers(1, 4))
    parents = [[-1] + [draw(st.integers(-1, i - 1)) for i in range(1, nodes)] for _ in range(batch)]
    return parents, draw(st.integers(2, 6)), draw(st.integers(0, 1000))


def walk(logits, tokens, parents, temperature, seed, position, depth):
    """One request, node by node, with the sampler that plain decoding uses."""
    here, out, path = 0, [], []
    for level in range(depth + 1):
        choice = KERNELS.sample(logits[here].unsqueeze(0), temperature.view(1), seed.view(1), position.view(1) + level).item()
        out.append(choice)
        path.append(here)
        children = [i for i in range(len(parents)) if parents[i] == here and tokens[i] == choice]
        if not children or level == depth:
            break
        here = children[0]
    return out, path


@given(trees(), st.sampled_from([0.0, 0.8, None]), st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_verify_tree_equals_a_walk(case, temperature, depth):
    parents, vocabulary, seed = case
    generator = torch.Generator().manual_seed(seed)
    batch, nodes = len(parents), len(parents[0])
    logits = torch.randn(batch, nodes, vocabulary, generator=generator) * 2
    tokens = torch.randint(0, vocabulary, (batch, nodes), generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    positions = torch.randint(1, 50, (batch,), generator=generator)
    heat = torch.tensor([0.0, 0.9, 1.3, 0.0])[:batch] if temperature is None else torch.full((batch,), temperature)
    out, path, accepted = KERNELS.verify_tree(
        logits, tokens, torch.tensor(parents), heat, seeds, positions, depth=depth, sampling=bool((heat > 0).any())
    )
    for b in range(batch):
        expected, nodes_seen = walk(logits[b], tokens[b].tolist(), parents[b], heat[b], seeds[b], positions[b], depth)
        rest = depth + 1 - len(expected)
        assert accepted[b] == len(expected) - 1
        assert out[b].tolist() == expected + [-1] * rest
        assert path[b].tolist() == nodes_seen + [0] * rest


def test_a_chain_as_a_tree_gives_what_verify_chain_gives():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 4, 3, generator=generator)
    drafts = torch.randint(0, 3, (50, 3), generator=generator)
    zero = torch.zeros(50, dtype=torch.int64)
    tokens, accepted = KERNELS.verify_chain(logits, drafts, None, torch.zeros(50), zero, zero)
    parents = torch.tensor([-1, 0, 1, 2]).expand(50, 4)
    out, _, count = KERNELS.verify_tree(
        logits, torch.cat((zero.unsqueeze(1), drafts), 1), parents, torch.zeros(50), zero, zero, depth=3, sampling=False
    )
    assert torch.equal(out, tokens)
    assert torch.equal(count, accepted)
    assert set(accepted.tolist()) == {0, 1, 2, 3}


# -- losslessness ----------------------------------------------------------------------------------------------------

VOCABULARY, TEMPERATURE, DRAWS = 5, 0.8, 60_000
FIRST = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 1.5
SECOND = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(6)) * 1.5


def verify(logits, tokens, parents, temperature, seeds, positions):
    return KERNELS.verify_tree(logits, tokens, parents, temperature, seeds, positions, depth=2, sampling=True)


def joint_counts(rule, *, random_tree=False):
    """Counts of the first two tokens where the draft is the same tree for all, or drawn anew for each request."""
    seeds = torch.arange(DRAWS)
    hot = torch.full((DRAWS,), TEMPERATURE)
    positions = torch.full((DRAWS,), 11)
    if random_tree:  # siblings drawn by the draft's own lane, with replacement: duplicates occur
        draft = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(8)).expand(DRAWS, -1)
        level = [KERNELS.sample(draft, hot, seeds, positions + 100 + i, draft=True) for i in range(3)]
        below = [KERNELS.sample(draft, hot, seeds, positions + 200 + i, draft=True) for i in range(2)]
        tokens = torch.stack((seeds * 0, *level, *below), 1)
    else:
        likely = FIRST.topk(3).indices
        tokens = torch.cat((torch.zeros(1, dtype=torch.int64), likely, SECOND[likely[0]].topk(2).indices)).expand(DRAWS, -1)
    parents = torch.tensor([-1, 0, 0, 0, 1, 1]).expand(DRAWS, -1)
    logits = torch.stack(
        (FIRST.expand(DRAWS, -1), *(SECOND[tokens[:, i]] for i in (1, 2, 3)), *[FIRST.expand(DRAWS, -1)] * 2), 1
    )
    out, _, accepted = rule(logits, tokens, parents, hot, seeds, positions)
    alone = KERNELS.sample(SECOND[out[:, 0]], hot, seeds, positions + 1)
    second = torch.where(accepted >= 1, out[:, 1], alone)
    counts = torch.bincount(out[:, 0] * VOCABULARY + second, minlength=VOCABULARY**2).double()
    return counts, accepted


def excess(counts):
    """Chi-square over its upper 1e-4 quantile (Wilson and Hilferty 1931)."""
    p = torch.softmax(FIRST / TEMPERATURE, -1).double().unsqueeze(1) * torch.softmax(SECOND / TEMPERATURE, -1).double()
    wanted = p.flatten() * counts.sum()
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    freedom = counts.numel() - 1
    return statistic / (freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3)


@pytest.mark.parametrize("random_tree", [False, True])
def test_tree_sampling_is_lossless(random_tree):
    counts, accepted = joint_counts(verify, random_tree=random_tree)
    assert float(accepted.double().mean()) > 0.5
    assert excess(counts) < 1


def siblings_by_ratio(logits, tokens, parents, temperature, seeds, positions):
    """A wrong rule: tries the siblings one after another, each with the target's probability, and forgets to take away
    from the target what the earlier ones have used up.
    """
    out, path, accepted = verify(logits, tokens, parents, temperature, seeds, positions)
    p = torch.softmax(logits[:, 0] / temperature.unsqueeze(1), -1)
    rejected = torch.ones(len(seeds), dtype=torch.bool)
    for sibling in (1, 2, 3):
        coin = torch.rand(len(seeds), generator=torch.Generator().manual_seed(sibling))
        token = tokens[:, sibling]
        take = rejected & (coin < p.gather(1, token.unsqueeze(1)).squeeze(1))
        out[:, 0] = torch.where(take, token, out[:, 0])
        rejected &= ~take
    return out, path, torch.zeros_like(accepted)


def follow_the_likeliest(logits, tokens, parents, temperature, seeds, positions):
    """A wrong rule: accepts the first child whenever the target finds it likely."""
    out, path, accepted = verify(logits, tokens, parents, temperature, seeds, positions)
    p = torch.softmax(logits[:, 0] / temperature.unsqueeze(1), -1).gather(1, tokens[:, 1:2]).squeeze(1)
    out[:, 0] = torch.where(p > 0.2, tokens[:, 1], out[:, 0])
    return out, path, torch.zeros_like(accepted)


@pytest.mark.parametrize("rule", [siblings_by_ratio, follow_the_likeliest])
def test_the_same_draws_fail_a_wrong_rule(rule):
    counts, _ = joint_counts(rule)
    assert excess(counts) > 1


def test_tree_samples_are_the_very_tokens_of_plain_sampling():
    """The draw at a position depends on seed and position alone, so a tree changes no token."""
    seeds = torch.arange(200)
    hot, positions = torch.full((200,), TEMPERATURE), torch.full((200,), 11)
    tokens = torch.tensor([0, 2, 4]).expand(200, -1)
    logits = torch.stack((FIRST.expand(200, -1), SECOND[tokens[:, 1]], SECOND[tokens[:, 2]]), 1)
    out, _, accepted = KERNELS.verify_tree(
        logits, tokens, torch.tensor([-1, 0, 0]).expand(200, -1), hot, seeds, positions, depth=1, sampling=True
    )
    first = KERNELS.sample(FIRST.expand(200, -1), hot, seeds, positions)
    assert torch.equal(out[:, 0], first)
    second = KERNELS.sample(SECOND[first], hot, seeds, positions + 1)
    assert torch.equal(out[:, 1], torch.where(accepted == 1, second, -1))


# -- moves -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True), st.data())
@settings(max_examples=60, deadline=None)
def test_move_cache_reads_everything_before_it_writes(destinations, data):
    sources = [data.draw(st.integers(0, 11)) for _ in destinations]
    k, v = torch.randn(4, 3, 2, 8), torch.randn(4, 3, 2, 8)
    before = k.view(12, 2, 8).clone(), v.view(12, 2, 8).clone()
    KERNELS.move_cache(k, v, torch.tensor(sources), torch.tensor(destinations))
    for cache, old in zip((k, v), before, strict=True):
        expected = old.clone()
        for source, destination in zip(sources, destinations, strict=True):
            expected[destination] = old[source]
        assert torch.equal(cache.view(12, 2, 8), expected)


def test_the_rows_of_a_move_are_its_sources_and_destinations():
    k = torch.zeros(4, 3, 2, 8)
    arguments = {"k_cache": k, "v_cache": k, "sources": torch.tensor([5, 7]), "destinations": torch.tensor([4, 5])}
    for operand in ("k_cache", "v_cache"):
        assert ROW_ACCESS["outrider::move_cache"][operand](arguments).tolist() == [5, 7, 4, 5]


def test_schemas_hold():
    opcheck = torch.library.opcheck
    utils = ("test_schema", "test_faketensor")
    logits, tokens = torch.randn(2, 3, 5), torch.tensor([[1, 2, 3], [4, 0, 1]])
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]])
    heat, seeds = torch.tensor([0.0, 1.0]), torch.tensor([1, 2])
    opcheck(
        torch.ops.outrider.verify_tree.default,
        (logits, tokens, parents, heat, seeds, seeds.clone(), 2, True),
        test_utils=utils,
    )
    k = torch.randn(4, 3, 2, 8)
    opcheck(
        torch.ops.outrider.move_cache.default,
        (k, k.clone(), torch.tensor([5, 7]), torch.tensor([4, 5])),
        test_utils=utils,
    )
