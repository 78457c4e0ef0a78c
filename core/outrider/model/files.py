"""The tensor files of a checkpoint: safetensors or torch's own format, one file or several with an index.

Opening checks the files against their index and learns every tensor's shape. Tensors are read one at a time, or many at once
from where they lie (:mod:`outrider.model.bulk`).
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.errors import CheckpointError, shown
from outrider.model.bulk import Extent
from outrider.model.cuts import Cut
from outrider.model.reading import EXPECTED, JSON_LIMIT, present, read_json, reading, regular_size

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_AGAIN = "if it's truncated or corrupt, fetch it again"
_MAX_SHARDS = 4096
_PART = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_EXTENTS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What a pickle names, and what a state of plain tensors needs.
_NAMING = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"})
_PLAIN = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch (\w+Storage|\w*(float|int|bool)\w*)"
)


class TensorFile(ABC):
    """One open file of tensors."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        self.shapes = shapes

    @abstractmethod
    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """The tensor, or a cut of it, on the host, in the file's dtype."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype | None:
        """The tensor's dtype, without reading it; None for one that isn't known here."""

    def extent(self, name: str) -> Extent | None:
        """Where the tensor lies in the file, where it lies there in one piece; None: :meth:`read` it."""
        del name
        return None


class _SafetensorsFile(TensorFile):
    def __init__(self, path: Path) -> None:
        size = regular_size(path)
        with reading(path, "safetensors", _AGAIN):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, JSON_LIMIT):
                raise ValueError(f"its header would be {length} bytes long, the file has {size}")
            # The library takes no tensor that leaves the file, or that another overlaps.
            self._file = safe_open(path, framework="pt", device="cpu")
            names = self._file.keys()
            shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
            with path.open("rb") as file:
                file.seek(8)
                self._header: dict[str, Any] = json.loads(file.read(length))
            self._data = 8 + length
        super().__init__(path, shapes)

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        with reading(self.path, f"tensor {name!r}"):
            if cut is None:
                tensor: Tensor = self._file.get_tensor(name)
            else:
                tensor = self._file.get_slice(name)[cut.index(len(self.shapes[name]))]
        return tensor

    def dtype(self, name: str) -> torch.dtype | None:
        return _DTYPES.get(self._header[name]["dtype"])

    def extent(self, name: str) -> Extent | None:
        found = self._header[name]
        dtype = _EXTENTS.get(found["dtype"])
        return None if dtype is None else Extent(self.path, self._data + int(found["data_offsets"][0]), dtype)


class _TorchFile(TensorFile):
    def __init__(self, path: Path) -> None:
        size = regular_size(path)
        with reading(path, "a torch file of plain tensors", _AGAIN):
            _check_archive(path, size)
            # weights_only: a pickle may run code, and a checkpoint is somebody else's file. mmap: opening reads no values.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, dict) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
        ):
            raise CheckpointError(f"{path}: expected a flat mapping of names to tensors")
        for name, tensor in state.items():
            if tensor.layout != torch.strided or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
                raise CheckpointError(f"{path}: tensor {name!r} has shape {list(tensor.shape)}, but fewer values than that")
        if sum(tensor.nbytes for tensor in state.values()) > 2 * size:  # twice: tied embeddings are stored once
            raise CheckpointError(f"{path}: its tensors share their values, and are larger together than the file")
        self._state: dict[str, Tensor] = state
        super().__init__(path, {name: tuple(tensor.shape) for name, tensor in state.items()})

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        whole = self._state[name].detach()
        return (whole if cut is None else whole[cut.index(whole.dim())]).clone()  # what is mapped changes with the file

    def dtype(self, name: str) -> torch.dtype | None:
        return self._state[name].dtype


def _check_archive(path: Path, size: int) -> None:
    """Raise unless the file is an archive as torch writes it, of tensors alone, that unpacks to no more than it is."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > size or any(member.compress_type for member in members):
            raise ValueError("its parts are compressed, or larger than the file")
        pickled = [member for member in members if member.filename.split("/")[-1] == "data.pkl"]
        if len(pickled) != 1 or pickled[0].file_size > JSON_LIMIT:
            raise ValueError(f"it has {len(pickled)} parts data.pkl, expected one of at most {JSON_LIMIT} bytes")
        # These are the instructions of the pickle; none of them is followed here.
        for instruction, operand, _ in pickletools.genops(archive.read(pickled[0])):
            if instruction.name in _NAMING and not (isinstance(operand, str) and _PLAIN.fullmatch(operand)):
                raise ValueError(f"it holds other objects than tensors: {shown(operand)}")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Every tensor of a checkpoint by name: the file that holds it. ``origin`` names the whole for messages."""

    origin: Path
    tensors: Mapping[str, TensorFile]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is there."""
        return self.tensors[name].shapes[name]

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """Read a floating-point tensor, or a cut of it, on the host; :class:`CheckpointError` for another dtype."""
        tensor = self.tensors[name].read(name, cut)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self.tensors[name].path}: tensor {shown(name)} is {tensor.dtype}, expected float16, bfloat16, float32 or "
                "float64; the config says nothing of quantised weights here"
            )
        return tensor

    def dtype(self, name: str) -> torch.dtype | None:
        """Dtype of a tensor that is there; None for one that isn't known here."""
        return self.tensors[name].dtype(name)

    def dtype_name(self, name: str) -> str:
        """The same in words."""
        dtype = self.dtype(name)
        return "of a dtype that isn't known" if dtype is None else str(dtype).removeprefix("torch.")

    def read_stored(self, name: str) -> Tensor:
        """Read a tensor of whatever dtype, on the host."""
        return self.tensors[name].read(name)

    def extent(self, name: str) -> Extent | None:
        """Where a tensor lies in its file, if it can be read from there as it is."""
        return self.tensors[name].extent(name)

    def read_ids(self, name: str) -> Tensor:
        """Read a tensor of integers as int64, on the host; :class:`CheckpointError` for another dtype."""
        tensor = self.tensors[name].read(name)
        if tensor.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(f"{self.tensors[name].path}: tensor {name!r} is {tensor.dtype}, expected int64")
        return tensor.to(torch.int64)


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Open the tensor files of ``directory``: an index if there is one, else the single file; safetensors first.

    Raises :class:`CheckpointError` when there is no such directory or no such file in it, when a file is truncated or
    corrupt, when a shard is missing, or when the index and the files disagree.
    """
    for single in _SINGLE:
        index = directory / f"{single}.index.json"
        if present(index):
            return _open_sharded(index)
        path = directory / single
        if present(path):
            file = _open_file(path)
            return CheckpointFiles(path, MappingProxyType(dict.fromkeys(file.shapes, file)))
    if not directory.exists():
        raise CheckpointError(f"{directory}: no such directory; {EXPECTED}")
    raise CheckpointError(
        f"{directory}: no tensor files; expected {' or '.join(_SINGLE)}, or their index{_others(directory)}"
    )


def _others(directory: Path) -> str:
    """Tensor files by other names, for a message."""
    try:
        found = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))
    except OSError:
        return ""
    if not found:
        return ""
    part = next((match for name in found if (match := _PART.fullmatch(name))), None)
    instead = "give one of them that name, if it's the whole"
    if part is not None:
        instead = f"they're parts: fetch {part[1]}.{part[2]}.index.json too, which says what is in which"
    return f"; there are {', '.join(found[:3])}{' and others' if len(found) > 3 else ''}: {instead}"


def _open_file(path: Path) -> TensorFile:
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


def _open_sharded(index: Path) -> CheckpointFiles:
    with reading(index, "an index of tensor files"):
        promised = read_json(index).get("weight_map")
        if not isinstance(promised, dict) or not promised or not all(isinstance(value, str) for value in promised.values()):
            raise CheckpointError(f"{index}: expected a weight_map of tensor names to file names")
        files: dict[str, TensorFile] = {}
        names = sorted(set(promised.values()))
        if len(names) > _MAX_SHARDS:
            raise CheckpointError(f"{index}: names {len(names)} files, expected at most {_MAX_SHARDS}")
        for name in names:
            path = index.parent / name
            if path.parent != index.parent or path.suffix not in (".safetensors", ".bin"):
                raise CheckpointError(f"{index}: names the file {shown(name)}, expected a tensor file beside the index")
            if not present(path):
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
