"""Opening of a checkpoint's tensor files: safetensors, torch or GGUF format, one file or several with an index.

Opening checks the files against their index and reads the shape of every tensor.
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import (
    EXPECTED_CHECKPOINT,
    GGUF_LIST,
    JSON_LIMIT,
    CheckpointFiles,
    Extent,
    TensorFile,
    TensorSlice,
    present,
    read_json,
    regular_size,
    wrap_read_errors,
)
from outrider.model.checkpoint.gguf_checkpoint import open_gguf

_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_FETCH_AGAIN = "if it's truncated or corrupt, fetch it again"
_MAX_SHARDS = 4096
_SHARD_NAME = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
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
_BULK_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Pickle opcodes that name a global, and the globals that a dictionary of tensors needs.
_NAME_OPCODES = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"})
_TENSOR_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch (\w+Storage|\w*(float|int|bool)\w*)"
)


class _SafetensorsFile(TensorFile):
    def __init__(self, path: Path) -> None:
        size = regular_size(path)
        with wrap_read_errors(path, "safetensors", _FETCH_AGAIN):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, JSON_LIMIT):
                raise ValueError(f"its header would be {length} bytes long, the file has {size}")
            # safe_open rejects tensors that overlap or exceed the file.
            self._file = safe_open(path, framework="pt", device="cpu")
            names = self._file.keys()
            shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
            with path.open("rb") as file:
                file.seek(8)
                self._header: dict[str, Any] = json.loads(file.read(length))
            self._data = 8 + length
        super().__init__(path, shapes)

    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        with wrap_read_errors(self.path, f"tensor {name!r}"):
            if tensor_slice is None:
                tensor: Tensor = self._file.get_tensor(name)
            else:
                tensor = self._file.get_slice(name)[tensor_slice.slices(len(self.shapes[name]))]
        return tensor

    def dtype(self, name: str) -> torch.dtype | None:
        return _DTYPES.get(self._header[name]["dtype"])

    def extent(self, name: str) -> Extent | None:
        found = self._header[name]
        dtype = _BULK_DTYPES.get(found["dtype"])
        return None if dtype is None else Extent(self.path, self._data + int(found["data_offsets"][0]), dtype)


class _TorchFile(TensorFile):
    def __init__(self, path: Path) -> None:
        size = regular_size(path)
        with wrap_read_errors(path, "a torch file of plain tensors", _FETCH_AGAIN):
            _check_archive(path, size)
            # weights_only prevents code execution from an untrusted pickle. mmap opens the file without reading values.
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

    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        whole = self._state[name].detach()
        return (
            whole if tensor_slice is None else whole[tensor_slice.slices(whole.dim())]
        ).clone()  # a mapped tensor changes with the file

    def dtype(self, name: str) -> torch.dtype | None:
        return self._state[name].dtype


def _check_archive(path: Path, size: int) -> None:
    """Raise ValueError unless the file of ``size`` bytes is an uncompressed torch archive that holds only tensors, so that
    unpickling runs no code of the file.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > size or any(member.compress_type for member in members):
            raise ValueError("its parts are compressed, or larger than the file")
        pickled = [member for member in members if member.filename.split("/")[-1] == "data.pkl"]
        if len(pickled) != 1 or pickled[0].file_size > JSON_LIMIT:
            raise ValueError(f"it has {len(pickled)} parts data.pkl, expected one of at most {JSON_LIMIT} bytes")
        # genops parses the pickle's opcodes without executing them.
        for instruction, operand, _ in pickletools.genops(archive.read(pickled[0])):
            if instruction.name in _NAME_OPCODES and not (isinstance(operand, str) and _TENSOR_GLOBALS.fullmatch(operand)):
                raise ValueError(f"it holds other objects than tensors: {shown(operand)}")


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Open the tensor files of ``directory``: the files of an index if there is one, else the single file. Safetensors take
    precedence.

    Raises :class:`CheckpointError` if the directory or its tensor files are missing, if a file is truncated or corrupt, if a
    shard is missing, or if the index and the files disagree.
    """
    if present(directory / GGUF_LIST):
        return open_gguf(directory)
    for single in _SINGLE_FILES:
        index = directory / f"{single}.index.json"
        if present(index):
            return _open_sharded(index)
        path = directory / single
        if present(path):
            file = _open_file(path)
            return CheckpointFiles(path, MappingProxyType(dict.fromkeys(file.shapes, file)))
    if not directory.exists():
        raise CheckpointError(f"{directory}: no such directory; {EXPECTED_CHECKPOINT}")
    raise CheckpointError(
        f"{directory}: no tensor files; expected {' or '.join(_SINGLE_FILES)}, or their index{_other_tensor_files(directory)}"
    )


def _other_tensor_files(directory: Path) -> str:
    """Return a sentence about tensor files with other names in ``directory``, for the error message; empty if
    there are none.
    """
    try:
        found = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))
    except OSError:
        return ""
    if not found:
        return ""
    part = next((match for name in found if (match := _SHARD_NAME.fullmatch(name))), None)
    instead = "give one of them that name, if it's the whole"
    if part is not None:
        instead = f"they're parts: fetch {part[1]}.{part[2]}.index.json too, which says what is in which"
    return f"; there are {', '.join(found[:3])}{' and others' if len(found) > 3 else ''}: {instead}"


def _open_file(path: Path) -> TensorFile:
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


def _open_sharded(index: Path) -> CheckpointFiles:
    with wrap_read_errors(index, "an index of tensor files"):
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping or not all(isinstance(value, str) for value in mapping.values()):
            raise CheckpointError(f"{index}: expected a weight_map of tensor names to file names")
        files: dict[str, TensorFile] = {}
        names = sorted(set(mapping.values()))
        if len(names) > _MAX_SHARDS:
            raise CheckpointError(f"{index}: names {len(names)} files, expected at most {_MAX_SHARDS}")
        for name in names:
            path = index.parent / name
            if path.parent != index.parent or path.suffix not in (".safetensors", ".bin"):
                raise CheckpointError(f"{index}: names the file {shown(name)}, expected a tensor file next to the index")
            if not present(path):
                tensor = next(key for key, value in mapping.items() if value == name)
                raise CheckpointError(f"{index}: shard {name!r} is missing (it should hold {tensor!r} and others)")
            files[name] = _open_file(path)
        for tensor, name in mapping.items():
            if tensor not in files[name].shapes:
                raise CheckpointError(f"{index}: says that {tensor!r} is in {name!r}, but that file doesn't hold it")
        for name, file in files.items():
            for tensor in file.shapes:
                if mapping.get(tensor) == name:
                    continue
                if tensor not in mapping:
                    raise CheckpointError(f"{file.path}: holds {tensor!r}, which {index.name} doesn't place there")
                listed = files[mapping[tensor]]
                if not torch.equal(file.read_tensor(tensor), listed.read_tensor(tensor)):
                    raise CheckpointError(
                        f"{file.path}: holds {tensor!r}, which {index.name} places in {mapping[tensor]!r}, with other values "
                        "there; expected equal copies, or one"
                    )
        return CheckpointFiles(index, MappingProxyType({tensor: files[name] for tensor, name in mapping.items()}))
