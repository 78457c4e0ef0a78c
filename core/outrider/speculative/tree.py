"""Draft trees: their representation, and the shapes in which they grow.

Letters: B requests, N nodes with the root, D longest path, T candidate children per node (top-k).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
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


class TreeShape(ABC):
    """The rule by which a draft tree grows from the most likely first tokens."""

    def __init__(self, *, branches: int, depth: int, nodes: int, levels: tuple[int, ...]) -> None:
        self.branches = branches
        """T, the number of first tokens."""
        self.depth = depth
        """D, the longest path in edges."""
        self.nodes = nodes
        """K, the number of nodes without the root."""
        self.levels = levels
        """Number of nodes of each :class:`Level` in turn."""

    @property
    def expanded(self) -> int:
        """Number of nodes of the largest :class:`Level`."""
        return max(self.levels, default=0)

    def allocate_constants(self, device: torch.device) -> None:
        """Allocate the constants of :meth:`grow` on ``device``, before its first call."""
        del device

    @abstractmethod
    def grow(self, tokens: Tensor, scores: Tensor, expand: Expand, *, ids: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Return tokens int64 [B, K] and the tree of N = K + 1 nodes.

        ``tokens`` int64 [B, T] are the most likely first tokens, best first; ``scores`` float32 [B, T] are their
        log-probabilities. ``ids`` int64 [V] is the token of each column of ``expand``'s logits; None means the column's
        index.
        """


class DynamicTree(TreeShape):
    """A shape of the most likely nodes by the draft's probabilities, as in EAGLE-2 (Li et al. 2024, sections 4.1 and 4.2).

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
        super().__init__(
            branches=topk,
            depth=depth,
            nodes=nodes or min(candidates, topk * depth),
            levels=tuple(topk * level for level in range(1, depth)),
        )

    def grow(self, tokens: Tensor, scores: Tensor, expand: Expand, *, ids: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Expand the most likely nodes level by level, then select the K most likely nodes of all levels. See the base class
        for arguments and results.
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


class FixedTree(TreeShape):
    """A shape that is the same in every iteration, as in EAGLE-1 and Medusa (Cai et al. 2024, section 2.3.2).

    ``paths`` name nodes by ranks: ``(0, 1)`` is the second most likely child of the most likely first token. Every prefix of
    a path is also a node.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        named = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
        if not named or min(min(path) for path in named) < 0:
            raise ConfigError("a fixed draft tree needs at least one path, and ranks count from 0")
        self._paths = tuple(sorted(named, key=lambda path: (len(path), path)))
        internal, depth = {path[:-1] for path in self._paths}, max(map(len, self._paths))
        # Expanded nodes by level, known on the host.
        self._levels = [
            [path for path in self._paths if len(path) == length and path in internal] for length in range(1, depth)
        ]
        super().__init__(
            branches=1 + max(rank for path in self._paths for rank in path),
            depth=depth,
            nodes=len(self._paths),
            levels=tuple(itertools.accumulate(len(level) for level in self._levels)),
        )
        self._level_parents: list[Tensor] = []
        self._parents = torch.empty(0)

    @classmethod
    def regular(cls, widths: Sequence[int]) -> FixedTree:
        """Return a tree in which every node of level i has ``widths[i]`` children."""
        return cls(itertools.product(*(range(width) for width in widths)))

    def allocate_constants(self, device: torch.device) -> None:
        """Allocate the constant parents of each level and of the whole tree on ``device``."""
        expanded: list[tuple[int, ...]] = []
        self._level_parents = []
        for level in self._levels:
            expanded += level
            index = {path: i for i, path in enumerate(expanded)}
            self._level_parents.append(torch.tensor([index.get(path[:-1], -1) for path in expanded], device=device))
        index = {path: i + 1 for i, path in enumerate(self._paths)}
        self._parents = torch.tensor([-1, *(index.get(path[:-1], 0) for path in self._paths)], device=device)

    def grow(self, tokens: Tensor, scores: Tensor, expand: Expand, *, ids: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Fill the nodes of the fixed tree with tokens, level by level. See the base class for arguments and results."""
        del scores  # the shape doesn't depend on them
        batch = tokens.shape[0]
        token_of: dict[tuple[int, ...], Tensor] = {path: tokens[:, path[0]] for path in self._paths if len(path) == 1}
        expanded: list[tuple[int, ...]] = []
        for level, level_parents in zip(self._levels, self._level_parents, strict=True):
            expanded += level
            parents = level_parents.expand(batch, -1)
            tree = Tree.from_parents(parents, depth=len(level[0]) - 1)
            level_tokens = torch.stack([token_of[path] for path in expanded], dim=1)
            logits = expand(Level(level_tokens, parents, tree.depths + 1, tree.mask, len(level)))
            columns = logits.topk(self.branches, dim=-1).indices
            ranked = columns if ids is None else ids[columns]  # [B, fresh, T]
            for i, path in enumerate(level):
                token_of |= {child: ranked[:, i, child[-1]] for child in self._paths if child[:-1] == path}
        tree = Tree.from_parents(self._parents.expand(batch, -1), depth=self.depth)
        return torch.stack([token_of[path] for path in self._paths], dim=1), tree
