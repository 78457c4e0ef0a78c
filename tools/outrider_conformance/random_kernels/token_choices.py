"""Random tokens: sampling and verification, against the random numbers that the backend interface prescribes.

Two devices may round a score differently, so a token is accepted if its score is the best within rounding. This holds for
more than one token in about one of ten thousand rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from outrider_conformance.random_kernels.problem import (
    MANY,
    KernelProblems,
    Operand,
    Problem,
    RandomValues,
    Shape,
    between,
    kernel_call,
    row_counts,
)

_UNIT = 2.0**-24
_LAYOUTS = ("rows", "wide")
Mapped = Mapping[str, Tensor]
_TEMPERATURES = torch.tensor([0.0, 0.02, 0.3, 0.7, 1.0, 1.5, 4.0])


def _rows(dice: RandomValues, batch: int, *, sampling: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return random temperatures, seeds and positions of the rows, with large and equal values among them."""
    temperature = _TEMPERATURES[dice.integers(0, len(_TEMPERATURES), batch)] if sampling else torch.zeros(batch)
    seeds = dice.integers(-(1 << 62), 1 << 62, batch)
    seeds[batch // 2 :] = dice.integers(0, 100, batch - batch // 2)
    positions = dice.integers(0, 1 << 17, batch)
    if batch > 2:
        seeds[1], seeds[2], positions[2] = seeds[0], seeds[0] + (1 << 32), positions[0]
        positions[1] = positions[0] + 1
    return temperature, seeds, positions


def _row_operands(temperature: Tensor, seeds: Tensor, positions: Tensor) -> dict[str, Operand]:
    return {"temperature": Operand(temperature), "seeds": Operand(seeds), "positions": Operand(positions)}


def _logits(dice: RandomValues, *shape: int) -> Tensor:
    """Return random logits: some rows have several equal maxima, some excluded tokens, some a likely last token. In some, the
    best logit is -0.0, and 0.0 follows.
    """
    logits = dice.normal(*shape, dtype=torch.float32, scale=3.0)
    flat = logits.view(-1, shape[-1])
    flat[::3, -1] += 6
    if shape[-1] > 4:
        flat[1::4, 1 :: 1 + shape[-1] // 7] = flat[1::4].amax(-1, keepdim=True)  # equals: the first one wins when greedy
        flat[2::5, : shape[-1] // 2] = -torch.inf
        flat[3::5] = -1 - flat[3::5].abs()
        flat[3::5, 1], flat[3::5, 3:5] = -0.0, 0.0  # equals too
        flat[6::7, -1] = flat[6::7].amax(-1) + 60
    return logits


def scores(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, lane: int) -> tuple[Tensor, Tensor]:
    """Return the scores whose maximum :meth:`sample` returns, and their errors. Scores of greedy rows have no noise."""
    hot = (temperature > 0).unsqueeze(-1)
    scaled = logits.double() / torch.where(hot, temperature.unsqueeze(-1), 1.0).double()
    drawn = gumbel(seeds, positions, lane, logits.shape[-1])
    slack = 8 * _UNIT * (scaled.abs().nan_to_num(0.0, posinf=0.0) + drawn.abs() + 1)
    return torch.where(hot, scaled + drawn, scaled), torch.where(hot, slack, 0.0)


def allowed(score: Tensor, slack: Tensor) -> Tensor:
    """Return a bool tensor of the tokens whose score is the best within ``slack``. Without slack only the first maximum
    counts.
    """
    sure = (score - slack).amax(-1, keepdim=True)
    fine = score + slack >= sure
    first = torch.zeros_like(fine).scatter(-1, score.argmax(-1, keepdim=True), True)
    return torch.where((slack == 0).all(-1, keepdim=True), first, fine)


def _check(right: Tensor, chosen: Tensor, what: str) -> None:
    inside = (chosen >= 0) & (chosen < right.shape[-1])
    fine = inside & right.gather(-1, chosen.clamp(0, right.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    if not fine.all():
        row = [int(index) for index in (~fine).nonzero()[0]]
        raise AssertionError(
            f"{what}: {int((~fine).sum())} of {fine.numel()} rows chose a token that isn't the draw; at {row} found "
            f"{int(chosen[tuple(row)])}, expected {right[tuple(row)].nonzero().flatten().tolist()}"
        )


def _sample(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    batch, draft = shape["batch"], bool(shape["draft"])
    logits = _logits(dice, batch, shape["vocabulary"])
    temperature, seeds, positions = _rows(dice, batch, sampling=True)
    operands = {
        "logits": Operand(logits, _LAYOUTS[shape["layout"]]),
        **_row_operands(temperature, seeds, positions),
    }
    right = allowed(*scores(logits, temperature, seeds, positions, DRAFT if draft else SAMPLE))

    call = kernel_call("sample", *operands, results=("tokens",), draft=draft)
    return Problem(operands, call, {}, lambda made: _check(right, made["tokens"], "sample"))


# -- chains ----------------------------------------------------------------------------------------------------------


def _chain(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    batch, count, vocabulary, sampling = shape["batch"], shape["drafts"], shape["vocabulary"], bool(shape["sampling"])
    logits = _logits(dice, batch, count + 1, vocabulary)
    temperature, seeds, positions = _rows(dice, batch, sampling=sampling)
    probs = torch.softmax(logits[:, :count] / 2 + dice.normal(batch, count, vocabulary, dtype=torch.float32), dim=-1)
    probs[probs < 1e-5] = 0  # a draft that was truncated
    probs /= probs.sum(-1, keepdim=True)
    drafts = torch.multinomial(probs.view(-1, vocabulary), 1, generator=dice.generator).view(batch, count)
    greedy = (temperature == 0) & (dice.uniform(batch) < 0.8)
    drafts = torch.where(greedy.unsqueeze(1), logits[:, :count].argmax(-1), drafts)
    broken = dice.integers(0, count + 1, batch)
    rows = torch.arange(batch)[greedy & (broken < count)]
    drafts[rows, broken[rows]] = (drafts[rows, broken[rows]] + 1) % vocabulary
    operands = {
        "logits": Operand(logits, _LAYOUTS[shape["layout"]]),
        "draft_tokens": Operand(drafts, "columns"),
        **_row_operands(temperature, seeds, positions),
    }
    if sampling:
        operands["draft_probs"] = Operand(probs)

    def check(made: Mapped) -> None:
        _check_chain(made, logits, drafts, probs if sampling else None, temperature, seeds, positions)

    names = ("logits", "draft_tokens", "draft_probs", "temperature", "seeds", "positions")
    call = kernel_call("verify_chain", *names, results=("tokens", "accepted"))
    return Problem(operands, call, {}, check)


def _checked(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return the problem of greedy chains whose logits the kernel checks for NaN; a few chains hold NaN."""
    batch, count, vocabulary = shape["batch"], shape["drafts"], shape["vocabulary"]
    logits = _logits(dice, batch, count + 1, vocabulary)
    temperature, seeds, positions = _rows(dice, batch, sampling=False)
    drafts = logits[:, :count].argmax(-1)
    broken = dice.integers(0, count + 1, batch)
    rows = torch.arange(batch)[broken < count]
    drafts[rows, broken[rows]] = (drafts[rows, broken[rows]] + 1) % vocabulary
    flat = logits.view(batch, -1)
    clean = dice.uniform(batch) < 0.8
    for row in torch.arange(batch)[~clean].tolist():
        flat[row, dice.integers(0, flat.shape[1], 3)] = torch.nan
    bad = flat.isnan()
    first = torch.where(bad.any(1), bad.to(torch.int8).argmax(1), -1)
    operands = {
        "logits": Operand(logits, _LAYOUTS[shape["layout"]]),
        "draft_tokens": Operand(drafts, "columns" if count else "rows"),
        **_row_operands(temperature, seeds, positions),
        "found": Operand(torch.full((batch, 2), 7), "wide"),
    }

    def check(made: Mapped) -> None:
        tokens = made["tokens"]
        assert ((tokens >= -1) & (tokens < vocabulary)).all(), f"a token outside of the vocabulary: {tokens.tolist()}"
        sound = {name: made[name][clean] for name in ("tokens", "accepted")}
        given = (x[clean] for x in (temperature, seeds, positions))
        _check_chain(sound, logits[clean], drafts[clean], None, *given)

    call = kernel_call("verify_checked", *operands, results=("tokens", "accepted"))
    return Problem(operands, call, {"found": torch.stack((first, torch.full_like(first, -1)), dim=1)}, check)


def _check_chain(
    made: Mapped,
    logits: Tensor,
    drafts: Tensor,
    probs: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> None:
    batch, count = drafts.shape
    vocabulary = logits.shape[-1]
    tokens, accepted = made["tokens"], made["accepted"]
    shapes = (tuple(tokens.shape), tuple(accepted.shape))
    assert shapes == ((batch, count + 1), (batch,)), f"shapes {shapes}"
    assert ((accepted >= 0) & (accepted <= count)).all(), f"accepted lies outside of 0..{count}: {accepted.tolist()}"
    hot = temperature > 0
    choice = logits.argmax(-1)
    surely = refused = choice[:, :count] == drafts
    refused = ~refused
    right = torch.zeros(batch, count + 1, vocabulary, dtype=torch.bool).scatter(2, choice.unsqueeze(-1), True)
    if probs is not None:
        where = positions.unsqueeze(1) + torch.arange(count + 1)
        seed = seeds.unsqueeze(1).expand(batch, count + 1)
        target = torch.softmax(logits.double() / torch.where(hot, temperature, 1.0).double().view(-1, 1, 1), dim=-1)
        p, q = (x[:, :count].gather(2, drafts.unsqueeze(-1)).squeeze(-1) for x in (target, probs.double()))
        coin = uniforms(seed, where, ACCEPT, 1).squeeze(-1)[:, :count]
        margin = _probability_error(p, logits[:, :count], temperature) + 4 * _UNIT * q
        surely = torch.where(hot.unsqueeze(1), coin * q < p - margin, surely)
        refused = torch.where(hot.unsqueeze(1), coin * q >= p + margin, refused)
        draft = torch.cat((probs.double(), torch.zeros(batch, 1, vocabulary)), dim=1)
        left = (target - draft).clamp(min=0)
        loose = _probability_error(target, logits, temperature) + _UNIT * draft
        drawn = gumbel(seed, where, RESIDUAL, vocabulary)
        slack = 8 * _UNIT * (drawn.abs() + left.log().abs().nan_to_num(0.0, posinf=0.0) + 1)
        most = (left + loose).log() + drawn + slack
        least = ((left - loose).clamp(min=0)).log() + drawn - slack
        fine = (most >= least.amax(-1, keepdim=True)) & (target > 0)
        right = torch.where(hot.view(-1, 1, 1), fine, right)
    lane = torch.arange(count)
    kept = lane < accepted.unsqueeze(1)
    wrong = (kept & refused).any(1)
    assert not wrong.any(), f"row {int(wrong.nonzero()[0])} accepts a draft that must be rejected"
    edge = accepted.clamp(max=max(count - 1, 0)).unsqueeze(1)
    wrong = (accepted < count) & surely.gather(1, edge).squeeze(1) if count else torch.zeros(batch, dtype=torch.bool)
    assert not wrong.any(), f"row {int(wrong.nonzero()[0])} rejects a draft that must be accepted"
    assert torch.equal(torch.where(kept, tokens[:, :count], 0), torch.where(kept, drafts, 0)), "accepted tokens aren't drafts"
    undecided = torch.arange(count + 1) > accepted.unsqueeze(1)
    assert (tokens[undecided] == -1).all(), "a token other than -1 after the decided token"
    rows = torch.arange(batch)
    _check(right[rows, accepted], tokens[rows, accepted], "the token after the accepted drafts")


def _probability_error(p: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the error bound of a softmax probability: the rounding of its exponent and of the sum."""
    scale = torch.where(temperature > 0, temperature, 1.0).double()
    largest = logits.double().nan_to_num(0.0, neginf=0.0).abs().amax(-1) / scale.view(-1, *[1] * (logits.dim() - 2))
    relative = 8 * _UNIT * (largest + 8)
    return p * (relative if p.dim() < logits.dim() else relative.unsqueeze(-1))


# -- trees -----------------------------------------------------------------------------------------------------------


def _tree(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    batch, nodes, vocabulary, sampling = shape["batch"], shape["nodes"], shape["vocabulary"], bool(shape["sampling"])
    depth = shape["depth"]
    logits = _logits(dice, batch, nodes, vocabulary)
    temperature, seeds, positions = _rows(dice, batch, sampling=sampling)
    parents = torch.full((batch, nodes), -1)
    level = torch.zeros(batch, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        # The parent is mostly the previous node, so that paths grow long; some nodes are unused.
        near = (dice.uniform(batch) < 0.6).long() * (node - 1)
        parents[:, node] = torch.maximum(near, dice.integers(0, node, batch))
        parents[dice.uniform(batch) < 0.05, node] = -1
        above = level.gather(1, parents[:, node].clamp(min=0).unsqueeze(1)).squeeze(1)
        level[:, node] = above + 1
    if nodes > _MOST_NODES:  # a path of the last nodes alone
        parents[::2, 1:] = -1
        for number, node in enumerate(range(nodes - depth, nodes)):
            parents[::2, node], level[::2, node] = node - 1 if number else 0, number + 1
    # The target's token at each node, so that most trees contain the accepted path; some siblings are equal.
    per = [x.unsqueeze(1).expand(batch, nodes).contiguous() for x in (temperature, seeds, positions)]
    draws, slack = scores(logits, per[0], per[1], per[2] + level, SAMPLE)
    target = draws.argmax(-1)
    tokens = target.gather(1, parents.clamp(min=0))
    tokens[:, 0] = dice.integers(0, vocabulary, batch)
    tokens = torch.where(dice.uniform(batch, nodes) < 0.25, dice.integers(0, vocabulary, batch, nodes), tokens)
    right = allowed(draws, slack)
    operands = {
        "logits": Operand(logits, _LAYOUTS[shape["layout"]]),
        "tokens": Operand(tokens),
        "parents": Operand(parents),
        # Without sampling no temperature is read.
        **_row_operands(temperature if sampling else torch.ones_like(temperature), seeds, positions),
    }

    def check(made: Mapped) -> None:
        for row in range(batch):
            found = {name: tensor[row].tolist() for name, tensor in made.items()}
            _walk(found, right[row], tokens[row].tolist(), parents[row].tolist(), depth, f"row {row}")

    results = ("tokens", "path", "accepted")
    call = kernel_call("verify_tree", *operands, results=results, depth=depth, sampling=sampling)
    return Problem(operands, call, {}, check)


def _walk(
    found: Mapping[str, list[int]], right: Tensor, tokens: list[int], parents: list[int], depth: int, what: str
) -> None:
    here, wanted_path, wanted_tokens, accepted = 0, [0] * (depth + 1), [-1] * (depth + 1), 0
    for level in range(depth + 1):
        chosen = found["tokens"][level]
        assert chosen in right[here].nonzero().flatten().tolist(), (
            f"{what}: after node {here} the target draws one of {right[here].nonzero().flatten().tolist()}, found {chosen}"
        )
        wanted_tokens[level], wanted_path[level] = chosen, here
        children = [n for n, parent in enumerate(parents) if parent == here and tokens[n] == chosen]
        if not children or level == depth:
            break
        here, accepted = children[0], accepted + 1
    wanted = {"tokens": wanted_tokens, "path": wanted_path, "accepted": accepted}
    for name, value in wanted.items():
        assert found[name] == value, f"{what}: {name} is {found[name]}, expected {value}"


_MOST_NODES = 24
"""Maximum number of nodes of a tree with random parents."""
_VOCABULARY = between(2, 70, 1023, 1024, 1025, 2049, 4099)
_ANY_VOCABULARY = between(2, 70, 1023, 1024, 1025, 2049, 4099, MANY)
_BATCH = row_counts(1, 9)
_FLAG = between(0, 1)
_SMALL = {"batch": 7, "vocabulary": 37, "layout": 0}
_WIDE = {"batch": 3, "vocabulary": 33001, "layout": 1}
_TALL = {"batch": 300, "vocabulary": 67, "layout": 0}
CHOICES = (
    KernelProblems(
        "sample",
        _sample,
        {"batch": _BATCH, "vocabulary": _ANY_VOCABULARY, "draft": _FLAG, "layout": _FLAG},
        [{**corner, "draft": draft} for corner in (_SMALL, _WIDE, _TALL) for draft in (0, 1)],
        choices=True,
    ),
    KernelProblems(
        "verify_chain",
        _chain,
        {
            "batch": _BATCH,
            "vocabulary": _VOCABULARY,
            "drafts": between(1, 8),
            "sampling": _FLAG,
            "layout": _FLAG,
        },
        [
            {**corner, "drafts": drafts, "sampling": sampling}
            for corner, drafts in ((_SMALL, 4), (_WIDE, 2), (_TALL, 5))
            for sampling in (0, 1)
        ],
        choices=True,
    ),
    KernelProblems(
        "verify_checked",
        _checked,
        {
            "batch": _BATCH,
            "vocabulary": _VOCABULARY,
            "drafts": between(0, 8),
            "layout": _FLAG,
        },
        [{**corner, "drafts": drafts} for corner, drafts in ((_SMALL, 4), (_WIDE, 2), (_TALL, 5), (_WIDE, 0), (_TALL, 0))],
        choices=True,
    ),
    KernelProblems(
        "verify_tree",
        _tree,
        {
            "batch": _BATCH,
            "vocabulary": _VOCABULARY,
            "nodes": between(1, _MOST_NODES, rare=(33, 65)),
            "depth": between(1, 6),
            "sampling": _FLAG,
            "layout": _FLAG,
        },
        [
            {**corner, "nodes": nodes, "depth": depth, "sampling": sampling}
            for corner, nodes, depth in ((_SMALL, 12, 4), (_WIDE, 6, 3), (_TALL, 9, 2))
            for sampling in (0, 1)
        ],
        choices=True,
    ),
)


# -- random numbers of the interface, in numpy: Philox4x32-10 (Salmon et al., SC 2011) and Gumbel noise ----------------


_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
SAMPLE, ACCEPT, DRAFT, RESIDUAL = range(4)
"""Lanes: what a draw is for."""


def uniforms(seeds: Tensor, positions: Tensor, lane: int, count: int) -> Tensor:
    """Return float64 in (0, 1) of shape ``seeds.shape + (count,)``. Value i is word i % 4 of block i // 4, its upper 23
    bits.
    """
    seed = seeds.numpy().astype(np.int64).view(np.uint64)[..., None]
    position = positions.numpy().astype(np.int64).view(np.uint64)[..., None]
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    words = list(np.broadcast_arrays(block, position & _MASK, position >> _HALF, np.uint64(lane)))
    key = [seed & _MASK, seed >> _HALF]
    for _ in range(_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _HALF) ^ words[1] ^ key[0],
            second & _MASK,
            (first >> _HALF) ^ words[3] ^ key[1],
            first & _MASK,
        ]
        key = [(part + step) & _MASK for part, step in zip(key, _WEYL, strict=True)]
    flat = np.stack(np.broadcast_arrays(*words), axis=-1).reshape(*seeds.shape, -1)[..., :count]
    return torch.from_numpy(((flat >> np.uint64(9)).astype(np.float64) + 0.5) / (1 << 23))


def gumbel(seeds: Tensor, positions: Tensor, lane: int, count: int) -> Tensor:
    """Return Gumbel noise of the shape that :func:`uniforms` returns."""
    return -torch.log(-torch.log(uniforms(seeds, positions, lane, count)))
