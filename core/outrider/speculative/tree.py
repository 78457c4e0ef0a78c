"""Draft trees: what they're made of, and how a dynamic one is chosen.

Letters: B requests, N nodes with the root, D longest path, T children that are looked at a node (top-k).
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
    """Trees of N nodes, one a request. Node 0 is the root, the request's last token; a parent comes before its children.

    ``parents`` int64 [B, N]: index of the parent; -1 for the root and for nodes that aren't used. ``depths`` int64
    [B, N]: edges from the root. ``mask`` bool [B, N, N]: whether node i sees node j, its ancestor or itself.
    """

    parents: Tensor
    depths: Tensor
    mask: Tensor

    @classmethod
    def from_parents(cls, parents: Tensor, *, depth: int) -> Tree:
        """The tree of ``parents`` int64 [B, N], no path of which is longer than ``depth``."""
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
    """Nodes of a growing tree that a draft model must look at: all that have been expanded so far, M a request.

    ``tokens`` int64 [B, M]; ``parents`` int64 [B, M], index into these nodes, -1 for children of the root; ``depths`` int64
    [B, M], at least 1; ``mask`` bool [B, M, M], ancestor or itself. The last ``fresh`` of them are new; the others come
    again, since the attention's mask covers the new tokens of a call only, not what earlier calls cached.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    fresh: int


Expand = Callable[[Level], Tensor]
"""Logits [B, fresh, V] of the token after each fresh node of a level."""


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` likeliest tokens of ``logits`` [..., V], best first, and their log-probabilities float32."""
    found = torch.log_softmax(logits.float(), dim=-1).topk(count, dim=-1)
    return found.indices, found.values


class TreeShape(ABC):
    """How a draft tree grows from the likeliest first tokens."""

    @property
    @abstractmethod
    def branches(self) -> int:
        """T: how many first tokens it starts from."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """D: the longest path."""

    @property
    @abstractmethod
    def nodes(self) -> int:
        """K: nodes without the root."""

    @property
    def expanded(self) -> int:
        """The most nodes of a :class:`Level`."""
        return max(self.levels, default=0)

    @property
    @abstractmethod
    def levels(self) -> tuple[int, ...]:
        """Nodes of each :class:`Level` in turn."""

    def bind(self, device: torch.device) -> None:
        """Make the constants that :meth:`grow` needs, before the first call."""
        del device

    @abstractmethod
    def grow(self, tokens: Tensor, scores: Tensor, expand: Expand, *, ids: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Tokens int64 [B, K] and the tree of N = K + 1 nodes.

        ``tokens`` int64 [B, T]: the likeliest first tokens, best first; ``scores`` float32 [B, T]: their log-probabilities.
        ``ids`` int64 [V]: the token that each column of ``expand``'s logits stands for; None where it's the column.
        """


class DynamicTree(TreeShape):
    """The likeliest nodes by the draft's own probabilities, as EAGLE-2 chooses them (Li et al. 2024, sections 4.1, 4.2).

    Each of D - 1 steps expands the T likeliest nodes of the last level, by the product of the probabilities along the
    path, and looks at T children of each. Of all nodes seen the K likeliest stay; a parent is at least as likely as its
    child, so they're a tree.
    """

    def __init__(self, *, topk: int, depth: int, nodes: int | None = None) -> None:
        candidates = topk + (depth - 1) * topk * topk
        if topk < 1 or depth < 1:
            raise ConfigError(f"a draft tree of topk {topk} and depth {depth} is impossible; both must be at least 1")
        if nodes is not None and not depth <= nodes <= candidates:
            raise ConfigError(
                f"a draft tree of topk {topk} and depth {depth} has {depth} to {candidates} nodes, {nodes} were asked for"
            )
        self._topk = topk
        self._depth = depth
        self._nodes = nodes or min(candidates, topk * depth)

    @property
    def branches(self) -> int:
        """T."""
        return self._topk

    @property
    def depth(self) -> int:
        """D."""
        return self._depth

    @property
    def nodes(self) -> int:
        """K."""
        return self._nodes

    @property
    def levels(self) -> tuple[int, ...]:
        """T more with each level but the last."""
        return tuple(self._topk * level for level in range(1, self._depth))

    def grow(self, tokens: Tensor, scores: Tensor, expand: Expand, *, ids: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Expand, then choose."""
        topk, batch, device = self._topk, tokens.shape[0], tokens.device
        # Every node seen, in order of level: its token, score, and parent's index among them.
        seen_tokens, seen_scores = [tokens], [scores]
        seen_parents = [tokens.new_full((batch, topk), -1)]
        # The expanded ones, a subset: index among the seen, and parent's index among the expanded.
        chosen = torch.arange(topk, device=device).expand(batch, topk)
        parents = seen_parents[0]
        level_tokens, level_parents = tokens, parents
        seen = topk
        for step in range(1, self._depth):
            shape = Tree.from_parents(level_parents, depth=step - 1)
            logits = expand(Level(level_tokens, level_parents, shape.depths + 1, shape.mask, topk))
            children, log_probs = likeliest(logits, topk)  # [B, T, T] each
            child_scores = (scores.unsqueeze(-1) + log_probs).flatten(1)
            columns = children.flatten(1)
            child_tokens = columns if ids is None else ids[columns]
            seen_tokens.append(child_tokens)
            seen_scores.append(child_scores)
            seen_parents.append(chosen.repeat_interleave(topk, dim=1))
            if step + 1 < self._depth:
                best = child_scores.topk(topk, dim=1)
                scores, chosen = best.values, best.indices + seen
                fresh_tokens = child_tokens.gather(1, best.indices)
                parent = (step - 1) * topk + best.indices // topk
                level_tokens = torch.cat((level_tokens, fresh_tokens), dim=1)
                level_parents = torch.cat((level_parents, parent), dim=1)
            seen += topk * topk
        return self._choose(torch.cat(seen_tokens, 1), torch.cat(seen_scores, 1), torch.cat(seen_parents, 1))

    def _choose(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> tuple[Tensor, Tree]:
        """The K best of the nodes seen; a parent comes first in the order of levels, hence also among equals."""
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : self._nodes]
        picked = torch.sort(order, dim=1).values
        node = torch.arange(1, self._nodes + 1, device=tokens.device).expand_as(picked)
        index = torch.zeros_like(tokens).scatter_(1, picked, node)
        parent = parents.gather(1, picked)
        mapped = torch.where(parent < 0, 0, index.gather(1, parent.clamp(min=0)))
        root = mapped.new_full((mapped.shape[0], 1), -1)
        return tokens.gather(1, picked), Tree.from_parents(torch.cat((root, mapped), dim=1), depth=self._depth)


class FixedTree(TreeShape):
    """The same shape in every iteration, as EAGLE-1 and Medusa have it (Cai et al. 2024, section 2.3.2).

    ``paths`` name nodes by ranks: ``(0, 1)`` is the second likeliest child of the likeliest first token. Every prefix of a
    path is a node too, named or not.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        named = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
        if not named or min(min(path) for path in named) < 0:
            raise ConfigError("a fixed draft tree needs at least one path, and ranks count from 0")
        self._paths = tuple(sorted(named, key=lambda path: (len(path), path)))
        self._branches = 1 + max(rank for path in self._paths for rank in path)
        internal = {path[:-1] for path in self._paths}
        # Host constants: nodes that are expanded, by level.
        self._levels = [
            [path for path in self._paths if len(path) == length and path in internal] for length in range(1, self.depth)
        ]
        self._level_parents: list[Tensor] = []
        self._parents = torch.empty(0)

    @classmethod
    def regular(cls, widths: Sequence[int]) -> FixedTree:
        """Every node of level i has ``widths[i]`` children."""
        return cls(itertools.product(*(range(width) for width in widths)))

    @property
    def branches(self) -> int:
        """The highest rank, plus one."""
        return self._branches

    @property
    def depth(self) -> int:
        """D."""
        return max(len(path) for path in self._paths)

    @property
    def nodes(self) -> int:
        """K."""
        return len(self._paths)

    @property
    def levels(self) -> tuple[int, ...]:
        """Nodes with children, the root not counted, up to each level."""
        return tuple(itertools.accumulate(len(level) for level in self._levels))

    def bind(self, device: torch.device) -> None:
        """Parents of each level and of the whole, on the device."""
        expanded: list[tuple[int, ...]] = []
        self._level_parents = []
        for level in self._levels:
            expanded += level
            index = {path: i for i, path in enumerate(expanded)}
            self._level_parents.append(torch.tensor([index.get(path[:-1], -1) for path in expanded], device=device))
        index = {path: i + 1 for i, path in enumerate(self._paths)}
        self._parents = torch.tensor([-1, *(index.get(path[:-1], 0) for path in self._paths)], device=device)

    def grow(self, tokens: Tensor, scores: Tensor, expand: Expand, *, ids: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Fill in the tokens, level by level."""
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
            columns = logits.topk(self._branches, dim=-1).indices
            ranked = columns if ids is None else ids[columns]  # [B, fresh, T]
            for i, path in enumerate(level):
                token_of |= {child: ranked[:, i, child[-1]] for child in self._paths if child[:-1] == path}
        tree = Tree.from_parents(self._parents.expand(batch, -1), depth=self.depth)
        return torch.stack([token_of[path] for path in self._paths], dim=1), tree
