"""Checks of a checkpoint's tensors, and their transfer to the device.

Nothing is allocated on the device before the whole checkpoint has been checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, Stream
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.bulk import TensorRead, read_parts
from outrider.model.checkpoint.files import CheckpointFiles
from outrider.model.checkpoint.mapping import is_unused_tensor
from outrider.model.checkpoint.pieces import Piece, Target
from outrider.model.quantization.loading import Quantization
from outrider.model.quantization.storages import SUFFIXES

Progress = Callable[[str, int, int], None]
"""Callback with the name of the tensor just read, the bytes read so far and their total, in the dtype of the model."""

_MODEL_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_MAX_LISTED = 5


def check_tensors(
    files: CheckpointFiles,
    targets: Sequence[Target],
    *,
    optional: set[str],
    quantization: Quantization | None = None,
    backend: Backend | None = None,
) -> None:
    """Raise :class:`CheckpointError` unless the files hold exactly the pieces of ``targets``, each in its shape.

    ``quantization`` adds the stored tensors of quantized weights. With a ``backend``, raises :class:`CapabilityError` if it
    has no products for them.
    """
    if quantization is None:
        wanted = {piece.key: piece.shape for target in targets for piece in target.pieces}
    else:
        wanted = {piece.key: piece.shape for target in targets for piece in quantization.stored_pieces(files, target)}
        optional = optional | quantization.unused_tensors(files, targets)
        if backend is not None:
            quantization.check(files, targets, backend)
    missing = [key for key in wanted if key not in files.tensors]
    extra = sorted(key for key in files.tensors if key not in wanted and key not in optional and not is_unused_tensor(key))
    if missing or extra:
        parts = []
        if missing:
            shapes = [f"{key!r} {list(wanted[key])}" for key in missing[:_MAX_LISTED]]
            parts.append(f"missing: {_list_with_count(shapes, len(missing))}")
        if extra:
            unexpected = [f"{shown(key)} {list(files.shape(key))}" for key in extra[:_MAX_LISTED]]
            parts.append(f"not expected: {_list_with_count(unexpected, len(extra))}")
        parts += _explain_quantized(extra, quantization)
        raise CheckpointError(f"{files.origin}: the tensors aren't those of the config; {'; '.join(parts)}")
    for key, shape in wanted.items():
        if files.shape(key) != shape:
            raise CheckpointError(
                f"{files.tensors[key].path}: tensor {key!r} has shape {list(files.shape(key))}, expected {list(shape)}"
            )


def _explain_quantized(extra: Sequence[str], quantization: Quantization | None) -> list[str]:
    """Return a message for tensors ``extra`` that belong to quantized weights which the config doesn't declare; empty for
    other tensors.
    """
    if not any(key.rpartition(".")[2] in SUFFIXES for key in extra):
        return []
    if quantization is None:
        return [
            "they're of quantised weights, and config.json has no quantization_config: fetch the one that belongs to them"
        ]
    return [f"they're of quantised weights, and {quantization.path} ({quantization.method}) says that these aren't stored so"]


def _list_with_count(names: Sequence[str], count: int) -> str:
    rest = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + rest


@contextmanager
def loading_stream(backend: Backend, dtype: torch.dtype) -> Generator[Stream]:
    """Open the scope of a new stream for loading, and wait for its work at the end.

    Raises :class:`CapabilityError` if the device doesn't compute in ``dtype``.
    """
    usable = backend.capabilities.dtypes & _MODEL_DTYPES
    if dtype not in usable:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in usable))
        raise CapabilityError(f"{backend.label} can't run a model in {dtype}; it declares {names}")
    stream = backend.create_stream("load")
    with backend.on(stream):
        yield stream
    stream.synchronize()


def load_tensors(
    files: CheckpointFiles,
    targets: Sequence[Target],
    *,
    dtype: torch.dtype,
    backend: Backend,
    stream: Stream,
    progress: Progress | None,
    quantization: Quantization | None = None,
) -> dict[str, Any]:
    """Load the weights of ``targets`` onto the device. Return them by the model's names, valid after the work of ``stream``.

    The caller has opened the scope of ``stream``. Weights are tensors, or quantized weights as ``quantization`` declares.
    Tensors that are stored in ``dtype`` are read in bulk; others are converted one by one.
    """
    bytes_by_key = Counter[str]()
    for piece in (piece for target in targets for piece in target.pieces):
        bytes_by_key[piece.key] += math.prod(piece.read_shape) * dtype.itemsize
    total, num_done = bytes_by_key.total(), 0

    def done(key: str) -> None:
        nonlocal num_done
        num_done += bytes_by_key.pop(key, 0)  # pieces of one tensor are read one after the other
        if progress is not None:
            progress(key, num_done, total)

    weights: dict[str, Any] = {}
    parts: list[TensorRead] = []
    cast: list[tuple[Piece, Tensor]] = []
    for target in targets:
        if quantization is not None and quantization.has_quantized_piece(files, target):
            weights[target.name] = quantization.load(files, target, dtype=dtype, device=backend.device, done=done)
            continue
        stored = torch.promote_types(dtype, torch.float32) if target.wide else dtype
        weight = weights[target.name] = torch.empty(target.shape, dtype=stored, device=backend.device)
        row = 0
        for piece in target.pieces:
            rows = weight[row : row + piece.read_shape[0]]
            row += rows.shape[0]
            extent = files.extent(piece.key)
            if extent is not None and extent.dtype == stored:
                parts.append(TensorRead(piece.key, extent.sliced(piece.shape, piece.tensor_slice), rows))
            else:
                cast.append((piece, rows))
        if target.padding:
            weight[row:].zero_()
    read_parts([part for part in parts if part.destination.numel()], backend, stream, done)
    for piece, rows in cast:
        rows.copy_(files.read_tensor(piece.key, piece.tensor_slice).to(rows.dtype).reshape(rows.shape))
        done(piece.key)
    for target in targets:
        if target.offset:
            weights[target.name].add_(target.offset)
    return weights
