"""Mapping from a checkpoint's tensors to the weights of a mixture of experts: one tensor per expert, or one stack of all
experts.

Letters: E experts, H hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CheckpointError
from outrider.model.checkpoint.files import CheckpointFiles, TensorFile
from outrider.model.checkpoint.pieces import Piece, Target, TensorSlice
from outrider.model.config.model_config import ExpertsConfig, ModelConfig
from outrider.model.layers.ranks import Shards

_GATE_UP_DOWN = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_MIXTRAL_PARTS = ("w1.weight", "w3.weight", "w2.weight")
_STACKS = ("gate_up_proj", "down_proj")  # [E, 2 I, H], the gate's rows first, and [E, H, I]


def check_count(config: ModelConfig, tensors: Collection[str], origin: object) -> None:
    """Raise :class:`CheckpointError` if the config has far more experts than the files have tensors.

    This bounds the number of tensor names that the mapping generates.
    """
    experts = config.experts
    if experts is None:
        return
    stacks = {key.rpartition(".")[0] for key in tensors if key.endswith(_STACKS)}
    layers = config.num_layers - len(experts.dense_layers) - len(stacks)
    if layers * experts.count > len(tensors):
        raise CheckpointError(
            f"{origin}: holds {len(tensors)} tensors, and the config has {experts.count} experts in each of {layers} layers "
            "without stacks of them; expected three tensors for each expert, or two for all of a layer"
        )


class _TransposedStack(TensorFile):
    """One stack of matrices of another file, with each matrix transposed."""

    def __init__(self, file: TensorFile, name: str) -> None:
        count, columns, rows = file.shapes[name]
        super().__init__(file.path, {name: (count, rows, columns)})
        self._file = file

    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        if tensor_slice is None:
            return self._file.read_tensor(name).transpose(1, 2)
        if tensor_slice.matrix is None:
            return self._file.read_tensor(name).transpose(1, 2)[tensor_slice.slices(3)]
        matrix = TensorSlice(0, 0, self.shapes[name][2], matrix=tensor_slice.matrix)
        return self._file.read_tensor(name, matrix).transpose(1, 2)[:, tensor_slice.start : tensor_slice.stop]

    def dtype(self, name: str) -> torch.dtype | None:
        return self._file.dtype(name)


def with_transposed_stacks(config: ModelConfig, files: CheckpointFiles) -> CheckpointFiles:
    """Return ``files`` with the stacks of experts in the shapes of :func:`expert_targets`. Published Qwen3-VL-MoE checkpoints
    store each matrix of a stack transposed, those that transformers saves do not.
    """
    experts = config.experts
    if experts is None or config.family != "qwen3_vl_moe":
        return files
    hidden, inner = config.hidden_size, experts.intermediate_size
    shapes = [(experts.count, hidden, 2 * inner), (experts.count, inner, hidden)]  # one of the two isn't square
    transposed = dict(files.tensors)
    for key in files.tensors:
        pair = [key.removesuffix(_STACKS[0]) + stack for stack in _STACKS]
        if key == pair[0] and pair[1] in files.tensors and [files.shape(each) for each in pair] == shapes:
            transposed |= {each: _TransposedStack(files.tensors[each], each) for each in pair}
    return replace(files, tensors=transposed)


def expert_targets(config: ModelConfig, prefix: str, name: str, present: Container[str], shards: Shards) -> list[Target]:
    """Return the expert weights of one layer, called ``name`` in the model and ``prefix`` in the checkpoint.

    ``present`` holds the checkpoint's tensor names, which determine the layout. A rank holds the whole router, and either a
    slice of every expert's intermediate size or some of the experts. Stacks are read as their concatenated rows.
    """
    experts = config.experts
    assert experts is not None  # the caller asks for layers that have some
    hidden = config.hidden_size
    mixtral_names = config.family == "mixtral" and f"{prefix}.mlp.gate.weight" not in present
    block = f"{prefix}.block_sparse_moe" if mixtral_names else f"{prefix}.mlp"
    targets = [Target(f"{name}.router", (Piece(f"{block}.gate.weight", (experts.count, hidden)),))]
    if any(f"{block}.experts.{part}" in present for part in _STACKS):
        targets += _stacked_targets(experts, hidden, f"{block}.experts", name, shards)
    else:
        first = f"{block}.experts.0"
        mixtral_names = mixtral_names and not any(f"{first}.{part}" in present for part in _GATE_UP_DOWN)
        parts = _MIXTRAL_PARTS if mixtral_names else _GATE_UP_DOWN
        held = shards.held_experts(experts.count)
        each = [f"{block}.experts.{expert}" for expert in range(*(held or (0, experts.count)))]
        span = shards.mlp.even(experts.intermediate_size) if held is None else None
        targets += _expert_targets(each, parts, hidden, experts.intermediate_size, name, "", span)
    if experts.shared_size:
        shared = f"{block}.shared_expert"
        span = shards.mlp.even(experts.shared_size)
        targets += _expert_targets([shared], _GATE_UP_DOWN, hidden, experts.shared_size, name, "shared_", span)
        targets.append(Target(f"{name}.shared_gate", (Piece(f"{shared}_gate.weight", (1, hidden)),)))
    return targets


def _expert_targets(
    stems: list[str],
    parts: tuple[str, str, str],
    hidden: int,
    inner: int,
    name: str,
    field: str,
    span: tuple[int, int] | None,
) -> list[Target]:
    """Return the stacked gate-up and down weights of experts or a shared expert with one tensor per projection.

    ``span``: the part of the intermediate size ``inner`` that is read; None for all of it.
    """
    gate, up, down = parts
    is_unsliced = span is None or span == (0, inner)
    rows, columns = (None, None) if span is None or is_unsliced else (TensorSlice(0, *span), TensorSlice(1, *span))
    gates = [Piece(f"{stem}.{part}", (inner, hidden), rows) for stem in stems for part in (gate, up)]
    return [
        Target(f"{name}.{field}gate_up", tuple(gates)),
        Target(f"{name}.{field}down", tuple(Piece(f"{stem}.{down}", (hidden, inner), columns) for stem in stems)),
    ]


def _stacked_targets(experts: ExpertsConfig, hidden: int, stem: str, name: str, shards: Shards) -> list[Target]:
    """Return the gate-up and down weights of a checkpoint that stores the experts of a layer as two stacked tensors."""
    inner, count = experts.intermediate_size, experts.count
    held = shards.held_experts(count)
    span = shards.mlp.even(inner) if held is None else (0, inner)
    gate_up_shape, down_shape = (count, 2 * inner, hidden), (count, hidden, inner)
    if held is not None:
        gates, downs = (
            [
                Piece(f"{stem}.{stack}", shape, TensorSlice(0, 0, shape[1], matrix=expert), stack=True)
                for expert in range(*held)
            ]
            for stack, shape in ((_STACKS[0], gate_up_shape), (_STACKS[1], down_shape))
        )
    elif span == (0, inner):
        gates = [Piece(f"{stem}.{_STACKS[0]}", gate_up_shape, stack=True)]
        downs = [Piece(f"{stem}.{_STACKS[1]}", down_shape, stack=True)]
    else:
        gates = [
            Piece(
                f"{stem}.{_STACKS[0]}",
                gate_up_shape,
                TensorSlice(0, half + span[0], half + span[1], matrix=expert),
                stack=True,
            )
            for expert in range(count)
            for half in (0, inner)
        ]
        downs = [Piece(f"{stem}.{_STACKS[1]}", down_shape, TensorSlice(1, *span), stack=True)]
    return [Target(f"{name}.gate_up", tuple(gates)), Target(f"{name}.down", tuple(downs))]


def stack_experts(experts: ExpertsConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's weights by field, with the expert weights as stacks [E, ...].

    Quantized expert weights keep their concatenated rows.
    """
    stacks = {key: fields[key] for key in ("gate_up", "down")}
    return fields | {
        key: value.view(experts.held, -1, value.shape[-1]) if isinstance(value, Tensor) else value
        for key, value in stacks.items()
    }
