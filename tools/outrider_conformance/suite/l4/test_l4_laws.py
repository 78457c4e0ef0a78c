"""L4: sampling and verification follow their distributions, also with rejections, and a row's tokens do not depend on
other rows.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider_conformance.lab import Lab, expect
from outrider_conformance.promises import promise
from outrider_conformance.random_kernels.distributions import ROWS, SHAPINGS, Shaping, check_distribution, check_independence
from outrider_conformance.random_kernels.problem import RandomValues

_VOCABULARY = 9
_LOSSLESS = "the others by lossless rejection sampling."


class _Device:
    """Kernels of the backend on one stream, from host tensors to host tensors."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        (self.stream,) = lab.streams("s")

    @property
    def kernels(self) -> KernelSet:
        return self._lab.backend.kernels_in_use

    def run_kernel(self, method: str, *operands: Tensor | None, **options: object) -> tuple[Tensor, ...]:
        backend, stream = self._lab.backend, self.stream
        with backend.on(stream):
            there = [x if x is None else x.contiguous().to(backend.device, copy=True) for x in operands]
        stream.synchronize()
        with backend.on(stream):
            made = getattr(self.kernels, method)(*there, **options)
        stream.synchronize()
        return tuple(x.cpu() for x in (made if isinstance(made, tuple) else (made,)))

    def truncated(self, logits: Tensor, shaping: Shaping) -> Tensor:
        """Return ``logits`` [N, V] with -inf for tokens that ``shaping`` excludes."""
        one = (torch.tensor([value]) for value in (shaping.temperature, shaping.top_k, shaping.top_p, shaping.min_p))
        return self.run_kernel("truncate_logits", logits.unsqueeze(0), *one)[0][0]


def _dice(lab: Lab, salt: int) -> RandomValues:
    return RandomValues(lab.seed * 1009 + salt)


def _seeds(lab: Lab) -> Tensor:
    """Return neighbouring seeds, then seeds that differ only in their upper half."""
    low = torch.arange(ROWS // 2) + lab.seed * 7919
    return torch.cat((low, (torch.arange(ROWS // 2) << 32) + 3 + lab.seed))


def _logits(dice: RandomValues, count: int) -> Tensor:
    return dice.normal(count, _VOCABULARY, dtype=torch.float32, scale=1.3)


@promise(
    "KernelSet.sample",
    "Otherwise the token is a sample of softmax(logits / temperature) that depends only on ``seeds`` "
    "int64 [B] and ``positions`` int64 [B] (Philox).",
)
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_samples_follow_the_law(lab: Lab, shaping: Shaping) -> None:
    """Samples over many seeds, and over many positions, follow the softmax distribution."""
    device, dice = _Device(lab), _dice(lab, 1)
    raw = _logits(dice, 1)
    logits, law = device.truncated(raw, shaping), shaping.probabilities(raw[0])
    many, temperature = logits.expand(ROWS, -1), torch.full((ROWS,), shaping.temperature)
    one, other = torch.full((ROWS,), 11 + lab.seed), torch.arange(ROWS)
    (by_seed,) = device.run_kernel("sample", many, temperature, _seeds(lab), one)
    (by_position,) = device.run_kernel("sample", many, temperature, one, other)
    (drafted,) = device.run_kernel("sample", many, temperature, _seeds(lab), one, draft=True)
    check_distribution(by_seed, law, f"sample by seed, {shaping}")
    check_distribution(by_position, law, f"sample by position, {shaping}")
    check_distribution(drafted, law, f"sample for a draft, {shaping}")


@promise("KernelSet.sample", "which are independent of the target's.")
def test_draws_are_independent(lab: Lab) -> None:
    """Samples are independent between target and draft, between neighbouring and distant seeds, and between positions."""
    device, dice = _Device(lab), _dice(lab, 2)
    logits = _logits(dice, 1)
    law = torch.softmax(logits[0].double(), dim=-1)
    many, temperature, seeds = logits.expand(ROWS, -1), torch.ones(ROWS), _seeds(lab)
    positions = torch.arange(ROWS) % 97

    def drawn(seeds: Tensor, positions: Tensor, *, draft: bool = False) -> Tensor:
        return device.run_kernel("sample", many, temperature, seeds, positions, draft=draft)[0]

    first = drawn(seeds, positions)
    for what, other in (
        ("the target's and the draft's draws", drawn(seeds, positions, draft=True)),
        ("draws of neighbouring seeds", drawn(seeds + 1, positions)),
        ("draws of seeds that differ in their upper half", drawn(seeds + (1 << 40), positions)),
        ("draws at neighbouring positions", drawn(seeds, positions + 1)),
        ("draws at positions far apart", drawn(seeds, positions + (1 << 16))),
    ):
        check_independence(first, other, law, law, what)


def _chains(lab: Lab, shaping: Shaping) -> tuple[_Device, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return device, target logits [K+1, V], target and draft probabilities, seeds, and the tokens sampled from the
    draft.
    """
    device, dice = _Device(lab), _dice(lab, 3)
    raw = _logits(dice, 4)
    guess = raw[:3] * 0.3 + _logits(dice, 3)
    target, draft = device.truncated(raw, shaping), device.truncated(guess, shaping)
    p, q, seeds = shaping.probabilities(raw), shaping.probabilities(guess), _seeds(lab)
    heat = torch.full((ROWS,), shaping.temperature)
    drafts = [
        device.run_kernel("sample", draft[i].expand(ROWS, -1), heat, seeds, torch.full((ROWS,), 20 + i), draft=True)[0]
        for i in range(3)
    ]
    return device, target, p, q, seeds, torch.stack(drafts, dim=1)


@promise("KernelSet.verify_chain", _LOSSLESS)
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_chains_are_lossless(lab: Lab, shaping: Shaping) -> None:
    """Each token follows the target distribution for any draft, and drafts are accepted with the maximum probability."""
    device, logits, p, q, seeds, drafts = _chains(lab, shaping)
    many = logits.unsqueeze(0).expand(ROWS, -1, -1)
    probs = q.float().unsqueeze(0).expand(ROWS, -1, -1)
    heat = torch.full((ROWS,), shaping.temperature)
    tokens, accepted = device.run_kernel("verify_chain", many, drafts, probs, heat, seeds, torch.full((ROWS,), 20))
    for place in range(4):
        reached = accepted >= place
        if int(reached.sum()) < 400:
            break
        check_distribution(tokens[reached, place], p[place], f"token {place} of a chain, {shaping}")
        if place < 3:
            share = torch.minimum(p[place], q[place]).sum()
            law = torch.stack((1 - share, share))
            assert place or float(law[0]) > 0.03, "the case rejects nothing: it shows nothing"
            check_distribution(
                (accepted[reached] > place).long(), law, f"whether draft {place} of a chain is accepted, {shaping}"
            )
    rejected = accepted == 0
    left = (p[0] - q[0]).clamp(min=0)
    if int(rejected.sum()) >= 400:
        check_distribution(tokens[rejected, 0], left / left.sum(), f"what is drawn after a rejection, {shaping}")
    expect(bool(place), True, "a draft was accepted often enough to judge the tokens after it")


@promise("KernelSet.verify_tree", "lossless for any tree")
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_trees_are_lossless(lab: Lab, shaping: Shaping) -> None:
    """The token after each node of a tree follows the distribution of that node."""
    device, dice = _Device(lab), _dice(lab, 4)
    raw = _logits(dice, 6)
    logits, law = device.truncated(raw, shaping), shaping.probabilities(raw)
    best = raw.argsort(dim=-1, descending=True)
    # The root's children are its likeliest token and the third; the first child has two, one of them a twin.
    parents = torch.tensor([-1, 0, 0, 1, 1, 2])
    tokens = torch.stack((best[0, 0], best[0, 0], best[0, 2], best[1, 1], best[1, 0], best[2, 0]))
    heat, seeds = torch.full((ROWS,), shaping.temperature), _seeds(lab)
    operands = (logits.expand(ROWS, -1, -1), tokens.expand(ROWS, -1), parents.expand(ROWS, -1), heat, seeds)
    found, path, accepted = device.run_kernel("verify_tree", *operands, torch.full((ROWS,), 5), depth=2, sampling=True)
    check_distribution(found[:, 0], law[0], f"the token after the root, {shaping}")
    for node in range(1, 6):
        level = 1 if node < 3 else 2
        here = (accepted >= level) & (path[:, level] == node)
        if int(here.sum()) >= 400:
            check_distribution(found[here, level], law[node], f"the token after node {node}, {shaping}")


@promise(
    "KernelSet.sample",
    "Otherwise the token is a sample of softmax(logits / temperature) that depends only on ``seeds`` "
    "int64 [B] and ``positions`` int64 [B] (Philox).",
)
def test_a_draw_does_not_depend_on_its_company(lab: Lab) -> None:
    """Rows give the same tokens in reversed order, in smaller batches, alone, and with padding."""
    device, dice = _Device(lab), _dice(lab, 5)
    batch, drafts = 23, 3
    logits = dice.normal(batch, drafts + 1, 131, dtype=torch.float32, scale=2.0)
    probs = torch.softmax(dice.normal(batch, drafts, 131, dtype=torch.float32, scale=2.0), dim=-1)
    tokens = torch.multinomial(probs.flatten(0, 1), 1, generator=dice.generator).view(batch, drafts)
    heat = torch.tensor([0.0, 0.7, 1.0, 1.4])[dice.integers(0, 4, batch)]
    seeds, positions = dice.integers(0, 1 << 60, batch), dice.integers(0, 4000, batch)
    parents = torch.tensor([-1, 0, 1, 1]).expand(batch, -1)
    nodes = torch.cat((tokens[:, :1], tokens), dim=1)

    def every(rows: Tensor, padding: int) -> list[Tensor]:
        def pick(x: Tensor) -> Tensor:
            return torch.cat((x[rows], torch.zeros(padding, *x.shape[1:], dtype=x.dtype)))

        rest = [pick(x) for x in (heat, seeds, positions)]
        sampled = device.run_kernel("sample", pick(logits[:, 0]), *rest)
        chained = device.run_kernel("verify_chain", pick(logits), pick(tokens), pick(probs), *rest)
        walked = device.run_kernel("verify_tree", pick(logits), pick(nodes), pick(parents), *rest, depth=2, sampling=True)
        return [x[: len(rows)] for x in (*sampled, *chained, *walked)]

    whole = every(torch.arange(batch), 0)
    for what, rows, padding in (
        ("the other way round", torch.arange(batch).flip(0), 0),
        ("with padding", torch.arange(batch), 9),
        ("a few of them", torch.tensor([4, 17, 2]), 1),
        ("alone", torch.tensor([8]), 0),
    ):
        for number, (found, wanted) in enumerate(zip(every(rows, padding), whole, strict=True)):
            expect(found.tolist(), wanted[rows].tolist(), f"result {number} of rows {what}")
