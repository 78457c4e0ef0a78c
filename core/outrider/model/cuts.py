"""Cut: what of a checkpoint's tensor is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """``start`` to ``stop`` (exclusive) of rows, ``dim`` 0, or of columns, ``dim`` 1.

    Of a stack of matrices: rows of the one with the number ``matrix``, or columns of all.
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
        return (own,) if self.dim == 0 else (*[slice(None)] * (dimensions - 1), own)
