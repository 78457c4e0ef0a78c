"""Moving a checkpoint's tensors to the device, once every one of them was found to be as expected.

Nothing is allocated on the device before the whole checkpoint was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, Stream
from outrider.errors import CheckpointError, shown
from outrider.model.bulk import Part, read_parts
from outrider.model.files import CheckpointFiles
from outrider.model.mapping import Piece, Target, ignored

Progress = Callable[[str, int, int], None]
"""Called with the name of the tensor just read, how many are done, and how many there are."""

_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_SHOWN = 5


def check_tensors(files: CheckpointFiles, targets: Sequence[Target], *, optional: set[str]) -> None:
    """Raise unless the files hold exactly the pieces of ``targets``, each in its shape."""
    wanted = {piece.key: piece.shape for target in targets for piece in target.pieces}
    missing = [key for key in wanted if key not in files.tensors]
    extra = sorted(key for key in files.tensors if key not in wanted and key not in optional and not ignored(key))
    if missing or extra:
        parts = []
        if missing:
            shapes = [f"{key!r} {list(wanted[key])}" for key in missing[:_SHOWN]]
            parts.append(f"missing: {_some(shapes, len(missing))}")
        if extra:
            strange = [f"{shown(key)} {list(files.shape(key))}" for key in extra[:_SHOWN]]
            parts.append(f"not expected: {_some(strange, len(extra))}")
        raise CheckpointError(f"{files.origin}: the tensors aren't those of the config; {'; '.join(parts)}")
    for key, shape in wanted.items():
        if files.shape(key) != shape:
            raise CheckpointError(
                f"{files.tensors[key].path}: tensor {key!r} has shape {list(files.shape(key))}, expected {list(shape)}"
            )


def _some(names: Sequence[str], count: int) -> str:
    rest = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + rest


@contextmanager
def placed(backend: Backend, dtype: torch.dtype) -> Generator[Stream]:
    """A scope of a stream of its own, which it hands out, for the work of loading; its end waits for that work."""
    usable = backend.capabilities.dtypes & _DTYPES
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
) -> dict[str, Tensor]:
    """Weights by the model's name for them, on the device once ``stream``, whose scope this is, has run.

    What the files hold in ``dtype`` already is read from where it lies, in large pieces; the rest is cast tensor by tensor.
    """
    total = sum(len(target.pieces) for target in targets)
    names: list[str] = []

    def done(key: str) -> None:
        names.append(key)
        if progress is not None:
            progress(key, len(names), total)

    weights: dict[str, Tensor] = {}
    parts: list[Part] = []
    cast: list[tuple[Piece, Tensor]] = []
    for target in targets:
        weight = weights[target.name] = torch.empty(target.shape, dtype=dtype, device=backend.device)
        row = 0
        for piece in target.pieces:
            rows = weight[row : row + piece.read_shape[0]]
            row += rows.shape[0]
            extent = files.extent(piece.key)
            if extent is not None and extent.dtype == dtype:
                parts.append(Part(piece.key, extent.cut(piece.shape, piece.cut), rows))
            else:
                cast.append((piece, rows))
        if target.padding:
            weight[row:].zero_()
    read_parts([part for part in parts if part.destination.numel()], backend, stream, done)
    for piece, rows in cast:
        rows.copy_(files.read(piece.key, piece.cut).to(dtype).reshape(rows.shape))
        done(piece.key)
    return weights
