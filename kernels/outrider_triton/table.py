"""Tuned configurations, by device and shape: what was measured, and what is used because of it.

A table is a JSON file in this package, named after the device: a head start. What ``outrider tune`` measures on a machine
goes before it (:mod:`outrider_triton.tuned_store`). Each entry of a matrix product says which configuration was fastest and
how long it and torch's own took; where torch's own won, the entry says so and torch's own is used. The same for
each other kernel. What no table has is derived: :mod:`outrider_triton.derive`.

What was fastest in one layer needn't be so in another, where the same product has other neighbours. So an entry names the
layer (:func:`layer_of`) that it was measured in. A layer uses its own entries; where it has none, another's are a head start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib import resources
from math import log2
from typing import Any

from outrider.device import BackendLoadError, DecoderShape

BUCKETS = (8, 16, 32, 64, 128)
"""Numbers of tokens for which configurations are told apart; each serves those down to the one before."""
STREAMED = 2
"""``descriptor`` of products whose operands a warp of its own brings."""
TALL = 3
"""And of gates in tall tiles."""
ANY = ""
"""Layer of what was measured alone, or of an entry that doesn't say where it was measured: every layer's."""

Key = tuple[str, str, int, int]
"""Operator, dtype, rows and columns of the weight."""


def bucket(m: int) -> int:
    """The least of :data:`BUCKETS` that isn't below ``m``; the largest for more."""
    return next((size for size in BUCKETS if size >= m), BUCKETS[-1])


def layer_of(shape: DecoderShape) -> str:
    """Name of a layer of this shape: hidden size, heads, key heads, inner size; the same for two models of such layers.

    ``4096-32x128-8-14336``. What lies outside of the layers isn't in it, nor the dtype, which a product says itself.
    """
    ends = ("-bias" if shape.bias else "") + ("-qk_norm" if shape.qk_norm else "")
    return f"{shape.hidden}-{shape.heads}x{shape.head_size}-{shape.kv_heads}-{shape.inner}{ends}"


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """How a skinny matrix product is cut up.

    Blocks of ``block_m`` tokens, ``block_n`` rows of the weight and ``block_k`` columns; k is shared out among ``split``
    programs; ``warps`` a program and ``stages`` of loads in flight; ``ahead`` columns (a multiple of 256) of the
    weight are asked for ahead of the kernel before; ``descriptor``: 1 where the copy engine loads the weight.
    ``each``: rows of the weight a program has, 0 for all of a block.

    ``descriptor`` STREAMED: a kernel of :mod:`outrider_triton.jit.streamed`. Then ``block_n`` is the rows of a box, ``each``
    the *pairs* of rows a program has (in a product that isn't split, those that are one row, folded), and ``ahead`` 0: what
    is asked for ahead is as much as the stages hold. With weights of four bits it is :mod:`outrider_triton.jit.planes_ring`:
    ``block_n`` is the rows of a box, ``block_k`` all columns of a program and ``ahead`` those of a tile, ``each`` its rows,
    and four ``warps`` a group. ``descriptor`` TALL: :mod:`outrider_triton.jit.tall`, as a STREAMED one, with four ``warps`` a
    group; ``ahead``: stages of tokens.
    """

    block_m: int
    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int
    ahead: int
    descriptor: int
    each: int = 0

    def as_list(self) -> list[int]:
        """As operators and tables carry it."""
        return list(astuple(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What was measured for one matrix product: ``config`` is None where torch's own was faster."""

    m: int
    config: MatmulConfig | None
    us: float
    torch_us: float


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How attention is cut up: blocks of ``block_kv`` cached tokens, shared out among ``split`` programs; ``ring``: they come
    through one.
    """

    block_kv: int
    split: int
    warps: int
    stages: int
    ring: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionEntry:
    """The best configuration for ``groups`` programs without a split (sequences, key heads and blocks of queries) of heads of
    ``head_size`` numbers, ``group`` of them a key head, measured with ``max_kv`` cached tokens in ``layer``. ``config`` is
    None where the derived one was faster.
    """

    groups: int
    max_kv: int
    config: AttentionConfig | None
    head_size: int = 128
    group: int = 4
    layer: str = ANY


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The measurements of one device. ``kernels`` says of each other kernel whether Triton's won.

    ``entries``: of each product by layer, in the order of names, and by number of tokens; see :func:`by_layer`.
    """

    device: str
    software: Mapping[str, str]
    entries: Mapping[Key, Mapping[str, tuple[Entry, ...]]]
    kernels: Mapping[str, bool]
    attention: tuple[AttentionEntry, ...] = ()

    def attention_config(self, groups: int, head_size: int, group: int, *, layer: str = ANY) -> AttentionConfig | None:
        """That of the nearest measurement with such heads, half as many to twice as many programs away; None where there is
        none, or the derived one won. ``layer``'s measurements go first, then those of every layer, then other layers' in the
        order of their names.

        How many tokens are cached isn't asked: a capture knows what fits at most, and a program takes its share of what is
        there.
        """
        alike = [entry for entry in self.attention if (entry.head_size, entry.group) == (head_size, group)]
        for each in dict.fromkeys((layer, ANY, *sorted(entry.layer for entry in alike))):
            found = _nearest([entry for entry in alike if entry.layer == each], groups)
            if found is not None:
                return found.config
        return None

    def entry(self, operator: str, dtype: str, *, n: int, k: int, m: int, layer: str = ANY) -> Entry | None:
        """The entry for the least measured number of tokens not below ``m``, in the same bucket; else that for the most
        tokens below ``m`` whose tile has room for as many, since it does the same work; None where there is none. Of
        ``layer``'s entries; without one, of every layer's; else of other layers', in the order of their names.

        What was measured for more tokens says little about fewer: there, a configuration is derived.
        """
        measured = self.entries.get((operator, dtype, n, k))
        if measured is None:
            return None
        for each in (layer, ANY, *measured):
            found = _serving(measured.get(each, ()), m)
            if found is not None:
                return found
        return None


def by_layer(entries: Iterable[tuple[str, Entry]]) -> dict[str, tuple[Entry, ...]]:
    """Entries of one product, each with its layer; of two for the same layer and tokens, the one behind."""
    found: dict[str, dict[int, Entry]] = {}
    for layer, entry in entries:
        found.setdefault(layer, {})[entry.m] = entry
    return {layer: tuple(found[layer][m] for m in sorted(found[layer])) for layer in sorted(found)}


def _serving(measured: Sequence[Entry], m: int) -> Entry | None:
    alike = (entry for entry in measured if entry.m >= m and bucket(entry.m) == bucket(m))
    roomy = (e for e in reversed(measured) if e.m < m and e.config is not None and e.config.block_m >= m)
    return next(alike, None) or next(roomy, None)


def _nearest(alike: Sequence[AttentionEntry], groups: int) -> AttentionEntry | None:
    if not alike:
        return None
    # Of two that are as near the smaller one, in whatever order they were read.
    near = min(alike, key=lambda entry: (abs(log2(entry.groups / groups)), entry.groups))
    return near if near.groups <= 2 * groups and groups <= 2 * near.groups else None


def slug(device: str) -> str:
    """File name of a device's table: ``NVIDIA H200`` → ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def load(device: str) -> Table | None:
    """The table of the device that calls itself ``device``, or None."""
    file = resources.files("outrider_triton").joinpath("tuned", f"{slug(device)}.json")
    if not file.is_file():
        return None
    try:
        return parse(json.loads(file.read_text(encoding="utf-8")))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BackendLoadError(
            f"the table of tuned kernels {file} can't be used: {type(error).__name__}: {error}; restore the file, or choose "
            "kernels=torch"
        ) from error


def parse(data: Mapping[str, Any]) -> Table:
    """A table from its JSON. Rows that name no layer are every layer's."""
    entries: dict[Key, list[tuple[str, Entry]]] = {}
    for item in data["matmul"]:
        config = None if item["config"] is None else MatmulConfig(*item["config"])
        entry = Entry(m=int(item["m"]), config=config, us=float(item["us"]), torch_us=float(item["torch_us"]))
        product = item["operator"], item["dtype"], int(item["n"]), int(item["k"])
        entries.setdefault(product, []).append((str(item.get("layer", ANY)), entry))
    return Table(
        device=str(data["device"]),
        software=dict(data["software"]),
        entries={product: by_layer(found) for product, found in entries.items()},
        attention=tuple(
            AttentionEntry(
                groups=int(item["groups"]),
                max_kv=int(item["max_kv"]),
                config=None if item["config"] is None else AttentionConfig(*item["config"]),
                head_size=int(item.get("head_size", 128)),
                group=int(item.get("group", 4)),
                layer=str(item.get("layer", ANY)),
            )
            for item in data.get("attention", ())
        ),
        kernels={str(name): bool(wins) for name, wins in data["kernels"].items()},
    )
