"""Tiny random hybrid models of transformers, as oracles, and their checkpoints.

Norms, ``A_log`` and ``dt_bias`` are random, because the defaults 0 and 1 hide errors.
"""

import json
import random
from importlib import import_module

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

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
        },
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family != "qwen3_next":
        frequencies = int(size * values["rope_parameters"]["partial_rotary_factor"]) // 2
        sections = [frequencies - frequencies // 2, frequencies // 2, 0]
        values["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
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
    model = model_class(kind(**config_values(family, seed) | overrides)).float().eval()
    randomize(model, seed)
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


class MtpOracle(torch.nn.Module):
    """The head of multi-token prediction, from transformers' parts: two norms, a projection, a layer and a norm."""

    def __init__(self, model, seed):
        super().__init__()
        config = model.config.get_text_config()
        module = import_module(type(model).__module__)
        layers, norms = (getattr(module, f"{type(model).__name__.partition('For')[0]}{part}") for part in _PARTS)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = norms(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = norms(config.hidden_size, config.rms_norm_eps)
        self.norm = norms(config.hidden_size, config.rms_norm_eps)
        attention = config.layer_types.index("full_attention")
        self.layers = torch.nn.ModuleList([layers(config, attention)])
        randomize(self, seed)
        self.float().eval()

    def forward(self, model, tokens):
        """Results of the head at every position but the last, [T - 1, H], over the model's states of ``tokens``."""
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            states = model.model(ids).last_hidden_state
            positions = torch.arange(len(tokens) - 1).unsqueeze(0)
            axes = positions if "Next" in type(model).__name__ else positions.expand(3, 1, -1)
            return self.states(model.model, states, model.model.embed_tokens(ids), axes)

    def states(self, text, states, embeddings, axes):
        """The same from the states and the embeddings of all tokens, [1, T, H], and positions on each axis."""
        with torch.no_grad():
            embedded = self.pre_fc_norm_embedding(embeddings[:, 1:])
            x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(states[:, :-1])), dim=-1))
            length = x.shape[1]
            rotary = text.rotary_emb(x, axes)
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            return self.norm(self.layers[0](x, position_embeddings=rotary, attention_mask=mask))[0]


_PARTS = ("DecoderLayer", "RMSNorm")


def randomize(module, seed):
    """Random weights: norms and ``A_log`` too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            scale = 0.3 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.copy_(noise * scale if "A_log" not in name else noise.abs())


def save(model, directory, *, head=None, nested=False):
    """Write the checkpoint in two shards: the head of multi-token prediction has its own.

    ``nested``: as a vision-language model writes it, with its config inside and its tower.
    """
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    if nested:
        tensors = {
            key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: value
            for key, value in tensors.items()
        }
        vision = Qwen3_5VisionConfig(
            depth=1, hidden_size=8, num_heads=1, intermediate_size=8, out_hidden_size=config["hidden_size"], patch_size=2
        )
        tower = Qwen3_5VisionModel(vision).float()
        tensors |= {f"model.visual.{key}": value.contiguous() for key, value in tower.state_dict().items()}
        outer = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config}
        outer |= {"tie_word_embeddings": config["tie_word_embeddings"], "vision_config": vision.to_dict()}
        config = outer
    heads = {} if head is None else {f"mtp.{key}": value.contiguous() for key, value in head.state_dict().items()}
    (config["text_config"] if nested else config)["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    shards = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": heads}
    index = {}
    for name, part in shards.items():
        if part:
            save_file(part, directory / name, metadata={"format": "pt"})
            index |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
