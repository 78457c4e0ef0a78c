"""Torch references of logits processing before sampling, and of reported log-probabilities.

Shapes: B requests, N nodes of each (1 at a prompt's end, K+1 in a chain, the nodes of a tree), V vocabulary, R request
rows, M entries of a bias list. Node 0 holds a request's last committed token; the logits at a node decide the token after
it. Everything is vectorised and reads nothing back to the host. Statistics are in float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

IN_PROMPT, OCCURRENCE = 1, 2
"""Encoding of a token's history in ``counts``: bit 0 is set if the prompt has the token; higher bits count the output."""


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Return ``logits`` [..., V] with ``-inf`` for tokens whose bit in ``bitmask`` int32 [..., ceil(V / 32)] isn't set."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask.unsqueeze(-1) >> bits) & 1
    return logits.masked_fill(allowed.flatten(-2)[..., : logits.shape[-1]] == 0, -torch.inf)


def bias_logits(logits: Tensor, positions: Tensor, entries: Tensor, tokens: Tensor, values: Tensor, until: Tensor) -> Tensor:
    """Return ``logits`` [B, N, V] with each request's biases added.

    Of ``tokens`` and ``values`` [B, M], the first ``entries`` [B] count, and of these a node takes those whose ``until`` [B,
    M] exceeds the position in ``positions`` [B, N] that the node decides.
    """
    batch, nodes, _ = logits.shape
    lane = torch.arange(tokens.shape[1], device=tokens.device)
    applies = (lane < entries.unsqueeze(1)).unsqueeze(1) & (positions.unsqueeze(2) < until.unsqueeze(1))  # [B, N, M]
    # where, not a product: a ban is -inf, and 0 * -inf is NaN. Other entries add -0, which changes no bit. Entries of
    # one token may be added in any order: the engine gives a token one bias and bans, and -inf absorbs any addend.
    added = torch.where(applies, values.unsqueeze(1), -0.0).to(logits.dtype)
    return logits.scatter_add(2, tokens.unsqueeze(1).expand(batch, nodes, -1), added)


def penalize_logits(
    logits: Tensor, tokens: Tensor, tree_mask: Tensor | None, rows: Tensor, counts: Tensor, penalties: Tensor
) -> Tensor:
    """Return ``logits`` [B, N, V] with penalties by each row's history and the drafted tokens on the path to each node.

    ``counts`` [R, V] is the history, of which request b has row ``rows[b]``. ``penalties`` [B, 3]: repetition, presence,
    frequency.
    """
    batch, nodes, vocabulary = logits.shape
    history = counts.index_select(0, rows).unsqueeze(1)  # [B, 1, V]
    if nodes == 1:
        drafted = torch.zeros_like(history)
    else:
        lane = torch.arange(nodes, device=logits.device)
        on_path = (lane.unsqueeze(0) <= lane.unsqueeze(1)) if tree_mask is None else tree_mask.view(batch, nodes, nodes)
        # Node 0 is committed: the history has it already.
        on_path = (on_path & (lane > 0)).expand(batch, nodes, nodes).to(counts.dtype)
        drafted = torch.zeros((batch, nodes, vocabulary), dtype=counts.dtype, device=logits.device)
        drafted = drafted.scatter_add(2, tokens.unsqueeze(1).expand(batch, nodes, nodes), on_path)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    repetition, presence, frequency = (column.view(batch, 1, 1).to(wide.dtype) for column in penalties.unbind(1))
    occurrences = history // OCCURRENCE + drafted
    seen = (occurrences > 0) | (history % OCCURRENCE == IN_PROMPT)
    repeated = torch.where(wide > 0, wide / repetition, wide * repetition)
    wide = torch.where(seen, repeated, wide)
    wide = wide - frequency * occurrences - presence * (occurrences > 0)
    return wide.to(logits.dtype)


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add output ``tokens`` [B, n] (-1: none) to their rows of ``counts`` [R, V] in place.

    An ignored token adds zero to the reserved row.
    """
    real = tokens >= 0
    index = torch.where(real, rows.unsqueeze(1), 0)
    counts.index_put_((index, tokens.clamp(min=0)), real.to(counts.dtype) * OCCURRENCE, accumulate=True)


def truncate_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return ``logits`` [B, N, V] with ``-inf`` for the tokens that top-k, then top-p, then min-p drop.

    The parameters are tensors [B]. Rows with temperature 0 keep all tokens.
    """
    batch, _, vocabulary = logits.shape
    hot = temperature > 0
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = wide / torch.where(hot, temperature, 1.0).to(wide.dtype).view(batch, 1, 1)
    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).view(batch, 1, 1)
    # Tokens equal to the k-th largest stay, as in the logits processors of transformers.
    keep = ranked >= ranked.gather(2, (k - 1).expand(batch, logits.shape[1], 1))
    probs = torch.softmax(ranked.masked_fill(~keep, -torch.inf), dim=-1)
    above = probs.cumsum(-1) - probs  # mass of the tokens that are likelier
    nucleus = top_p.to(wide.dtype).view(batch, 1, 1)
    # A nucleus of 1 is everything: rounding in the sum must not cost the tail.
    keep = keep & ((above < nucleus) | (nucleus >= 1))
    keep = keep & (probs >= min_p.to(wide.dtype).view(batch, 1, 1) * probs[..., :1])
    # The likeliest token stays, independent of rounding; a greedy row keeps all tokens.
    rank = torch.arange(vocabulary, device=logits.device)
    keep = keep | (rank == 0) | ~hot.view(batch, 1, 1)
    return logits.masked_fill(~torch.zeros_like(keep).scatter(2, order, keep), -torch.inf)


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities float32 [B, N, 1 + count] of ``tokens`` [B, N] and of the likeliest tokens, and ids of the
    latter.

    The ids are int64 [B, N, count].
    """
    logs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    chosen = logs.gather(2, tokens.clamp(min=0).unsqueeze(2))
    ids = _likeliest(logs, count)
    return torch.cat((chosen, logs.gather(2, ids)), dim=2).to(torch.float32), ids


def _likeliest(logs: Tensor, count: int) -> Tensor:
    """Return the ids of the ``count`` largest values of each row, the lower id first among equals.

    The first ids don't depend on ``count``, which other requests of the batch may determine.
    """
    if not count:
        return torch.topk(logs, count, dim=-1).indices
    vocabulary = logs.shape[-1]
    least = torch.topk(logs, count, dim=-1).values[..., -1:]
    # Distinct keys rank values above the least selected value first, then values equal to it, the lower id first.
    id_keys = torch.arange(vocabulary, 0, -1, dtype=torch.float32, device=logs.device)
    keys = torch.where(logs > least, id_keys + vocabulary, torch.where(logs == least, id_keys, 0.0))
    found = torch.topk(keys, count, dim=-1).indices
    return found.gather(2, torch.sort(logs.gather(2, found), dim=-1, descending=True, stable=True).indices)
