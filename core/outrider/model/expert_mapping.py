"""Which tensors of a checkpoint make up a mixture of experts: one for each expert, or one for all of them.

Letters: E experts, H hidden size, I inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Any

from torch import Tensor

from outrider.errors import CheckpointError
from outrider.model.config import ExpertsConfig, ModelConfig
from outrider.model.cuts import Cut
from outrider.model.pieces import Piece, Target
from outrider.model.shards import Shards

_GATE_UP_DOWN = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_NUMBERED = ("w1.weight", "w3.weight", "w2.weight")  # Mixtral's
_FUSED = ("gate_up_proj", "down_proj")  # [E, 2 I, H], the gate's rows first, and [E, H, I]


def check_count(config: ModelConfig, tensors: Collection[str], origin: object) -> None:
    """Raise :class:`CheckpointError` for a config with far more experts than there are tensors, before they're all named."""
    experts = config.experts
    if experts is None:
        return
    stacks = {key.rpartition(".")[0] for key in tensors if key.endswith(_FUSED)}
    layers = config.num_layers - len(experts.dense_layers) - len(stacks)
    if layers * experts.count > len(tensors):
        raise CheckpointError(
            f"{origin}: holds {len(tensors)} tensors, and the config has {experts.count} experts in each of {layers} layers "
            "without stacks of them; expected three tensors for each expert, or two for all of a layer"
        )


def expert_targets(config: ModelConfig, prefix: str, name: str, present: Container[str], shards: Shards) -> list[Target]:
    """Weights of the experts of a layer, called ``name`` in the model, ``prefix`` in the checkpoint.

    ``present`` are the checkpoint's tensor names, which decide between the layouts. A rank has a part of every expert's inner
    size, and the whole router. Stacks are read as their rows, one behind the other.
    """
    experts = config.experts
    assert experts is not None  # the caller asks for layers that have some
    hidden = config.hidden_size
    numbered = config.family == "mixtral" and f"{prefix}.mlp.gate.weight" not in present
    block = f"{prefix}.block_sparse_moe" if numbered else f"{prefix}.mlp"
    targets = [Target(f"{name}.router", (Piece(f"{block}.gate.weight", (experts.count, hidden)),))]
    if any(f"{block}.experts.{part}" in present for part in _FUSED):
        targets += _fused(experts, hidden, f"{block}.experts", name, shards)
    else:
        first = f"{block}.experts.0"
        numbered = numbered and not any(f"{first}.{part}" in present for part in _GATE_UP_DOWN)
        parts = _NUMBERED if numbered else _GATE_UP_DOWN
        each = [f"{block}.experts.{expert}" for expert in range(experts.count)]
        targets += _gated(each, parts, hidden, experts.intermediate_size, name, "", shards)
    if experts.shared_size:
        shared = f"{block}.shared_expert"
        targets += _gated([shared], _GATE_UP_DOWN, hidden, experts.shared_size, name, "shared_", shards)
        targets.append(Target(f"{name}.shared_gate", (Piece(f"{shared}_gate.weight", (1, hidden)),)))
    return targets


def _gated(
    stems: list[str], parts: tuple[str, str, str], hidden: int, inner: int, name: str, field: str, shards: Shards
) -> list[Target]:
    """Gate, up and down of MLPs that each have their tensors, stacked."""
    gate, up, down = parts
    own = shards.mlp.even(inner)
    whole = own == (0, inner)
    rows, columns = (None, None) if whole else (Cut(0, *own), Cut(1, *own))
    gates = [Piece(f"{stem}.{part}", (inner, hidden), rows) for stem in stems for part in (gate, up)]
    return [
        Target(f"{name}.{field}gate_up", tuple(gates)),
        Target(f"{name}.{field}down", tuple(Piece(f"{stem}.{down}", (hidden, inner), columns) for stem in stems)),
    ]


def _fused(experts: ExpertsConfig, hidden: int, stem: str, name: str, shards: Shards) -> list[Target]:
    """The two stacks of all experts."""
    inner, count = experts.intermediate_size, experts.count
    own = shards.mlp.even(inner)
    both, down = (count, 2 * inner, hidden), (count, hidden, inner)
    if own == (0, inner):
        gates, downs = [Piece(f"{stem}.{_FUSED[0]}", both, stack=True)], Piece(f"{stem}.{_FUSED[1]}", down, stack=True)
    else:
        gates = [
            Piece(f"{stem}.{_FUSED[0]}", both, Cut(0, half + own[0], half + own[1], matrix=expert), stack=True)
            for expert in range(count)
            for half in (0, inner)
        ]
        downs = Piece(f"{stem}.{_FUSED[1]}", down, Cut(1, *own), stack=True)
    return [Target(f"{name}.gate_up", tuple(gates)), Target(f"{name}.down", (downs,))]


def stacked(config: ModelConfig, weights: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The weights of a layer ``name``, those of its experts as stacks [E, …]; quantised ones as they are, row behind row."""
    experts = config.experts
    assert experts is not None
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    stacks = {key: own[key] for key in ("gate_up", "down")}
    return own | {
        key: value.view(experts.count, -1, value.shape[-1]) if isinstance(value, Tensor) else value
        for key, value in stacks.items()
    }
