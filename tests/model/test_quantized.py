"""Quantised checkpoints against transformers: the same logits and tokens, for each published form; and broken ones."""

import json
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from safetensors.torch import load_file, save_file

from model.harness import Driver
from model.quantized_checkpoints import (
    COMPRESSED,
    MODELOPT,
    compressed_config,
    compressor,
    group_of,
    off_the_border,
    rewrite,
    write_awq,
    write_compressed,
    write_fp8,
    write_gptq,
    write_modelopt,
)
from model.wrong_configs import WRONG_CONFIGS
from outrider.device import Capabilities, CapabilityError, ConfigError, QuantizedWeight
from outrider.device.kernels.weights import SplitWeight, quantized_products
from outrider.errors import CheckpointError
from outrider.model import load_decoder
from outrider_cpu.backend import CpuBackend
from tiny_checkpoints import write_checkpoint

PROMPT = [1, 17, 44, 90, 5, 61, 61, 8, 33, 72]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.1}
TOLERANCE = 1e-4
DEQUANTIZE, KERNELS = "dequantize", "kernels"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    return SimpleNamespace(directory=directory, model=write_checkpoint(directory, "llama", **SHAPE))


def logits_of(plain, state):
    """Transformers' logits with these weights."""
    with torch.no_grad():
        return torch.func.functional_call(plain.model, state, (torch.tensor([PROMPT]),)).logits[0]


def ours(directory, backend, mode=KERNELS):
    model = load_decoder(directory, backend=backend, dtype=torch.float32, quantized=mode)
    driver = Driver(model)
    return model, driver.logits([(driver.sequence(), PROMPT)])


def agree(plain, state, directory, backend, *, products, activations=False):
    wanted = logits_of(plain, state)
    _, dequantized = ours(directory, backend, DEQUANTIZE)
    assert (dequantized - wanted).abs().max() < TOLERANCE
    model, multiplied = ours(directory, backend)
    if not activations:
        assert (multiplied - wanted).abs().max() < TOLERANCE
    assert sum(quantized_products(model.weights).values()) == products
    return model


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(tmp_path, backend, plain, name):
    state = write_compressed(plain.directory, tmp_path, name)
    agree(plain, state, tmp_path, backend, products=8, activations=COMPRESSED[name][2] is not None)


@pytest.mark.parametrize("name", ["fp8-tensor-static", "fp8-channel-dynamic", "int8-w8a8"])
def test_activations_are_quantised_as_compressed_tensors_does(tmp_path, backend, plain, name, monkeypatch):
    """Transformers runs these with quantised activations itself: the same logits, and token by token the same greedy ones."""
    import transformers

    off_the_border(monkeypatch)
    write_compressed(plain.directory, tmp_path, name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model, logits = ours(tmp_path, backend)
    driver, tokens, new = Driver(model), [], list(PROMPT)
    sequence = driver.sequence()
    for step in range(7):
        tokens += new
        with torch.no_grad():
            wanted = reference(torch.tensor([tokens])).logits[0]
        if not step:
            assert (logits - wanted).abs().max() < TOLERANCE
        made = driver.logits([(sequence, new)])[-1]
        assert (made - wanted[-1]).abs().max() < TOLERANCE
        new = [int(wanted[-1].argmax())]
        assert int(made.argmax()) == new[0]
    assert Driver(model).greedy(PROMPT, 6)[0] == tokens[len(PROMPT) :]
    dequantized = ours(tmp_path, backend, DEQUANTIZE)[1]
    assert (logits - dequantized).abs().max() > 100 * TOLERANCE  # they are quantised


@pytest.mark.parametrize(
    "options", [{}, {"block": None}, {"block": (48, 32), "e8m0": True}], ids=["block 128", "tensor", "block 48x32, e8m0"]
)
def test_fp8_of_hugging_face(tmp_path, backend, plain, options):
    """Blocks of 128 over 64 rows of k and v, and blocks off every border."""
    state = write_fp8(plain.directory, tmp_path, **options)
    agree(plain, state, tmp_path, backend, products=8, activations=True)
    if options == {}:
        held, key = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
        made = FP8BlockDequantizer().process({name: held[name] for name in (key, f"{key}_scale_inv")})
        assert (made[key].float() - state[key]).abs().max() < 1e-2 * state[key].abs().max()  # it makes bfloat16


def test_fp8_as_transformers_names_its_scales(tmp_path, backend, plain):
    """By the tensor, its own module ends the names otherwise than vLLM's writers."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    own = FP8Linear(16, 16, block_size=None, activation_scheme="static")
    names = [name for name, _ in own.named_parameters() if name != "weight"]
    state = write_fp8(plain.directory, tmp_path / "own", block=None, names=names)
    agree(plain, state, tmp_path / "own", backend, products=8, activations=True)
    write_fp8(plain.directory, tmp_path / "vllm", block=None)
    assert torch.equal(ours(tmp_path / "own", backend)[1], ours(tmp_path / "vllm", backend)[1])
    path, key = tmp_path / "own" / "model.safetensors", "model.layers.0.mlp.up_proj"
    save_file(load_file(path) | {f"{key}.weight_scale": torch.tensor(1.0)}, path)
    with pytest.raises(CheckpointError, match=f"not expected: '{key}.weight_scale_inv'"):
        ours(tmp_path / "own", backend)  # one of the two


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("algorithm", "name"), MODELOPT.items())
def test_modelopt(tmp_path, backend, plain, algorithm, name, beside):
    """What transformers runs as compressed-tensors', in the same tensors: the same logits to the bit."""
    state = write_modelopt(plain.directory, tmp_path / "made", algorithm, beside=beside)
    agree(plain, state, tmp_path / "made", backend, products=8, activations=True)
    write_compressed(plain.directory, tmp_path / "compressed", name)
    assert torch.equal(ours(tmp_path / "made", backend)[1], ours(tmp_path / "compressed", backend)[1])


@pytest.mark.parametrize(
    ("left", "products"),
    [
        (("lm_head", "model.layers.0*"), 4),
        (("lm_head", "model.layers.1.self_attn*", "model.layers.0.mlp.down_proj"), 5),
        (("*.mlp.*", "lm_head"), 4),
        (("lm_head", "layers.1.mlp"), 6),
    ],
)
def test_modelopt_leaves_out_what_its_wildcards_name(tmp_path, backend, plain, left, products):
    state = write_modelopt(plain.directory, tmp_path, "FP8", plain=left)
    agree(plain, state, tmp_path, backend, products=products, activations=True)


@pytest.mark.parametrize(("said", "error"), WRONG_CONFIGS["modelopt"])
def test_what_modelopt_says_that_isnt_supported(tmp_path, backend, plain, said, error):
    write_modelopt(plain.directory, tmp_path, "FP8")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    with pytest.raises(CheckpointError, match=rf"hf_quant_config.json: .*{error}"):
        ours(tmp_path, backend)


@pytest.mark.parametrize(
    ("suffix", "change", "error"),
    [
        ("input_scale", None, r"missing: 'model.layers.1.mlp.up_proj.input_scale'"),
        ("weight_scale", None, r"missing: 'model.layers.1.mlp.up_proj.weight_scale'"),
        ("weight_scale", torch.ones(256, 1), r"weight_scale' has shape \[256, 1\]"),
        ("input_scale", torch.zeros(1), r"up_proj: input_scale is 0.0, expected a number above 0"),
    ],
)
def test_broken_tensors_of_modelopt(tmp_path, backend, plain, suffix, change, error):
    write_modelopt(plain.directory, tmp_path, "FP8")
    held, key = load_file(tmp_path / "model.safetensors"), f"model.layers.1.mlp.up_proj.{suffix}"
    held.pop(key)
    save_file(held if change is None else held | {key: change}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=error):
        ours(tmp_path, backend)


@pytest.mark.parametrize("group", [32, 128])
def test_awq(tmp_path, backend, plain, group):
    state = write_awq(plain.directory, tmp_path, group=group)
    agree(plain, state, tmp_path, backend, products=8)
    converter = AutoAWQConverter(group_size=group)
    key = "model.layers.1.mlp.gate_proj"
    held = {name: part for name, part in load_file(tmp_path / "model.safetensors").items() if name.startswith(key)}
    made = {name.removeprefix(f"{key}."): part for name, part in converter.process(held).items()}
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    args = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": group}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    found = BaseCompressor.get_value_from_registry("pack-quantized").decompress(made, scheme)["weight"]
    assert torch.allclose(found.float(), state[f"{key}.weight"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group": 128},
        {"sym": False, "layout": "gptq"},
        {"sym": False, "layout": "gptq_v2"},
        {"sym": False, "layout": "GPTQ_V2", "stored": "gptq_v2", "key": "format"},
        {"layout": "gptq", "stored": "gptq_v2"},
        {"bits": 8, "group": -1, "sym": False},
        {"head": True},
    ],
    ids=[
        "g32",
        "g128",
        "v1, zero points",
        "v2, zero points",
        "v2, another key",
        "a label that lies",
        "8 bits per channel",
        "head",
    ],
)
def test_gptq(tmp_path, backend, plain, options):
    state = write_gptq(plain.directory, tmp_path, **options)
    agree(plain, state, tmp_path, backend, products=9 if "head" in options else 8)


def test_gptq_leaves_out_what_its_expressions_name(tmp_path, backend, plain):
    dynamic = {r"-:.*\.0\.mlp\.down_proj": {}}
    state = write_gptq(plain.directory, tmp_path, dynamic=dynamic)
    with pytest.raises(CheckpointError, match="not expected: 'model.layers.0.mlp.down_proj.g_idx'"):
        ours(tmp_path, backend)
    held, key = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj"
    held = {name: part for name, part in held.items() if not name.startswith(key)} | {f"{key}.weight": state[f"{key}.weight"]}
    held["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(128)  # such writers give each module one
    save_file(held, tmp_path / "model.safetensors")
    agree(plain, state, tmp_path, backend, products=7)
    held["model.layers.1.self_attn.o_proj.bias"][3] = 1
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not expected: 'model.layers.1.self_attn.o_proj.bias'"):
        ours(tmp_path, backend)


def test_act_order_is_right_as_plain_weights_and_refused_otherwise(tmp_path, backend, plain):
    state = write_gptq(plain.directory, tmp_path, sym=False, order=lambda count: torch.randperm(count))
    assert (ours(tmp_path, backend, DEQUANTIZE)[1] - logits_of(plain, state)).abs().max() < TOLERANCE
    with pytest.raises(CheckpointError, match=r"q_proj: g_idx assigns columns.*act-order, desc_act.*--quantized dequantize"):
        ours(tmp_path, backend)


def test_a_mixture(tmp_path, backend, plain):
    """Two groups, a plain q beside quantised k and v, a plain layer that the config doesn't except, a quantised head."""
    parts = {"mlp": "int4-g32-asymmetric", "attn": "fp8-channel-dynamic", "lm_head": "int8-w8a16"}
    makers = {part: compressor(name) for part, name in parts.items()}

    def convert(module, weight):
        if "layers.0.self_attn.q_proj" in module or "layers.1.mlp.down_proj" in module:
            return {"weight": weight}, weight
        return next(make for part, make in makers.items() if part in module)(module, weight)

    groups = {
        "by_name": group_of("int8-w8a16", ["lm_head"]),
        "by_expression": group_of("int4-g32-asymmetric", ["re:.*mlp.*"]),
        "others": group_of("fp8-channel-dynamic"),
    }
    config = compressed_config(groups, ignore=["model.layers.0.self_attn.q_proj"])
    state = rewrite(plain.directory, tmp_path, convert, config, head=True)
    model = agree(plain, state, tmp_path, backend, products=8, activations=True)
    first, last = model.weights.layers
    assert isinstance(first.qkv, SplitWeight)
    assert [type(part) for part in first.qkv.parts] == [torch.Tensor, QuantizedWeight]
    assert isinstance(last.down, torch.Tensor)
    assert model.weights.head.format == "int8"


def test_static_scales_that_differ_are_kept_apart(tmp_path, backend, plain):
    write_compressed(plain.directory, tmp_path, "fp8-tensor-static")
    held = load_file(tmp_path / "model.safetensors")
    held["model.layers.0.self_attn.v_proj.input_scale"] *= 2
    save_file(held, tmp_path / "model.safetensors")
    model, _ = ours(tmp_path, backend)
    assert [part.shape[0] for part in model.weights.layers[0].qkv.parts] == [192, 64]
    assert isinstance(model.weights.layers[1].qkv, QuantizedWeight)


# -- refused -------------------------------------------------------------------------------------------------------

LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "suffix", "change", "error"),
    [
        ("fp8-channel-dynamic", "weight_scale", None, rf"missing: '{LAYER}.weight_scale' \[128, 1\]"),
        ("int4-g128", "weight_packed", None, rf"missing: '{LAYER}.weight_packed' \[128, 32\]"),
        ("fp8-tensor-static", "input_scale", None, rf"missing: '{LAYER}.input_scale' \[1\]"),
        (
            "fp8-block",
            "weight_scale",
            lambda t: t.T.contiguous(),
            rf"'{LAYER}.weight_scale' has shape \[2, 1\], expected \[1, 2\]",
        ),
        (
            "int4-g32-asymmetric",
            "weight_zero_point",
            lambda t: t[:8],
            r"weight_zero_point' has shape \[8, 8\], expected \[16, 8\]",
        ),
        ("int8-w8a8", "weight", lambda t: t.to(torch.float8_e4m3fn), rf"'{LAYER}.weight' is float8_e4m3fn, expected int8"),
        (
            "fp8-channel-dynamic",
            "weight",
            lambda t: t.to(torch.float8_e5m2),
            r"is float8_e5m2, expected float8_e4m3fn, since config",
        ),
        (
            "int4-g128",
            "weight_shape",
            lambda t: t.flip(0),
            rf"tensors of {LAYER}: weight_shape is \[256, 128\], expected \[128, 256\]",
        ),
        ("fp8-tensor-static", "input_scale", lambda t: -t, rf"tensors of {LAYER}: input_scale is -0.0199"),
    ],
)
def test_broken_tensors(tmp_path, backend, plain, name, suffix, change, error):
    write_compressed(plain.directory, tmp_path, name)
    held, key = load_file(tmp_path / "model.safetensors"), f"{LAYER}.{suffix}"
    tensor = held.pop(key)
    if change is not None:
        held[key] = change(tensor)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=error):
        ours(tmp_path, backend)


@pytest.mark.parametrize(("config", "error"), WRONG_CONFIGS["quantised"])
def test_unknown_schemes(tmp_path, backend, plain, config, error):
    raw = json.loads((plain.directory / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(plain.directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"config.json: .*{error}"):
        ours(tmp_path, backend)


def test_symmetric_zero_points_that_are_not(tmp_path, backend, plain):
    write_gptq(plain.directory, tmp_path, sym=False)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["sym"] = True
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"q_proj: qzeros aren't 8 or 7 everywhere, but the config says sym"):
        ours(tmp_path, backend)


def test_zero_points_of_awq_that_the_config_denies(tmp_path, backend, plain):
    write_awq(plain.directory, tmp_path, zero_point=False)
    with pytest.raises(CheckpointError, match=r"q_proj: qzeros aren't 8 everywhere, but the config says that zero_point is"):
        ours(tmp_path, backend)


def test_zero_points_of_awq_that_are_none(tmp_path, backend, plain):
    """A writer of symmetric weights may leave the tensor out, or have 8 everywhere in it."""
    write_awq(plain.directory, tmp_path, zero_point=False)
    held = load_file(tmp_path / "model.safetensors")
    eights = {key: torch.full_like(held[key], -0x77777778) for key in held if key.endswith("qzeros")}
    save_file(held | eights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with_them = ours(tmp_path, backend)[1]
    save_file(
        {key: held[key] for key in held if key not in eights}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    assert torch.equal(ours(tmp_path, backend)[1], with_them)


def test_the_older_key_of_compressed_tensors(tmp_path, backend, plain):
    write_compressed(plain.directory, tmp_path, "int8-w8a16")
    wanted = ours(tmp_path, backend)[1]
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["compression_config"] = raw.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert torch.equal(ours(tmp_path, backend)[1], wanted)


@pytest.mark.parametrize(
    ("ignore", "told"),
    [
        (None, "not expected: .*weight_packed.*: fetch the one that belongs to them"),
        (
            ["re:.*down_proj"],
            r"not expected: .*down_proj.weight_packed.*config\.json \(compressed-tensors\) says that these",
        ),
    ],
)
def test_tensors_that_the_config_takes_for_plain(tmp_path, backend, plain, ignore, told):
    write_compressed(plain.directory, tmp_path, "int8-w8a16")
    raw = json.loads((tmp_path / "config.json").read_text())
    if ignore is None:
        del raw["quantization_config"]
    else:
        raw["quantization_config"]["ignore"] = ignore
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=told):
        ours(tmp_path, backend)


def test_a_config_beside_the_config(tmp_path, backend, plain):
    """As older writers of GPTQ left it."""
    state = write_gptq(plain.directory, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "sym": True, "desc_act": False}))
    raw.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    agree(plain, state, tmp_path, backend, products=8)
    (tmp_path / "quantize_config.json").rename(tmp_path / "hf_quant_config.json")
    with pytest.raises(CheckpointError, match="quant_algo is None, which isn't supported"):  # that's ModelOpt's file
        ours(tmp_path, backend)


class Without(CpuBackend):
    capabilities = Capabilities(host_writes_memory=True, quantized_formats=frozenset({"fp8"}))


def test_a_backend_that_lacks_a_format(tmp_path, plain):
    state = write_compressed(plain.directory, tmp_path, "int4-g128")
    message = r"as int4 \(compressed-tensors\), and backend 'cpu'.*has no kernels.*declares fp8.*--quantized reference"
    with pytest.raises(CapabilityError, match=message):
        ours(tmp_path, Without())
    for mode in ("reference", DEQUANTIZE):
        assert (ours(tmp_path, Without(), mode)[1] - logits_of(plain, state)).abs().max() < TOLERANCE
    with pytest.raises(ConfigError, match="quantized is 'no', expected one of kernels, reference, dequantize"):
        ours(tmp_path, Without(), "no")
