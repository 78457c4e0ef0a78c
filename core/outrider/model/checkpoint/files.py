"""The files of a checkpoint: bounded reading with a uniform error type, and the tensor files, whatever their format.

Every reader of a checkpoint uses :func:`wrap_read_errors`, which converts any parser's exception to a
:class:`CheckpointError` that names the file. The model's weights are stacked from pieces of tensors, which are read one at a
time, or in bulk from their extents (:mod:`outrider.model.checkpoint.bulk`).
"""

from __future__ import annotations

import json
import math
import stat
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.device import ConfigError, OutriderError
from outrider.errors import CheckpointError, one_line, shown

JSON_LIMIT = 64 << 20
"""Maximum size of a JSON file in bytes. An index of a hundred thousand tensors has nine million."""
EXPECTED_CHECKPOINT = "expected a checkpoint directory as Hugging Face writes it"
"""Advice of messages about missing files."""
_MAX_JSON_DEPTH = 64  # published configs nest four deep
_POINTER = b"version https://git-lfs."
"""The first bytes of a file that a clone without Git LFS has in place of a large one."""


@contextmanager
def wrap_read_errors(path: Path, content: str, advice: str = "") -> Generator[None]:
    """Convert any failure of the block to a :class:`CheckpointError` that names ``path``, its expected ``content`` and
    ``advice``.

    A :class:`ConfigError` keeps its message. Other Outrider errors pass unchanged, and so do KeyboardInterrupt and
    SystemExit.
    """
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OutriderError:
        raise
    except BaseException as error:
        # A panic in a Rust extension derives from BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if _is_pointer(path):
            raise CheckpointError(f"{path}: is a pointer of Git LFS, not {content}; run 'git lfs pull' there") from error
        suffix = f"; {advice}" if advice else ""
        raise CheckpointError(f"{path}: can't be read as {content}: {describe(error)}{suffix}") from error


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def describe(error: BaseException) -> str:
    """Return the error as one line of bounded length. The line includes the error's type if its text alone is unclear."""
    text = one_line(str(error))
    return text if type(error) in (OSError, ValueError, RuntimeError) and text else f"{type(error).__name__}: {text}"


def present(path: Path) -> bool:
    """Return True if the directory of ``path`` has an entry of that name, even a dangling link."""
    return path.is_symlink() or path.exists()


def regular_size(path: Path) -> int:
    """Return the bytes of a regular file or of a link's target. Raises :class:`CheckpointError` for anything else, without
    opening it.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a link to a file that isn't there") from None
        raise CheckpointError(f"{path}: no such file; {EXPECTED_CHECKPOINT}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read: {describe(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise CheckpointError(f"{path}: is {kind}, expected a regular file")
    return found.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises :class:`CheckpointError` otherwise."""
    size = regular_size(path)
    with wrap_read_errors(path, "a file"):
        if size <= limit:
            with path.open("rb") as file:
                content = file.read(limit + 1)
            size = max(size, len(content))
    if size > limit:
        raise CheckpointError(f"{path}: has {size} bytes, expected at most {limit}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the checkpoint.

    Raises :class:`CheckpointError` if the file is too large, nested too deeply, or not a JSON object.
    """
    content = read_bytes(path, JSON_LIMIT)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: isn't valid JSON: {describe(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(_MAX_JSON_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return value
    raise CheckpointError(f"{path}: its values are nested more than {_MAX_JSON_DEPTH} deep")


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


class AdjacentPairs(NamedTuple):
    """Heads of ``head`` rows, whose last ``rotated`` rows are rotated in pairs of adjacent rows."""

    head: int
    rotated: int

    def share_scales(self, rows: int) -> bool:
        """Return True if the rotated rows of each head are in one block of ``rows`` rows."""
        return self.head % self.rotated == rows % self.rotated == 0


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
    paired: AdjacentPairs | None = None
    """The heads whose rotated rows are read in the order of the model, the first ones of all pairs first. None: rows are read
    in the order of the file.
    """

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of the values that are read: that of the slice, with a stack as one matrix."""
        shape, cut = list(self.shape), self.tensor_slice
        if self.stack:
            shape = [shape[1] if cut is not None and cut.matrix is not None else shape[0] * shape[1], shape[2]]
        if cut is not None:
            shape[cut.dim] = cut.stop - cut.start
        return tuple(shape)

    def in_model_order(self, rows: Tensor) -> Tensor:
        """Return ``rows``, a row of the file for each row of the piece, in the order in which the model has them."""
        if self.paired is None:
            return rows
        index = torch.arange(rows.shape[0]).unflatten(0, (-1, self.paired.head))
        unrotated, rotated = index.split((self.paired.head - self.paired.rotated, self.paired.rotated), dim=1)
        turned = rotated.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        return rows[torch.cat((unrotated, turned), dim=1).flatten().to(rows.device)]


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


GGUF_LIST = "gguf.json"
"""File of an unpacked GGUF checkpoint that lists the GGUF files."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Location of a tensor's values in a file: contiguous, or a range of columns with a constant row pitch."""

    path: Path
    """The tensor file."""
    offset: int
    """Position of the first value in the file, in bytes."""
    dtype: torch.dtype
    """Dtype of the values in the file."""
    contiguous_values: int = 0
    """Number of contiguous values in each row of a column range. 0 if all values are contiguous."""
    row_pitch_values: int = 0
    """Distance between the starts of two rows of a column range, in values. 0 if all values are contiguous."""

    def sliced(self, shape: tuple[int, ...], tensor_slice: TensorSlice | None) -> Extent:
        """Return the extent of ``tensor_slice`` of this tensor, which has the whole ``shape``."""
        if tensor_slice is None:
            return self
        columns = math.prod(shape[1:]) if tensor_slice.dim == 0 and tensor_slice.matrix is None else shape[-1]
        if tensor_slice.dim == 0:
            first = tensor_slice.start if tensor_slice.matrix is None else tensor_slice.matrix * shape[1] + tensor_slice.start
            return replace(self, offset=self.offset + first * columns * self.dtype.itemsize)
        offset = self.offset + tensor_slice.start * self.dtype.itemsize
        return replace(
            self, offset=offset, contiguous_values=tensor_slice.stop - tensor_slice.start, row_pitch_values=columns
        )


class TensorFile(ABC):
    """An open file of tensors: their names, shapes, dtypes and values."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        self.shapes = shapes

    @abstractmethod
    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        """Return tensor ``name``, or the part ``tensor_slice`` of it, on the host in the dtype of the file."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype | None:
        """Return the tensor's dtype without reading its values, or None if the dtype is not supported."""

    def extent(self, name: str) -> Extent | None:
        """Return the tensor's extent in the file if its values are contiguous there. None means: use :meth:`read_tensor`."""
        del name
        return None


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The tensors of a checkpoint by name, each with the file that holds it."""

    origin: Path
    """Index or single tensor file, for error messages."""
    tensors: Mapping[str, TensorFile]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the checkpoint contains."""
        return self.tensors[name].shapes[name]

    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        """Return a floating-point tensor, or its slice ``tensor_slice``, on the host.

        Raises :class:`CheckpointError` for another dtype.
        """
        tensor = self.tensors[name].read_tensor(name, tensor_slice)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self.tensors[name].path}: tensor {shown(name)} is {tensor.dtype}, expected float16, bfloat16, float32 or "
                "float64; the config says nothing of quantised weights here"
            )
        return tensor

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of an existing tensor, or None if the dtype is not supported."""
        return self.tensors[name].dtype(name)

    def dtype_name(self, name: str) -> str:
        """Return the dtype of an existing tensor in words, for error messages."""
        dtype = self.dtype(name)
        return "of a dtype that isn't known" if dtype is None else str(dtype).removeprefix("torch.")

    def read_stored(self, name: str) -> Tensor:
        """Return tensor ``name`` as the file stores it, in any dtype, on the host."""
        return self.tensors[name].read_tensor(name)

    def extent(self, name: str) -> Extent | None:
        """Return a tensor's extent in its file, or None if it cannot be read in bulk."""
        return self.tensors[name].extent(name)

    def read_ids(self, name: str) -> Tensor:
        """Return a tensor of integers as int64, on the host. Raises :class:`CheckpointError` for another dtype."""
        tensor = self.tensors[name].read_tensor(name)
        if tensor.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(f"{self.tensors[name].path}: tensor {name!r} is {tensor.dtype}, expected int64")
        return tensor.to(torch.int64)
