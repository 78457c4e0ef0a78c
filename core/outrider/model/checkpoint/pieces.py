"""Piece and Target: a tensor of a checkpoint, or a slice of it, and a model weight that is stacked from such tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A range ``start`` to ``stop`` (exclusive) of the rows (``dim`` 0) or columns (``dim`` 1) of a matrix or of stacked
    matrices.
    """

    dim: int
    start: int
    stop: int
    matrix: int | None = None
    """Index of the matrix whose rows are read from a stack. None for a single matrix, or for columns of all matrices."""

    def slices(self, dimensions: int) -> tuple[slice, ...]:
        """Return the index of the slice in a tensor with ``dimensions`` dimensions. It keeps all dimensions."""
        rows_or_columns = slice(self.start, self.stop)
        if self.matrix is not None:
            return slice(self.matrix, self.matrix + 1), rows_or_columns
        return (rows_or_columns,) if self.dim == 0 else (*[slice(None)] * (dimensions - 1), rows_or_columns)


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint that makes up a weight, or part of one."""

    key: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Required shape in the checkpoint."""
    tensor_slice: TensorSlice | None = None
    """The slice that is read. None means the whole tensor."""
    stack: bool = False
    """True if the tensor is a stack of matrices whose rows are read as one matrix."""

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of the values that are read."""
        shape, cut = list(self.shape), self.tensor_slice
        if self.stack:
            shape = [shape[1] if cut is not None and cut.matrix is not None else shape[0] * shape[1], shape[2]]
        if cut is not None:
            shape[cut.dim] = cut.stop - cut.start
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class Target:
    """A weight of the model, concatenated from pieces."""

    name: str
    """Name in the model."""
    pieces: tuple[Piece, ...]
    """Tensors that are concatenated along the rows."""
    padding: int = 0
    """Number of zero rows after them."""
    wide: bool = False
    """True for a weight that is loaded in float32 if the model's dtype is narrower."""
    offset: float = 0.0
    """Number that is added to the stored values. Only for wide weights."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenated weight, padding included."""
        rows = sum(piece.read_shape[0] for piece in self.pieces) + self.padding
        return (rows, *self.pieces[0].read_shape[1:])
