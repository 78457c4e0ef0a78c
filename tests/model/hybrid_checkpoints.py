"""Tiny random hybrid models of transformers, as oracles, and their checkpoints.

Norms, ``A_log`` and ``dt_bias`` are random, because the defaults 0 and 1 hide errors.
"""

import random

import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_CLASSES = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
}


def config_values(family, seed):
    """A config with odd head counts, groups, kernel sizes and patterns of layers."""
    draw = random.Random(f"{family} {seed}")
    layers = draw.randint(2, 5)
    kinds = [draw.choice(("linear_attention", "linear_attention", "full_attention")) for _ in range(layers)]
    kinds[draw.randrange(layers)] = "full_attention"
    kinds[kinds.index("full_attention") - 1] = "linear_attention"
    if "full_attention" not in kinds:
        kinds[0] = "full_attention"
    heads, groups = draw.choice(((2, 1), (4, 2), (3, 3), (6, 2)))
    keys, repeats = draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
    size = draw.choice((8, 16))
    values = {
        "vocab_size": draw.choice((40, 53)),
        "hidden_size": draw.choice((24, 32)),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
        "linear_key_head_dim": draw.choice((4, 6, 8)),
        "linear_value_head_dim": draw.choice((4, 5, 8)),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * repeats,
        "max_position_embeddings": 512,
        "tie_word_embeddings": draw.random() < 0.3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": draw.choice((0.25, 0.5, 1.0)),
            **({} if family == "qwen3_next" else {"mrope_section": [1, 1, 0], "mrope_interleaved": True}),
        },
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family != "qwen3_5_moe":
        values["intermediate_size"] = draw.choice((20, 36))
    if family != "qwen3_5":
        values |= {
            "num_experts": draw.choice((3, 4)),
            "num_experts_per_tok": draw.choice((1, 2)),
            "moe_intermediate_size": draw.choice((8, 12)),
            "shared_expert_intermediate_size": draw.choice((8, 10)),
        }
    if family == "qwen3_next":
        values |= {"norm_topk_prob": draw.random() < 0.7, "mlp_only_layers": [0] if draw.random() < 0.3 else []}
    return values


def random_model(family, seed, **overrides):
    """The oracle, in float32."""
    kind, model_class = _CLASSES[family]
    generator = torch.Generator().manual_seed(seed)
    model = model_class(kind(**config_values(family, seed) | overrides)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            scale = 0.3 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.copy_(noise * scale if "A_log" not in name else noise.abs())
    return model


def greedy(model, prompt, count):
    """Greedy tokens of the oracle after ``prompt``."""
    with torch.no_grad():
        made = model.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, use_cache=True)
    return made[0, len(prompt) :].tolist()


def logits(model, tokens):
    """Logits of the oracle at every token."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0]
