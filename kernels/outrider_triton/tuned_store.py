"""What tuning found on one machine, kept for the next start: a file a choice, by device, software and sources of the kernels.

A file is written beside its place and renamed, so that a reader finds a whole one or none; there are no locks. One that can't
be read is a miss: what it would say is derived.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import triton

from outrider_triton.derive import MOST, OPERATORS, brings, shared_bytes
from outrider_triton.facts import DeviceFacts
from outrider_triton.table import ANY, STREAMED, TALL, AttentionConfig, MatmulConfig, Table, by_layer, parse, slug

_WARPS = (1, 2, 4, 8, 16, 32)
_AHEAD = 256  # columns of a weight that are asked for at once
_MOST = 64  # splits, and stages
_ATTENTION_WARPS, _ATTENTION_STAGES = (1, 2, 4, 8), 4  # without a ring: more have never been tried
_FEWEST, _WIDEST = 16, 1024  # of a block: the matrix unit takes no fewer, and none has ever been larger

Row = Mapping[str, Any]
"""A choice as a table's file has it: of a product (``operator`` among its keys), or of attention. ``layer``: the one that it
was measured in (:func:`outrider_triton.table.layer_of`); without it, it's every layer's."""


def software() -> dict[str, str]:
    """What a choice was measured with: another release or another kernel may want another one."""
    digest = hashlib.sha256()
    package = resources.files("outrider_triton")
    for folder in (package, package.joinpath("jit")):
        for file in sorted(folder.iterdir(), key=lambda each: each.name):
            if file.name.endswith(".py"):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return {"torch": torch.__version__, "triton": triton.__version__, "kernels": digest.hexdigest()[:16]}


class TunedStore:
    """The files of one device under ``directory``, which needn't exist yet."""

    def __init__(self, directory: Path, facts: DeviceFacts) -> None:
        self._facts = facts
        found = software()
        versions = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "-", found[name]) for name in ("torch", "triton", "kernels"))
        self.home = directory / "triton" / f"{slug(facts.name)}-{facts.architecture}-{facts.processors}" / versions

    def read(self) -> list[Row]:
        """Every choice that can be read and used."""
        try:
            files = sorted(self.home.glob("*.json"))
        except OSError:
            return []
        return [row for row in map(self._row, files) if row is not None]

    def _row(self, path: Path) -> Row | None:
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            parse(_data(self._facts.name, [row]))
            sane = path.name == _name(row) and self._fits(row)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            return None
        return row if sane else None

    def _fits(self, row: Row) -> bool:
        """Whether a launch can be cut up so: what is damaged is found here, and not where it's compiled or divided by."""
        table = parse(_data("", [row]))
        if "operator" not in row:
            (found,) = table.attention
            able = found.config is None or _cuts_attention(found.config, rings=self._facts.rings)
            return min(found.groups, found.max_kv) > 0 and able
        ((entries,),) = (found.values() for found in table.entries.values())
        (entry,), operator = entries, row["operator"]
        if not 0 < entry.m <= MOST or operator not in OPERATORS:
            return False
        config = entry.config
        if config is None:
            return True
        if not _cuts(config):
            return False
        if config.descriptor in (STREAMED, TALL):
            n, k = row["n"], row["k"]
            whole = self._facts.rings and config.each <= n and brings(operator, config, n=n, k=k)
        else:  # a program has no more rows than a block: the others would be nobody's
            whole = config.each * (2 if operator == "linear_rope" else 1) <= config.block_n
        return whole and shared_bytes(self._facts, operator, config) <= self._facts.shared_bytes

    def write(self, rows: Sequence[Row]) -> None:
        """Keep choices; each replaces the one of the same name. Raises OSError where the directory can't be written."""
        self.home.mkdir(parents=True, exist_ok=True)
        for row in rows:
            write_whole(self.home / _name(row), json.dumps(row) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write beside and rename: who reads meanwhile finds what was there or all of this."""
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")  # engines may have a thread each
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def merged(table: Table | None, facts: DeviceFacts, rows: Sequence[Row]) -> Table | None:
    """``table`` with ``rows`` in place of its own entries for the same in the same layer; None where there is neither."""
    if not rows:
        return table
    made = parse(_data(facts.name, rows))
    if table is None:
        return made
    entries = dict(table.entries)
    for product, found in made.entries.items():
        both = (*entries.get(product, {}).items(), *found.items())
        entries[product] = by_layer((layer, entry) for layer, each in both for entry in each)
    places = {(entry.groups, entry.head_size, entry.group, entry.layer) for entry in made.attention}
    kept = tuple(e for e in table.attention if (e.groups, e.head_size, e.group, e.layer) not in places)
    return replace(table, entries=entries, attention=(*kept, *made.attention))


def _cuts(config: MatmulConfig) -> bool:
    """Whether the kernels of products can be cut up so, on some device."""
    ring = config.descriptor in (STREAMED, TALL)
    return (
        all(type(value) is int for value in config.as_list())
        and all(map(_divides, (config.block_m, config.block_n, config.block_k, config.split)))
        and max(config.block_m, config.block_n, config.block_k) <= _WIDEST
        and config.split <= _MOST
        and config.warps in _WARPS
        and 0 < config.stages <= _MOST
        and _asks_ahead(config)
        and config.descriptor in (0, 1, STREAMED, TALL)
        and config.each >= int(ring)
    )


def _asks_ahead(config: MatmulConfig) -> bool:
    """Whether ``ahead`` is columns of a weight, or where tiles are tall as many places as a ring may have."""
    if config.descriptor == TALL:
        return 1 < config.ahead <= _MOST
    return config.ahead >= 0 and config.ahead % _AHEAD == 0


def _cuts_attention(config: AttentionConfig, *, rings: bool) -> bool:
    """The same of attention's. What a launch makes of ``block_kv`` and of a ring's stages fits the device in any case."""
    able = (
        all(type(value) is int for value in (config.block_kv, config.split, config.warps, config.stages))
        and type(config.ring) is bool
        and _divides(config.block_kv)
        and _divides(config.split)
        and config.split <= _MOST
    )
    if config.ring:
        return able and rings and config.block_kv in (64, 128) and config.warps == 4 and 0 < config.stages <= _MOST
    few = config.warps in _ATTENTION_WARPS and 0 < config.stages <= _ATTENTION_STAGES
    return able and few and _FEWEST <= config.block_kv <= _WIDEST


def _divides(size: int) -> bool:
    """Whether it's a power of two: blocks of other sizes aren't compiled."""
    return size > 0 and size & (size - 1) == 0


def _data(device: str, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "device": device,
        "software": {},
        "kernels": {},
        "matmul": [row for row in rows if "operator" in row],
        "attention": [row for row in rows if "operator" not in row],
    }


def _name(row: Row) -> str:
    layer = row.get("layer", ANY)
    of = f"-layer-{layer}" if layer else ""
    if "operator" in row:
        return f"{row['operator']}-{row['dtype']}-{row['n']}x{row['k']}-{row['m']}{of}.json"
    return f"attention-{row['head_size']}x{row['group']}-{row['groups']}{of}.json"
