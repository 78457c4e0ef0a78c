"""Draft trees: their representation, and how they grow.

Letters: B requests, N nodes with the root, D longest path, T candidate children per node (top-k).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import ConfigError


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of N nodes for each request. Node 0 is the root, the request's last token; parents precede their children."""

    parents: Tensor
    """Index of each node's parent, int64 [B, N]. -1 for the root and for unused nodes."""
    depths: Tensor
    """Number of edges from the root to each node, int64 [B, N]."""
    mask: Tensor
    """True if node i attends to node j, which is an ancestor of i or i itself, bool [B, N, N]."""

    @classmethod
    def from_parents(cls, parents: Tensor, *, depth: int) -> Tree:
        """Return the tree of ``parents`` int64 [B, N], whose paths have at most ``depth`` edges."""
        batch, nodes = parents.shape
        eye = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, nodes, nodes)
        index = parents.clamp(min=0).unsqueeze(-1).expand(batch, nodes, nodes)
        has_parent = (parents >= 0).unsqueeze(-1)
        mask = eye
        for _ in range(depth):
            mask = eye | (has_parent & mask.gather(1, index))
        return cls(parents=parents, depths=mask.sum(dim=-1) - 1, mask=mask)


@dataclass(frozen=True, slots=True)
class Level:
    """The M nodes per request of a growing tree that have been expanded so far. The draft model processes all of them.

    Earlier nodes are processed again, because an attention mask covers only the new tokens of a call, not cached ones.
    """

    tokens: Tensor
    """Tokens of the nodes, int64 [B, M]."""
    parents: Tensor
    """Index of each node's parent among these nodes, int64 [B, M]. -1 for children of the root."""
    depths: Tensor
    """Depth of each node in the tree, int64 [B, M], at least 1."""
    mask: Tensor
    """True if node i attends to node j, which is an ancestor or itself, bool [B, M, M]."""
    fresh: int
    """Number of nodes, at the end, that were added in this level."""


Expand = Callable[[Level], Tensor]
"""The function that returns the logits [B, fresh, V] of the token after each fresh node of a level."""


def most_likely(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` most likely tokens of ``logits`` [..., V], best first, and their float32 log-probabilities."""
    found = torch.log_softmax(logits.float(), dim=-1).topk(count, dim=-1)
    return found.indices, found.values


class DynamicTree:
    """The growth of a draft tree to its most likely nodes, as in EAGLE-2 (Li et al. 2024, sections 4.1 and 4.2).

    Each of D - 1 steps expands the T most likely nodes of the last level, by the product of the probabilities along the path,
    and scores T children of each. The K most likely of all nodes form the tree: a parent is at least as likely as its child,
    so every selected node's parent is selected too.
    """

    def __init__(self, *, topk: int, depth: int, nodes: int | None = None) -> None:
        candidates = topk + (depth - 1) * topk * topk
        if topk < 1 or depth < 1:
            raise ConfigError(f"a draft tree of topk {topk} and depth {depth} is impossible; both must be at least 1")
        if nodes is not None and not depth <= nodes <= candidates:
            raise ConfigError(
                f"a draft tree of topk {topk} and depth {depth} has {depth} to {candidates} nodes, {nodes} were asked for"
            )
        self.branches = topk
        """T, the number of first tokens."""
        self.depth = depth
        """D, the longest path in edges."""
        self.nodes = nodes or min(candidates, topk * depth)
        """K, the number of nodes without the root."""
        self.levels = tuple(topk * level for level in range(1, depth))
        """Number of nodes of each :class:`Level` in turn."""

    @property
    def expanded(self) -> int:
        """Number of nodes of the largest :class:`Level`."""
        return max(self.levels, default=0)

    def grow(self, tokens: Tensor, scores: Tensor, expand: Expand, *, ids: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Expand the most likely nodes level by level, then select the K most likely nodes of all levels.

        Returns tokens int64 [B, K] and the tree of N = K + 1 nodes. ``tokens`` int64 [B, T] are the most likely first tokens,
        best first; ``scores`` float32 [B, T] are their log-probabilities. ``ids`` int64 [V] is the token of each column of
        ``expand``'s logits; None means the column's index.
        """
        topk, batch, device = self.branches, tokens.shape[0], tokens.device
        # All scored nodes in order of level: token, score, and the parent's index among them.
        scored_tokens, all_scores = [tokens], [scores]
        scored_parents = [tokens.new_full((batch, topk), -1)]
        # Expanded nodes, a subset: index among the scored nodes, and the parent's index among the expanded nodes.
        chosen = torch.arange(topk, device=device).expand(batch, topk)
        parents = scored_parents[0]
        level_tokens, level_parents = tokens, parents
        num_scored = topk
        for step in range(1, self.depth):
            shape = Tree.from_parents(level_parents, depth=step - 1)
            logits = expand(Level(level_tokens, level_parents, shape.depths + 1, shape.mask, topk))
            children, log_probs = most_likely(logits, topk)  # [B, T, T] each
            child_scores = (scores.unsqueeze(-1) + log_probs).flatten(1)
            columns = children.flatten(1)
            child_tokens = columns if ids is None else ids[columns]
            scored_tokens.append(child_tokens)
            all_scores.append(child_scores)
            scored_parents.append(chosen.repeat_interleave(topk, dim=1))
            if step + 1 < self.depth:
                best = child_scores.topk(topk, dim=1)
                scores, chosen = best.values, best.indices + num_scored
                fresh_tokens = child_tokens.gather(1, best.indices)
                parent = (step - 1) * topk + best.indices // topk
                level_tokens = torch.cat((level_tokens, fresh_tokens), dim=1)
                level_parents = torch.cat((level_parents, parent), dim=1)
            num_scored += topk * topk
        return self._select_nodes(torch.cat(scored_tokens, 1), torch.cat(all_scores, 1), torch.cat(scored_parents, 1))

    def _select_nodes(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> tuple[Tensor, Tree]:
        """Return the K best of the scored nodes as tokens [B, K] and a tree. The stable sort prefers a parent to a child of
        equal score.
        """
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : self.nodes]
        picked = torch.sort(order, dim=1).values
        node = torch.arange(1, self.nodes + 1, device=tokens.device).expand_as(picked)
        index = torch.zeros_like(tokens).scatter_(1, picked, node)
        parent = parents.gather(1, picked)
        mapped = torch.where(parent < 0, 0, index.gather(1, parent.clamp(min=0)))
        root = mapped.new_full((mapped.shape[0], 1), -1)
        return tokens.gather(1, picked), Tree.from_parents(torch.cat((root, mapped), dim=1), depth=self.depth)
