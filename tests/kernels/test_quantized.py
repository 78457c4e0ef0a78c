"""Products with quantised weights, by the interpreter, against the reference in float64: each way they're computed."""

from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES, SMALL
from kernels.test_numerics import close
from kernels.unfused import UnfusedProducts, scaled_mm
from outrider.device import QuantizedWeight
from outrider.device.kernels.formats import FP8, INT4, INT8
from outrider.device.kernels.reference.model import dequantize, quantize_activations
from outrider.device.kernels.weight_formats import WeightFormat
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products.operands import QuantizedProduct
from outrider_triton.quantized import activations as activation_ops
from outrider_triton.quantized import library as library_ops
from outrider_triton.quantized import operators as quantized_ops
from outrider_triton.quantized import plan as plans
from outrider_triton.quantized import products as quantized
from outrider_triton.quantized.nibble_planes import INT8_COMPONENTS, NIBBLE_PLANES, permute_rows
from outrider_triton.quantized.plan import ProductPlan, plan
from outrider_triton.tiles.configs import MatmulConfig
from outrider_triton.tiles.derive.fits import OperandStorage
from outrider_triton.tiles.derive.products import choose_config

REFERENCE = UnfusedProducts()
ROW, BLOCK = ("row", 0), ("block", 128)
WAYS = {
    "fp8 per channel, fp8 tokens": (WeightFormat(elements=FP8, activations=FP8), 256, ROW),
    "fp8 per tensor, fp8 tokens": (WeightFormat(elements=FP8, rows=0, activations=FP8), 256, ROW),
    "fp8 blocks": (WeightFormat(elements=FP8, rows=32, columns=128, activations=FP8, activation_group=128), 300, BLOCK),
    "fp8, plain tokens": (WeightFormat(elements=FP8), 200, ROW),
    "int8 per channel, int8 tokens": (WeightFormat(elements=INT8, activations=INT8), 256, ROW),
    "int8 groups": (WeightFormat(elements=INT8, columns=64, activations=INT8), 256, ("block", 64)),
    "int8 zeros, plain tokens": (WeightFormat(elements=INT8, zeros=True), 256, ("block", 0)),
    "int4 groups of 128": (WeightFormat(elements=INT4, columns=128), 512, BLOCK),
    "int4 groups of 128, zeros": (WeightFormat(elements=INT4, columns=128, zeros=True), 300, BLOCK),
    "int4 groups of 32": (WeightFormat(elements=INT4, columns=32), 512, ("fine", 256)),
    "int4 groups of 32, zeros": (WeightFormat(elements=INT4, columns=32, zeros=True), 264, ("fine", 256)),
    "int4 per channel, int8 tokens": (WeightFormat(elements=INT4, zeros=True, activations=INT8), 200, ("block", 0)),
    "int4 groups, grouped int8": (
        WeightFormat(elements=INT4, columns=32, activations=INT8, activation_group=128), 264, ("fine", 128),
    ),
}  # fmt: skip
COLUMNS = 48


@pytest.fixture(params=["without", "with"])
def either(request, device, pdl):
    """Kernels of a device without instructions for e4m3, and with."""
    if device.type == "cuda":
        pytest.skip("not run: a device has them or not: tests/kernels/quantized_on_device.py")
    return TritonKernels(replace(SMALL, architecture="sm_80" if request.param == "without" else "sm_89", early_starts=pdl))


def drawn(way, k, seed=3):
    return way.random_weight(COLUMNS, k, device=torch.device("cpu"), generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def check(made, x, weight, bias):
    """Activations near the border of two steps may go either way, and the reference rounds from float64: both are allowed."""
    right = REFERENCE.linear_quantized(x.double(), weight, bias.double())
    assert made.dtype is x.dtype
    off = (made.double() - right).abs()
    step = {None: 0.0, "fp8": 32.0, "int8": 2.0}[weight.activations] / 448
    plain = REFERENCE.linear_quantized(x.double().abs().amax(-1, keepdim=True).expand_as(x), absolute(weight))
    allowed = 2e-3 * (1 + right.abs()) + step * plain / x.shape[-1]
    assert bool((off <= allowed).all()), float((off / allowed).max())


def absolute(weight):
    """Plain tokens, and magnitudes of the weight: what one step of one activation may change at most, times the columns."""
    if weight.format == "int4":
        data = torch.full_like(weight.data, 0xFF)  # 7 + 8 above the lowest zero point
    else:
        data = weight.data.float().abs().clamp(max=120).to(weight.data.dtype)
    return replace(weight, data=data, zero_points=None, activations=None, activation_group=0, input_scale=None)


OFTEN = ("fp8 per channel, fp8 tokens", "fp8 blocks", "int8 groups", "int4 groups of 128, zeros", "int4 groups of 32, zeros")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in WAYS])
def test_each_way(name, either):
    way, k, expected = WAYS[name]
    weight, x, bias = drawn(way, k), normal(3, k), normal(COLUMNS, seed=6)
    found = plan(either.facts, weight)
    assert (found.mode, found.at_once) == expected
    assert either.quantized.quantized_config(x, weight, found) is not None
    check(either.linear_quantized(x, weight, bias), x, weight, bias)


@pytest.mark.sample(1, per="ours")
@pytest.mark.parametrize("name", ["fp8 blocks", "int4 groups of 128, zeros"])
@pytest.mark.parametrize(("tokens", "ours"), [(40, True), (65, False)])
def test_of_many_tokens_the_most_are_the_librarys(tokens, ours, name, either):
    way, k, _ = WAYS[name]
    weight, x, bias = drawn(way, k), normal(2, tokens, k), normal(COLUMNS, seed=6)
    config = either.quantized.quantized_config(x, weight, plan(either.facts, weight))
    assert (config is not None) is ours
    assert config is None or config.block_m == 128
    made = either.linear_quantized(x, weight, bias)
    assert made.shape == (2, tokens, COLUMNS)
    check(made.flatten(0, 1), x.flatten(0, 1), weight, bias)


@pytest.mark.parametrize(("tokens", "group"), [(8, 128), (5, 128), (5, 0)])
def test_the_library_takes_8_bits_with_scales_of_blocks(tokens, group, monkeypatch, device):
    if device.type != "cpu":
        pytest.skip("not run: a device has the library's product: tests/kernels/quantized_on_device.py")
    n, k = 256, 512
    blocks = WeightFormat(elements=FP8, rows=128, columns=128, activations=FP8, activation_group=128)
    weight = (blocks if group else WeightFormat(elements=FP8, activations=FP8)).quantize(normal(n, k).bfloat16())
    x, bias = normal(tokens, k).bfloat16(), normal(n, seed=6).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    operands = quantized.library_operands(weight, bias)
    made = torch.ops.outrider.linear_quantized.library(x, *operands, True, True, False)
    right = REFERENCE.linear_quantized(x.double(), weight, bias.double())
    assert made.shape == (tokens, n)
    # One step of rounding of an activation may go either way.
    assert float((made.double() - right).norm() / right.norm()) < 0.01


@pytest.mark.parametrize(
    ("cuda", "architecture", "columns", "takes"),
    [
        ("13.0", "sm_90", 512, True),
        ("12.8", "sm_90", 512, False),
        ("13.0", "sm_100", 512, False),
        ("13.0", "sm_90", 640, False),
    ],
)
def test_the_library_scales_blocks_on_hopper_alone(cuda, architecture, columns, takes, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    blocks = WeightFormat(elements=FP8, rows=128, columns=128, activations=FP8, activation_group=128)
    facts = replace(SMALL, architecture=architecture)
    assert plan(facts, blocks.quantize(normal(256, columns))).library_blocks is takes


@pytest.mark.sample(1)
@pytest.mark.parametrize("split", [4])
@pytest.mark.parametrize("name", ["fp8 per channel, fp8 tokens", "int4 groups of 128, zeros"])
def test_parts_are_added(name, split, either):
    way, k, _ = WAYS[name]
    weight, x, bias = drawn(way, k), normal(5, k), normal(COLUMNS, seed=6)
    found = plan(either.facts, weight)
    for size in (4, 8):
        key = "linear_parts", found.stored(weight.format), COLUMNS, k, size, 0
        either.tiles._derived[key] = MatmulConfig(16, 16, 128, split, 1, 2, 0, 0, 8)
    check(either.linear_quantized(x, weight, bias), x, weight, bias)


@pytest.mark.sample(2)
@pytest.mark.parametrize("group", [0, 32])
def test_the_largest_of_a_row_is_one_step_whatever_its_last_bits(group, either):
    """Over half of the range it would be either of two, as the division rounds: the same row could differ by a step."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    made, scales = activation_ops.quantized_rows(x, "int8", group, None, torch.float32, either.pdl)
    groups = x.view(64, -1, group or 128)
    place = groups.abs().argmax(-1, keepdim=True)
    largest, step = groups.gather(-1, place), made.view_as(groups).gather(-1, place)
    assert torch.equal(step, torch.where(largest < 0, -128.0, 127.0))
    for wide in (x, x.double(), x.double() * (1 + 2**-50)):
        right = quantize_activations(wide, "int8", group, None).view_as(groups).gather(-1, place)
        torch.testing.assert_close(right, (step * scales.view(64, -1, 1)).to(right.dtype), rtol=1e-6, atol=0)


def test_a_given_scale_clamps(either):
    """Static activations: beyond the range they're the largest number, and NaN stays NaN in its row alone."""
    for way in (WeightFormat(elements=FP8, activations=FP8), WeightFormat(elements=INT8, activations=INT8)):
        weight = replace(drawn(way, 256), input_scale=torch.tensor([0.0078125]))
        x = normal(4, 256) * 3
        x[2, 7] = float("nan")
        made = either.linear_quantized(x, weight)
        right = REFERENCE.linear_quantized(x.double(), weight)
        assert made[2].isnan().all()
        kept = torch.tensor([0, 1, 3])
        close(made[kept], right[kept], torch.float16)


JOINED = {
    "fp8, fp8": ("fp8 per channel, fp8 tokens", "fp8 per channel, fp8 tokens"),
    "blocks": ("fp8 blocks", "fp8 blocks"),
    "int4": ("int4 groups of 128, zeros", "int4 groups of 128"),
    "int8 behind int4": ("int4 groups of 32", "int8 per channel, int8 tokens"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "gated", "split"),
    [
        pytest.param(name, gated, split, marks=() if (place + gated) % 2 == split - 1 and place < 3 else pytest.mark.slow)
        for place, name in enumerate(JOINED)
        for gated in (False, True)
        for split in (1, 2)
    ],
)
def test_a_norm_between_two_products(name, gated, split, either):
    """One number of the residual after the other is as the reference has it, and so is what comes of its norm."""
    (one, _, _), (two, _, _) = (WAYS[each] for each in JOINED[name])
    k, hidden, tokens = 256, 256, 5
    cpu, dice = torch.device("cpu"), torch.Generator().manual_seed(11)
    first = one.random_weight(hidden, k, device=cpu, generator=dice)
    second = two.random_weight(COLUMNS, hidden, device=cpu, generator=dice)
    for weight in (first, second):
        stored = plan(either.facts, weight).stored(weight.format)
        split_of = split if weight is first else 1
        config = MatmulConfig(16, 16, 128, split_of, 1, 2, 0, 0, 16)
        for operator in ("linear_parts", "linear"):
            either.tiles._derived[operator, stored, *weight.shape, 8, 0] = config
    x, residual, norm = normal(tokens, k * (1 + gated)), normal(tokens, hidden, seed=12), normal(hidden, seed=13)
    added = QuantizedProduct(x, first, normal(hidden, seed=14), gated)
    exact = QuantizedProduct(x.double(), first, added.bias.double(), gated)
    kept, wide = residual.clone(), residual.double()
    if gated:
        norm = norm.float()  # a wider norm multiplies what isn't rounded yet
    normed = torch.empty_like(residual) if second.activations else None
    bias = normal(COLUMNS, seed=15)
    made = either.quantized.norm_linear_quantized(added, kept, norm, 1e-5, second, bias, unquantized=normed)
    if normed is not None:
        close(normed, REFERENCE.rms_norm(kept.double(), norm.double(), 1e-5), torch.float16)
    right = REFERENCE.norm_linear_quantized(exact, wide, norm.double(), 1e-5, second, normal(COLUMNS, seed=15).double())
    # Of activations near the border of two steps a few go another way than from float64.
    loose = 0.06 if first.activations else 4e-3
    assert bool(((kept.double() - wide).abs() <= loose * (1 + wide.abs())).all())
    error = (made.double() - right).norm() / right.norm()
    assert float(error) < (0.02 if first.activations or second.activations else 3e-3)
    # The same from what is there now: what is behind the residual has the norm's own numbers.
    again = REFERENCE.linear_quantized(REFERENCE.rms_norm(kept.double(), norm.double(), 1e-5).half(), second)
    off = made.float() - normal(COLUMNS, seed=15).float() - again.float()
    assert float(off.norm() / again.float().norm()) < (0.012 if second.activations else 3e-3)


@pytest.mark.parametrize("size", [128, 1024, 2560, 2600])
def test_programs_share_a_row_whose_groups_have_scales_of_their_own(size, device):
    """The same values and scales as of SwiGLU quantised in one piece."""
    both = normal(3, 2 * size).to(device)
    rows, scales = torch.ops.outrider.silu_mul.triton_quantize(both, "fp8", 128, torch.float16, 0, False)
    gated = torch.ops.outrider.silu_mul.triton(both, False)
    wanted_rows, wanted_scales = torch.ops.outrider.quantize_rows.triton(gated, "fp8", 128, None, torch.float16, False)
    assert scales.shape == (3, -(-size // 128))
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(rows, wanted_rows)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # infinity by itself, in numpy
def test_zeros_and_infinity(either):
    weight = drawn(WeightFormat(elements=FP8, activations=FP8), 256)
    x = normal(3, 256)
    x[0], x[1, 3] = 0, float("inf")
    made = either.linear_quantized(x, weight)
    assert not made[0].any()
    assert made[1].isnan().all()
    close(made[2:], REFERENCE.linear_quantized(x[2:].double(), weight), torch.float16)


def test_every_number_of_e4m3_is_read_right(either):
    """All bytes, the two that are NaN included, against torch's own conversion."""
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(2, 1).contiguous()
    weight = QuantizedWeight(format="fp8", data=bits, scales=torch.ones(2, 1), block=(1, 256), shape=(2, 256))
    made = library_ops.dequantized_weight(weight, torch.float16, fp8=False, pdl=False)
    assert torch.equal(made.nan_to_num(1e4), bits.half().nan_to_num(1e4))
    assert int(made.isnan().sum()) == 4
    finite = bits.float().nan_to_num(0.0).to(torch.float8_e4m3fn)
    x = torch.eye(256)[:64].half()  # each column by itself
    for part in range(4):
        own = replace(weight, data=finite.roll(-64 * part, 1).contiguous())
        made = either.linear_quantized(x, own)
        assert torch.equal(made[:, 0].float(), own.data[0, :64].float())


PLAIN_WAYS = {
    "groups": (WeightFormat(elements=INT4, columns=128), 512),
    "small groups, zeros": (WeightFormat(elements=INT4, columns=32, zeros=True), 264),
    "groups of no power of two": (WeightFormat(elements=INT4, columns=96), 300),
    "groups of more than a block": (WeightFormat(elements=INT4, columns=512, zeros=True), 1030),
    "whole rows": (WeightFormat(elements=INT4), 200),
    "an odd row": (WeightFormat(elements=INT4, columns=64), 201),
    "fp8 blocks": (WeightFormat(elements=FP8, rows=32, columns=128), 300),
    "fp8 of a tensor": (WeightFormat(elements=FP8, rows=0), 256),
    "int8 zeros": (WeightFormat(elements=INT8, columns=24, zeros=True), 100),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PLAIN_WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_a_weight_stands_for_is_the_references(name, dtype, device):
    weight = drawn(*PLAIN_WAYS[name])
    held = weight.data, weight.scales, weight.zero_points
    right = dequantize(*held, weight.format, weight.block, weight.shape, dtype)
    data, scales, zero_points = (None if each is None else each.to(device) for each in held)
    there = replace(weight, data=data, scales=scales, zero_points=zero_points)
    assert torch.equal(library_ops.dequantized_weight(there, dtype, fp8=False, pdl=False).cpu(), right)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 7, 2048])
@pytest.mark.parametrize("biased", [False, True])
def test_whole_sums_are_scaled_in_one_kernel(rows, biased, device):
    n = 1300  # more than a program has, and no multiple
    dice = torch.Generator().manual_seed(8)
    sums = torch.randint(-(1 << 20), 1 << 20, (3, n), generator=dice, dtype=torch.int32).to(device)

    def powers(count):  # of two: a device may round a product and a sum at once
        return torch.ldexp(torch.ones(count, 1), torch.randint(-12, -8, (count, 1), generator=dice)).to(device)

    by_row, scales = powers(3), powers(-(-n // rows))
    bias = normal(n).to(device) if biased else None
    made = library_ops.scaled_products(sums, by_row, scales, bias, rows, torch.float16, False)
    right = sums.float() * by_row * scales.repeat_interleave(rows, 0)[:n].t()
    assert torch.equal(made, (right + bias.float() if biased else right).half())


def test_rounding_to_e4m3_is_torchs(either):
    """The quotients of a row with the scale 1: steps, halves between them, subnormal ones."""
    values = torch.cat([torch.linspace(-460, 460, 900), torch.linspace(-0.05, 0.05, 500), torch.tensor([448.0, 2.0**-10])])
    x = values.half().view(1, -1)
    one = torch.ones(1)
    for format in ("fp8", "int8"):
        made, scales = activation_ops.quantized_rows(x, format, 0, one, torch.float32, either.pdl)
        wide = x.float()
        right = wide.clamp(-448, 448).to(torch.float8_e4m3fn).float() if format == "fp8" else wide.round().clamp(-128, 127)
        assert torch.equal(made, right)
        assert scales.tolist() == [[1.0]]


def test_a_format_that_is_not_registered_runs_by_the_reference(device, monkeypatch):
    """Its values are those of the interface's registry; nothing of Triton's is called for them."""
    weight, x = drawn(WeightFormat(elements=INT8, activations=INT8), 64), normal(3, 64)
    for module in (plans, quantized):
        monkeypatch.setattr(module, "TRITON_FORMATS", {})
    kernels = TritonKernels(SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(quantized_ops, "launch", None)
        assert torch.equal(kernels.linear_quantized(x, weight), REFERENCE.linear_quantized(x, weight))
    assert plan(SMALL, weight) is None


def test_what_the_kernel_does_not_take(device):
    """Then the whole weight is made plain: groups of a length that no tile has, float64 scales, half a byte."""
    odd = WeightFormat(elements=INT4, columns=24)
    assert plan(SMALL, drawn(odd, 240)) is None
    assert plan(SMALL, drawn(WeightFormat(elements=INT4), 201)) is None
    wide = drawn(WeightFormat(elements=INT4, columns=128), 256)
    assert plan(SMALL, replace(wide, scales=wide.scales.double())) is None
    assert plan(SMALL, drawn(WeightFormat(elements=FP8, activations=FP8, activation_group=16), 256)) is None
    assert plan(DEVICES["MI300X"], drawn(WeightFormat(elements=FP8, activations=FP8), 256)) == ProductPlan(
        "row", False, 256, 0
    )
    kernels = TritonKernels(SMALL)
    weight, x = drawn(odd, 240), normal(3, 240)
    right = REFERENCE.linear_quantized(x.double(), weight)
    tensors = {each.name: getattr(weight, each.name) for each in fields(weight)}
    weight = replace(weight, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, torch.Tensor)})
    x = x.to(device)
    close(kernels.linear_quantized(x, weight), right, torch.float16)
    assert kernels.linear_quantized(x.float(), weight).dtype is torch.float32
    assert kernels.linear_quantized(x[:0], weight).shape == (0, COLUMNS)


@pytest.mark.parametrize("device_name", ["A100", "RTX 3090", "L4", "H100", "B200", "MI300X"])
def test_fewer_bits_take_less_time(device_name):
    """What is derived fits, and is estimated to take no longer than twice as many bits do; on those that are faster than
    the one that was measured, what a program does between two tiles is a larger share.
    """
    from outrider_triton.tiles.derive.estimates import estimate_seconds
    from outrider_triton.tiles.derive.fits import shared_bytes

    facts = DEVICES[device_name]
    for n, k in ((28672, 4096), (4096, 14336), (128256, 4096)):
        times = []
        for stored in (
            OperandStorage(),
            OperandStorage(8, 1, min_tokens=8),
            OperandStorage(4, 2, 128, 1.7, stores_converted=True),
        ):
            config = choose_config(facts, "linear_parts", m=4, n=n, k=k, stored=stored)
            assert shared_bytes(facts, "linear_parts", config, stored) <= facts.shared_bytes
            assert config.block_k % stored.at_once(config.block_k) == 0
            times.append(estimate_seconds(facts, "linear_parts", config, m=8, n=n, k=k, stored=stored))
        assert times[1] < (0.95 if device_name in ("B200", "MI300X") else 0.75) * times[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [64, 128, 0])
def test_weights_of_four_bits_are_multiplied_in_planes(columns, either):
    """Each column by itself: which number of the weight meets which of the tokens."""
    weight = drawn(WeightFormat(elements=INT4, columns=columns, zeros=columns == 64), 384)
    found = plan(either.facts, weight)
    assert found.planes
    x = torch.eye(384)[torch.tensor([0, 1, 2, 3, 4, 63, 64, 127, 128, 255, 383])].half()
    made = either.linear_quantized(x, weight)
    close(made, REFERENCE.linear_quantized(x.double(), weight), torch.float16)
    assert not plan(either.facts, drawn(WeightFormat(elements=INT4, columns=64), 192)).planes  # no whole units
    assert not plan(either.facts, drawn(WeightFormat(elements=INT4, columns=32), 384)).planes


def test_rows_are_laid_out_in_planes(device):
    """Of 128 columns every fourth, then those beside them; rows that lie apart, too."""
    x = torch.arange(2 * 512, dtype=torch.float16).reshape(2, 512)[:, 128:384].to(device)
    made = permute_rows(x, False).float()
    assert made[0, :34].tolist() == [*range(128, 256, 4), 129, 133]
    assert torch.equal(made, x.float().unflatten(1, (2, 32, 4)).transpose(2, 3).flatten(1))


@pytest.mark.sample(1, per="by")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by", ["itself", "norm", "gate"])
def test_rows_for_a_ring_are_in_two_digits(by, dtype, device):
    """Whichever kernel lays them out: even columns of 128 first, then odd ones, to the nearest multiple of a power of two;
    units that are small, all zero, and with what isn't finite.
    """
    k, generator = 768, torch.Generator().manual_seed(3)
    x = torch.randn(3, 2 * k, generator=generator)
    x[:, k : k + 128] *= 1e-3
    x[:, k + 128 : k + 256] = 0
    x[1, k + 300] = 90.0
    x = x.to(device, dtype)
    if by != "norm":
        x[2, k + 700] = torch.inf
    norm = torch.ones(k, dtype=dtype, device=device)

    def laid(how):
        if by == "gate":
            return torch.ops.outrider.silu_mul.triton(x, False, how)
        if by == "norm":
            return torch.ops.outrider.add_rms_norm.triton(x[:, k:], None, 0 * x[:, :k], norm, 1e-5, False, how)
        return permute_rows(x[:, k:], False, how)

    straight, rows = laid(NIBBLE_PLANES).cpu().double(), laid(INT8_COMPONENTS).cpu()
    assert (rows.shape, rows.dtype) == ((3, 2 * (k + 32)), torch.int8)
    straight = straight.unflatten(1, (6, 4, 32)).transpose(2, 3).flatten(2)  # columns as they were
    low, high = rows.view(3, 2, -1)[:, :, :k].double().unbind(1)
    whole = (256 * high + low).unflatten(1, (6, 2, 64)).transpose(2, 3).flatten(2)
    grains = 16 * rows[:, k : k + 24].contiguous().view(torch.float32).double()
    most = straight.abs().amax(2)
    finite = most.isfinite()
    assert torch.equal(grains.isfinite(), finite)
    assert finite.all() == (by == "norm")
    assert (torch.frexp(grains[finite])[0] == 0.5).all()
    large = finite & (most > 0)
    assert (most < 2**14 * grains)[large].all()
    assert (most >= 2**13 * grains)[large].all()
    assert ((whole * grains[:, :, None] - straight).abs() <= grains[:, :, None] / 2)[finite].all()
