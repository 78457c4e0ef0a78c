"""Puts choices that ``outrider tune`` kept into a table that ships.

    python -m outrider_triton.shipping TABLE.json CHOICE.json... --device NAME --date DAY

A choice takes the place of the table's for the same product, dtype and tokens, or the same attention, in the same layer
(:func:`outrider_triton.table.layer_of`); everything else stays, so that two models which share a product have one each.
Where there is no table yet, one is made. The choices must come from one device, and from the one that the table names: the
folder says which, and with which torch and Triton it was (:mod:`outrider_triton.tuned_store`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider_triton.table import ANY, parse, slug

_PRODUCT = ("operator", "dtype", "n", "k", "m", "layer")
_ATTENTION = ("groups", "head_size", "group", "layer")
_MEASURED = {"head_size": 128, "group": 4, "layer": ANY}
"""What was measured where a row doesn't say it: attention of these heads, and whatever layer it was."""


def add(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``table`` with ``rows``, in the order that it had and new ones behind; a table as JSON has it."""
    made = dict(table)
    for name, keys in (("matmul", _PRODUCT), ("attention", _ATTENTION)):
        kept = {_key(row, keys): dict(row) for row in made.get(name, ())}
        kept |= {_key(row, keys): dict(row) for row in rows if ("operator" in row) is (name == "matmul")}
        made[name] = list(kept.values())
    parse(made)
    return made


def _key(row: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(key, _MEASURED.get(key)) for key in keys)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, and write the table whole or not at all. A choice that can't be read raises as ``parse`` does."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider_triton.shipping", description="Put choices into a table that ships."
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("choices", type=Path, nargs="+")
    parser.add_argument("--device", required=True, help="as the device calls itself: 'NVIDIA H200'")
    parser.add_argument("--date", required=True, help="of the measurements: 2026-11-24")
    said = parser.parse_args(arguments)
    if said.table.name != f"{slug(said.device)}.json":
        parser.error(f"the table of {said.device!r} is called {slug(said.device)}.json, not {said.table.name}")
    homes = {path.resolve().parent for path in said.choices}
    name = slug(said.device)
    if len(homes) != 1 or not next(iter(homes)).parent.name.startswith(f"{name}-"):
        parser.error(f"choices must lie in one folder of {said.device!r}: {name}-ARCHITECTURE-PROCESSORS/VERSIONS")
    torch, triton, _ = homes.pop().name.rsplit("-", 2)
    software = {"torch": torch, "triton": triton}
    made = {"device": said.device, "software": software, "date": said.date, "kernels": {}, "matmul": []}
    table = json.loads(said.table.read_text(encoding="utf-8")) if said.table.exists() else made
    rows = [json.loads(path.read_text(encoding="utf-8")) | {"date": said.date} for path in said.choices]
    beside = said.table.with_suffix(".new")
    beside.write_text(json.dumps(add(table, rows), indent=1) + "\n", encoding="utf-8")
    beside.replace(said.table)


if __name__ == "__main__":
    main()
