"""ResidualStream: the sum [T, H] that travels through the blocks of a model, with the last block's contribution to it.

A contribution stays pending until the next norm, so that one kernel can add and normalise. A kernel set may also defer the
work that computes the contribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from outrider.device.kernels.blocks import BlockKernels


class Contribution(ABC):
    """The addend [T, H] of one block. A kernel set may define further kinds, which its own blocks recognise."""

    __slots__ = ()

    @abstractmethod
    def add(self, rows: Tensor) -> Tensor:
        """Add the contribution to ``rows`` [T, H] in place; returns ``rows``."""

    @abstractmethod
    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the contribution to ``rows`` [T, H] in place; return the norm of ``rows`` with weight ``norm`` [H]."""


class RankBoundary:
    """The collectives at the ends of a block. This class is for one rank and does nothing.

    With several ranks, each block computes one part of a sum. Letters: D data-parallel groups, W tokens per group.
    """

    reduces = False
    """True if the contribution of a block is one rank's part of a sum."""

    def add(self, partial: Tensor, rows: Tensor) -> Tensor:
        """Add the sum of ``partial`` [T, H] over the tensor-parallel ranks to ``rows`` in place; returns ``rows``."""
        return rows.add_(partial)

    def add_rms_norm(self, kernels: BlockKernels, partial: Tensor, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the sum of ``partial`` [T, H] to ``rows`` in place; return the norm of ``rows``."""
        return kernels.add_rms_norm(partial, rows, norm, eps)

    def gather_tokens(self, normed: Tensor) -> Tensor:
        """Return the tokens of all data-parallel groups [D * W, H] for this group's ``normed`` [T, H]."""
        return normed

    def scatter_tokens(self, partial: Tensor, tokens: int) -> Tensor:
        """Sum ``partial`` [D * W, H] over the data-parallel ranks. Return this group's ``tokens`` rows [T, H]."""
        del tokens
        return partial


SINGLE_RANK = RankBoundary()


@dataclass(frozen=True, slots=True)
class Computed(Contribution):
    """A contribution ``value`` [T, H] that is computed, or this rank's part of it."""

    kernels: BlockKernels
    value: Tensor
    ranks: RankBoundary = SINGLE_RANK

    def add(self, rows: Tensor) -> Tensor:
        """Add the value, summed over the ranks if there are several, to ``rows`` [T, H] in place; return ``rows``."""
        return self.ranks.add(self.value, rows)

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the value, summed over the ranks, to ``rows`` [T, H] in place; return the norm of ``rows``.

        One rank calls ``KernelSet.add_rms_norm``; several ranks reduce and normalise in one collective.
        """
        return self.ranks.add_rms_norm(self.kernels, self.value, rows, norm, eps)


@dataclass(frozen=True, slots=True)
class SeparateInput(Contribution):
    """An input ``normed`` [T, H'] that the next block reads instead of a norm of the residual stream; adds nothing."""

    normed: Tensor

    def add(self, rows: Tensor) -> Tensor:
        """Return ``rows`` unchanged."""
        return rows

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Return ``normed`` [T, H'] in place of a norm; ``rows``, ``norm`` and ``eps`` are ignored."""
        del rows, norm, eps
        return self.normed


class ResidualStream(NamedTuple):
    """The residual stream between two blocks: ``rows`` [T, H], to which ``pending`` is still to be added."""

    kernels: BlockKernels
    rows: Tensor
    pending: Contribution | None = None
    """What the block before adds to ``rows``. None before the first block, and if ``rows`` are complete."""

    def add(self) -> Tensor:
        """Add the pending contribution; return ``rows``, which are complete then. Call :meth:`add` or :meth:`norm` once."""
        return self.rows if self.pending is None else self.pending.add(self.rows)

    def norm(self, weight: Tensor | None, eps: float) -> Tensor:
        """Add the pending contribution; return the norm of ``rows`` with ``weight`` [H], or ``rows`` if it is None."""
        if weight is None:
            return self.add()
        if self.pending is None:
            return self.kernels.rms_norm(self.rows, weight, eps)
        return self.pending.add_rms_norm(self.rows, weight, eps)
