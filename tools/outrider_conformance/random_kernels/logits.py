"""Random logits before sampling: biases, penalties, truncation, counts and reported log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.problem import (
    MANY,
    KernelProblems,
    Operand,
    Problem,
    RandomValues,
    Shape,
    among,
    between,
    kernel_call,
    row_counts,
)

_LAYOUTS = ("rows", "wide")
_FEW_TOKENS = 100
"""Maximum vocabulary size for which the order of equal tokens is checked."""
Mapped = Mapping[str, Tensor]


def _random_logits(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Tensor:
    logits = dice.normal(shape["batch"], shape["nodes"], shape["vocabulary"], dtype=torch.float32, scale=3.0)
    logits[..., -1] += 4
    logits[:, ::2, 0] = -torch.inf
    return logits.to(dtype)


def _bias(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    logits, entries = _random_logits(shape, dtype, dice), shape["entries"]
    batch, nodes, vocabulary = logits.shape
    positions = dice.indices(MANY + 5000, batch, 1) + torch.arange(nodes)
    count = dice.integers(0, entries + 1, batch)
    count[0] = entries
    tokens = torch.stack([dice.permutation(max(vocabulary, entries))[:entries] % vocabulary for _ in range(batch)])
    tokens[:, 0] = vocabulary - 1
    values = dice.normal(batch, entries, dtype=torch.float32, scale=5.0)
    values[:, 1::3] = -torch.inf
    until = torch.where(
        dice.uniform(batch, entries) < 0.5, positions[:, :1] + dice.integers(0, nodes + 1, batch, entries), 1 << 40
    )
    wanted = bounds.exact(logits)
    unit = bounds.UNIT[dtype]
    for row in range(batch):
        for entry in range(int(count[row])):
            token, value = int(tokens[row, entry]), values[row, entry].double()
            on = positions[row] < until[row, entry]
            here = wanted.value[row, on, token]
            error = 2 * unit * (here.abs() + value.abs() + (here + value).abs()) + 2 * bounds.TINY[dtype]
            wanted.error[row, on, token] += error.nan_to_num(0, 0, 0)
            wanted.value[row, on, token] = here + value
    operands = {
        "logits": Operand(logits, _LAYOUTS[shape["layout"]]),
        "positions": Operand(positions),
        "entries": Operand(count),
        "tokens": Operand(tokens),
        "values": Operand(values),
        "until": Operand(until),
    }
    return Problem(operands, kernel_call("bias_logits", *operands), {"out": wanted})


def _bitmask(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    logits = _random_logits(shape, dtype, dice)
    batch, nodes, vocabulary = logits.shape
    allowed = dice.uniform(batch, nodes, vocabulary) < 0.5
    allowed[..., -1] = True
    if vocabulary > 32:  # one token of the first word, by the sign of the word
        allowed[:, 1::2, :32] = False
        allowed[:, 1::2, 31] = True
    allowed[0, 0] = True  # all tokens allowed: the row stays unchanged, bit for bit
    words = -(-vocabulary // 32)
    bits = torch.ones(batch, nodes, 32 * words, dtype=torch.int64)  # bits beyond the vocabulary are ignored
    bits[..., :vocabulary] = allowed
    bitmask = (bits.view(batch, nodes, words, 32) << torch.arange(32)).sum(-1).to(torch.int32)
    operands = {"logits": Operand(logits, _LAYOUTS[shape["layout"]]), "bitmask": Operand(bitmask)}
    wanted = logits.masked_fill(~allowed, -torch.inf)
    return Problem(operands, kernel_call("apply_token_bitmask", *operands), {"out": wanted})


def _penalties(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    logits = _random_logits(shape, dtype, dice)
    batch, nodes, vocabulary = logits.shape
    tokens = dice.integers(0, vocabulary, batch, nodes)
    tokens[:, -1] = vocabulary - 1
    if nodes > 2:
        tokens[:, 2] = tokens[:, 1]  # twice on one way
    mask = torch.ones(nodes, nodes, dtype=torch.bool).tril().repeat(batch, 1, 1)
    if shape["tree"]:
        for row in range(batch):
            for node in range(1, nodes):
                mask[row, node] = mask[row, int(dice.integers(0, node, 1))]
                mask[row, node, node] = True
    requests = batch + 3
    rows = dice.permutation(requests)[:batch]
    counts = dice.integers(0, 8, requests, vocabulary, dtype=torch.int32) * dice.integers(
        0, 2, requests, vocabulary, dtype=torch.int32
    )
    counts[dice.uniform(requests, vocabulary) < 0.05] = 2 * 1000 + 1  # more occurrences than 8 bits hold
    choices = torch.tensor([[1.3, 0.5, 0.2], [1.0, 0.0, 0.0], [0.8, 0.0, 0.1], [1.0, 1.0, 0.0], [1.7, -0.4, -0.2]])
    penalties = choices[dice.integers(0, len(choices), batch)]
    penalties[0] = choices[0]
    history = counts[rows].unsqueeze(1)
    drafted = torch.zeros(batch, nodes, vocabulary, dtype=torch.int32)
    way = (mask & (torch.arange(nodes) > 0)).to(torch.int32)
    drafted.scatter_add_(2, tokens.unsqueeze(1).expand(batch, nodes, nodes), way)
    repetition, presence, frequency = (penalties.double()[:, i].view(-1, 1, 1) for i in range(3))
    times = history // 2 + drafted
    seen = (times > 0) | (history % 2 == 1)
    value = logits.double()
    value = torch.where(seen, torch.where(value > 0, value / repetition, value * repetition), value)
    lowered = frequency * times + presence * (times > 0)
    unit = bounds.wide(dtype)
    error = (4 * unit * (value.abs() + 2 * lowered.abs())).nan_to_num(0, 0, 0)
    value = value - lowered
    moved = value != logits.double()
    error = torch.where(moved, error + bounds.UNIT[dtype] * value.abs().nan_to_num(0, 0, 0) + bounds.TINY[dtype], 0.0)
    operands = {
        "logits": Operand(logits, _LAYOUTS[shape["layout"]]),
        "tokens": Operand(tokens),
        "tree_mask": Operand(mask.view(-1, nodes)),
        "rows": Operand(rows),
        "counts": Operand(counts),
        "penalties": Operand(penalties),
    }
    if not shape["tree"]:
        del operands["tree_mask"]
    names = ("logits", "tokens", "tree_mask", "rows", "counts", "penalties")
    wanted = {"out": bounds.Number(value, error)}
    return Problem(operands, kernel_call("penalize_logits", *names), wanted)


def _count(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    batch, nodes, vocabulary = shape["batch"], shape["nodes"], shape["vocabulary"]
    counts = dice.integers(0, 9, batch + 3, vocabulary, dtype=torch.int32)
    rows = dice.permutation(batch + 2)[:batch] + 1
    if batch > 2:
        rows[1] = 0  # padding
    tokens = dice.integers(0, vocabulary, batch, nodes)
    tokens[0] = vocabulary - 1
    tokens[dice.uniform(batch, nodes) < 0.3] = -1
    if batch > 2:
        tokens[1] = -1
    after = counts.clone()
    for row, line in zip(rows.tolist(), tokens.tolist(), strict=True):
        for token in line:
            if token >= 0:
                after[row, token] += 2
    operands = {"counts": Operand(counts), "rows": Operand(rows), "tokens": Operand(tokens)}

    return Problem(operands, kernel_call("count_tokens", *operands), {"counts": after})


# -- truncation ------------------------------------------------------------------------------------------------------


def _truncate(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    logits = _random_logits(shape, dtype, dice)
    batch, _, vocabulary = logits.shape
    temperature = torch.tensor([0.0, 0.3, 0.8, 1.0, 2.0])[dice.integers(0, 5, batch)]
    limits = torch.tensor([0, 1, 2, 5, 65, 257, 1025, vocabulary - 1, vocabulary, vocabulary + 9])
    top_k = limits[dice.integers(0, len(limits), batch)]
    top_p = torch.tensor([1.0, 0.95, 0.7, 0.3])[dice.integers(0, 4, batch)]
    min_p = torch.tensor([0.0, 0.02, 0.1, 0.5])[dice.integers(0, 4, batch)]
    if batch > 3:  # each alone, and nothing at all
        temperature[:4] = 1.0
        top_k[:4], top_p[:4], min_p[:4] = torch.tensor([3, 0, 0, 0]), torch.tensor([1.0, 0.8, 1.0, 1.0]), 0.0
        min_p[2] = 0.05
    if batch > 4:
        temperature[4], top_k[4], top_p[4], min_p[4] = 1.0, max(vocabulary // 2, 1), 1.0, 0.0
    if vocabulary > 8:
        logits[:, :, 2:6] = logits[:, :, 2:3]  # equals
    operands = {
        "logits": Operand(logits, _LAYOUTS[shape["layout"]]),
        "temperature": Operand(temperature),
        "top_k": Operand(top_k),
        "top_p": Operand(top_p),
        "min_p": Operand(min_p),
    }

    def check(made: Mapped) -> None:
        out = made["out"]
        for row in range(batch):
            limits = (float(temperature[row]), int(top_k[row]), float(top_p[row]), float(min_p[row]))
            for node in range(logits.shape[1]):
                check_truncated(out[row, node], logits[row, node], *limits, f"row {row}, node {node}, {limits}")

    return Problem(operands, kernel_call("truncate_logits", *operands), {}, check)


def check_truncated(
    found: Tensor, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, what: str
) -> None:
    """Fail unless the row ``found`` [V] is allowed for ``logits`` [V] by the docstring of `truncate_logits`, in float64.

    A token at a limit, within rounding, may stay or be dropped.
    """
    kept = found == logits
    assert (kept | (found == -torch.inf)).all(), f"{what}: a logit is neither what it was nor -inf"
    if temperature == 0:
        assert kept.all(), f"{what}: a greedy row lost tokens"
        return
    vocabulary = logits.shape[-1]
    unit = bounds.wide(logits.dtype)
    scaled = logits.double() / temperature
    ranked, order = torch.sort(scaled, descending=True, stable=True)
    slack = 4 * unit * (ranked.abs().nan_to_num(0, 0, 0) + 1)
    edge = ranked[min(top_k if top_k > 0 else vocabulary, vocabulary) - 1]
    must, may = ranked > edge + slack, ranked >= edge - slack
    must = must | (ranked == edge)
    # Probability of likelier tokens: at least that of tokens that must stay, at most that of all that may stay.
    off = 16 * unit * (float(ranked[0].abs()) + 8) + bounds.growth(vocabulary, unit)
    weight = torch.exp(ranked - ranked[0])
    if top_p < 1:
        for_sure, at_most = (weight * must).sum(), (weight * may).sum()
        above = weight.cumsum(0) - weight
        must = must & (above / for_sure < top_p - off)
        may = may & (above / at_most < top_p + off)
    if min_p > 0:
        must = must & (weight > min_p * (1 + off))
        may = may & (weight >= min_p * (1 - off))
    dead = ranked == -torch.inf  # kept or not, it's -inf
    first = torch.arange(vocabulary) == 0
    stays = kept[order]
    lost, left = (must | first) & ~stays & ~dead, stays & ~(may | first) & ~dead
    assert not lost.any(), f"{what}: token {int(order[lost.nonzero()[0]])} is dropped, which must stay"
    assert not left.any(), f"{what}: token {int(order[left.nonzero()[0]])} stays, which must be dropped"


def _logprobs(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    logits = _random_logits(shape, dtype, dice)
    batch, nodes, vocabulary = logits.shape
    logits[-1, 0, 2:] = -torch.inf  # two tokens that aren't excluded, or one
    logits[:, :, 5:8] = logits[:, :, 5:6]  # equals
    tokens = dice.integers(1, vocabulary, batch, nodes)
    tokens[:, 0] = 0  # an excluded token
    tokens[0, 0] = vocabulary - 1
    tokens[-1, -1] = -1
    count = min(shape["entries"], vocabulary - 1)
    wide = logits.double()
    wanted = torch.log_softmax(wide, dim=-1)
    unit = 2.0**-24
    error = unit * (4 * wanted.abs().nan_to_num(0, 0, 0) + 4 * wide.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True) + 8)
    error = error + bounds.growth(vocabulary, unit)
    operands = {"logits": Operand(logits, _LAYOUTS[shape["layout"]]), "tokens": Operand(tokens)}

    def check(made: Mapped) -> None:
        values, ids = made["values"], made["ids"]
        shapes = (tuple(values.shape), tuple(ids.shape))
        assert shapes == ((batch, nodes, 1 + count), (batch, nodes, count)), f"shapes {shapes}"
        dtypes = (values.dtype, ids.dtype)
        assert dtypes == (torch.float32, torch.int64), f"dtypes {dtypes}"
        assert ((ids >= 0) & (ids < vocabulary)).all(), "an id outside of the vocabulary"
        assert all(len(set(line)) == count for line in ids.flatten(0, 1).tolist()), "an id twice among the likeliest"
        chosen = torch.zeros(batch, nodes, vocabulary, dtype=torch.int64).scatter(
            2, ids, torch.arange(count, 0, -1).expand_as(ids)
        )
        for token in range(vocabulary - 1) if vocabulary < _FEW_TOKENS else ():
            later = (logits[..., token + 1 :] == logits[..., token : token + 1]) & (chosen[..., token + 1 :] > 0)
            before = chosen[..., token + 1 :] < chosen[..., token : token + 1]
            assert (before | ~later).all(), f"an equal of token {token} with a higher id comes first"
        every = torch.cat((tokens.clamp(min=0).unsqueeze(-1), ids), dim=-1)
        error_of = error.gather(2, every)
        error_of[..., 0] = torch.where(tokens < 0, torch.inf, error_of[..., 0])
        right = wanted.gather(2, every)
        right[..., 0] = torch.where(tokens < 0, values[..., 0].double(), right[..., 0])
        bounds.compare(values, bounds.Number(right, error_of), "log-probabilities")
        best = wanted.topk(count, dim=-1).values
        bounds.compare(values[..., 1:], bounds.Number(best, error.amax(-1, keepdim=True).expand_as(best)), "the likeliest")
        assert (values[..., 1:-1] >= values[..., 2:]).all(), "the likeliest tokens aren't in order"

    call = kernel_call("logprobs", "logits", "tokens", count, results=("values", "ids"))
    return Problem(operands, call, {}, check)


_FLAG = between(0, 1)
_SHAPE = {
    "batch": row_counts(1, 6),
    "nodes": between(1, 9),
    "vocabulary": between(9, 70, 1023, 1025, rare=(2049, 2**15 + 1)),
    "layout": _FLAG,
}
_SMALL = {"batch": 6, "nodes": 4, "vocabulary": 37, "layout": 1}
_WIDE = {"batch": 4, "nodes": 2, "vocabulary": 4099, "layout": 0}
_TALL = {"batch": 260, "nodes": 1, "vocabulary": 33, "layout": 0}
_ALL = (_SMALL, _WIDE, _TALL)
_ENTRIES = among(1, 4, 7)


def _corners_with(**more: int) -> list[dict[str, int]]:
    return [{**corner, **more} for corner in _ALL]


LOGITS = (
    KernelProblems("apply_token_bitmask", _bitmask, _SHAPE, _ALL),
    KernelProblems("bias_logits", _bias, {**_SHAPE, "entries": _ENTRIES}, _corners_with(entries=7)),
    KernelProblems("penalize_logits", _penalties, {**_SHAPE, "tree": _FLAG}, [*_corners_with(tree=0), {**_SMALL, "tree": 1}]),
    KernelProblems("count_tokens", _count, _SHAPE, _ALL, choices=True),
    KernelProblems("truncate_logits", _truncate, _SHAPE, [*_ALL, {**_WIDE, "batch": 5, "nodes": 1}]),
    KernelProblems("logprobs", _logprobs, {**_SHAPE, "entries": _ENTRIES}, _corners_with(entries=4)),
)
