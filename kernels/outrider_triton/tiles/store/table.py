"""Measured tile configurations by device and shape.

A table is a JSON file in this package, named after its device. Choices that ``outrider tune`` measures on a machine take
precedence (:mod:`outrider_triton.tiles.store.choices`). An entry of a matrix product has the fastest configuration, its time
and torch's time, or says that torch's product is faster. Configurations that no table has are derived:
:mod:`outrider_triton.tiles.derive.products`.

The fastest configuration depends on the surrounding kernels, so an entry names the layer (:func:`layer_of`) that it was
measured in. A layer uses its own entries first, then those of other layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from math import log2
from typing import Any

from outrider.device import BackendLoadError, DecoderShape
from outrider_triton.tiles.configs import AttentionConfig, MatmulConfig, bucket

ANY_LAYER = ""
"""Layer name of measurements outside a layer, and of rows without a layer; such entries apply to every layer."""

Key = tuple[str, str, int, int]
"""The key of a product in a table: operator, dtype, and rows and columns of the weight."""


def layer_of(shape: DecoderShape) -> str:
    """Return the name of layers of this shape, such as ``4096-32x128-8-14336``.

    It lists hidden size, heads, key heads and inner size. Models with equal layers share the name. It contains neither
    parameters outside the layers nor the dtype, which products name themselves.
    """
    suffix = ("-bias" if shape.bias else "") + ("-qk_norm" if shape.qk_norm else "")
    return f"{shape.hidden}-{shape.heads}x{shape.head_size}-{shape.kv_heads}-{shape.inner}{suffix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductEntry:
    """The measured configuration of one matrix product, with its time and the library's time."""

    m: int
    """Number of tokens."""
    config: MatmulConfig | None
    """The fastest configuration; None: torch's product was faster."""
    us: float
    """Microseconds of the product with ``config``."""
    torch_us: float
    """Microseconds of torch's product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionEntry:
    """The measured configuration of attention for one shape of heads and number of programs."""

    groups: int
    """Number of programs without splits: sequences times key heads times blocks of queries."""
    max_kv: int
    """Number of cached tokens during the measurement."""
    config: AttentionConfig | None
    """The fastest configuration; None: the derived one was faster."""
    head_size: int = 128
    """Number of elements per head."""
    group: int = 4
    """Number of query heads per key head."""
    layer: str = ANY_LAYER

    @property
    def key(self) -> tuple[int, int, int, str]:
        """The operands that the entry is for: number of programs, head size, query heads per key head, and layer."""
        return self.groups, self.head_size, self.group, self.layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The measured kernel configurations of one device."""

    device: str
    software: Mapping[str, str]
    entries: Mapping[Key, Mapping[str, tuple[ProductEntry, ...]]]
    """Entries of each product by layer, in the order of layer names, then by number of tokens; see :func:`by_layer`."""
    attention: tuple[AttentionEntry, ...] = ()

    def attention_config(self, groups: int, head_size: int, group: int, *, layer: str = ANY_LAYER) -> AttentionConfig | None:
        """Return the configuration of the nearest measurement with these head shapes, or None.

        The nearest measurement has half to twice as many programs. None means no measurement, or that the derived
        configuration won. Entries of ``layer`` go first, then those of every layer, then other layers by name. The number of
        cached tokens doesn't matter: a capture only knows its maximum, and a program takes its share of the actual length.
        """
        same_heads = [entry for entry in self.attention if (entry.head_size, entry.group) == (head_size, group)]
        for layer_name in dict.fromkeys((layer, ANY_LAYER, *sorted(entry.layer for entry in same_heads))):
            found = _nearest([entry for entry in same_heads if entry.layer == layer_name], groups)
            if found is not None:
                return found.config
        return None

    def with_attention(self, entries: Sequence[AttentionEntry]) -> Table:
        """Return the table with ``entries`` in place of those for the same heads, number of programs and layer."""
        replaced = {entry.key for entry in entries}
        return replace(self, attention=(*(entry for entry in self.attention if entry.key not in replaced), *entries))

    def entry(self, operator: str, dtype: str, *, n: int, k: int, m: int, layer: str = ANY_LAYER) -> ProductEntry | None:
        """Return the entry for ``m`` tokens, or None.

        This is the entry with the fewest tokens not below ``m`` in the same bucket. Otherwise it is the entry with the most
        tokens below ``m`` whose tile has room for ``m``, since it does the same work. Entries of ``layer`` go first, then
        those of every layer, then other layers by name. Entries for larger buckets aren't used: a configuration is derived
        instead.
        """
        measured = self.entries.get((operator, dtype, n, k))
        if measured is None:
            return None
        for layer_name in (layer, ANY_LAYER, *measured):
            found = _serving(measured.get(layer_name, ()), m)
            if found is not None:
                return found
        return None


def by_layer(entries: Iterable[tuple[str, ProductEntry]]) -> dict[str, tuple[ProductEntry, ...]]:
    """Group one product's entries by layer, sorted by tokens; a later entry replaces an earlier one with the same tokens."""
    found: dict[str, dict[int, ProductEntry]] = {}
    for layer, entry in entries:
        found.setdefault(layer, {})[entry.m] = entry
    return {layer: tuple(found[layer][m] for m in sorted(found[layer])) for layer in sorted(found)}


def _serving(measured: Sequence[ProductEntry], m: int) -> ProductEntry | None:
    in_bucket = (entry for entry in measured if entry.m >= m and bucket(entry.m) == bucket(m))
    fitting = (e for e in reversed(measured) if e.m < m and e.config is not None and e.config.block_m >= m)
    return next(in_bucket, None) or next(fitting, None)


def _nearest(entries: Sequence[AttentionEntry], groups: int) -> AttentionEntry | None:
    if not entries:
        return None
    # Of two equally near measurements take the smaller one, independent of their order.
    nearest = min(entries, key=lambda entry: (abs(log2(entry.groups / groups)), entry.groups))
    return nearest if nearest.groups <= 2 * groups and groups <= 2 * nearest.groups else None


def table_name(device: str) -> str:
    """Return the file name stem of a device's table: ``NVIDIA H200`` → ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def load(device: str) -> Table | None:
    """Return the table of the device named ``device``, or None. Raises :class:`BackendLoadError` for a damaged file."""
    file = resources.files("outrider_triton.tiles.store").joinpath("tuned", f"{table_name(device)}.json")
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
    """Build a table from parsed JSON. Rows without a layer apply to every layer."""
    entries: dict[Key, list[tuple[str, ProductEntry]]] = {}
    for item in data["matmul"]:
        config = None if item["config"] is None else MatmulConfig(*item["config"])
        entry = ProductEntry(m=int(item["m"]), config=config, us=float(item["us"]), torch_us=float(item["torch_us"]))
        product = item["operator"], item["dtype"], int(item["n"]), int(item["k"])
        entries.setdefault(product, []).append((str(item.get("layer", ANY_LAYER)), entry))
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
                layer=str(item.get("layer", ANY_LAYER)),
            )
            for item in data.get("attention", ())
        ),
    )
