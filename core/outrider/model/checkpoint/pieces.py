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
        """Return the slice as an index into a tensor with ``dimensions`` dimensions. The result keeps all dimensions."""
        rows_or_columns = slice(self.start, self.stop)
        if self.matrix is not None:
            return slice(self.matrix, self.matrix + 1), rows_or_columns
        return (rows_or_columns,) if self.dim == 0 else (*[slice(None)] * (dimensions - 1), rows_or_columns)


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint, or a slice of one, from which a weight of the model is concatenated."""

    key: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Shape that the tensor must have in the checkpoint."""
    tensor_slice: TensorSlice | None = None
    """The slice of the tensor that is read; None reads the whole tensor."""
    stack: bool = False
    """True if the tensor is a stack of matrices whose rows are read as one matrix."""

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of the values that are read: that of the slice, with a stack as one matrix."""
        shape, cut = list(self.shape), self.tensor_slice
        if self.stack:
            shape = [shape[1] if cut is not None and cut.matrix is not None else shape[0] * shape[1], shape[2]]
        if cut is not None:
            shape[cut.dim] = cut.stop - cut.start
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class Target:
    """A weight of the model, concatenated along its rows from pieces of the checkpoint."""

    name: str
    """Name of the weight in the model."""
    pieces: tuple[Piece, ...]
    """Tensors that are concatenated along the rows, in this order."""
    padding: int = 0
    """Number of zero rows after the last piece."""
    wide: bool = False
    """True for a weight that is loaded in float32 if the model's dtype is narrower."""
    offset: float = 0.0
    """Number that is added to the stored values in float32. Only for ``wide`` weights."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenated weight, padding included."""
        rows = sum(piece.read_shape[0] for piece in self.pieces) + self.padding
        return (rows, *self.pieces[0].read_shape[1:])
