"""Four bits that come through a ring: what is launched, anywhere; right on a device that has one. Compiled in
``test_compile.py``; more cases on a device: ``planes_ring_on_device.py``.
"""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.test_numerics import close
from outrider.device import KernelSet, RotaryArgs
from outrider.device.kernels.weight_formats import weight_format
from outrider_triton.quantized import nibble_planes
from outrider_triton.quantized.jit import nibble_planes_streamed
from outrider_triton.quantized.nibble_planes import (
    INT8_COMPONENTS,
    allocate_rows,
    computes_swiglu,
    permute_rows,
)
from outrider_triton.quantized.plan import plan
from outrider_triton.tiles.configs import STREAMED, MatmulConfig
from outrider_triton.tiles.facts import facts_of

CONFIGS = [
    [8, 16, 1024, 1, 4, 3, 256, STREAMED, 48],
    [8, 8, 1024, 1, 8, 2, 512, STREAMED, 72],
    [16, 64, 512, 2, 8, 2, 256, STREAMED, 64],
    [16, 16, 512, 2, 4, 4, 512, STREAMED, 144],
    [4, 16, 512, 2, 8, 4, 256, STREAMED, 48],
]


def weight_of(n, k, device):
    return weight_format("int4").random_weight(n, k, device=device)


@pytest.fixture
def said(monkeypatch):
    """What a launch is told, by name; nothing is launched."""
    found = {}

    def launched(kernel, grid, *arguments, pdl, warps, maxnreg, **settings):
        found.update(dict(zip(kernel.arg_names, arguments, strict=False)), PDL=pdl, grid=grid, warps=warps, **settings)

    monkeypatch.setattr(nibble_planes, "launch", launched)
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_operand_goes_where_the_kernel_has_it(config, said):
    made = MatmulConfig(*config)
    m = min(5, made.block_m)
    weight, x = weight_of(1000, 1024, torch.device("cpu")), torch.zeros(m, 1024, dtype=torch.bfloat16)
    out = torch.empty(made.split, m, 1000)
    rows, grains = allocate_rows(x, x.shape, INT8_COMPONENTS)
    nibble_planes.launch_planes(rows.view(2 * m, -1)[:, :1024], grains, weight.data, weight.scales, None, out, made, True)
    assert set(said) - {"grid", "warps"} == set(nibble_planes_streamed.streamed_planes.arg_names)
    assert (said["grid"], said["warps"]) == ((-(-1000 // made.rows_per_program), made.split), 4)
    assert (said["m"], said["n"], said["groups"], said["rows_per_program"]) == (m, 1000, 8, made.rows_per_program)
    assert said["steps"] == said["STEPS"] == 1024 // made.split // made.prefetch_columns
    assert (said["TILES"], said["GROUPS"]) == (-(-made.rows_per_program // 64), made.warps // 4)
    assert (said["x"].block_shape, said["w"].block_shape) == (
        [2 * made.block_m, made.prefetch_columns],
        [made.block_n, made.prefetch_columns // 2],
    )
    assert said["w"].base.dtype is said["x"].base.dtype is torch.int8
    assert said["scales"] is weight.scales
    assert said["grains"] is grains
    assert said["stride"] == grains.stride(0) == (1024 + 32) // 2
    assert tuple(said["x"].strides) == (1024 + 32, 1)
    assert said["out"] is out


ACTIVATING = [
    [4, 16, 2048, 1, 8, 4, 512, STREAMED, 64],
    [4, 16, 1024, 2, 8, 2, 512, STREAMED, 48],
    [4, 16, 1024, 2, 4, 3, 512, STREAMED, 144],
    [8, 16, 512, 4, 4, 3, 512, STREAMED, 32],
]
"""Of a weight with 2,048 columns."""


@pytest.mark.parametrize("config", ACTIVATING, ids=str)
def test_gate_and_up_of_one_token_go_to_the_product(config, said):
    made, weight = MatmulConfig(*config), weight_of(1000, 2048, torch.device("cpu"))
    both, gated = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.ops.outrider.linear_quantized.triton_gated_planes
    gated(both, weight.data, weight.scales, None, config, True)
    assert set(said) - {"grid", "warps"} == set(nibble_planes_streamed.streamed_planes.arg_names)
    assert (said["grid"], said["m"], said["GATED"]) == ((-(-1000 // made.rows_per_program), made.split), 1, True)
    assert said["steps"] == said["STEPS"] == 2048 // made.split // 512
    assert said["x"] is both
    assert said["grains"] is None
    two = torch.zeros(2, 4096, dtype=torch.bfloat16)
    for wrong in (two, both[:, 1:], both[:, :2048]):
        with pytest.raises(RuntimeError, match="expected one row of 4096 that begins at a multiple of 16 bytes"):
            gated(wrong, weight.data, weight.scales, None, config, True)


def test_which_products_take_gate_and_up():
    """One token alone, units of 512 columns, and no more of them than a group of warps has registers for."""
    takes = [4, 16, 4096, 1, 4, 4, 512, STREAMED, 64]
    assert computes_swiglu(MatmulConfig(*takes), 1)
    assert not computes_swiglu(MatmulConfig(*takes), 2)
    assert not computes_swiglu(MatmulConfig(4, 16, 4096, 1, 4, 4, 256, STREAMED, 64), 1)
    assert not computes_swiglu(MatmulConfig(4, 16, 4608, 1, 4, 4, 512, STREAMED, 64), 1)
    assert computes_swiglu(MatmulConfig(4, 16, 8192, 1, 8, 4, 512, STREAMED, 64), 1)
    assert not computes_swiglu(MatmulConfig(4, 64, 512, 1, 4, 4, 512, 0, 64), 1)


@pytest.mark.parametrize("config", ACTIVATING, ids=str)
@pytest.mark.parametrize("n", [64, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_product_gates_itself_has_the_bits_of_two_kernels(dtype, n, config, hopper):
    """Also where numbers are infinite or none, all 0, or as small as can be."""
    weight = weight_of(n, 2048, hopper)
    both = torch.randn(1, 4096, device=hopper).to(dtype)
    small, none, odd = both * 1e-6, both.clone(), both.clone()
    none[:, 128:256] = 0.0
    odd[0, 700], odd[0, 2048 + 1500] = float("inf"), float("nan")
    for each in (both, small, none, odd):
        laid = torch.ops.outrider.silu_mul.triton(each, True, INT8_COMPONENTS)
        own = dtype, "block", 128, 128, True, config, True
        held = weight.data, weight.scales, None, None, [1, 128]
        apart = torch.ops.outrider.linear_quantized.triton_planes(laid, *held, *own)
        made = torch.ops.outrider.linear_quantized.triton_gated_planes(each, weight.data, weight.scales, None, config, True)
        assert made.shape == apart.shape
        bits = torch.int32 if made.dtype is torch.float32 else torch.int16  # NaN is no number's equal
        assert torch.equal(made.view(bits), apart.view(bits))


@pytest.mark.parametrize(
    "config",
    [
        [8, 16, 512, 1, 4, 3, 256, STREAMED, 48],  # half of the columns
        [8, 16, 1024, 1, 4, 3, 128, STREAMED, 48],  # units of one group
        [8, 16, 1024, 1, 4, 3, 256, STREAMED, 40],  # no whole boxes
        [4, 16, 1024, 1, 4, 3, 256, STREAMED, 48],  # fewer tokens
        [8, 16, 256, 4, 8, 3, 256, STREAMED, 48],  # nothing for the second group of warps
        [8, 16, 1024, 1, 4, 1, 256, STREAMED, 48],  # one stage
        [8, 16, 1024, 1, 8, 3, 256, STREAMED, 48],  # a place changes hands between the groups of warps
    ],
    ids=str,
)
def test_a_cut_that_cannot_be_is_refused(config):
    weight, x = weight_of(64, 1024, torch.device("cpu")), torch.zeros(10, 1024, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="can't be tiled"):
        nibble_planes.launch_planes(x, x, weight.data, weight.scales, None, x, MatmulConfig(*config), True)


TURNING = [[4, 8, 1024, 1, 8, 2, 512, STREAMED, 24], [8, 8, 1024, 1, 4, 3, 256, STREAMED, 40]]


@pytest.mark.parametrize("config", TURNING, ids=str)
def test_what_turns_goes_where_the_kernel_has_it(config, said):
    heads, kv_heads, size, m = 6, 2, 64, 3
    _, rotary, q = turned_operands(heads, kv_heads, size, m, torch.device("cpu"), torch.bfloat16)
    rows, _ = allocate_rows(q, (m, 1024), INT8_COMPONENTS)
    weight = weight_of((heads + 2 * kv_heads) * size, 1024, torch.device("cpu"))
    made = MatmulConfig(*config)
    turned = torch.ops.outrider.rope_write_cache.triton_linear_planes
    q = turned(rows, weight.data, weight.scales, None, q.dtype, *rotary, config, True)
    assert set(said) - {"grid", "warps"} == set(nibble_planes_streamed.streamed_planes.arg_names)
    assert said["grid"] == (-(-320 // made.rows_per_program), 1)
    assert (said["HALF"], said["TILES"], said["heads"], said["kv_heads"]) == (
        32,
        -(-made.rows_per_program // 32),
        heads,
        kv_heads,
    )
    assert all(said[name] is each for name, each in zip(("cos", "sin", "k_cache", "v_cache", "slots"), rotary, strict=True))
    assert (said["angles_token"], said["cache_slot"], said["cache_head"]) == (size, kv_heads * size, size)
    assert said["out"] is q
    assert said["w"].block_shape == [8, made.prefetch_columns // 2]


def turned_operands(heads, kv_heads, size, m, device, dtype):
    """Rows, angles, caches and slots, and where queries go."""
    x = torch.randn(m, 1024, device=device).to(dtype)
    angles = (torch.rand(m, size, device=device).to(dtype) for _ in range(2))
    caches = (torch.zeros(2, 16, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
    q = torch.empty(m, heads, size, dtype=dtype, device=device)
    return x, (*angles, *caches, torch.arange(m, device=device) + 7), q


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ([8, 16, 1024, 1, 4, 3, 256, STREAMED, 32], 64),  # boxes of as many rows as others have
        ([8, 8, 512, 2, 4, 3, 256, STREAMED, 32], 64),  # in parts
        ([8, 8, 1024, 1, 4, 3, 256, STREAMED, 32], 24),  # a box would lie in two heads
    ],
    ids=str,
)
def test_a_cut_that_cannot_turn_is_refused(config, size):
    _, rotary, q = turned_operands(4, 2, size, 3, torch.device("cpu"), torch.bfloat16)
    rows, _ = allocate_rows(q, (3, 1024), INT8_COMPONENTS)
    weight = weight_of(8 * size, 1024, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="can't be tiled"):
        torch.ops.outrider.rope_write_cache.triton_linear_planes(
            rows, weight.data, weight.scales, None, q.dtype, *rotary, config, True
        )


@pytest.mark.parametrize("config", TURNING, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 64), (5, 1, 128), (3, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_and_keys_turn(dtype, heads, kv_heads, size, config, hopper):
    weight = weight_of((heads + 2 * kv_heads) * size, 1024, hopper)
    bias = torch.randn(weight.shape[0], device=hopper).to(dtype)
    x, rotary, _ = turned_operands(heads, kv_heads, size, 3, hopper, dtype)
    q = torch.ops.outrider.rope_write_cache.triton_linear_planes(
        permute_rows(x, True, INT8_COMPONENTS), weight.data, weight.scales, bias, dtype, *rotary, config, True
    )
    angles, caches, slots = rotary[:2], rotary[2:4], rotary[4]
    wide = RotaryArgs(*(each.double() for each in angles), *(torch.zeros_like(each).double() for each in caches), slots)
    turned, keys, values = wide.split(KernelSet().linear_quantized(x.double(), weight, bias.double()))
    KernelSet().rope_write_cache(turned, keys, values, *wide)
    close(q, turned.cpu(), dtype)
    for made, wanted in zip(caches, (wide.k_cache, wide.v_cache), strict=True):
        close(made, wanted.cpu(), dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("n", [64, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product(dtype, n, config, hopper):
    weight = weight_of(n, 1024, hopper)
    assert plan(facts_of(torch.cuda.get_device_properties(hopper)), weight).can_stream
    x = torch.randn(min(5, config[0]), 1024, device=hopper).to(dtype)
    right = KernelSet().linear_quantized(x.double(), weight)
    own = dtype, "block", 128, 128, True, config, True
    made = torch.ops.outrider.linear_quantized.triton_planes(
        permute_rows(x, True, INT8_COMPONENTS), weight.data, weight.scales, None, None, [1, 128], *own
    )
    made = made.sum(0).to(x.dtype) if made.dim() == 3 else made
    close(made, right.cpu(), dtype)
