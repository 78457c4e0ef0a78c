"""A KV cache in fp8: checkpoints as compressed-tensors writes them against transformers with the same cache; broken ones."""

import pytest
import torch

from model.cached_checkpoints import MODELOPT, OLDER, rewrite, write_cached, write_scales
from model.harness import Driver
from model.quantized_checkpoints import write_compressed, write_modelopt
from outrider.device import CapabilityError, KernelSet
from outrider.device.kernels.weights import quantized_products
from outrider.errors import CheckpointError
from outrider.model import load_decoder
from outrider_cpu.backend import CpuBackend
from tiny_checkpoints import write_checkpoint

PROMPT = [1, 17, 44, 90, 5, 61, 61, 8, 33, 72]


def logits_of(model, tokens):
    model.config._experts_implementation = "eager"  # the others don't compute in float64
    with torch.no_grad():
        return model.double()(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("llama", {"strategy": "tensor"}),
        ("llama-biases", {"strategy": "attn_head"}),
        ("qwen3", {"strategy": "attn_head"}),
        ("mistral-window", {"strategy": "tensor", "names": OLDER}),
        ("llama", {"strategy": "tensor", "names": MODELOPT}),
        ("mixtral", {"strategy": "attn_head"}),
    ],
)
def test_logits_are_those_of_transformers_with_the_same_cache(tmp_path, backend, family, written):
    reference = write_cached(tmp_path, family, **written)
    model = load_decoder(tmp_path, backend=backend, dtype=torch.float64)
    driver = Driver(model)
    assert driver.cache.layers[0][0].dtype is torch.float8_e4m3fn
    sequence, tokens, made = driver.sequence(), list(PROMPT), []
    made.append(driver.logits([(sequence, tokens)]))  # the prompt, then token by token
    for token in (3, 14, 15, 92):
        made.append(driver.logits([(sequence, [token])]))
        tokens.append(token)
    wanted = logits_of(reference, tokens)
    assert (torch.cat(made) - wanted).abs().max() < 1e-5
    plain = load_decoder(tmp_path, backend=backend, dtype=torch.float64, kv_dtype="plain")
    driver = Driver(plain)
    assert (driver.logits([(driver.sequence(), tokens)]) - wanted).abs().max() > 1e-3, "the cache makes no difference"


@pytest.mark.parametrize("name", ["int4-g32-asymmetric", "int8-w8a16"])
def test_quantised_weights_beside_it(tmp_path, backend, name):
    """No kernel that turns queries at the end of a quantised product leaves the scales out."""
    plain = write_checkpoint(tmp_path / "plain", "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    plain.load_state_dict(write_compressed(tmp_path / "plain", tmp_path / "made", name))
    reference = write_scales(tmp_path / "made", plain, strategy="attn_head")
    wanted = logits_of(reference, PROMPT)
    dequantized = load_decoder(tmp_path / "made", backend=backend, dtype=torch.float64, quantized="dequantize")
    kept = load_decoder(tmp_path / "made", backend=backend, dtype=torch.float64)
    assert quantized_products(kept.weights)
    for model in (dequantized, kept):
        driver = Driver(model)
        assert driver.cache.layers[0][0].dtype is torch.float8_e4m3fn
        assert (
            driver.logits([(driver.sequence(), PROMPT)]) - wanted
        ).abs().max() < 1e-4  # weights made plain in float32 and float64 round some keys to neighbours


@pytest.mark.parametrize("beside", [True, False])
def test_modelopt_says_so_in_words_of_its_own(tmp_path, backend, beside):
    write_checkpoint(tmp_path / "plain", "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    write_modelopt(tmp_path / "plain", tmp_path / "made", "FP8", beside=beside, cache="FP8")
    scales = {
        f"model.layers.{layer}.self_attn.{each}_proj.{each}_scale": torch.tensor(0.125 + layer)
        for layer in range(2)
        for each in "kv"
    }
    rewrite(tmp_path / "made", lambda state, raw: (state | scales, raw))
    kept = load_decoder(tmp_path / "made", backend=backend, dtype=torch.float32)
    assert kept.cache_dtype is torch.float8_e4m3fn
    assert [float(layer.cache.output_scales[0]) for layer in kept.weights.layers] == [0.125, 1.125]
    plain = load_decoder(tmp_path / "made", backend=backend, dtype=torch.float32, kv_dtype="plain")
    assert plain.cache_dtype is torch.float32
    rewrite(
        tmp_path / "made",
        lambda state, raw: ({k: v for k, v in state.items() if not k.endswith("1.self_attn.v_proj.v_scale")}, raw),
    )
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.v_proj.v_scale.* is missing"):
        load_decoder(tmp_path / "made", backend=backend, dtype=torch.float32)


@pytest.mark.parametrize("times", [1, 2])
def test_scales_by_two_names_must_agree(tmp_path, backend, times):
    write_cached(tmp_path, "llama", strategy="tensor")

    def twice(state, raw):
        for key in [key for key in state if key.endswith("_scale")]:
            stem, kind = key.rsplit(".", 1)
            state[f"{stem}.{kind[0]}_proj.{kind}"] = state[key] * times
        return state, raw

    rewrite(tmp_path, twice)
    if times == 1:
        load_decoder(tmp_path, backend=backend, dtype=torch.float64)
        return
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_scale' and '.*k_proj\.k_scale' are both the scale"):
        load_decoder(tmp_path, backend=backend, dtype=torch.float64)


def test_without_a_scheme_the_scales_are_one(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    kept = load_decoder(tmp_path, backend=backend, dtype=torch.float32, kv_dtype="fp8")
    assert kept.cache_dtype is torch.float8_e4m3fn
    assert kept.weights.layers[0].cache.input_scales is None
    assert load_decoder(tmp_path, backend=backend, dtype=torch.float32).cache_dtype is torch.float32


K1 = "model.layers.1.self_attn.k_scale"
V2 = "model.layers.2.self_attn.v_scale"


def without(name):
    return lambda state, raw: ({key: value for key, value in state.items() if key != name}, raw)


def replaced(name, value):
    return lambda state, raw: (state | {name: value}, raw)


def scheme(**fields):
    def change(state, raw):
        quantised = raw["quantization_config"]
        return state, raw | {"quantization_config": quantised | {"kv_cache_scheme": quantised["kv_cache_scheme"] | fields}}

    return change


BROKEN = {
    "missing": (without(K1), K1),
    "all of a layer missing": (lambda state, raw: without(K1.replace("k_", "v_"))(*without(K1)(state, raw)), K1),
    "a scale for each head": (replaced(V2, torch.ones(2, 1, 1)), V2),
    "zero": (replaced(K1, torch.zeros(1)), K1),
    "negative": (replaced(K1, torch.full((1,), -0.5)), K1),
    "NaN": (replaced(V2, torch.full((1,), float("nan"))), V2),
    "infinite": (replaced(V2, torch.full((1,), float("inf"))), V2),
    "whole numbers": (replaced(V2, torch.ones(1, dtype=torch.int32)), V2),
    "a tensor too many": (replaced("model.layers.1.self_attn.q_scale", torch.ones(1)), "q_scale"),
    "strategy": (scheme(strategy="channel"), "kv_cache_scheme.strategy"),
    "bits": (scheme(num_bits=4), "kv_cache_scheme.num_bits"),
    "type": (scheme(type="int"), "kv_cache_scheme.type"),
    "dynamic": (scheme(dynamic=True), "kv_cache_scheme.dynamic"),
    "zero points": (scheme(symmetric=False), "kv_cache_scheme.symmetric"),
    "no object": (
        lambda state, raw: (state, raw | {"quantization_config": raw["quantization_config"] | {"kv_cache_scheme": "fp8"}}),
        "kv_cache_scheme",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_names_the_tensor_or_the_key(tmp_path, name):
    write_cached(tmp_path)
    change, named = BROKEN[name]
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")):
        load_decoder(tmp_path, backend=CpuBackend(), dtype=torch.float32)


def test_scales_of_heads_are_no_tensor_s(tmp_path):
    write_cached(tmp_path, strategy="attn_head")
    rewrite(tmp_path, replaced(K1, torch.ones(1)))
    with pytest.raises(CheckpointError, match=r"k_scale' has shape \[1\], expected \[2, 1, 1\]"):
        load_decoder(tmp_path, backend=CpuBackend(), dtype=torch.float32)


class Unaware(KernelSet):
    """Overrides what reads a cache, and says nothing of formats."""

    name = "unaware"

    def paged_attention(self, *operands, **options):
        return super().paged_attention(*operands, **options)


def test_kernels_without_the_format_are_refused_before_anything_is_loaded(tmp_path):
    write_cached(tmp_path)
    assert KernelSet().cache_formats == {"fp8"}
    assert not Unaware().cache_formats
    assert not Unaware().batch_invariant().cache_formats
    with pytest.raises(CapabilityError, match=r"kept in fp8.*'unaware'.*--kv-dtype plain"):
        load_decoder(tmp_path, backend=CpuBackend(), dtype=torch.float32, kernels=Unaware())
    load_decoder(tmp_path, backend=CpuBackend(), dtype=torch.float32, kernels=Unaware(), kv_dtype="plain")
