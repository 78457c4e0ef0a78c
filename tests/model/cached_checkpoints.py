"""Tiny checkpoints with a quantised KV cache, as compressed-tensors writes them, and transformers with the same cache."""

import copy
import json

import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file

from tiny_checkpoints import write_checkpoint

FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def quantised_cache(plain, *, strategy="tensor", seed=0):
    """A copy of transformers' model in which the library rounds keys and values, by scales that are drawn: some so small that
    numbers are clamped.
    """
    model = copy.deepcopy(plain)
    config = QuantizationConfig(
        config_groups={}, kv_cache_scheme=FP8 | {"strategy": strategy}, quantization_status="frozen", format="dense"
    )
    apply_quantization_config(model, config, show_progress=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, scale in model.state_dict().items():
            if name.endswith(("k_scale", "v_scale")):
                scale.copy_(torch.exp2(torch.rand(scale.shape, generator=generator) * 8 - 14))
    return model, json.loads(config.model_dump_json(exclude_none=True))


OLDER, MODELOPT = "{}_proj.output_scale", "{}_proj.{}_scale"
"""How scales are named by older writers of compressed-tensors, and by ModelOpt."""


def write_cached(out, family="llama", *, strategy="tensor", names=None, **shape):
    """A checkpoint of a family, its cache quantised; returns transformers' model with the same cache."""
    return write_scales(out, write_checkpoint(out, family, **shape), strategy=strategy, names=names)


def write_scales(out, plain, *, strategy="tensor", names=None):
    """Quantise the cache of a checkpoint where it lies, which is that of transformers' ``plain``, its weights quantised or
    not; returns transformers' model with the same cache. ``names``: other ones of the scales.
    """
    model, config = quantised_cache(plain, strategy=strategy)
    scales = {name: value.clone() for name, value in model.state_dict().items() if name.endswith(("k_scale", "v_scale"))}
    if names is not None:
        for each in "kv":
            scales = {name.replace(f"{each}_scale", names.format(each, each)): value for name, value in scales.items()}
    rewrite(out, lambda state, raw: (state | scales, raw | {"quantization_config": merged(raw, config)}))
    return model


def merged(raw, config):
    """What is said of weights, with what is said of the cache."""
    said = raw.get("quantization_config")
    return config if said is None else said | {"kv_cache_scheme": config["kv_cache_scheme"]}


def rewrite(directory, change):
    """Change tensors and config of a checkpoint where it lies: ``change(tensors, config)`` → both."""
    file = directory / "model.safetensors"
    raw = json.loads((directory / "config.json").read_text())
    state, raw = change(load_file(file), raw)
    save_file(state, file, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw))
