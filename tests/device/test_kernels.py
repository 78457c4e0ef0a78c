"""The torch references against independent formulations."""

import math

import pytest
import torch

from outrider.device import KernelSet
from outrider.device.kernels.reference.model import philox, uniforms

KERNELS = KernelSet()

# Random123's known-answer vectors for philox4x32-10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(w) for w in words) == expected


def test_uniforms_depend_on_seed_position_lane_and_index_alone():
    seeds, positions = torch.tensor([3, 3, 4]), torch.tensor([7, 8, 7])
    batch = uniforms(seeds, positions, 1, 10)
    for row in range(3):
        assert torch.equal(batch[row], uniforms(seeds[row : row + 1], positions[row : row + 1], 1, 10)[0])
    assert len(set(batch.flatten().tolist())) == 30
    assert not torch.equal(batch, uniforms(seeds, positions, 2, 10))
    assert batch.min() > 0
    assert batch.max() < 1


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def critical(freedom: int) -> float:
    """Upper 1e-4 quantile of chi-square (Wilson and Hilferty 1931)."""
    z = 3.719
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def speculative_draws(draws: int, accept=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Joint counts of the first two tokens of a chain, and their true distribution under the target."""
    vocabulary, chain, temperature = 4, 2, 0.7
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(vocabulary, generator=generator) * 1.5
    second = torch.randn(vocabulary, vocabulary, generator=generator) * 1.5  # given the first token
    third = torch.zeros(vocabulary)
    drafts = [torch.randn(vocabulary, generator=generator) for _ in range(chain)]
    seeds = torch.arange(draws)
    hot = torch.full((draws,), temperature)
    positions = torch.full((draws,), 11)
    tokens, probs = [], []
    for step in range(chain):
        logits = drafts[step].expand(draws, vocabulary)
        tokens.append(KERNELS.sample(logits, hot, seeds, positions + step, draft=True))
        probs.append(torch.softmax(logits / temperature, -1))
    draft = torch.stack(tokens, 1)
    target = torch.stack((first.expand(draws, -1), second[draft[:, 0]], third.expand(draws, -1)), 1)
    verify = accept or KERNELS.verify_chain
    out, accepted = verify(target, draft, torch.stack(probs, 1), hot, seeds, positions)
    # A request that accepted nothing decides its second token by itself, one iteration later.
    alone = KERNELS.sample(second[out[:, 0].clamp(min=0)], hot, seeds, positions + 1)
    pair = torch.stack((out[:, 0], torch.where(accepted >= 1, out[:, 1], alone)), 1)
    counts = torch.bincount(pair[:, 0] * vocabulary + pair[:, 1], minlength=vocabulary**2).double()
    p_first = torch.softmax(first / temperature, -1).double()
    p_second = torch.softmax(second / temperature, -1).double()
    return counts, (p_first.unsqueeze(1) * p_second).flatten()


def test_speculative_sampling_is_lossless():
    counts, probs = speculative_draws(40_000)
    assert chi_square(counts, probs) < critical(probs.numel() - 1)


def accept_everything_likely(target_logits, draft_tokens, draft_probs, temperature, seeds, positions):
    """A wrong rule: accepts a draft when the target gives it at least a tenth of what the draft did."""
    tokens, accepted = KERNELS.verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
    probs = torch.softmax(target_logits[:, :-1] / temperature.view(-1, 1, 1), -1)
    p = probs.gather(2, draft_tokens.unsqueeze(-1)).squeeze(-1)
    q = draft_probs.gather(2, draft_tokens.unsqueeze(-1)).squeeze(-1)
    wrong = (p > 0.1 * q)[:, 0] & (accepted == 0)
    tokens[:, 0] = torch.where(wrong, draft_tokens[:, 0], tokens[:, 0])
    return tokens, accepted


def resample_from_the_target(target_logits, draft_tokens, draft_probs, temperature, seeds, positions):
    """A wrong rule that is hard to see: after a rejection it draws from the target, not from the residual."""
    tokens, accepted = KERNELS.verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
    again = KERNELS.sample(target_logits[:, 0], temperature, seeds, positions)
    tokens[:, 0] = torch.where(accepted == 0, again, tokens[:, 0])
    return tokens, accepted


@pytest.mark.parametrize("rule", [accept_everything_likely, resample_from_the_target])
def test_the_same_draws_fail_a_wrong_rule(rule):
    counts, probs = speculative_draws(40_000, rule)
    assert chi_square(counts, probs) > critical(probs.numel() - 1)


def test_plain_sampling_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    draws = 20_000
    tokens = KERNELS.sample(
        logits.expand(draws, 4), torch.full((draws,), 1.3), torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    )
    counts = torch.bincount(tokens, minlength=4).double()
    assert chi_square(counts, torch.softmax(logits / 1.3, -1).double()) < critical(3)


def test_draws_are_independent():
    """Of the target and of a draft, of neighbouring seeds and positions, and of seeds that differ in their upper half."""
    draws = 12_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    law = torch.softmax(logits.double(), -1)
    seeds, positions = torch.arange(draws), torch.arange(draws) % 97

    def drawn(seeds, positions, draft=False):
        return KERNELS.sample(logits.expand(draws, 4), torch.ones(draws), seeds, positions, draft=draft)

    first = drawn(seeds, positions)
    others = [drawn(seeds, positions, True), drawn(seeds + 1, positions), drawn(seeds + (1 << 40), positions)]
    for other in (*others, drawn(seeds, positions + 1), drawn(seeds, positions + (1 << 16))):
        counts = torch.bincount(first * 4 + other, minlength=16).double()
        assert chi_square(counts, (law.unsqueeze(1) * law).flatten()) < critical(15)


def test_the_largest_word_is_still_below_one(monkeypatch):
    """All bits set: a uniform of 1 would be infinite Gumbel noise, and its token would win whatever the logits say."""
    ones = torch.full((1, 1), 0xFFFFFFFF)
    monkeypatch.setattr("outrider.device.kernels.reference.model.philox", lambda counter, key: (ones,) * 4)
    made = uniforms(torch.tensor([0]), torch.tensor([0]), 0, 4)
    assert (made < 1).all()
    assert (-torch.log(-torch.log(made))).isfinite().all()
