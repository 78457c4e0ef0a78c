"""Tiny random checkpoints for the proof: a vision-language model, written by transformers, and an EAGLE head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# untyped in transformers
_VISION: Any = transformers.AutoModelForImageTextToText

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # wide enough that random logits have a clear winner
    "initializer_range": 0.3,
}

VISION_TOKENS = {"vision_start_token_id": 90, "vision_end_token_id": 91, "image_token_id": 92, "video_token_id": 93}

START, END = VISION_TOKENS["vision_start_token_id"], VISION_TOKENS["vision_end_token_id"]
IMAGE, VIDEO = [START, VISION_TOKENS["image_token_id"], END], [START, VISION_TOKENS["video_token_id"], END]

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
    directory: str | Path,
    family: str,
    *,
    shards: int = 1,
    seed: int = 0,
    rope: dict[str, Any] | None = None,
    tie: bool = False,
) -> Any:
    """Write a tiny vision-language checkpoint of ``family`` with its image processor to ``directory``, and return
    transformers' model of it.

    ``shards`` is the approximate number of tensor files. ``rope`` replaces entries of the rope parameters. ``tie``: the
    output head is the embedding.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}}
    text |= _TEXT.get(family, {})
    text["rope_parameters"] = text["rope_parameters"] | (rope or {})
    vision = VISION_FAMILIES[family] | {"patch_size": 4, "initializer_range": 0.2}
    make: Any = CONFIG_MAPPING[family]
    config = make(text_config=text, vision_config=vision, tie_word_embeddings=tie, **VISION_TOKENS)
    torch.manual_seed(seed)
    model = _VISION.from_config(config, dtype=torch.float32)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=size if shards == 1 else size // shards)
    Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1600}).save_pretrained(directory)
    if family in _TEXT:  # prompts of videos state times as text
        spelled = {character: token for token, character in enumerate("0123456789.<> second", 60)}
        Tokenizer(models.BPE(vocab=spelled, merges=[])).save(str(Path(directory) / "tokenizer.json"))
        limits = {"size": {"shortest_edge": 128, "longest_edge": 3200}}  # of all frames together
        (Path(directory) / "video_preprocessor_config.json").write_text(json.dumps(limits))
    return model.eval()


def picture(rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return an image of random pixels, [rows, columns, 3] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


def write_eagle(
    directory: str | Path,
    *,
    hidden_size: int = 32,
    seed: int = 1,
    bias: bool = True,
    input_norm: bool = False,
    embedding: bool = True,
    fmt: str = "safetensors",
) -> dict[str, torch.Tensor]:
    """Write a random EAGLE head in its published format to ``directory``, and return its tensors by name.

    ``bias``, ``input_norm`` and ``embedding``: the head has a bias of its fusion, a norm before attention, an embedding of
    its own. ``fmt``: as in :func:`save_head`.
    """
    torch.manual_seed(seed)
    config: Any = CONFIG_MAPPING["llama"](**SHAPE | {"hidden_size": hidden_size, "num_hidden_layers": 1})
    inner, kv = config.intermediate_size, config.num_key_value_heads * config.head_dim
    shapes = {
        "fc.weight": (hidden_size, 2 * hidden_size),
        **layer_products("layers.0", hidden_size, inner, kv),
        "layers.0.post_attention_layernorm.weight": (hidden_size,),
    }
    if bias:
        shapes["fc.bias"] = (hidden_size,)
    if input_norm:
        shapes["layers.0.input_layernorm.weight"] = (hidden_size,)
    if embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden_size)
    state = {key: torch.randn(shape) * 0.3 for key, shape in shapes.items()}
    config.architectures = ["LlamaForCausalLM"]
    save_head(Path(directory), config, state, fmt)
    return state


def layer_products(prefix: str, hidden: int, inner: int, kv: int, *, reads: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's matrices, by name; ``reads`` is the input width of attention (None: ``hidden``)."""
    reads = reads or hidden
    return {
        f"{prefix}.self_attn.q_proj.weight": (hidden, reads),
        f"{prefix}.self_attn.k_proj.weight": (kv, reads),
        f"{prefix}.self_attn.v_proj.weight": (kv, reads),
        f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }


def save_head(directory: Path, config: Any, state: dict[str, torch.Tensor], fmt: str) -> None:
    """Write the config and tensors of a draft head, as ``model.safetensors`` or by torch.save for any other ``fmt``."""
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    if fmt == "safetensors":
        save_file(state, directory / "model.safetensors")
    else:
        torch.save(state, directory / "pytorch_model.bin")
