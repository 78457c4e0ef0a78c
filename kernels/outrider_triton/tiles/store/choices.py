"""Tuning results of one machine, stored for the next start: one file per choice, by device, software and kernel sources.

A file is written next to its destination and renamed, so a reader finds a whole file or none, without locks. An unreadable
file is ignored: its configuration is derived.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton

import outrider_triton
from outrider_triton.tiles.configs import LARGE_M, STREAMED, AttentionConfig, MatmulConfig
from outrider_triton.tiles.derive.fits import MAX_TOKENS_TUNED, OPERATORS, can_stream, shared_bytes
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.table import ANY_LAYER, Table, by_layer, parse, table_name

_WARPS = (1, 2, 4, 8, 16, 32)
_PREFETCH_COLUMNS = 256  # columns of one prefetch request
_MAX_SPLITS_OR_STAGES = 64  # maximum splits, and maximum pipeline stages
_ATTENTION_WARPS, _MAX_ATTENTION_STAGES = (1, 2, 4, 8), 4  # limits without a pipeline; larger values were never tried
_MIN_BLOCK, _MAX_BLOCK = 16, 1024  # limits of a block: the matrix unit's minimum, and the largest value tried

ChoiceRow = Mapping[str, Any]
"""A choice as a table's file stores it, of a product (with the key ``operator``) or of attention.

``layer`` is the layer that it was measured in (:func:`outrider_triton.tiles.store.table.layer_of`); without it, every layer.
"""
Ranking = Mapping[int, tuple[str, ...]]
"""Names of candidates, the fastest first, by the number of new tokens."""
_ATTENTION_LIBRARIES = ("fa3-fwd",)


def software() -> dict[str, str]:
    """Return the software that choices depend on: releases of torch and Triton, and a hash of the kernel sources."""
    digest = hashlib.sha256()
    package = Path(outrider_triton.__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return {"torch": torch.__version__, "triton": triton.__version__, "kernels": digest.hexdigest()[:16]}


class TunedStore:
    """The choice files of one device under ``directory``, which needn't exist yet."""

    def __init__(self, directory: Path, facts: DeviceFacts) -> None:
        self._facts = facts
        found = software()
        versions = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "-", found[name]) for name in ("torch", "triton", "kernels"))
        self.home = directory / "triton" / f"{table_name(facts.name)}-{facts.architecture}-{facts.processors}" / versions

    def load(self) -> list[ChoiceRow]:
        """Return every choice that can be read and launched."""
        try:
            files = sorted(self.home.glob("*.json"))
        except OSError:
            return []
        return [row for row in map(self._row, files) if row is not None]

    def _row(self, path: Path) -> ChoiceRow | None:
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            parse(_table_json(self._facts.name, [row]))
            sane = path.name == _file_name(row) and self._fits(row)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            return None
        return row if sane else None

    def _fits(self, row: ChoiceRow) -> bool:
        """Return True if a launch with this choice is valid. A damaged file is found here, before its values reach a
        compiler.
        """
        table = parse(_table_json("", [row]))
        if "operator" not in row:
            (found,) = table.attention
            valid = found.config is None or _is_valid_attention(found.config, streams=self._facts.streams_products)
            return min(found.groups, found.max_kv) > 0 and valid
        ((entries,),) = (found.values() for found in table.entries.values())
        (entry,), operator = entries, row["operator"]
        if not 0 < entry.m <= MAX_TOKENS_TUNED or operator not in OPERATORS:
            return False
        config = entry.config
        if config is None:
            return True
        if not _is_valid_product(config):
            return False
        if config.descriptor in (STREAMED, LARGE_M):
            n, k = row["n"], row["k"]
            fits = self._facts.streams_products and config.rows_per_program <= n and can_stream(operator, config, n=n, k=k)
        else:  # a program with more rows than a block would leave rows out
            fits = config.rows_per_program * (2 if operator == "linear_rope" else 1) <= config.block_n
        return fits and shared_bytes(self._facts, operator, config) <= self._facts.shared_bytes

    def write(self, rows: Sequence[ChoiceRow]) -> None:
        """Store choices; each replaces the file of the same name. Raises OSError if the directory can't be written."""
        self.home.mkdir(parents=True, exist_ok=True)
        for row in rows:
            write_whole(self.home / _file_name(row), json.dumps(row) + "\n")


def libraries() -> dict[str, str]:
    """Return releases of attention libraries that torch doesn't bring along; an empty string if one isn't installed."""
    releases = {}
    for name in _ATTENTION_LIBRARIES:
        try:
            releases[name] = version(name)
        except PackageNotFoundError:
            releases[name] = ""
    return releases


class PromptStore:
    """Measured rankings of prefill attention kernels, one file per kind of operands under ``directory``.

    The directory needn't exist yet. Each file names the releases of other libraries.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, key: Sequence[object], counts: Sequence[int]) -> Ranking:
        """Return the ranking for all ``counts`` of new tokens. Return {} if a file is incomplete, unreadable or of other
        libraries.
        """
        try:
            row = json.loads(self._path(key).read_text(encoding="utf-8"))
            ranked = {count: tuple(map(str, row["ranked"][str(count)])) for count in counts}
            same_libraries = row["libraries"] == libraries()
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}
        return ranked if same_libraries and all(ranked.values()) else {}

    def write(self, key: Sequence[object], ranked: Ranking) -> None:
        """Store a ranking in place of the previous one. Raises OSError if the directory can't be written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        row = {"libraries": libraries(), "ranked": {str(count): list(names) for count, names in ranked.items()}}
        write_whole(self._path(key), json.dumps(row) + "\n")

    def _path(self, key: Sequence[object]) -> Path:
        return self._directory / ("-".join(str(each).removeprefix("torch.") for each in key) + ".json")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: write next to it, then rename. A concurrent reader finds the old or the new contents."""
    # Each engine may have its own thread.
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def merge_choices(table: Table | None, facts: DeviceFacts, rows: Sequence[ChoiceRow]) -> Table | None:
    """Return ``table`` with ``rows`` in place of its entries for the same operands and layer; None without table and rows."""
    if not rows:
        return table
    added = parse(_table_json(facts.name, rows))
    if table is None:
        return added
    entries = dict(table.entries)
    for product, found in added.entries.items():
        both = (*entries.get(product, {}).items(), *found.items())
        entries[product] = by_layer((layer, entry) for layer, each in both for entry in each)
    return replace(table, entries=entries).with_attention(added.attention)


def _is_valid_product(config: MatmulConfig) -> bool:
    """Return True if some device's product kernels accept this configuration."""
    is_streamed = config.descriptor in (STREAMED, LARGE_M)
    return (
        all(type(value) is int for value in config.as_list())
        and all(map(_is_power_of_two, (config.block_m, config.block_n, config.block_k, config.split)))
        and max(config.block_m, config.block_n, config.block_k) <= _MAX_BLOCK
        and config.split <= _MAX_SPLITS_OR_STAGES
        and config.warps in _WARPS
        and 0 < config.stages <= _MAX_SPLITS_OR_STAGES
        and _has_valid_prefetch(config)
        and config.descriptor in (0, 1, STREAMED, LARGE_M)
        and config.rows_per_program >= int(is_streamed)
    )


def _has_valid_prefetch(config: MatmulConfig) -> bool:
    """Return True if ``prefetch_columns`` is a valid number of columns, or with tiles for large M of pipeline stages."""
    if config.descriptor == LARGE_M:
        return 1 < config.prefetch_columns <= _MAX_SPLITS_OR_STAGES
    return config.prefetch_columns >= 0 and config.prefetch_columns % _PREFETCH_COLUMNS == 0


def _is_valid_attention(config: AttentionConfig, *, streams: bool) -> bool:
    """Return True if attention kernels accept this configuration.

    The launch reduces ``block_kv`` and pipeline stages to what the device can hold.
    """
    valid = (
        all(type(value) is int for value in (config.block_kv, config.split, config.warps, config.stages))
        and type(config.streamed) is bool
        and _is_power_of_two(config.block_kv)
        and _is_power_of_two(config.split)
        and config.split <= _MAX_SPLITS_OR_STAGES
    )
    if config.streamed:
        return (
            valid
            and streams
            and config.block_kv in (64, 128)
            and config.warps == 4
            and 0 < config.stages <= _MAX_SPLITS_OR_STAGES
        )
    in_limits = config.warps in _ATTENTION_WARPS and 0 < config.stages <= _MAX_ATTENTION_STAGES
    return valid and in_limits and _MIN_BLOCK <= config.block_kv <= _MAX_BLOCK


def _is_power_of_two(size: int) -> bool:
    """Return True for a power of two: blocks of other sizes don't compile."""
    return size > 0 and size & (size - 1) == 0


def _table_json(device: str, rows: Sequence[ChoiceRow]) -> dict[str, Any]:
    return {
        "device": device,
        "software": {},
        "matmul": [row for row in rows if "operator" in row],
        "attention": [row for row in rows if "operator" not in row],
    }


def _file_name(row: ChoiceRow) -> str:
    layer = row.get("layer", ANY_LAYER)
    suffix = f"-layer-{layer}" if layer else ""
    if "operator" in row:
        return f"{row['operator']}-{row['dtype']}-{row['n']}x{row['k']}-{row['m']}{suffix}.json"
    return f"attention-{row['head_size']}x{row['group']}-{row['groups']}{suffix}.json"
