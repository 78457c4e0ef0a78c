"""A checkpoint of random values in a published shape, as Hugging Face writes one: starting from files is measured on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

from outrider.device.errors import ConfigError
from outrider.registry.interruptions import interruptions_held
from outrider_bench.peers.work import checkpoint_config

_SHARD = 4 << 30
_BLOCK = 16 << 20  # values that are drawn; larger tensors repeat them
_SPREAD = 0.02
_MARK = "written.json"
"""Says what a checkpoint is, once it's whole."""
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class Written:
    """Directories of a target and of its EAGLE head, and their size."""

    target: Path
    draft: Path
    bytes: int


def kept_checkpoint(shape: str, root: Path) -> tuple[Written, bool]:
    """The checkpoint of ``shape`` in ``root``, and whether it lay there: read through then, so that it's in the page cache as
    one is that was written just now. A directory that isn't there or is empty gets one.

    Raises :class:`ConfigError` for a directory that holds anything else, or can't be read or written.
    """
    try:
        return _kept(shape, root)
    except OSError as error:
        raise ConfigError(
            f"the checkpoint of {shape} in {root} can't be read or written: {error.strerror or error}; name another directory"
        ) from error


def _kept(shape: str, root: Path) -> tuple[Written, bool]:
    mark = root / _MARK
    if mark.is_file():
        there, size = _marked(mark)
        if there != shape:
            raise ConfigError(f"{root} holds a checkpoint of {there}, not of {shape}; name another directory")
        for file in root.glob("*/*.safetensors"):
            with file.open("rb", buffering=0) as opened:
                while opened.read(_BLOCK):
                    pass
        return Written(root / "target", root / "draft", size), True
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} holds something else than a checkpoint that was written whole; name an empty directory")
    made = [each for each in (root, *root.parents) if not each.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        written = write_checkpoint(shape, root)
        mark.write_text(json.dumps({"shape": shape, "bytes": written.bytes}), encoding="utf-8")
    except BaseException:
        with interruptions_held():
            _remove(root, made)
        raise
    return written, False


def _remove(root: Path, made: Sequence[Path]) -> None:
    """Remove what there is of a checkpoint that wasn't written whole, and the directories made for it, inner ones first."""
    for part in ("target", "draft"):
        shutil.rmtree(root / part, ignore_errors=True)
    with suppress(OSError):  # why it wasn't written is what people need to hear
        (root / _MARK).unlink(missing_ok=True)
        for each in made:
            each.rmdir()


def _marked(mark: Path) -> tuple[str, int]:
    """Shape and bytes of the checkpoint that lies beside ``mark``."""
    try:
        said = json.loads(mark.read_text(encoding="utf-8"))
        return str(said["shape"]), int(said["bytes"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{mark} doesn't say which checkpoint lies beside it ({type(error).__name__}: {error}); remove that directory, "
            "or name another one"
        ) from error


def write_checkpoint(shape: str, root: Path, *, dtype: str = "bfloat16", shard: int = _SHARD) -> Written:
    """Write a target and an EAGLE head of ``shape`` below ``root``, the target in files of about ``shard`` bytes.

    Norms are ones, matrices are drawn. The tokenizer is the bundled model's, which knows fewer tokens. What is written is in
    the page cache, as far as the memory holds it.
    """
    from dataclasses import replace

    from outrider.cli.models import bundled
    from outrider.model.head_mapping import eagle_targets
    from outrider.model.mapping import decoder_targets
    from outrider_bench.random_weights import shape_config

    config = shape_config(shape)
    head = replace(config, num_layers=1, windows=(0,), qk_norm=False, attention_bias=False, tie_embeddings=False)
    head = replace(head, experts=None)
    target, draft = root / "target", root / "draft"
    total = 0
    for directory, model, pieces in (
        (target, config, decoder_targets(config, ())),
        (draft, head, eagle_targets(head, ())),
    ):
        directory.mkdir(parents=True)
        content = checkpoint_config(model, dtype=dtype)
        (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
        shapes = [(piece.key, piece.shape) for each in pieces for piece in each.pieces]
        total += _write(directory, shapes, dtype, shard if directory == target else 1 << 60)
    shutil.copyfile(bundled("target") / "tokenizer.json", target / "tokenizer.json")
    return Written(target, draft, total)


def _write(directory: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: str, shard: int) -> int:
    """One file, or several with an index; returns their bytes."""
    import torch

    from outrider.engine.config import DTYPES

    torch_dtype = DTYPES[dtype]
    drawn = torch.empty(min(_BLOCK, max(prod(shape) for _, shape in shapes)))
    drawn.normal_(std=_SPREAD, generator=torch.Generator().manual_seed(0))
    block = drawn.to(torch_dtype)
    ones = torch.ones(max(prod(shape) for _, shape in shapes if len(shape) == 1), dtype=torch_dtype)
    files = list(_shards(shapes, torch_dtype.itemsize, shard))
    placed: dict[str, str] = {}
    total = 0
    for number, part in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        placed |= {key: name for key, _ in part}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for key, shape in part:
            size = prod(shape) * torch_dtype.itemsize
            header[key] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, shape in part:
                _put(
                    file,
                    (ones if len(shape) == 1 else block).view(torch.uint8).numpy().data,
                    prod(shape) * torch_dtype.itemsize,
                )
        total += 8 + len(text) + offset
    if len(files) > 1:
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": placed})
        (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return total


def _shards(
    shapes: Sequence[tuple[str, tuple[int, ...]]], itemsize: int, most: int
) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    part: list[tuple[str, tuple[int, ...]]] = []
    size = 0
    for key, shape in shapes:
        more = prod(shape) * itemsize
        if part and size + more > most:
            yield part
            part, size = [], 0
        part.append((key, shape))
        size += more
    yield part


def _put(file: IO[bytes], block: memoryview, size: int) -> None:
    while size:
        count = file.write(block[:size])
        size -= count
