"""The slice of a checkpoint's tensor that a rank reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """A range ``start`` to ``stop`` (exclusive) of the rows (``dim`` 0) or columns (``dim`` 1) of a matrix or of stacked
    matrices.
    """

    dim: int
    start: int
    stop: int
    matrix: int | None = None
    """Index of the matrix whose rows are read from a stack. None for a single matrix, or for columns of all matrices."""

    def index(self, dimensions: int) -> tuple[slice, ...]:
        """Return the index of the slice in a tensor with ``dimensions`` dimensions. It keeps all dimensions."""
        rows_or_columns = slice(self.start, self.stop)
        if self.matrix is not None:
            return slice(self.matrix, self.matrix + 1), rows_or_columns
        return (rows_or_columns,) if self.dim == 0 else (*[slice(None)] * (dimensions - 1), rows_or_columns)
