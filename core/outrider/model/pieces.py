"""Piece and Target: a tensor of a checkpoint, and a weight of the model that is stacked from some of them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.model.cuts import Cut


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint: its name, the shape that it must have there, and what is read of it (None: all).

    ``stack``: it's a stack of matrices, read as one: their rows, one behind the other.
    """

    key: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    stack: bool = False

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of what is read."""
        shape, cut = list(self.shape), self.cut
        if self.stack:
            shape = [shape[1] if cut is not None and cut.matrix is not None else shape[0] * shape[1], shape[2]]
        if cut is not None:
            shape[cut.dim] = cut.stop - cut.start
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class Target:
    """A weight of the model: its name there, and the pieces that it's stacked from.

    ``padding``: rows of zeros behind them.
    """

    name: str
    pieces: tuple[Piece, ...]
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stacked weight."""
        rows = sum(piece.read_shape[0] for piece in self.pieces) + self.padding
        return (rows, *self.pieces[0].read_shape[1:])
