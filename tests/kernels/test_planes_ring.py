"""Four bits that come through a ring: what is launched, anywhere; right on a device that has one. Compiled in
``test_compile.py``; more cases on a device: ``planes_ring_on_device.py``.
"""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.test_numerics import close
from outrider.device import KernelSet
from outrider_triton import streamed
from outrider_triton.facts import facts_of
from outrider_triton.jit import planes_ring
from outrider_triton.planes_ops import DIGITS, in_planes, room
from outrider_triton.quantized_ops import plan
from outrider_triton.table import STREAMED, MatmulConfig
from outrider_tune.quantized import random_format, random_quantized

CONFIGS = [
    [8, 16, 1024, 1, 4, 3, 256, STREAMED, 48],
    [8, 8, 1024, 1, 8, 2, 512, STREAMED, 72],
    [16, 64, 512, 2, 8, 2, 256, STREAMED, 64],
    [16, 16, 512, 2, 4, 4, 512, STREAMED, 144],
    [4, 16, 512, 2, 8, 4, 256, STREAMED, 48],
]


def weight_of(n, k, device):
    return random_quantized(random_format("int4"), n, k, device=device)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_operand_goes_where_the_kernel_has_it(config, monkeypatch):
    said = {}

    def launched(kernel, grid, *arguments, pdl, warps, maxnreg, **settings):
        said.update(dict(zip(kernel.arg_names, arguments, strict=False)), PDL=pdl, grid=grid, warps=warps, **settings)

    monkeypatch.setattr(streamed, "launch", launched)
    made = MatmulConfig(*config)
    m = min(5, made.block_m)
    weight, x = weight_of(1000, 1024, torch.device("cpu")), torch.zeros(m, 1024, dtype=torch.bfloat16)
    out = torch.empty(made.split, m, 1000)
    rows, grains = room(x, x.shape, DIGITS)
    streamed.multiply_planes(rows.view(2 * m, -1)[:, :1024], grains, weight.data, weight.scales, None, out, made, True)
    assert set(said) - {"grid", "warps"} == set(planes_ring.streamed_planes.arg_names)
    assert (said["grid"], said["warps"]) == ((-(-1000 // made.each), made.split), 4)
    assert (said["m"], said["n"], said["groups"], said["each"]) == (m, 1000, 8, made.each)
    assert said["steps"] == said["STEPS"] == 1024 // made.split // made.ahead
    assert (said["TILES"], said["GROUPS"]) == (-(-made.each // 64), made.warps // 4)
    assert (said["x"].block_shape, said["w"].block_shape) == ([2 * made.block_m, made.ahead], [made.block_n, made.ahead // 2])
    assert said["w"].base.dtype is said["x"].base.dtype is torch.int8
    assert said["scales"] is weight.scales
    assert said["grains"] is grains
    assert said["stride"] == grains.stride(0) == (1024 + 32) // 2
    assert tuple(said["x"].strides) == (1024 + 32, 1)
    assert said["out"] is out


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
    with pytest.raises(RuntimeError, match="can't be cut up"):
        streamed.multiply_planes(x, x, weight.data, weight.scales, None, x, MatmulConfig(*config), True)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("n", [64, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product(dtype, n, config, device):
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("not run: it takes a device of compute capability 9, and TRITON_INTERPRET=0")
    weight = weight_of(n, 1024, device)
    assert plan(facts_of(torch.cuda.get_device_properties(device)), weight).ring
    x = torch.randn(min(5, config[0]), 1024, device=device).to(dtype)
    right = KernelSet().linear_quantized(x.double(), weight)
    own = dtype, "block", 128, 128, True, config, True
    made = torch.ops.outrider.linear_quantized.triton_planes(
        in_planes(x, True, DIGITS), weight.data, weight.scales, None, None, [1, 128], *own
    )
    made = made.sum(0).to(x.dtype) if made.dim() == 3 else made
    close(made, right.cpu(), dtype)
