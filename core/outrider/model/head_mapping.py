"""Mapping from a checkpoint's tensors to the weights of EAGLE and EAGLE-3 heads. Letters as in ``mapping``."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from outrider.model.config import ModelConfig
from outrider.model.eagle import EagleWeights
from outrider.model.eagle3 import Eagle3Weights
from outrider.model.eagle3_config import Eagle3Options
from outrider.model.mapping import SINGLE_RANK, layer_targets, layer_weights, table_target
from outrider.model.pieces import Piece, Target
from outrider.model.shards import Shards


def eagle_targets(config: ModelConfig, present: Container[str], shards: Shards = SINGLE_RANK) -> list[Target]:
    """Return the weights of an EAGLE head. ``present`` holds the checkpoint's tensor names, for optional tensors.

    Published heads have no ``layers.0.input_layernorm`` and no final norm. They may have ``fc.bias`` and their own copies of
    the embedding and of the output head.
    """
    hidden = config.hidden_size
    targets = [Target("fusion", (Piece("fc.weight", (hidden, 2 * hidden)),))]
    if "fc.bias" in present:
        targets.append(Target("fusion_bias", (Piece("fc.bias", (hidden,)),)))
    if "embed_tokens.weight" in present:
        targets.append(table_target("embedding", "embed_tokens.weight", config.vocab_size, hidden, shards))
    if "lm_head.weight" in present:
        targets.append(table_target("head", "lm_head.weight", config.vocab_size, hidden, shards))
    for index in range(config.num_layers):
        norm = index > 0 or "layers.0.input_layernorm.weight" in present
        targets += layer_targets(config, f"layers.{index}", f"layers.{index}", attention_norm=norm, shards=shards)
    return targets


def eagle_weights(config: ModelConfig, weights: Mapping[str, Any], *, embedding: Tensor) -> EagleWeights:
    """Return the head's weights from the loaded tensors. ``embedding`` is the target's, for a head without its own."""
    return EagleWeights(
        fusion=weights["fusion"],
        fusion_bias=weights.get("fusion_bias"),
        embedding=weights.get("embedding", embedding),
        layers=tuple(layer_weights(weights, f"layers.{index}") for index in range(config.num_layers)),
    )


def eagle3_targets(
    config: ModelConfig,
    target: ModelConfig,
    options: Eagle3Options,
    draft_vocab: int,
    present: Container[str],
    shards: Shards = SINGLE_RANK,
) -> list[Target]:
    """Return the weights of an EAGLE-3 head, whose first attention reads embedding and hidden state side by side."""
    hidden, states = config.hidden_size, len(options.layers)
    targets = [
        Target("norm", (Piece("norm.weight", (hidden,)),)),
        Target("hidden_norm", (Piece(f"{options.prefix}.hidden_norm.weight", (hidden,)),)),
    ]
    if states:
        targets.append(Target("fusion", (Piece("fc.weight", (hidden, states * target.hidden_size)),)))
    if "lm_head.weight" in present or hidden != target.hidden_size:
        targets.append(table_target("head", "lm_head.weight", draft_vocab, hidden, shards))
    if "embed_tokens.weight" in present or hidden != target.hidden_size:
        targets.append(table_target("embedding", "embed_tokens.weight", config.vocab_size, hidden, shards))
    if options.norm_before_fc:
        targets.append(Target("input_norm", (Piece("input_norm.weight", (states * target.hidden_size,)),)))
    if options.fc_norm:
        targets += [
            Target(f"state_norms.{index}", (Piece(f"fc_norm.{index}.weight", (target.hidden_size,)),))
            for index in range(states)
        ]
    targets += layer_targets(config, options.prefix, "layer", attention_width=2 * hidden, shards=shards)
    for index in range(1, config.num_layers):
        targets += layer_targets(config, f"layers.{index}", f"later.{index}", shards=shards)
    return targets


def eagle3_weights(
    weights: Mapping[str, Any], *, num_layers: int, embedding: Tensor, target_ids: Tensor | None
) -> Eagle3Weights:
    """Return the head's weights from the loaded tensors. ``embedding`` is the target's, for a head without its own."""
    return Eagle3Weights(
        fusion=weights.get("fusion"),
        embedding=weights.get("embedding", embedding),
        head=weights.get("head"),
        norm=weights["norm"],
        hidden_norm=weights["hidden_norm"],
        layer=layer_weights(weights, "layer"),
        target_ids=target_ids,
        input_norm=weights.get("input_norm"),
        state_norms=tuple(weights[name] for name in sorted(weights) if name.startswith("state_norms.")),
        later=tuple(layer_weights(weights, f"later.{index}") for index in range(1, num_layers)),
    )
