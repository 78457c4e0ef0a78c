"""Products with 4-bit floats (e2m1) and powers of two as scales, by the interpreter against the references.

The interpreter doesn't run inline assembly: its instructions are emulated.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from conformance.small_problems import small
from outrider.device import ClampedActivation, ExpertBiases, KernelSet, QuantizedWeight
from outrider.device.kernels.formats import FP4
from outrider.device.kernels.weight_formats import weight_format
from outrider.model.quantization.loading import to_device
from outrider_conformance.random_kernels.kernels import KERNELS, check_kernels
from outrider_conformance.random_kernels.problem import RandomValues
from outrider_triton.quantized import library as library_ops
from outrider_triton.quantized.jit import products as jit

REFERENCE = KernelSet()
ACTIVATION = ClampedActivation(1.5, 1.702)
ALL_CODES = torch.arange(16).repeat(2)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- inline assembly -------------------------------------------------------------------------------------------------


def word(value):
    """A value as a register of 32 bits."""
    return value & 0xFFFFFFFF


def floats(register, dtype):
    """The two 16-bit floats of a register, in float64."""
    signed = register - (1 << 32) if register >> 31 else register
    return torch.tensor([signed], dtype=torch.int32).view(dtype).double()


def permuted(low, high, selected):
    stored = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    return int.from_bytes(bytes(stored[selected >> 4 * place & 7] for place in range(4)), "little")


def executed(code, source, dtype):
    """The registers that the assembly of an unpacking writes for the register ``source``."""
    registers = {"$4": source}
    for line in code.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operator, operands = line.strip().split(" ", 1)
        target, *names = (each.strip() for each in operands.split(","))
        values = [registers[name] if name in registers else int(name, 0) for name in names]
        if operator in ("mov.b32", "shl.b32", "shr.u32", "and.b32"):
            shifted = {"mov": lambda a: a, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "and": lambda a, b: a & b}
            registers[target] = word(shifted[operator[:3]](*values))
        elif operator == "prmt.b32":
            registers[target] = permuted(*values)
        elif operator == "lop3.b32":
            assert values[3] == 0xEA  # (a & b) | c
            registers[target] = values[0] & values[1] | values[2]
        else:
            assert operator in ("fma.rn.bf16x2", "mul.rn.f16x2")
            exact = floats(values[0], dtype) * floats(values[1], dtype)
            exact = exact + floats(values[2], dtype) if len(values) > 2 else exact
            registers[target] = word(int(exact.to(dtype).view(torch.int32)))
    return [registers[f"${place}"] for place in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assembly_converts_every_byte(dtype):
    code = (jit._FLOATS_BF16 if dtype is torch.bfloat16 else jit._FLOATS_FP16).value
    for byte in range(256):
        stored = [byte, byte * 7 + 3 & 255, byte * 13 + 91 & 255, 255 - byte]
        made = torch.cat([floats(each, dtype) for each in executed(code, int.from_bytes(stored, "little"), dtype)])
        values = FP4.decode(torch.tensor([stored], dtype=torch.uint8), 8, torch.float64)[0]
        right = torch.cat((values[::2], values[1::2]))
        assert torch.equal(made, right)
        assert torch.equal(made.signbit(), right.signbit())


# -- weights ---------------------------------------------------------------------------------------------------------


def with_exponents(exponents, codes=ALL_CODES):
    """A weight whose rows hold each code twice, one group of 32 columns a row, with the scale 2**(exponent - 127)."""
    rows = len(exponents)
    data = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).repeat(rows, 1)
    scales = torch.tensor(exponents, dtype=torch.uint8).view(rows, 1).view(torch.float8_e8m0fnu)
    return QuantizedWeight(format="fp4", data=data, scales=scales, block=(1, 32), shape=(rows, 32))


def two_groups(weight):
    """The weight twice, side by side: a scale for each of two groups of columns."""
    scales = torch.cat((weight.scales, weight.scales), dim=1)
    return replace(weight, data=weight.data.repeat(1, 2), scales=scales, shape=(weight.shape[0], 64))


@pytest.mark.parametrize("grouped", [False, True])
def test_every_code_with_the_smallest_and_the_largest_scale(grouped, device):
    weight = with_exponents([0, 1, 2, 100, 127, 200, 251, 252])
    weight = two_groups(weight) if grouped else weight
    made = library_ops.dequantized_weight(to_device(weight, device), torch.float32, fp8=False, pdl=False).cpu()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    powers = torch.tensor([0, 1, 2, 100, 127, 200, 251, 252], dtype=torch.float64).sub(127).exp2().unsqueeze(1)
    assert torch.equal(made.double(), (powers * values).repeat(1, 4 if grouped else 2))


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def dtype(request, device):
    if request.param is torch.bfloat16 and device.type != "cuda":
        pytest.skip("not run: the interpreter doesn't multiply bfloat16; TRITON_INTERPRET=0 on a GPU does")
    return request.param


@pytest.mark.parametrize("grouped", [False, True])
def test_products_read_every_code(grouped, dtype, kernels, device):
    """Each column by itself, with scales whose values the dtype represents as normal numbers."""
    exponents = list(range(117, 139)) if dtype is torch.float16 else list(range(2, 253, 10))
    weight = with_exponents(exponents)
    weight = two_groups(weight) if grouped else weight
    columns = weight.shape[1]
    x = torch.eye(columns, dtype=dtype)
    right = REFERENCE.linear_quantized(x.double(), weight)
    made = kernels.linear_quantized(x.to(device), to_device(weight, device)).cpu()
    assert torch.equal(made.double(), right)
    assert right.unique().numel() > 16


# -- experts ---------------------------------------------------------------------------------------------------------


def experts(count, hidden, inner, dtype=torch.float16, seed=4):
    """Weights of experts on the host in MXFP4, and their biases in ``dtype``."""
    format, cpu, generator = weight_format("mxfp4"), torch.device("cpu"), torch.Generator().manual_seed(seed)
    gate_up = format.random_weight(count * 2 * inner, hidden, device=cpu, generator=generator)
    down = format.random_weight(count * hidden, inner, device=cpu, generator=generator)
    biases = (normal(count, rows, seed=seed).to(dtype) for rows in (2 * inner, hidden))
    return gate_up, down, ExpertBiases(*biases, ACTIVATION)


# Tokens, experts, experts of a token, hidden size, inner size. 832 is no multiple of a tile.
SIZES = {
    "one token": (1, 8, 4, 832, 32),
    "few tokens": (7, 6, 2, 64, 832),
    "one group": (3, 4, 2, 32, 32),
    "sorted": (40, 8, 4, 96, 160),
    "many tokens": (300, 4, 2, 96, 64),
}


@pytest.mark.sample(1, per="size,dtype")
@pytest.mark.parametrize("biased", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("size", SIZES)
def test_experts(size, biased, dtype, kernels, device):
    tokens, count, per_token, hidden, inner = SIZES[size]
    gate_up, down, biases = experts(count, hidden, inner, dtype)
    logits = normal(tokens, count, seed=1)
    logits[:, -1] = -9.0  # the last expert has no token
    shares, chosen = REFERENCE.route(logits, per_token, renormalize=True)
    assert int(chosen.max()) < count - 1
    x = normal(tokens, hidden, seed=2).to(dtype)
    wide, placed = {}, {}
    if biased:
        wide = {"biases": ExpertBiases(biases.gate_up.double(), biases.down.double(), ACTIVATION)}
        placed = {"biases": ExpertBiases(biases.gate_up.to(device), biases.down.to(device), ACTIVATION)}
    operands = x.to(device), shares.to(device), chosen.to(device), to_device(gate_up, device), to_device(down, device)
    made = kernels.experts_quantized(*operands, **placed).cpu()
    right = REFERENCE.experts_quantized(x.double(), shares.double(), chosen, gate_up, down, **wide)
    assert float((made.double() - right).norm() / right.norm()) < (1e-3 if dtype is torch.float16 else 8e-3)


@pytest.mark.sample(1, per="change")
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("change", [{}, {"tokens": 1}, {"tokens": 40, "held": 2}], ids=["few", "one", "sorted"])
@pytest.mark.parametrize("format", ["fp4", "int8"])
def test_the_kits_problems_of_biases(kernels, invariant, change, format, device):
    kernels = kernels.batch_invariant() if invariant else kernels
    check_kernels(kernels, small(f"experts_quantized, {format}, expert_biases", torch.float16, **change), device)


@pytest.mark.parametrize("corner", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_block_of_experts_with_biases(kernels, corner, device):
    drawn = KERNELS["experts_block, fp4"]
    problem = drawn.make(drawn.corners[corner], torch.float16, RandomValues(corner), has_biases=True)
    check_kernels(kernels, problem, device)


def test_a_bias_is_added_before_the_share(kernels, device):
    """With weights of zeros, an output is the share times the bias."""
    gate_up, down, biases = experts(4, 32, 32)
    gate_up, down = (to_device(replace(each, data=torch.zeros_like(each.data)), device) for each in (gate_up, down))
    shares, chosen = torch.tensor([[0.25, 0.5]]), torch.tensor([[2, 0]])
    placed = ExpertBiases(biases.gate_up.to(device), biases.down.to(device), ACTIVATION)
    x = torch.ones(1, 32, dtype=torch.float16)
    made = kernels.experts_quantized(x.to(device), shares.to(device), chosen.to(device), gate_up, down, biases=placed)
    right = 0.25 * biases.down[2].double() + 0.5 * biases.down[0].double()
    torch.testing.assert_close(made.cpu()[0].double(), right, rtol=2e-3, atol=1e-3)
