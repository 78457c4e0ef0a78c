"""The state of one guided request: what its grammar allows next, and behind each token of a draft. Host alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

EVERYTHING = -1
"""A word of a mask in which every token is allowed."""
WALK_SECONDS = 1.0
"""Of this thread's time, what a request's walk in one iteration may take: others wait for it. Grammars that can be read in
many ways take ever longer."""


def words_of(vocabulary: int) -> int:
    """Words of 32 bits that a mask of a vocabulary has."""
    return -(-vocabulary // 32)


def words_with(tokens: Iterable[int], vocabulary: int) -> Tensor:
    """A mask with these tokens alone, int32 [W]."""
    allowed = torch.zeros(words_of(vocabulary) * 32, dtype=torch.int64)
    allowed[torch.tensor(sorted(tokens), dtype=torch.int64)] = 1
    bits = (allowed.view(-1, 32) << torch.arange(32)).sum(dim=1)
    return bits.to(torch.int32)


class Matcher(Protocol):
    """Walks a grammar along tokens. What a library has, or a tool stands in with."""

    def accept(self, token: int) -> bool:
        """Take a token that the grammar allows; else nothing changes, and it returns False."""

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens that were accepted."""

    def fill(self, words: Tensor, index: int) -> None:
        """Write the tokens that may come next into row ``index`` of ``words`` int32 [N, W]: bit i of word w is token 32w+i.
        Not called once it's :attr:`over`.
        """

    @property
    def over(self) -> bool:
        """Whether nothing may follow."""


class Anything:
    """A matcher that allows every token, and never ends."""

    over = False

    def accept(self, token: int) -> bool:
        """Always."""
        del token
        return True

    def rollback(self, count: int) -> None:
        """There is nothing to undo."""
        del count

    def fill(self, words: Tensor, index: int) -> None:
        """Every token."""
        words[index].fill_(EVERYTHING)


class Guidance:
    """One request's matcher, which has accepted the request's output whenever nobody walks.

    ``held_back``: tokens, and how many others come before any of them, unless the grammar allows nothing else. ``banned``:
    tokens that the request's biases ban.
    """

    def __init__(
        self,
        matcher: Matcher,
        *,
        vocabulary: int,
        held_back: Sequence[tuple[frozenset[int], int]] = (),
        banned: frozenset[int] = frozenset(),
    ) -> None:
        self._matcher = matcher
        self._taken: list[int] = []
        self._walked = 0  # tokens of a draft that the matcher has accepted on top
        self._late = False
        self._others = [(~words_with(held, vocabulary), until) for held, until in held_back if held and until]
        self._unbanned = ~words_with(banned, vocabulary) if banned else None

    @property
    def late(self) -> bool:
        """Whether a walk took too long: :meth:`take` refuses whatever comes then."""
        return self._late

    @property
    def over(self) -> bool:
        """Whether the output is complete, and nothing may follow."""
        return self._matcher.over

    def take(self, token: int) -> str | None:
        """The output has this token; returns why that can't be, None where the grammar allows it."""
        self._step_back(0)
        if self._late:
            return (
                f"finding what its guide allows behind {len(self._taken)} tokens took more than {WALK_SECONDS:g} s; write "
                "the guide with fewer ways to read a text"
            )
        if not self._matcher.accept(token):
            return (
                f"token {token} at {len(self._taken)} of the output isn't allowed by the guide, and nothing that is was left "
                "to choose; a logit_bias may ban it"
            )
        self._taken.append(token)
        return None

    def first(self, words: Tensor, index: int) -> None:
        """The mask of the next token into row ``index`` of ``words`` int32 [N, W]."""
        self._step_back(0)
        began = time.thread_time()
        self._fill(words, index)
        self._late |= time.thread_time() - began > WALK_SECONDS

    def along(self, tokens: Sequence[int], parents: Sequence[int], words: Tensor) -> None:
        """The masks behind the last token and behind each of a draft, into ``words`` int32 [N, W].

        ``tokens``: those of the nodes from 1 on; ``parents``: the parent of each node, of the root and of those that aren't
        used -1. What the grammar doesn't allow is followed by anything, since it's rejected.
        """
        words.fill_(EVERYTHING)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            if node and parent >= 0:
                children.setdefault(parent, []).append(node)
        began = time.thread_time()
        self._fill(words, 0)
        stack = [(node, 0) for node in reversed(children.get(0, ()))]
        while stack:
            node, depth = stack.pop()
            self._step_back(depth)
            self._late |= time.thread_time() - began > WALK_SECONDS
            if self._late:
                break
            if self._matcher.over or not self._matcher.accept(tokens[node - 1]):
                continue
            self._walked += 1
            self._fill(words, node)
            stack += [(child, depth + 1) for child in reversed(children.get(node, ()))]
        self._late |= time.thread_time() - began > WALK_SECONDS
        self._step_back(0)

    def _step_back(self, depth: int) -> None:
        """Undo what was walked beyond ``depth`` tokens; also what an interrupt left."""
        if self._walked > depth:
            self._matcher.rollback(self._walked - depth)
            self._walked = depth

    def _fill(self, words: Tensor, index: int) -> None:
        row = words[index]
        if self._matcher.over:
            row.fill_(EVERYTHING)
            return
        self._matcher.fill(words, index)
        for others, until in self._others:
            if len(self._taken) + self._walked < until and bool((row & others).any()):
                row &= others
        if self._unbanned is not None and not bool((row & self._unbanned).any()):
            row.fill_(EVERYTHING)  # whatever is drawn instead, take() refuses
