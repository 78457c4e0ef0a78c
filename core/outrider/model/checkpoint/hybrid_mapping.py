"""Mapping from a checkpoint's tensors to the weights of hybrid models: recurrent layers and gated attention.

Qwen3-Next stores q, k, v and the output gate of a recurrent layer in one tensor, key head by key head. Qwen3.5 has separate
tensors. Both become one product with the rows of all q, then all k, v, output gates, b and a. A tensor-parallel rank reads
its key heads, with the value heads that they serve.

Letters: H hidden size, Hk key heads, Hv value heads, D key size, E value size, C channels of the convolution, K kernel size.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from typing import Any

from outrider.device import DeltaRuleWeights
from outrider.model.checkpoint.pieces import Piece, Target, TensorSlice
from outrider.model.config.model_config import ModelConfig, RecurrentConfig
from outrider.model.layers.ranks import Shards

_FUSED_PARTS = ("in_proj_qkvz", "in_proj_ba")
_STORED_WEIGHTS = ("weight", "weight_packed", "qweight")
_RECURRENT = "recurrent."
_OFFSET_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "final_norm", "token_norm", "hidden_norm")


def recurrent_targets(config: ModelConfig, prefix: str, name: str, present: Container[str], shards: Shards) -> list[Target]:
    """Return the weights of the recurrent block of one layer, called ``name`` in the model and ``prefix`` in the checkpoint.

    ``present`` holds the checkpoint's tensor names, which determine the layout.
    """
    recurrent = config.recurrent
    assert recurrent is not None  # the caller asks for layers that are recurrent
    stem, hidden = f"{prefix}.linear_attn", config.hidden_size
    layout = _Layout(recurrent, shards)
    fused = any(f"{stem}.{part}.{kind}" in present for part in _FUSED_PARTS for kind in _STORED_WEIGHTS)
    if fused:
        projection, gates = layout.fused_projection(stem, hidden), layout.fused_gates(stem, hidden)
    else:
        projection, gates = layout.separate_projection(stem, hidden), layout.separate_gates(stem, hidden)
    heads, values = (recurrent.value_heads,), recurrent.value_width
    columns = layout.values(values, recurrent.value_size)
    convolution = (recurrent.channels, 1, recurrent.kernel_size)
    return [
        Target(f"{name}.qkv", (*projection, *gates)),
        Target(f"{name}.output", (Piece(f"{stem}.out_proj.weight", (hidden, values), as_columns(columns)),)),
        Target(
            f"{name}.{_RECURRENT}convolution",
            tuple(Piece(f"{stem}.conv1d.weight", convolution, rows, stack=True) for rows in layout.channel_slices()),
        ),
        Target(f"{name}.{_RECURRENT}a_log", (Piece(f"{stem}.A_log", heads, layout.values(heads[0], 1)),), wide=True),
        Target(f"{name}.{_RECURRENT}dt_bias", (Piece(f"{stem}.dt_bias", heads, layout.values(heads[0], 1)),), wide=True),
        Target(f"{name}.{_RECURRENT}norm", (Piece(f"{stem}.norm.weight", (recurrent.value_size,)),)),
    ]


class _Layout:
    """The rows of this rank's key heads and value heads in each tensor of a recurrent layer."""

    def __init__(self, config: RecurrentConfig, shards: Shards) -> None:
        self._config = config
        self._first, self._last = shards.attention.even(config.key_heads)
        self._values_per_key = config.value_heads // config.key_heads
        self._is_whole = (self._first, self._last) == (0, config.key_heads)

    def keys(self, offset: int) -> TensorSlice:
        """Return this rank's rows of key heads in the block of q or k rows that starts at row ``offset``."""
        size = self._config.key_size
        return TensorSlice(0, offset + self._first * size, offset + self._last * size)

    def values(self, rows: int, size: int, offset: int = 0) -> TensorSlice | None:
        """Return this rank's rows of value heads, ``size`` rows per head, in the block of ``rows`` rows at ``offset``. None
        if the rank reads the tensor as a whole.
        """
        if self._is_whole and rows == self._config.value_heads * size:
            return None
        each = self._values_per_key * size
        return TensorSlice(0, offset + self._first * each, offset + self._last * each)

    def channel_slices(self) -> tuple[TensorSlice | None, ...]:
        """Return this rank's rows of q, k and v in a tensor over all channels of the convolution, in this order."""
        config = self._config
        if self._is_whole:
            return (None,)
        values = self.values(config.channels, config.value_size, 2 * config.key_width)
        return self.keys(0), self.keys(config.key_width), values

    def separate_projection(self, stem: str, hidden: int) -> tuple[Piece, ...]:
        """Return the pieces of q, k, v and the output gate for a checkpoint with a tensor for each."""
        config = self._config
        qkv = [Piece(f"{stem}.in_proj_qkv.weight", (config.channels, hidden), rows) for rows in self.channel_slices()]
        gate = self.values(config.value_width, config.value_size)
        return *qkv, Piece(f"{stem}.in_proj_z.weight", (config.value_width, hidden), gate)

    def separate_gates(self, stem: str, hidden: int) -> tuple[Piece, ...]:
        """Return the pieces of the gates b and a for a checkpoint with a tensor for each."""
        heads = self._config.value_heads
        rows = self.values(heads, 1)
        return tuple(Piece(f"{stem}.in_proj_{kind}.weight", (heads, hidden), rows) for kind in ("b", "a"))

    def fused_projection(self, stem: str, hidden: int) -> tuple[Piece, ...]:
        """Return the pieces of q, k, v and the output gate for a checkpoint with one tensor, whose rows are grouped by key
        head.
        """
        config = self._config
        values = self._values_per_key * config.value_size
        sizes = (config.key_size, config.key_size, values, values)
        rows = config.channels + config.value_width
        return self._grouped(f"{stem}.in_proj_qkvz.weight", (rows, hidden), sizes)

    def fused_gates(self, stem: str, hidden: int) -> tuple[Piece, ...]:
        """Return the pieces of the gates b and a for a checkpoint with one tensor, whose rows are grouped by key head."""
        sizes = (self._values_per_key, self._values_per_key)
        return self._grouped(f"{stem}.in_proj_ba.weight", (2 * self._config.value_heads, hidden), sizes)

    def _grouped(self, key: str, shape: tuple[int, int], sizes: tuple[int, ...]) -> tuple[Piece, ...]:
        pieces, start = [], 0
        for size in sizes:
            for head in range(self._first, self._last):
                first = head * sum(sizes) + start
                pieces.append(Piece(key, shape, TensorSlice(0, first, first + size)))
            start += size
        return tuple(pieces)


def as_columns(rows: TensorSlice | None) -> TensorSlice | None:
    """Return the slice of the columns that multiply the results of ``rows``; None stays None."""
    return None if rows is None else replace(rows, dim=1)


def gated_queries(qkv: Target, config: ModelConfig, shards: Shards) -> Target:
    """Return the target ``qkv`` with the rows of queries first, and those of the attention's gate after keys and values.

    ``q_proj`` holds the query and then the gate of each head.
    """
    query, size = qkv.pieces[0], config.head_size
    shape = (2 * config.num_heads * size, query.shape[1])
    first, last = shards.heads(config)

    def rows(start: int) -> tuple[Piece, ...]:
        starts = (head * 2 * size + start for head in range(first, last))
        return tuple(Piece(query.key, shape, TensorSlice(0, begin, begin + size)) for begin in starts)

    return replace(qkv, pieces=(*rows(0), *qkv.pieces[1:], *rows(size)))


def offset_norms(config: ModelConfig, targets: Iterable[Target]) -> Iterator[Target]:
    """Yield ``targets``, with the config's offset for norms that have one. These norms are loaded in float32."""
    for target in targets:
        is_norm = target.name == "norm" or target.name.rpartition(".")[2] in _OFFSET_NORMS
        yield replace(target, wide=True, offset=config.norm_offset) if config.norm_offset and is_norm else target


def nest_recurrent(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's weights by field, with those of its recurrent block moved into one
    :class:`DeltaRuleWeights` record.
    """
    inner = {key.removeprefix(_RECURRENT): value for key, value in fields.items() if key.startswith(_RECURRENT)}
    if not inner:
        return fields
    outer = {key: value for key, value in fields.items() if not key.startswith(_RECURRENT)}
    return outer | {"recurrent": DeltaRuleWeights(**inner)}
