"""Checkpoints, broken at random: a sound one of each kind, what may be done to its files, and what may come of it.

A mutation is a plain record, so that one that found something can be kept as a case.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider import Engine, SamplingParams
from outrider.device import OutriderError
from outrider.errors import CheckpointError
from outrider.model import MediaProcessor
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import IMAGE, picture, write_eagle
from outrider_proof.tiny import plain_config
from tiny_checkpoints import (
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    store_mxfp4,
    write_checkpoint,
    write_dflash,
    write_eagle3,
    write_eagle_variant,
    write_mtp,
    write_peagle,
)
from tiny_vision_checkpoints import write_vision_checkpoint

TARGET = "llama"
LONGEST = 2000  # characters of a message: a paragraph


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of checkpoint: ``speculate`` for one that drafts for :data:`TARGET`, ``door`` for transformers' own code."""

    write: Callable[[Path], object]
    speculate: str = "none"
    vision: bool = False
    door: bool = False


def _eagle_bin(directory: Path) -> None:
    write_eagle_variant(directory, fmt="bin")


KINDS: Mapping[str, Kind] = {
    "llama": Kind(lambda path: write_checkpoint(path, "llama")),
    "shards": Kind(lambda path: write_checkpoint(path, "llama-tied", shards=3)),
    "mistral": Kind(lambda path: write_checkpoint(path, "mistral-window")),
    "qwen2": Kind(lambda path: write_checkpoint(path, "qwen2-sliding")),
    "qwen3": Kind(lambda path: write_checkpoint(path, "qwen3-biases")),
    "yarn": Kind(lambda path: write_checkpoint(path, "llama", rope_parameters=YARN)),
    "mxfp4": Kind(lambda path: store_mxfp4(path, write_checkpoint(path, "gpt_oss"))),
    "eagle": Kind(write_eagle, "eagle"),
    "eagle-bin": Kind(_eagle_bin, "eagle"),
    "eagle3": Kind(write_eagle3, "eagle3"),
    "peagle": Kind(write_peagle, "peagle"),
    "dflash": Kind(write_dflash, "dflash"),
    "mtp": Kind(write_mtp, "mtp"),
    "qwen2_vl": Kind(lambda path: write_vision_checkpoint(path, "qwen2_vl"), vision=True),
    "qwen2_5_vl": Kind(lambda path: write_vision_checkpoint(path, "qwen2_5_vl"), vision=True),
    "qwen3_vl_moe": Kind(lambda path: write_vision_checkpoint(path, "qwen3_vl_moe"), vision=True),
    "qwen3_5": Kind(lambda path: write_vision_checkpoint(path, "qwen3_5"), vision=True),
    "door": Kind(lambda path: write_checkpoint(path, "mistral-window"), door=True),
    "door-gpt2": Kind(lambda path: write_checkpoint(path, "gpt2"), door=True),
    "door-experts": Kind(lambda path: write_checkpoint(path, "mixtral"), door=True),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def write_all(root: Path) -> Path:
    """A sound checkpoint of each kind under ``root``."""
    for name, kind in KINDS.items():
        directory = root / name
        kind.write(directory)
        if kind.speculate == "none":
            tokenizer = sentencepiece_tokenizer() if name == "mistral" else byte_level_tokenizer(280)
            tokenizer.save(str(directory / "tokenizer.json"))
    return root


NUMBERS = (0, -1, 1, 2, 7, 97, 10**7, 2**31, 2**63, 10**12, 10**30, 0.5, -0.5, 1e-300, 1e308)
OTHERS = (float("nan"), float("inf"), "", "many", "4", "../x", "\x00", True, False, None)
VALUES = (*NUMBERS, *OTHERS, [], [[]], [1, 2, 3], [-1] * 5, [10**9] * 3, {}, {"rope_type": "yarn"})
NESTED = "nested"  # stands for a list a hundred deep
BROKEN_JSON = (
    "",
    "{",
    "null",
    "[]",
    '"x"',
    "{" * 100_000,
    '{"a":' * 100_000,
    '{"a": 1' + "0" * 5000 + "}",
    "\ufeff{}",
    "NaN",
)
ENTRIES = ("directory", "pipe", "nowhere", "itself", "zero", "empty", "other", "gone", "huge")

Mutation = tuple[Any, ...]


def draw(source: random.Random, directory: Path) -> Mutation:
    """One mutation of a file of ``directory``."""
    name = source.choice(sorted(path.name for path in directory.iterdir()))
    path = directory / name
    tensors = path.suffix == ".safetensors"
    kinds = ["entry", "bytes", "bytes"] + (["json"] * 12 + ["text"] if path.suffix == ".json" else ["tensor"] * 6 * tensors)
    kind = source.choice(kinds)
    if kind == "entry":
        return kind, name, source.choice(ENTRIES)
    if kind == "text":
        return kind, name, source.randrange(len(BROKEN_JSON))
    if kind == "json":
        return kind, name, *_json_change(source, json.loads(path.read_text(encoding="utf-8")))
    if kind == "tensor":
        key = source.choice(sorted(load_file(path)))
        return kind, name, key, source.choice(sorted(TENSORS))
    size = max(path.stat().st_size, 1)
    begin = source.randrange(min(size, 4000)) if source.random() < 0.7 else source.randrange(size)
    what = source.choice(["flip", "cut", "twice", "length"])
    return kind, name, what, begin, bytes(source.randrange(256) for _ in range(source.randint(1, 8)))


def _json_change(source: random.Random, value: Any) -> tuple[Any, ...]:
    """Where, what is done there, and with what."""
    where: list[Any] = []
    while isinstance(value, dict | list) and value and (not where or source.random() < 0.7):
        key = source.choice(sorted(value)) if isinstance(value, dict) else source.randrange(len(value))
        where.append(key)
        value = value[key]
    new = NESTED if source.random() < 0.03 else source.choice(VALUES)
    return tuple(where), source.choice(["set", "set", "set", "set", "drop", "more"]), new


TENSORS: Mapping[str, Callable[[dict[str, torch.Tensor], str], object]] = {
    "drop": lambda state, key: state.pop(key),
    "rename": lambda state, key: state.update({key + "x" * 3000: state.pop(key)}),
    "more": lambda state, key: state.update({f"{key}.more": torch.zeros(2)}),
    "int8": lambda state, key: state.update({key: state[key].to(torch.int8)}),
    "float64": lambda state, key: state.update({key: state[key].double()}),
    "float8": lambda state, key: state.update({key: state[key].float().to(torch.float8_e4m3fn)}),
    "bool": lambda state, key: state.update({key: state[key].bool()}),
    "complex": lambda state, key: state.update({key: state[key].to(torch.complex64)}),
    "flat": lambda state, key: state.update({key: state[key].reshape(-1)}),
    "turned": lambda state, key: state.update(
        {key: state[key].t().contiguous() if state[key].dim() == 2 else state[key][:0]}
    ),
    "empty": lambda state, key: state.update({key: torch.zeros(0, 5)}),
    "scalar": lambda state, key: state.update({key: torch.tensor(1.0)}),
    "nan": lambda state, key: state.update({key: torch.full_like(state[key].float(), float("nan"))}),
    "inf": lambda state, key: state.update({key: torch.full_like(state[key].float(), float("inf"))}),
    "large": lambda state, key: state.update({key: torch.full_like(state[key], 2**62 if key == "d2t" else 100)}),
}


_COPIED = 1 << 24  # of a file at most: one that an earlier mutation made huge would fill the disk


def apply(directory: Path, mutation: Mutation) -> None:
    """Do it to the files; one whose file an earlier one took away does nothing."""
    kind, name, *rest = mutation
    path = directory / name
    if not path.is_file() or path.stat().st_size > _COPIED:
        return
    if kind == "entry":
        _replace(path, *rest)
    elif kind == "text":
        path.write_text(BROKEN_JSON[rest[0]], encoding="utf-8")
    elif kind == "bytes":
        _spoil(path, *rest)
    elif kind == "tensor":
        key, change = rest
        try:
            state = load_file(path)
        except Exception:  # it's broken already
            return
        if key in state:
            TENSORS[change](state, key)
            save_file(state, path)
    else:
        _set(path, *rest)


def _set(path: Path, where: tuple[Any, ...], what: str, new: Any) -> None:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        part = whole
        for key in where[:-1]:
            part = part[key]
        if what == "drop":
            del part[where[-1]]
        else:
            last = "more" if what == "more" and isinstance(part, dict) else where[-1]
            part[last] = _nested() if new == NESTED else new
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):  # an earlier one changed the place
        return
    path.write_text(json.dumps(whole), encoding="utf-8")


def _nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    return value


def _spoil(path: Path, what: str, begin: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    if what == "flip":
        for index, byte in enumerate(content, begin):
            if index < len(data):
                data[index] ^= byte | 1
    elif what == "cut":
        del data[begin:]
    elif what == "twice":
        data[begin:begin] = data[begin : begin + 100 * len(content)]
    else:
        data[:8] = content[:8].ljust(8, b"\xff")
    path.write_bytes(data)


def _replace(path: Path, entry: str) -> None:
    others = sorted(
        each for each in path.parent.iterdir() if each != path and each.is_file() and each.stat().st_size <= _COPIED
    )
    if entry == "other" and others:
        shutil.copyfile(others[len(path.name) % len(others)], path)
        return
    path.unlink()
    if entry == "directory":
        path.mkdir()
    elif entry == "pipe":
        os.mkfifo(path)
    elif entry == "nowhere":
        path.symlink_to(path.parent / "nowhere")
    elif entry == "itself":
        path.symlink_to(path)
    elif entry == "zero":
        path.symlink_to("/dev/zero")
    elif entry == "empty":
        path.touch()
    elif entry == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # takes no room


class Wrong(AssertionError):
    """What must not come of a broken checkpoint."""


def outcome(root: Path, scratch: Path, name: str, mutations: list[Mutation]) -> str:
    """Load the broken checkpoint and generate: "right", or the kind of our error. Raises :class:`Wrong`."""
    directory = scratch / "model"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(root / name, directory)
    for mutation in mutations:
        apply(directory, mutation)
    try:
        _use(root, directory, KINDS[name])
    except CheckpointError as error:
        text = str(error)
        if str(directory) not in text or "\n" in text or len(text) > LONGEST:
            raise Wrong(f"{name} {mutations}: not a paragraph that names the file: {text[:LONGEST]!r}") from error
        if "MemoryError" in text or "allocate" in text:
            raise Wrong(f"{name} {mutations}: too much memory was asked for: {text}") from error
        return type(error).__name__
    except OutriderError as error:
        if "\n" in str(error):
            raise Wrong(f"{name} {mutations}: {error}") from error
        return type(error).__name__
    except Exception as error:
        raise Wrong(f"{name} {mutations}: {type(error).__name__}: {error}") from error
    return "right"


def _use(root: Path, directory: Path, kind: Kind) -> None:
    config = plain_config(max_requests=1, draft_tokens=2)
    model, draft = (directory, None) if kind.speculate == "none" else (root / TARGET, directory)
    engine = Engine.from_checkpoint(
        model, CpuBackend(), draft_dir=draft, speculate=kind.speculate, config=config, through_transformers=kind.door
    )
    tokens, media = engine.tokenizer.encode("the cat")[:2], []
    if kind.vision:
        media = [MediaProcessor.from_checkpoint(directory).image(picture(16, 16))]
        tokens = [*IMAGE, 5]
    done = engine.generate(
        [[token % 90 for token in tokens] if not media else tokens], SamplingParams(max_tokens=2), media=[media]
    )
    engine.tokenizer.decode(done[0].token_ids)
