"""Merge choices that ``outrider tune`` stored into a table that ships with the package.

    python -m outrider_triton.tiles.store.shipping TABLE.json CHOICE.json... --device NAME --date DAY

A choice replaces the table's entry for the same product, dtype and tokens, or the same attention, in the same layer
(:func:`outrider_triton.tiles.store.table.layer_of`). All other entries stay, so two models that share a product have an entry
each. If the table doesn't exist, it is created. All choices must come from the device that the table names. Their folder
tells device, torch and Triton (:mod:`outrider_triton.tiles.store.choices`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider_triton.tiles.store.choices import write_whole
from outrider_triton.tiles.store.table import ANY_LAYER, parse, table_name

_PRODUCT = ("operator", "dtype", "n", "k", "m", "layer")
_ATTENTION = ("groups", "head_size", "group", "layer")
_DEFAULTS = {"head_size": 128, "group": 4, "layer": ANY_LAYER}
"""Values of the keys that a row may lack: attention with these heads, and every layer."""


def add(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``table`` with ``rows`` merged: entries keep their order, new ones follow. Both are parsed JSON."""
    result = dict(table)
    for name, keys in (("matmul", _PRODUCT), ("attention", _ATTENTION)):
        by_key = {_key(row, keys): dict(row) for row in result.get(name, ())}
        by_key |= {_key(row, keys): dict(row) for row in rows if ("operator" in row) is (name == "matmul")}
        result[name] = list(by_key.values())
    parse(result)
    return result


def _key(row: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(key, _DEFAULTS.get(key)) for key in keys)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and replace the table's file atomically. Raises the error of ``parse`` for an
    unreadable choice.
    """
    parser = argparse.ArgumentParser(
        prog="python -m outrider_triton.tiles.store.shipping", description="Put choices into a table that ships."
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("choices", type=Path, nargs="+")
    parser.add_argument("--device", required=True, help="as the device calls itself: 'NVIDIA H200'")
    parser.add_argument("--date", required=True, help="of the measurements: 2026-11-24")
    options = parser.parse_args(arguments)
    if options.table.name != f"{table_name(options.device)}.json":
        parser.error(f"the table of {options.device!r} is called {table_name(options.device)}.json, not {options.table.name}")
    folders = {path.resolve().parent for path in options.choices}
    name = table_name(options.device)
    if len(folders) != 1 or not next(iter(folders)).parent.name.startswith(f"{name}-"):
        parser.error(f"choices must lie in one folder of {options.device!r}: {name}-ARCHITECTURE-PROCESSORS/VERSIONS")
    torch, triton, _ = folders.pop().name.rsplit("-", 2)
    software = {"torch": torch, "triton": triton}
    empty_table = {"device": options.device, "software": software, "date": options.date, "matmul": []}
    table = json.loads(options.table.read_text(encoding="utf-8")) if options.table.exists() else empty_table
    rows = [json.loads(path.read_text(encoding="utf-8")) | {"date": options.date} for path in options.choices]
    write_whole(options.table, json.dumps(add(table, rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
