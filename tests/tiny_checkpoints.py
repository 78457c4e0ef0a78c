"""Tiny random checkpoints: models of every family, written by transformers, heads in their published formats, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider_proof.checkpoints import SHAPE, layer_products, write_eagle

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 16},
    "mistral": {"sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {},
    "qwen2-sliding": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5-biases": {"model_type": "ernie4_5", "head_dim": 8, "use_bias": True, "tie_word_embeddings": False},
    "qwen3-biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
}

_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 7,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}
SANDWICHES: dict[str, dict[str, Any]] = {
    "gemma4_text": _GEMMA4,
    "gemma4_text-values": {
        **_GEMMA4,
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "final_logit_softcapping": None,
    },
    "gemma4_text-still": {  # no dimension of a full layer rotates
        **_GEMMA4,
        "model_type": "gemma4_text",
        "rope_parameters": _GEMMA4["rope_parameters"]
        | {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.0, "rope_theta": 1000.0}},
    },
    "gemma4_unified_text": {**_GEMMA4, "num_global_key_value_heads": None, "attention_bias": True},
    "gemma4_text-experts": {
        **_GEMMA4,
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "rms_norm_eps": 0.3,  # with a small one, the norm of the experts' result hides a factor of it
    },
}
"""Families whose layers norm their results."""
_GEMMA4_SMALL: dict[str, Any] = {
    **_GEMMA4,
    "model_type": "gemma4_text",
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "rms_norm_eps": 0.3,  # with a small one, the norm of each layer's input hides a factor of it
    "initializer_range": 0.2,
}
SHARING_SANDWICHES: dict[str, dict[str, Any]] = {
    "gemma4_text-e2b": _GEMMA4_SMALL,
    "gemma4_text-e4b": {  # every sixth layer is full
        **_GEMMA4_SMALL,
        "num_hidden_layers": 12,
        "layer_types": None,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 99,
    },
    "gemma4_text-inputs": {**_GEMMA4_SMALL, "num_kv_shared_layers": 0},
    "gemma4_text-e2b-values": {
        **_GEMMA4_SMALL,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "attention_bias": True,
    },
    "gemma4_unified_text-sharing": {
        **{key: value for key, value in _GEMMA4_SMALL.items() if "per_layer_input" not in key},
        "model_type": "gemma4_unified_text",
    },
    "gemma4_text-small-experts": {
        **_GEMMA4_SMALL,
        "use_double_wide_mlp": False,
        **{key: value for key, value in SANDWICHES["gemma4_text-experts"].items() if "expert" in key or "moe" in key},
    },
}
"""Gemma 4 models whose last layers read the keys and values of earlier ones, or whose layers have inputs of their own."""

_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_GROUPED |= {"n_group": 4, "topk_group": 2}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "mixtral-window": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 7},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "qwen3_moe-dense": {"model_type": "qwen3_moe", **_EXPERTS, "head_dim": 8, "mlp_only_layers": [1]},
    "qwen3_moe-steps": {
        "model_type": "qwen3_moe",
        **_EXPERTS,
        "head_dim": 8,
        "decoder_sparse_step": 2,
        "attention_bias": True,
    },
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 40},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "head_dim": 16,
        "sliding_window": 7,
        "swiglu_limit": 0.5,  # so that the activation clamps
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
    },
    "glm4_moe": {
        **_GROUPED,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "norm_topk_prob": True,
        "num_mtp_layers": 0,
    },
    "glm4_moe-plain": {
        **_GROUPED,
        "model_type": "glm4_moe",
        "n_shared_experts": 2,
        "head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m2": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "head_dim": 16,
        "rotary_dim": 8,
    },
    "hy_v3": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "router_scaling_factor": 1.5,
    },
    "hy_v3-biases": {
        "model_type": "hy_v3",
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "attention_bias": True,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
    "ernie4_5_moe-steps": {
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 5,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 0,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 2,
        "moe_norm_min": 0.5,  # so that the sum of a token's weights is often below it
        "tie_word_embeddings": False,
    },
    "dots1": {**_GROUPED, "n_shared_experts": 1, "head_dim": 16, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    "qwen2_moe-sliding": {
        "model_type": "qwen2_moe",
        **_EXPERTS,
        "shared_expert_intermediate_size": 16,
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
}
"""Families with experts, and what their configs may say."""

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LATENT: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {**_LATENT, "v_head_dim": 24, "rms_norm_eps": 0.05, "routed_scaling_factor": 1.8},
    "glm4_moe_lite-q": {
        **_LATENT,
        "model_type": "glm4_moe_lite",
        "q_lora_rank": None,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "n_group": 2,
        "topk_group": 1,
        "rope_interleave": False,
    },
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v2-q": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "rope_parameters": {**_YARN, "mscale": 1.3},
    },
    "deepseek_v3": {
        **_LATENT,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_mtp_layers": 0,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "deepseek_v3-dense": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "rope_interleave": False,
        "num_mtp_layers": 0,
        "tie_word_embeddings": True,
    },
}
"""Families with latent attention."""

OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.5},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "starcoder2": {"sliding_window": 5},
    "gpt_neox": {},
    "gpt2": {},
    "smollm3": {"pad_token_id": 0},
    "glm": {"head_dim": 8, "pad_token_id": 0},
}
"""Families that transformers' own code runs."""

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "attention_factor": 0.8,
    },
}


def tiny_config(name: str, **overrides: Any) -> Any:
    """Return transformers' config of a family at the tiny shape; ``overrides`` replaces its fields.

    ``name`` is one of the families here, or a family of transformers that needs no further fields.
    """
    fields = (
        SHAPE | (FAMILIES | SANDWICHES | SHARING_SANDWICHES | MIXTURES | LATENT | OTHER_FAMILIES).get(name, {}) | overrides
    )
    family = fields.pop("model_type", name)
    if family in ("gpt_neox", "gpt2"):  # they have as many keys as queries, and no field for it
        del fields["num_key_value_heads"]
    return CONFIG_MAPPING[family](**fields)


def write_checkpoint(directory: str | Path, name: str, *, shards: int = 1, seed: int = 0, **overrides: Any) -> Any:
    """Write a checkpoint of family ``name`` and return transformers' model of it, in float32 and evaluation mode."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, **overrides), dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("norm.weight", ".bias", "proj_bias", "norm_1.weight", "norm_2.weight")):
            torch.nn.init.normal_(parameter, 1.0 if "norm" in parameter_name else 0.0, 0.3)  # ones and zeros hide mistakes
        if parameter_name.endswith(("router.scale", "per_expert_scale")):
            torch.nn.init.uniform_(parameter, 0.3, 3.0)
    for buffer_name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if buffer_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.3)
        if buffer_name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.3, 1.5)
    size = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    model.save_pretrained(directory, max_shard_size=size if shards == 1 else size // shards)
    return model.eval()


def store_mxfp4(directory: Path, model: Any, seed: int = 3) -> None:
    """Replace the experts of a gpt-oss checkpoint by random MXFP4 blocks and scales, and those of transformers' ``model`` of
    it by the numbers that transformers reads in them.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = parameter.shape
            grid = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*grid, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, grid, dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    replaced = {name.removesuffix("_blocks") for name in stored}
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    rewrite(
        directory,
        lambda state: {name: value for name, value in state.items() if name not in replaced} | stored,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": modules},
    )


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any] | None = None, **config: Any) -> None:
    """Change a checkpoint where it is: ``change`` modifies the tensors or returns other ones, ``config`` replaces fields."""
    if change is not None:
        state = load_file(directory / "model.safetensors")
        made = change(state)
        state = {key: value.contiguous() for key, value in (made if isinstance(made, dict) else state).items()}
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    if config:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))


def write_eagle_variant(
    directory: Path, *, bias: bool = True, input_norm: bool = False, embedding: bool = True, fmt: str = "safetensors"
) -> dict[str, torch.Tensor]:
    """Write the EAGLE head of :func:`write_eagle` without its bias or embedding, with a norm before attention, or by
    torch.save; returns its tensors.
    """
    state = write_eagle(directory)
    if not bias:
        del state["fc.bias"]
    if input_norm:
        state["layers.0.input_layernorm.weight"] = torch.randn(SHAPE["hidden_size"]) * 0.3
    if not embedding:
        del state["embed_tokens.weight"]
    (directory / "model.safetensors").unlink()
    _save_tensors(directory, state, fmt)
    return state


def save_head(directory: Path, config: Any, state: dict[str, torch.Tensor], fmt: str) -> None:
    """Write the config and tensors of a draft head, as ``model.safetensors`` or by torch.save for any other ``fmt``."""
    config.save_pretrained(directory)
    _save_tensors(directory, state, fmt)


def _save_tensors(directory: Path, state: dict[str, torch.Tensor], fmt: str) -> None:
    if fmt == "safetensors":
        save_file(state, directory / "model.safetensors")
    else:
        torch.save(state, directory / "pytorch_model.bin")


def write_eagle3(
    directory: str | Path,
    *,
    draft_vocab: int = 40,
    seed: int = 2,
    layers: tuple[int, ...] | None = (0, 1, 2),
    depth: int = 1,
    fmt: str = "safetensors",
    vocab: int = 96,
    mask: int | None = None,
) -> dict[str, torch.Tensor]:
    """Write a random EAGLE-3 head in its published format; returns its tensors. ``layers``: whose inputs it reads; ``depth``:
    its own; ``mask``: the mask token of a parallel one (P-EAGLE).
    """
    torch.manual_seed(seed)
    config = tiny_config("llama", num_hidden_layers=depth)
    hidden, inner, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        **layer_products("midlayer", hidden, inner, kv),
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        shapes[f"midlayer.self_attn.{name}.weight"] = (shapes[f"midlayer.self_attn.{name}.weight"][0], 2 * hidden)
    for index in range(1, depth):
        for key in [key for key in shapes if key.startswith("midlayer.") and "hidden_norm" not in key]:
            narrow = tuple(min(size, hidden) if "_proj" in key and "self_attn" in key else size for size in shapes[key])
            shapes[key.replace("midlayer", f"layers.{index}")] = narrow
    if mask is not None:
        config.mask_token_id = mask
        shapes["mask_hidden"] = (1, 1, 3 * hidden)
        shapes["embed_tokens.weight"] = (vocab, hidden)
    state = {key: torch.randn(shape) * 0.3 for key, shape in shapes.items()}
    kept = torch.randperm(vocab)[:draft_vocab].sort().values
    state["d2t"] = kept - torch.arange(draft_vocab)
    state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    config.architectures = ["LlamaForCausalLMEagle3"]
    config.draft_vocab_size = draft_vocab
    if layers is not None:
        config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
    save_head(Path(directory), config, state, fmt)
    return state


def write_peagle(
    directory: str | Path, *, mask: int = 95, depth: int = 2, layers: tuple[int, ...] = (0, 1, 2), fmt: str = "safetensors"
) -> dict[str, torch.Tensor]:
    """Write a random P-EAGLE head in its published format; returns its tensors. As :func:`write_eagle3`."""
    return write_eagle3(directory, seed=9, layers=layers, depth=depth, fmt=fmt, mask=mask)


def write_mtp(directory: str | Path, *, heads: int = 2, seed: int = 5) -> dict[str, torch.Tensor]:
    """Write random heads of multi-token prediction in the format that MiMo publishes; returns their tensors."""
    torch.manual_seed(seed)
    config = tiny_config("llama")
    hidden, inner, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(heads):
        layer = f"model.mtp_layers.{index}"
        shapes |= {
            f"{layer}.token_layernorm.weight": (hidden,),
            f"{layer}.hidden_layernorm.weight": (hidden,),
            f"{layer}.input_proj.weight": (hidden, 2 * hidden),
            f"{layer}.final_layernorm.weight": (hidden,),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            **layer_products(layer, hidden, inner, kv),
        }
    state = {key: torch.randn(shape) * 0.3 for key, shape in shapes.items()}
    config.num_nextn_predict_layers = heads
    save_head(Path(directory), config, state, "safetensors")
    return state


def write_dflash(
    directory: str | Path,
    *,
    block_size: int = 4,
    mask: int = 95,
    reads: tuple[int, ...] = (0, 1),
    layers: int = 2,
    seed: int = 5,
    fmt: str = "safetensors",
) -> dict[str, torch.Tensor]:
    """Write a random DFlash head in its published format; returns its tensors. ``reads``: layers whose output it reads."""
    torch.manual_seed(seed)
    config = tiny_config("qwen3", num_hidden_layers=layers)
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {"fc.weight": (hidden, len(reads) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for index in range(layers):
        own = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (heads, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, heads),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"layers.{index}.{key}": shape for key, shape in own.items()}
    state = {key: torch.randn(shape) * 0.3 for key, shape in shapes.items()}
    config.architectures = ["DFlashDraftModel"]
    config.block_size = block_size
    config.dflash_config = {"mask_token_id": mask, "target_layer_ids": list(reads)}
    save_head(Path(directory), config, state, fmt)
    return state


TEXT = ["the cat sat on the mat", "naïve café, déjà vu", "日本語のテキスト", "smile 🙂 and 👩‍👩‍👧", "a  b   c\n\td"]


def byte_level_tokenizer(size: int = 300) -> Tokenizer:
    """Return a byte-level BPE tokenizer with a start token, like those of Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return tokenizer


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with one token per word, in the order of ``words``; the first is the unknown token."""
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Return a BPE tokenizer with byte fallback and sentencepiece spaces, like those of Llama 2 and Mistral."""
    words = ["▁", "▁the", "▁cat", "a", "b", "c", "t", "h", "e", "▁▁", "\n", "é", ".", "▁a", "日"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
