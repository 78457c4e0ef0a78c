"""The tensor files of a checkpoint: safetensors or torch's own format, one file or several with an index.

Opening checks the files against their index and learns every tensor's shape; tensors are read one at a time.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import CheckpointError
from outrider.model.checkpoint_config import read_json

_SINGLE = ("model.safetensors", "pytorch_model.bin")


class TensorFile(ABC):
    """One open file of tensors."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        self.shapes = shapes

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor, on the host, in the file's dtype."""


class _SafetensorsFile(TensorFile):
    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
            names = self._file.keys()
            shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: can't be read as safetensors ({error}); the file is truncated or corrupt: fetch it again"
            ) from error
        super().__init__(path, shapes)

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} can't be read: {error}") from error
        return tensor


class _TorchFile(TensorFile):
    def __init__(self, path: Path) -> None:
        try:
            # weights_only: a pickle may run code, and a checkpoint is somebody else's file
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path}: can't be read as a torch file of plain tensors ({str(error).splitlines()[0]}); it's truncated, "
                "corrupt, or holds other objects than tensors"
            ) from error
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise CheckpointError(f"{path}: expected a flat mapping of names to tensors")
        self._state: dict[str, Tensor] = state
        super().__init__(path, {name: tuple(tensor.shape) for name, tensor in state.items()})

    def read(self, name: str) -> Tensor:
        return self._state[name]


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Every tensor of a checkpoint by name: the file that holds it. ``origin`` names the whole for messages."""

    origin: Path
    tensors: Mapping[str, TensorFile]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is there."""
        return self.tensors[name].shapes[name]

    def read(self, name: str) -> Tensor:
        """Read a floating-point tensor, on the host; :class:`CheckpointError` for another dtype."""
        tensor = self.tensors[name].read(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self.tensors[name].path}: tensor {name!r} is {tensor.dtype}, expected float16, bfloat16, float32 or "
                "float64; quantised checkpoints aren't supported"
            )
        return tensor

    def read_ids(self, name: str) -> Tensor:
        """Read a tensor of integers as int64, on the host; :class:`CheckpointError` for another dtype."""
        tensor = self.tensors[name].read(name)
        if tensor.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(f"{self.tensors[name].path}: tensor {name!r} is {tensor.dtype}, expected int64")
        return tensor.to(torch.int64)


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Open the tensor files of ``directory``: an index if there is one, else the single file; safetensors first.

    Raises :class:`CheckpointError` when there is none, when a file is truncated or corrupt, when a shard is missing, or
    when the index and the files disagree.
    """
    for single in _SINGLE:
        index = directory / f"{single}.index.json"
        if index.exists():
            return _open_sharded(index)
        path = directory / single
        if path.exists():
            file = _open_file(path)
            return CheckpointFiles(path, MappingProxyType(dict.fromkeys(file.shapes, file)))
    raise CheckpointError(f"{directory}: no tensor files; expected {' or '.join(_SINGLE)}, or their index")


def _open_file(path: Path) -> TensorFile:
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


def _open_sharded(index: Path) -> CheckpointFiles:
    promised = read_json(index).get("weight_map")
    if not isinstance(promised, dict) or not promised or not all(isinstance(value, str) for value in promised.values()):
        raise CheckpointError(f"{index}: expected a weight_map of tensor names to file names")
    files: dict[str, TensorFile] = {}
    for name in sorted(set(promised.values())):
        path = index.parent / name
        if path.parent != index.parent or path.suffix not in (".safetensors", ".bin"):
            raise CheckpointError(f"{index}: names the file {name!r}, expected a tensor file beside the index")
        if not path.exists():
            tensor = next(key for key, value in promised.items() if value == name)
            raise CheckpointError(f"{index}: shard {name!r} is missing (it should hold {tensor!r} and others)")
        files[name] = _open_file(path)
    for tensor, name in promised.items():
        if tensor not in files[name].shapes:
            raise CheckpointError(f"{index}: says that {tensor!r} is in {name!r}, but that file doesn't hold it")
    for name, file in files.items():
        for tensor in file.shapes:
            if promised.get(tensor) != name:
                raise CheckpointError(f"{file.path}: holds {tensor!r}, which {index.name} doesn't place there")
    return CheckpointFiles(index, MappingProxyType({tensor: files[name] for tensor, name in promised.items()}))
