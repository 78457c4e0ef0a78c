"""Tiny random checkpoints for the proof: a vision-language model, written by transformers, and an EAGLE head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file
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

IMAGE = [VISION_TOKENS[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]


def write_vision_checkpoint(
    directory: str | Path, family: str, *, text: dict[str, Any], vision: dict[str, Any], **fields: Any
) -> Any:
    """Write a tiny vision-language checkpoint of ``family`` with its image processor to ``directory``, and return
    transformers' model of it.

    ``text`` is what the text model's config has besides ``SHAPE``, ``vision`` is the config of the tower but for the patch
    size, and ``fields`` are of the whole config.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make: Any = CONFIG_MAPPING[family]
    own_vision = vision | {"patch_size": 4, "initializer_range": 0.2}
    config = make(text_config=SHAPE | text, vision_config=own_vision, **VISION_TOKENS | fields)
    torch.manual_seed(0)
    model = _VISION.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1600}).save_pretrained(directory)
    return model.eval()


def picture(rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return an image of random pixels, [rows, columns, 3] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


def write_eagle(directory: Path) -> dict[str, torch.Tensor]:
    """Write a random EAGLE head in its published format to ``directory``, and return its tensors by name."""
    torch.manual_seed(1)
    config: Any = CONFIG_MAPPING["llama"](**SHAPE | {"num_hidden_layers": 1})
    hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        **layer_products("layers.0", hidden, config.intermediate_size, kv),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "fc.bias": (hidden,),
        "embed_tokens.weight": (config.vocab_size, hidden),
    }
    state = {key: torch.randn(shape) * 0.3 for key, shape in shapes.items()}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    save_file(state, directory / "model.safetensors")
    return state


def layer_products(prefix: str, hidden: int, inner: int, kv: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's matrices, by name."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
        f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
        f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }
