"""verify_tree and move_cache against slow formulations; losslessness by chi-square, with wrong rules failing."""

import math

import pytest
import torch

from outrider.device import ROW_ACCESS, KernelSet

KERNELS = KernelSet()


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


# -- moves -----------------------------------------------------------------------------------------------------------


def test_the_rows_of_a_move_are_its_sources_and_destinations():
    k = torch.zeros(4, 3, 2, 8)
    arguments = {"k_cache": k, "v_cache": k, "sources": torch.tensor([5, 7]), "destinations": torch.tensor([4, 5])}
    for operand in ("k_cache", "v_cache"):
        assert ROW_ACCESS["outrider::move_cache"][operand](arguments).tolist() == [5, 7, 4, 5]
