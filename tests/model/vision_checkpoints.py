"""Random vision-language models of transformers, as oracles, with prompts of text, images of odd sizes and videos."""

import json
import random

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model.hybrid_checkpoints import config_values, randomize
from outrider_proof.checkpoints import picture

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
_MARKS = {"image_token_id": 30, "video_token_id": 31, "vision_start_token_id": 32, "vision_end_token_id": 33}
START, END, IMAGE, VIDEO = 32, 33, 30, 31


def random_config(family, seed, **overrides):
    """A config with odd sizes of patches, heads and the grid of positions, and any share of the axes in the rope.

    ``overrides`` are of the text model.
    """
    draw = random.Random(f"vision {family} {seed}")
    text = config_values(family if "5" in family else "qwen3_5", seed)
    rope = text["rope_parameters"]
    if "vl" in family:
        hybrid = {key for key in text if key.startswith("linear_") or key == "layer_types"}
        text = {key: value for key, value in text.items() if key not in hybrid} | {"head_dim": draw.choice((8, 16, 20))}
        text |= {"attention_bias": draw.random() < 0.3}
        rope["partial_rotary_factor"] = 1.0
    if family == "qwen3_vl_moe":
        text |= {"num_experts": draw.choice((3, 4)), "num_experts_per_tok": 2, "moe_intermediate_size": draw.choice((8, 12))}
        text |= {"mlp_only_layers": [0] if draw.random() < 0.3 else []}
    text |= overrides
    frequencies = int(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    height = draw.randint(0, frequencies // 3)
    width = draw.randint(0, frequencies // 3)
    rope["mrope_section"] = [frequencies - height - width, height, width]
    depth, layers = draw.randint(1, 4), text["num_hidden_layers"]
    stacked = draw.randint(0, min(depth, layers - 1)) if "vl" in family else 0
    heads = draw.choice((1, 2, 3))
    vision = {
        "depth": depth,
        "hidden_size": heads * draw.choice((4, 8, 12)),
        "num_heads": heads,
        "intermediate_size": draw.choice((20, 36)),
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": draw.choice((1, 9, 16, 25)),
        "patch_size": draw.choice((2, 4, 5)),
        "temporal_patch_size": draw.choice((1, 2, 3)),
        "spatial_merge_size": draw.choice((1, 2, 3)),
        "in_channels": 3,
        "hidden_act": draw.choice(("gelu_pytorch_tanh", "gelu")),
    }
    if "vl" in family:
        vision["deepstack_visual_indexes"] = sorted(draw.sample(range(depth), stacked))
    tie = text.pop("tie_word_embeddings")
    return CONFIG_MAPPING[family](text_config=text, vision_config=vision, tie_word_embeddings=tie, **_MARKS)


def write(directory, family, seed, *, transposed=False, **overrides):
    """Write a random checkpoint with its processor's configs. Return transformers' model of it.

    ``transposed``: stacks of experts as Qwen publishes them.
    """
    config = random_config(family, seed, **overrides)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model, seed)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    if transposed:
        tensors = load_file(directory / "model.safetensors")
        stacks = {key: value.transpose(1, 2).contiguous() for key, value in tensors.items() if ".experts." in key}
        save_file(tensors | stacks, directory / "model.safetensors", metadata={"format": "pt"})
    vision = config.vision_config
    size = (vision.patch_size * vision.spatial_merge_size) ** 2
    processor = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "size": {"shortest_edge": size, "longest_edge": 12 * size},
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.3, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    video = {"size": {"shortest_edge": size, "longest_edge": 20 * size}}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return model


def random_prompt(processor, vision, seed):
    """Tokens with a placeholder for each feature, and their media: up to four images and videos with text between."""
    draw = random.Random(seed)
    tokens, media = [], []

    def text(most):
        tokens.extend(draw.randrange(30) for _ in range(draw.randint(0, most)))

    for _ in range(draw.randint(1, 4)):
        text(6)
        rows, columns = draw.randint(3, 40), draw.randint(3, 40)
        if draw.random() < 0.6:
            medium, token = processor.image(picture(rows, columns, seed=draw.randrange(99))), IMAGE
        else:
            count = draw.randint(1, 5)
            frames = [picture(rows, columns, seed=draw.randrange(99)) for _ in range(count)]
            medium, token = processor.video(frames, frames_per_second=2.0), VIDEO
        media.append(medium)
        for run in medium.grid.runs(vision):
            text(3 if token == VIDEO else 0)
            tokens.extend([START, *[token] * run.features(vision), END])
    text(6)
    return [*tokens, draw.randrange(30)], media


def reference_inputs(tokens, media):
    """What transformers' own processor hands to its model."""
    kinds = {IMAGE: 1, VIDEO: 2}
    inputs = {
        "input_ids": torch.tensor([tokens]),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64),
        "mm_token_type_ids": torch.tensor([[kinds.get(token, 0) for token in tokens]]),
    }
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        chosen = [each for each in media if each.grid.kind == kind]
        if chosen:
            inputs[pixels] = torch.cat([each.pixels for each in chosen])
            grids = [[each.grid.frames, each.grid.rows, each.grid.columns] for each in chosen]
            inputs[f"{kind}_grid_thw"] = torch.tensor(grids)
    return inputs
