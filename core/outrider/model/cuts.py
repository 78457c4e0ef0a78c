"""Cut: what of a checkpoint's tensor is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """``start`` to ``stop`` (exclusive) of dimension ``dim``, the first or the second.

    Of a stack of matrices these count within a matrix: rows of the one with the number ``matrix``, or columns of all.
    """

    dim: int
    start: int
    stop: int
    matrix: int | None = None

    def index(self, dimensions: int) -> tuple[slice, ...]:
        """What is read of a tensor with so many ``dimensions``, which stay."""
        own = slice(self.start, self.stop)
        if self.matrix is not None:
            return slice(self.matrix, self.matrix + 1), own
        return (*[slice(None)] * (self.dim + max(0, dimensions - 2)), own)
