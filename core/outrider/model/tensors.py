"""Moving a checkpoint's tensors to the device, once every one of them was found to be as expected.

Nothing is allocated on the device before the whole checkpoint was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError
from outrider.errors import CheckpointError, shown
from outrider.model.files import CheckpointFiles
from outrider.model.mapping import Target, ignored

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
def placed(backend: Backend, dtype: torch.dtype) -> Generator[None]:
    """A scope of a stream of its own for the work of loading; its end waits for that work."""
    usable = backend.capabilities.dtypes & _DTYPES
    if dtype not in usable:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in usable))
        raise CapabilityError(f"{backend.label} can't run a model in {dtype}; it declares {names}")
    stream = backend.create_stream("load")
    with backend.on(stream):
        yield
    stream.synchronize()


def load_tensors(
    files: CheckpointFiles,
    targets: Sequence[Target],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> dict[str, Tensor]:
    """Weights by the model's name for them, on the device."""
    total = sum(len(target.pieces) for target in targets)
    done = 0
    weights = {}
    for target in targets:
        weight = torch.empty(target.shape, dtype=dtype, device=device)
        row = 0
        for piece in target.pieces:
            weight[row : row + piece.shape[0]].copy_(files.read(piece.key).to(dtype))
            row += piece.shape[0]
            done += 1
            if progress is not None:
                progress(piece.key, done, total)
        weights[target.name] = weight
    return weights
