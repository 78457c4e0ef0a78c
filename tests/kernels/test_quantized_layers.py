"""Layers with quantised weights: what follows their products, and how many kernels a token takes. Also on a device."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import SMALL
from outrider.device import AttentionMetadata, KernelSet, QuantizedProduct, RotaryArgs
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput
from outrider.model.layer import DecoderLayer, LayerWeights
from outrider.model.products import OtherProduct
from outrider_triton import ops, planes_ops, quantized_ops
from outrider_triton.kernelset import TritonKernels
from outrider_triton.quantized_ops import plan
from outrider_triton.table import MatmulConfig
from outrider_tune.quantized import RandomFormat, random_quantized

HEADS, KV_HEADS, SIZE, HIDDEN, INNER = 4, 2, 128, 256, 384
ROWS = (HEADS + 2 * KV_HEADS) * SIZE
FORMATS = {
    "int4": RandomFormat(format="int4", columns=128),
    "fp8": RandomFormat(format="fp8", activations="fp8"),
}


def normal(*shape, seed=5):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").half().to(torch.get_default_device())
    )


def weight(format, rows, columns, seed=3):
    dice, there = torch.Generator().manual_seed(seed), torch.get_default_device()
    made = random_quantized(FORMATS[format], rows, columns, device=torch.device("cpu"), generator=dice)
    return replace(made, data=made.data.to(there), scales=made.scales.to(there))


def rotary(m, seed=1):
    dice = torch.Generator().manual_seed(seed)
    angle = (torch.rand(m, SIZE // 2, generator=dice, device="cpu") * 6).repeat(1, 2)
    caches = (torch.randn(m + 1, 4, KV_HEADS, SIZE, generator=dice, device="cpu").half() for _ in range(2))
    slots = torch.randperm(4 * m, generator=dice, device="cpu")[:m] + 4
    made = angle.cos().half(), angle.sin().half(), *caches, slots
    return RotaryArgs(*(each.to(torch.get_default_device()) for each in made))


@pytest.fixture
def kernels(device, pdl):
    made = TritonKernels(SMALL, everywhere=True)
    made.pdl = pdl
    torch.set_default_device(device)
    yield made
    torch.set_default_device(None)


def same(mine, its):
    """Bit for bit by the interpreter; a compiler may join other products and sums in one kernel than in two."""
    if mine.device.type == "cpu":
        assert torch.equal(mine, its)
    else:
        torch.testing.assert_close(mine, its, rtol=2e-3, atol=2e-3)


def split_in(kernels, split, *weights):
    """Have products with these weights split into so many parts."""
    for each in weights:
        stored = plan(kernels.facts, each).stored(each.format)
        for m in (1, 2, 4, 8):
            kernels._derived_quantized[stored, *each.shape, m] = MatmulConfig(16, 16, 128, split, 1, 2, 0, 0, 16)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_parts_are_added_turned_and_written(split, with_bias, kernels):
    """Bit for bit what adding them up, rounding the sum and turning it does."""
    parts = normal(split, 5, ROWS, seed=2).float() * 1.1
    bias = normal(ROWS) if with_bias else None
    whole = quantized_ops.added(parts, bias, normal(5, HIDDEN), torch.float16, kernels.pdl)
    given = (parts, bias) if split > 1 else (whole.clone(), None)  # one that isn't split has its bias
    right, own = rotary(5), rotary(5)
    q, k, v = whole.view(5, -1, SIZE).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    kernels.rope_write_cache(q, k, v, *right)
    made = torch.ops.outrider.rope_write_cache.triton_parts(*given, *own, torch.float16, kernels.pdl)
    same(made, q)
    same(own.k_cache, right.k_cache)
    same(own.v_cache, right.v_cache)
    assert not torch.equal(own.k_cache, rotary(5).k_cache)


@pytest.mark.parametrize(
    ("format", "split"),
    [("int4", 2), ("fp8", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in [("int4", 1), ("fp8", 2)])],
)
def test_a_norm_and_queries_behind_it(format, split, kernels):
    """As the product and the rotation one after the other have it."""
    first, second = weight(format, HIDDEN, INNER), weight(format, ROWS, HIDDEN, seed=4)
    split_in(kernels, split, first, second)
    added = QuantizedProduct(normal(5, INNER), first, normal(HIDDEN, seed=14))
    bias, norm, once, again = normal(ROWS, seed=15), normal(HIDDEN, seed=13), rotary(5), rotary(5)
    kept, residual = normal(5, HIDDEN, seed=12), normal(5, HIDDEN, seed=12)
    made = kernels.norm_linear_quantized_rope_write_cache(added, kept, norm, 1e-5, second, bias, once)
    right = KernelSet.norm_linear_quantized_rope_write_cache(kernels, added, residual, norm, 1e-5, second, bias, again)
    for mine, its in ((made, right), (kept, residual), (once.k_cache, again.k_cache), (once.v_cache, again.v_cache)):
        same(mine, its)


def layer(format, kernels):
    config = ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        rms_eps=1e-5,
        max_context=64,
    )
    shapes = {
        "qkv": (ROWS, HIDDEN),
        "output": (HIDDEN, HEADS * SIZE),
        "gate_up": (2 * INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    made = {name: weight(format, *shape, seed=place) for place, (name, shape) in enumerate(shapes.items())}
    split_in(kernels, 2, made["qkv"], made["output"], made["down"])
    split_in(kernels, 1, made["gate_up"])
    weights = LayerWeights(**made, mlp_norm=normal(HIDDEN, seed=7), attention_norm=normal(HIDDEN, seed=8))
    return DecoderLayer(config, weights, kernels, window=0)


@pytest.mark.parametrize("format", FORMATS)
def test_kernels_of_a_layer(format, kernels, monkeypatch):
    """A few tokens behind another layer: four products, and between them what follows each in one kernel."""
    own = layer(format, kernels)
    launched = []
    for module in (ops, planes_ops, quantized_ops):
        real = module.launch

        def counted(kernel, *args, real=real, **settings):
            launched.append(kernel.fn.__name__)
            real(kernel, *args, **settings)

        monkeypatch.setattr(module, "launch", counted)
    m, turn = 2, rotary(2)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, m], dtype=torch.int32),
        seq_lens=torch.tensor([m], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        max_query=m,
        max_kv=m,
    )
    inputs = ForwardInput(
        tokens=torch.zeros(m, dtype=torch.int64), positions=torch.arange(m), slots=torch.arange(m) + 4, attention=metadata
    )
    pending = OtherProduct(normal(m, 2 * INNER), weight(format, HIDDEN, INNER, seed=3), None, gated=True)
    own.forward(pending, normal(m, HIDDEN, seed=9), inputs, (turn.cos, turn.sin), (turn.k_cache, turn.v_cache))
    found = Counter(launched)
    found.pop("join_splits", None)  # where attention is shared out
    always = {"add_parts_rope_write_cache": 1, "paged_attention": 1}
    if format == "int4":
        assert found == {**always, "linear_planes": 4, "add_rms_norm": 2, "silu_mul": 1, "lay_in_planes": 1}
    else:
        assert found == {
            **always,
            "linear_quantized": 4,
            "add_rms_norm_quantize": 2,
            "silu_mul_quantize": 1,
            "quantize_rows": 1,
        }
