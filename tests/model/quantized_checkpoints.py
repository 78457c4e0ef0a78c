"""Tiny quantised checkpoints, in each published form, of plain ones that transformers wrote.

compressed-tensors' own compressors write its formats. Those of Hugging Face's fp8, AWQ and GPTQ follow their published
layouts; what they stand for is computed here from the values before they're packed.
"""

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from outrider.device.kernels.formats import INT8_LARGEST

LINEARS = ("_proj", "_with_mqa", "fc", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", ".w1", ".w2", ".w3")


def is_linear(key, head):
    module = key.removesuffix(".weight")
    return key.endswith(".weight") and (module.endswith(LINEARS) or (head and module.endswith("lm_head")))


def rewrite(directory, out, convert, config, *, head=False, skip=()):
    """Every product's weight by ``convert(module, weight)`` → (tensors by suffix, the plain weight); plain ones go too.

    Returns the plain state that the new checkpoint stands for.
    """
    out.mkdir(parents=True, exist_ok=True)
    state, made, plain = load_file(directory / "model.safetensors"), {}, {}
    for key, tensor in state.items():
        module = key.removesuffix(".weight")
        if is_linear(key, head) and not any(part in module for part in skip):
            tensors, plain[key] = convert(module, tensor)
            made |= {f"{module}.{suffix}": value.contiguous() for suffix, value in tensors.items()}
        else:
            made[key] = plain[key] = tensor
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return plain


# -- compressed-tensors --------------------------------------------------------------------------------------------

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
DYNAMIC = {"strategy": "token", "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
COMPRESSED = {
    "fp8-tensor-static": ("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor"}),
    "fp8-channel-dynamic": ("float-quantized", FP8 | {"strategy": "channel"}, FP8 | DYNAMIC),
    "fp8-block": (
        "float-quantized",
        FP8 | {"strategy": "block", "block_structure": [128, 128]},
        FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "int8-w8a8": ("int-quantized", INT8 | {"strategy": "channel"}, INT8 | DYNAMIC),
    "int8-w8a16": ("pack-quantized", INT8 | {"strategy": "channel"}, None),
    "int8-static": ("int-quantized", INT8 | {"strategy": "tensor"}, INT8 | {"strategy": "tensor"}),
    "int8-asymmetric": ("int-quantized", INT8 | {"strategy": "channel", "symmetric": False}, None),
    "int4-g128": ("pack-quantized", INT4 | {"group_size": 128}, None),
    "int4-g32-asymmetric": ("pack-quantized", INT4 | {"group_size": 32, "symmetric": False}, None),
    "int4-block-asymmetric": (
        "pack-quantized",
        INT4 | {"strategy": "block", "block_structure": [32, 64], "symmetric": False},
        None,
    ),
    "int8-tensor-asymmetric": ("pack-quantized", INT8 | {"strategy": "tensor", "symmetric": False}, None),
    "int4-channel": ("pack-quantized", INT4 | {"strategy": "channel"}, None),
}


def group_of(name, targets=("Linear",)):
    """A config group of that name in COMPRESSED."""
    form, weights, inputs = COMPRESSED[name]
    return {"targets": list(targets), "weights": weights, "input_activations": inputs, "format": form}


def compressed_config(groups, ignore=("lm_head",), **more):
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": next(iter(groups.values()))["format"] if len(groups) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(ignore),
        **more,
    }


def compressor(name):
    """``convert`` of :func:`rewrite` by the library's own compressor."""
    form, weights, inputs = COMPRESSED[name]
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=form)
    kind = BaseCompressor.get_value_from_registry(form)

    def convert(module, weight):
        low, high = extremes(weight, args)
        scale, zero = calculate_qparams(low, high, args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        state = kind.compress(state, scheme)
        if inputs and not inputs.get("dynamic"):
            state["input_scale"] = torch.tensor([0.02])
        made = dict(state)
        plain = kind.decompress(dict(state), scheme)["weight"]
        return made, plain

    return convert


def extremes(weight, args):
    """The smallest and the largest value of what shares a scale."""
    strategy = getattr(args.strategy, "value", args.strategy)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "group":
        grouped = weight.unflatten(1, (-1, args.group_size))
        return grouped.amin(-1), grouped.amax(-1)
    blocks = in_blocks(weight, *args.block_structure)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def in_blocks(weight, rows, columns):
    """[out, in] → [blocks down, rows, blocks across, columns], zeros behind it."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def write_compressed(directory, out, name, *, ignore=("lm_head",), **more):
    config = compressed_config({"group_0": group_of(name)}, ignore, **more)
    head = "lm_head" not in ignore
    return rewrite(
        directory, Path(out), compressor(name), config, head=head, skip=[each for each in ignore if head or each != "lm_head"]
    )


# -- the others ----------------------------------------------------------------------------------------------------


def write_fp8(directory, out, *, block=(128, 128), skip=("lm_head",), e8m0=False, names=("weight_scale", "input_scale")):
    """Hugging Face's ``fp8``: by blocks with dynamic activations, or by the tensor with static ones (block None). ``names``:
    of the tensor's scale and of that of its activations.
    """

    def convert(module, weight):
        if block is None:
            scale = weight.abs().amax() / 448
            data = (weight / scale).to(torch.float8_e4m3fn)
            return {"weight": data, names[0]: scale, names[1]: torch.tensor(0.03)}, data.float() * scale
        scale = in_blocks(weight, *block).abs().amax((1, 3)) / 448
        if e8m0:
            scale = torch.exp2(scale.log2().ceil())
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: weight.shape[0], : weight.shape[1]]
        data = (weight / wide).to(torch.float8_e4m3fn)
        stored = scale.to(torch.float8_e8m0fnu) if e8m0 else scale
        return {"weight": data, "weight_scale_inv": stored}, data.float() * wide

    config = {
        "quant_method": "fp8",
        "activation_scheme": "static" if block is None else "dynamic",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": list(skip),
    }
    return rewrite(directory, Path(out), convert, config, skip=skip)


MODELOPT = {"FP8": "fp8-tensor-static", "FP8_PER_CHANNEL_PER_TOKEN": "fp8-channel-dynamic"}
"""ModelOpt's names of what compressed-tensors stores in the same tensors."""


def write_modelopt(directory, out, algorithm, *, plain=("lm_head",), beside=True, cache=None):
    """ModelOpt's ``FP8`` and its like. ``plain``: modules that aren't quantised, with wildcards. ``beside``: in a file of its
    own, as older writers left it. ``cache``: what it says of the KV cache.
    """
    skip = [name.strip("*").rstrip(".") for name in plain]
    state = rewrite(directory, Path(out), compressor(MODELOPT[algorithm]), {}, head="lm_head" not in plain, skip=skip)
    raw = json.loads((out / "config.json").read_text())
    raw.pop("quantization_config")
    producer = {"producer": {"name": "modelopt", "version": "0.33.0"}}
    if beside:
        said = {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "exclude_modules": list(plain)}
        (out / "hf_quant_config.json").write_text(json.dumps(producer | {"quantization": said}))
    else:
        kept = {} if cache is None else {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
        said = {"quant_algo": algorithm, "ignore": list(plain), "quant_method": "modelopt", **kept}
        raw["quantization_config"] = producer | said
    (out / "config.json").write_text(json.dumps(raw))
    return state


def grouped(weight, group, *, symmetric, bits=4):
    """Unsigned values [out, in], zero points and scales [out, groups], and what they stand for."""
    size = weight.shape[1] if group == -1 else group
    parts, top = weight.unflatten(1, (-1, size)), (1 << bits) - 1
    if symmetric:
        scale = parts.abs().amax(-1) / (1 << bits - 1)
        zero = torch.full_like(scale, 1 << bits - 1)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(1, top)
    scale = scale.half().float()
    values = ((parts / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, top)
    plain = (values - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
    return values.flatten(1).to(torch.int64), zero.to(torch.int64), scale, plain.flatten(1)


def packed(values, bits, order=None):
    """Words of int32 along the last dimension; place i of a word holds column ``order[i]``."""
    words = values.unflatten(-1, (-1, 32 // bits))
    places = order or range(32 // bits)
    total = sum(words[..., column] << bits * place for place, column in enumerate(places))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def write_awq(directory, out, *, group=32, skip=("lm_head",), **more):
    def convert(module, weight):
        values, zero, scale, plain = grouped(weight, group, symmetric=False)
        made = {"qweight": packed(values.T, 4, AWQ), "qzeros": packed(zero.T, 4, AWQ), "scales": scale.T.half()}
        return made, plain

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}
    return rewrite(directory, Path(out), convert, config | {"modules_to_not_convert": list(skip)}, skip=skip)


def write_gptq(
    directory,
    out,
    *,
    group=32,
    bits=4,
    sym=True,
    layout="gptq",
    key="checkpoint_format",
    stored=None,
    order=None,
    head=False,
    **more,
):
    """``key``: what names the layout in the config. ``stored``: the layout of the zero points where it isn't what the config
    says. ``order``: groups of the columns.
    """

    def convert(module, weight):
        index = torch.arange(weight.shape[1]) // (weight.shape[1] if group == -1 else group)
        index = index if order is None else index[order(weight.shape[1])]
        sorting = index.argsort(stable=True)
        values, zero, scale, plain = grouped(weight[:, sorting], group, symmetric=sym, bits=bits)
        back = sorting.argsort()
        values, plain = values[:, back], plain[:, back]
        offset = 1 if (stored or layout) == "gptq" else 0
        made = {
            "qweight": packed(values, bits).T,
            "qzeros": packed((zero - offset).T, bits),
            "scales": scale.T.half(),
            "g_idx": index.to(torch.int32),
        }
        return made, plain

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": order is not None,
        key: layout,
        "lm_head": head,
        **more,
    }
    return rewrite(directory, Path(out), convert, config, head=head)


def off_the_border(monkeypatch):
    """Have compressed-tensors divide rows of int8 by the same scale as this: at its own, their largest magnitude lies between
    two steps, and becomes either by its last bit.
    """
    from compressed_tensors.quantization.lifecycle import forward

    original = forward.compute_dynamic_scales_and_zp

    def settled(*arguments, **named):
        scale, zero_point = original(*arguments, **named)
        args = named.get("args", arguments[1] if len(arguments) > 1 else None)
        return (scale * (127.5 / INT8_LARGEST) if str(args.type) == "int" else scale), zero_point

    monkeypatch.setattr(forward, "compute_dynamic_scales_and_zp", settled)
