"""Tiny random checkpoints of every vision-language family, with image and video processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from outrider_proof import checkpoints
from outrider_proof.checkpoints import VISION_TOKENS

VIDEO = [VISION_TOKENS[f"{name}_token_id"] for name in ("vision_start", "video", "vision_end")]

_ALTERNATING = {
    "depth": 2,
    "hidden_size": 24,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "num_position_embeddings": 16,
}
VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 24,
        "out_hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 40,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 3,
    },
    "qwen3_vl": _ALTERNATING | {"deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": _ALTERNATING | {"deepstack_visual_indexes": [0]},
    "qwen3_5": _ALTERNATING,
    "qwen3_5_moe": _ALTERNATING,
}
"""Config of the vision tower of each family, but for the patch size."""

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 8}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"head_dim": 8},
    "qwen3_vl_moe": {"head_dim": 8} | _EXPERTS,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID | _EXPERTS,
}
"""What a family's text model has in addition to ``SHAPE``."""


def write_vision_checkpoint(
    directory: Path, family: str, *, shards: int = 1, rope: dict[str, Any] | None = None, tie: bool = False
) -> Any:
    """Write a tiny checkpoint of ``family`` and return transformers' model of it.

    ``shards``: roughly the number of tensor files. ``rope`` replaces entries of the rope parameters. ``tie``: the output head
    is the embedding.
    """
    text = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}}
    text |= _TEXT.get(family, {})
    text["rope_parameters"] = text["rope_parameters"] | (rope or {})
    model = checkpoints.write_vision_checkpoint(
        directory, family, text=text, vision=VISION_FAMILIES[family], tie_word_embeddings=tie
    )
    if shards > 1:
        (directory / "model.safetensors").unlink()
        model.save_pretrained(directory, max_shard_size=sum(parameter.nbytes for parameter in model.parameters()) // shards)
    if family in _TEXT:  # prompts of videos state times as text
        spelled = {character: token for token, character in enumerate("0123456789.<> second", 60)}
        Tokenizer(models.BPE(vocab=spelled, merges=[])).save(str(directory / "tokenizer.json"))
        limits = {"size": {"shortest_edge": 128, "longest_edge": 3200}}  # of all frames together
        (directory / "video_preprocessor_config.json").write_text(json.dumps(limits))
    return model
