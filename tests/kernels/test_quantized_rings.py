"""Two products in e4m3 and the norm between them through rings: what is launched, and that it is known beforehand.

The kernels are in Gluon, which the interpreter doesn't know; they are compiled in ``test_compile.py``, and held against the
reference on a device by ``quantized_on_device.py``.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from outrider.device import QuantizedProduct, RotaryArgs
from outrider_triton import fused_ops, ops, quantized_ops, streamed
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import _ahead
from outrider_triton.table import STREAMED, MatmulConfig
from outrider_tune.quantized import RandomFormat, random_quantized

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 4096, 14336, 32, 8, 128
TURNED = (HEADS + 2 * KV_HEADS) * SIZE
BF16 = torch.bfloat16
BY_ROW = RandomFormat(format="fp8", activations="fp8")


@pytest.fixture
def launched(monkeypatch):
    """Kernels that were launched, and what makes their variants; nothing runs."""
    calls = []

    def launch(kernel, grid, *arguments, pdl, warps, **settings):
        known = dict(zip(kernel.arg_names, arguments, strict=False))
        blocks = tuple(tuple(known[each].block_shape) for each in ("x", "w") if hasattr(known.get(each), "block_shape"))
        given = tuple(known[each] is None for each in ("bias", "squares", "x_scales") if each in known)
        calls.append((kernel.__name__, _ahead.get(), (blocks, given, tuple(sorted(settings.items())))))
        if kernel.__name__.startswith("streamed"):
            assert set(known) | set(settings) | {"PDL"} >= set(kernel.arg_names), "an operand is missing"

    for module in (streamed, quantized_ops, fused_ops, ops):
        monkeypatch.setattr(module, "launch", launch)
    return calls


@pytest.fixture(scope="module")
def weights():
    shapes = {"output": (HIDDEN, HIDDEN), "gates": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "turned": (TURNED, HIDDEN)}
    return {name: random_quantized(BY_ROW, *shape, device=torch.device("cpu")) for name, shape in shapes.items()}


@pytest.fixture
def kernels():
    return TritonKernels(DEVICES["H200"])


def gates(kernels, weights, m):
    added = QuantizedProduct(torch.zeros(m, HIDDEN, dtype=BF16), weights["output"], None)
    residual, norm = torch.zeros(m, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
    return kernels.norm_linear_quantized(added, residual, norm, 1e-5, weights["gates"])


def turns(kernels, weights, m):
    added = QuantizedProduct(torch.zeros(m, 2 * INNER, dtype=BF16), weights["down"], None, gated=True)
    residual, norm = torch.zeros(m, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
    caches = (torch.zeros(2, 64, KV_HEADS, SIZE, dtype=BF16) for _ in range(2))
    angles = torch.zeros(m, SIZE, dtype=BF16)
    rotary = RotaryArgs(angles, angles, *caches, torch.arange(m))
    return kernels.norm_linear_quantized_rope_write_cache(added, residual, norm, 1e-5, weights["turned"], None, rotary)


@pytest.mark.parametrize("m", [1, 4, 8, 9, 16])
def test_few_tokens_take_two_kernels_behind_what_quantises(m, launched, kernels, weights):
    assert gates(kernels, weights, m).shape == (m, 2 * INNER)
    assert turns(kernels, weights, m).shape == (m, HEADS, SIZE)
    names = [name for name, _, _ in launched]
    first, second = ["quantize_rows", "streamed_linear_add", "streamed_linear"], ["silu_mul_quantize", "streamed_linear_add"]
    assert names == [*first, *second, "streamed_rope_write_cache"]
    for name, _, (blocks, _, settings) in launched:
        settings = dict(settings)
        if name.startswith("streamed"):
            assert settings["ROWS"] == 1
            assert settings.get("SCALED", settings.get("NORM")) is True
            assert blocks[0] == (8 if m <= 8 else 16, 128)


@pytest.mark.parametrize("m", [17, 32])
def test_more_tokens_are_quantised_by_a_kernel(m, launched, kernels, weights):
    gates(kernels, weights, m)
    assert [name for name, _, _ in launched] == [
        "quantize_rows",
        "streamed_linear",
        "add_rms_norm_quantize",
        "streamed_linear",
    ]


def test_every_variant_is_compiled_beforehand(launched, kernels, weights):
    with kernels.every_variant():
        gates(kernels, weights, 4)
        turns(kernels, weights, 40)
        turns(kernels, weights, 4)
    known = {(name, variant) for name, _, variant in launched if name.startswith("streamed")}
    assert any(ahead for _, ahead, _ in launched)
    launched.clear()
    for m in range(1, 65):
        gates(kernels, weights, m)
        turns(kernels, weights, m)
    served = Counter((name, variant) for name, _, variant in launched if name.startswith("streamed"))
    assert set(served) <= known
    assert len(served) >= 8


@pytest.mark.parametrize("other", ["float16", "groups", "static", "another device"])
def test_what_does_not_come_through_rings(other, launched, weights):
    """Each of these keeps to its own kernels; a row that isn't divided yet may be too large for float16."""
    facts = DEVICES["L4" if other == "another device" else "H200"]
    kernels, kind = TritonKernels(facts), torch.float16 if other == "float16" else BF16
    way = BY_ROW
    if other == "groups":
        way = RandomFormat(format="fp8", columns=128, rows=128, activations="fp8", activation_group=128)
    made = random_quantized(way, HIDDEN, HIDDEN, device=torch.device("cpu"))
    if other == "static":
        made = replace(made, input_scale=torch.ones(1))
    added = QuantizedProduct(torch.zeros(4, HIDDEN, dtype=kind), made, None)
    norm, residual = torch.ones(HIDDEN, dtype=kind), torch.zeros(4, HIDDEN, dtype=kind)
    kernels.norm_linear_quantized(added, residual, norm, 1e-5, made)
    assert "streamed_linear_add" not in {name for name, _, _ in launched}


@pytest.mark.parametrize("operator", ["linear_add_scaled", "linear_parts", "linear_rope"])
@pytest.mark.parametrize("m", [1, 16])
def test_cuts_are_of_whole_boxes_and_fit(operator, m, kernels, weights):
    weight = weights["turned"]
    stored = kernels._stored(weight)
    config = kernels._ringed(operator, m, weight, stored, 64)
    assert isinstance(config, MatmulConfig)
    assert (config.descriptor, config.block_k, config.split) == (STREAMED, 128, 1)
    assert config.each % config.block_n == 0
    assert config.stages > 1
