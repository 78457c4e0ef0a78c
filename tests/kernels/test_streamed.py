"""Products whose operands come through a ring: right on a device that has one; how they are cut up, anywhere.

The interpreter knows Triton, not Gluon, in which these are written. They are compiled in ``test_compile.py``.
"""

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from kernels.test_numerics import close
from kernels.unfused import UnfusedProducts
from outrider.device import RotaryArgs
from outrider.model.config.shapes import decoder_shape, shape_config
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products import streamed
from outrider_triton.products.dense import _boxes_fit_heads
from outrider_triton.products.operands import Product
from outrider_triton.tiles.configs import LARGE_M, PREFILL_GATES, STREAMED, MatmulConfig
from outrider_triton.tiles.measure.chain import Chain
from outrider_triton.tiles.store.table import load

REFERENCE = UnfusedProducts()
HALF = torch.bfloat16
HEADS, KV_HEADS, SIZE = 5, 2, 128
# Boxes of 8 to 32 rows; shares of a tile, of part of one, of several; two and more stages; one block of tokens and more.
CONFIGS = [
    [8, 8, 128, 1, 4, 4, 0, STREAMED, 24],
    [16, 16, 64, 1, 4, 2, 0, STREAMED, 112],
    [32, 32, 128, 1, 4, 3, 0, STREAMED, 32],
    [8, 8, 256, 1, 4, 3, 0, STREAMED, 56],
]
TOKENS = [1, 4, 16, 37]
# One group of warps and two; shares of a tile, of part of one, of several; rings whose depths divide nothing.
TALLER = [
    [128, 16, 64, 1, 8, 4, 5, LARGE_M, 112],
    [128, 64, 64, 1, 4, 8, 5, LARGE_M, 64],
    [64, 8, 64, 1, 8, 4, 10, LARGE_M, 264],
    [64, 16, 64, 1, 4, 3, 7, LARGE_M, 144],
]


@pytest.fixture(scope="module")
def ops():
    return torch.ops.outrider


def normal(device, *shape, scale=1.0, seed=0):
    made = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=made) * scale).to(HALF).to(device)


def product(device, m, n, k):
    return normal(device, m, k), normal(device, n, k, scale=k**-0.5), normal(device, n)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("n", [64, 200, 4096])
def test_a_product(m, n, config, hopper, ops):
    x, weight, bias = product(hopper, m, n, 1024)
    wanted = x.double() @ weight.double().T
    close(ops.linear.triton(x, weight, None, config, True), wanted.cpu(), HALF)
    close(ops.linear.triton(x, weight, bias, config, True), (wanted + bias.double()).cpu(), HALF)


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("n", [64, 200, 4096])
def test_a_product_in_parts(m, n, split, hopper, ops):
    x, weight, _ = product(hopper, m, n, 2048)
    parts = ops.linear_parts.triton(x, weight, [8, 32, 128, split, 4, 4, 0, STREAMED, 32], True)
    assert parts.shape == (split, m, n)
    span = 2048 // split
    for part in range(split):
        columns = slice(part * span, (part + 1) * span)
        close(parts[part], (x[:, columns].double() @ weight[:, columns].double().T).cpu(), torch.float32)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c[8] <= 32], ids=str)
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("n", [64, 200, 4096])
def test_a_product_is_added_to_the_residual(m, n, config, hopper, ops):
    x, weight, bias = product(hopper, m, n, 1024)
    residual, norm = normal(hopper, m, n, seed=1), normal(hopper, n, seed=2)
    wanted = residual.double() + x.double() @ weight.double().T + bias.double()
    alone, kept = residual.clone(), residual.clone()
    ops.linear_add.triton(x, weight, bias, alone, config, True)
    close(alone, wanted.cpu(), HALF)
    scaled, squares = ops.linear_add_scaled.triton(x, weight, bias, kept, norm, config, True)
    assert torch.equal(kept, alone)
    close(scaled, (kept.double() * norm.double()).cpu(), HALF)
    assert squares.shape == (-(-n // config[8]), m)
    close(squares.sum(0), kept.double().square().sum(1).cpu(), torch.float32)


# Boxes that would straddle gate and up are refused, see below.
@pytest.mark.parametrize(("inner", "config"), [(n, c) for n in (64, 208, 3584) for c in CONFIGS if n % c[1] == 0], ids=str)
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_gates(m, inner, config, with_norm, hopper, ops):
    x, weight, bias = product(hopper, m, 2 * inner, 1024)
    if with_norm:
        residual, norm = normal(hopper, m, 1024, seed=3), normal(hopper, 1024, seed=4)
        added = Product(*product(hopper, m, 1024, 512))
        wanted = REFERENCE.norm_linear_silu_mul(
            Product(*(t.double() for t in added)), residual.double(), norm.double(), 1e-5, weight.double(), bias.double()
        )
        scaled = ops.linear_add_scaled.triton(*added, residual, norm, CONFIGS[2], True)
        made = ops.linear_silu_mul.triton(scaled[0], weight, bias, config, True, scaled[1], 1e-5)
    else:
        wanted = REFERENCE.linear_silu_mul(x.double(), weight.double(), bias.double())
        made = ops.linear_silu_mul.triton(x, weight, bias, config, True)
    close(made, wanted.cpu(), HALF)


@pytest.mark.parametrize(("inner", "config"), [(n, c) for n in (64, 208, 3584) for c in TALLER if n % c[1] == 0], ids=str)
@pytest.mark.parametrize("m", [1, 64, 65, 128, 200])
def test_gates_of_many_tokens(m, inner, config, hopper, ops):
    x, weight, bias = product(hopper, m, 2 * inner, 1024)
    for each in (None, bias):
        wanted = REFERENCE.linear_silu_mul(x.double(), weight.double(), None if each is None else each.double())
        close(ops.linear_silu_mul.triton(x, weight, each, config, True), wanted.cpu(), HALF)


# Programs with none, one and several tiles, groups of blocks that aren't full, and the first of them alone.
@pytest.mark.parametrize(("stages", "group", "programs"), [(4, 16, 132), (3, 2, 7), (2, 1, 1)])
@pytest.mark.parametrize(("m", "inner", "k"), [(129, 1000, 1000), (1024, 1792, 256), (300, 64, 192), (2000, 3584, 1024)])
def test_gates_of_prefill(m, inner, k, stages, group, programs, hopper, ops):
    x, weight, bias = product(hopper, m, 2 * inner, k)
    config = [128, 128, 64, 1, 8, stages, group, PREFILL_GATES, programs]
    wanted = REFERENCE.linear_silu_mul(x.double(), weight.double())
    close(ops.linear_silu_mul.triton(x, weight, None, config, True), wanted.cpu(), HALF)
    with pytest.raises(RuntimeError, match="without a bias"):
        ops.linear_silu_mul.triton(x, weight, bias, config, True)
    for field, wrong in ((0, 256), (1, 64), (4, 4), (5, 1), (5, -(-k // 64) + 2)):
        with pytest.raises(RuntimeError, match="can't be tiled"):
            ops.linear_silu_mul.triton(x, weight, None, [*config[:field], wrong, *config[field + 1 :]], True)


def test_gates_of_prefill_have_blocks_for_their_stages():
    """With more stages the first warpgroup could be a tile ahead, and both would wait for ever."""
    x, weight, out = (torch.empty(shape, dtype=HALF) for shape in ((129, 128), (256, 128), (129, 128)))
    with pytest.raises(RuntimeError, match="at most one more than blocks"):
        streamed.silu_mul_prefill(x, weight, out, MatmulConfig(128, 128, 64, 1, 8, 4, 12, PREFILL_GATES, 132), True)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_queries_turn_and_keys_and_values_go_to_their_slots(m, config, with_norm, hopper, ops):
    rows = (HEADS + 2 * KV_HEADS) * SIZE
    x, weight, bias = product(hopper, m, rows, 1024)
    angle = torch.rand(m, SIZE // 2, generator=torch.Generator().manual_seed(5)).repeat(1, 2).to(hopper) * 6
    caches = [normal(hopper, m + 1, 4, KV_HEADS, SIZE, seed=seed) for seed in (6, 7)]
    slots = (torch.randperm(4 * m, generator=torch.Generator().manual_seed(8))[:m] + 4).to(hopper)
    own = RotaryArgs(angle.cos().to(HALF), angle.sin().to(HALF), *caches, slots)
    exact = RotaryArgs(*(t.double() for t in own[:4]), slots)
    if with_norm:
        residual, norm = normal(hopper, m, 1024, seed=3), normal(hopper, 1024, seed=4)
        added = Product(*product(hopper, m, 1024, 512))
        wanted = REFERENCE.norm_linear_rope_write_cache(
            Product(*(t.double() for t in added)),
            residual.double(),
            norm.double(),
            1e-5,
            weight.double(),
            bias.double(),
            exact,
        )
        x, squares = ops.linear_add_scaled.triton(*added, residual, norm, CONFIGS[2], True)
    else:
        wanted, squares = REFERENCE.linear_rope_write_cache(Product(x.double(), weight.double(), bias.double()), exact), None
    made = ops.rope_write_cache.triton_linear(x, squares, weight, bias, 1e-5, *own, config, True)
    for one, two in zip((made, *own[2:4]), (wanted, *exact[2:4]), strict=True):
        close(one, two.cpu(), HALF)


@pytest.mark.parametrize(("batch", "width"), [(1, 4), (16, 1), (8, 4), (16, 4), (32, 4)])
def test_layers_one_after_another(batch, width, hopper):
    """Each kernel begins while the one before still runs and has its weights come then: what all make is the same without."""
    shape, table = decoder_shape(shape_config("llama-3.1-8b"), HALF), load("NVIDIA H200")
    chain = Chain(shape, TritonKernels(replace(DEVICES["H200"], early_starts=False), table=table), hopper)
    chain.prepare(batch, width, 640)
    wanted = chain.run_layers(0)
    chain.kernels = TritonKernels(DEVICES["H200"], table=table).for_shape(shape)
    chain.run_layers(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [chain.run_layers(0) for _ in range(4)]
    for _ in range(50):
        graph.replay()
        for each in made:
            assert torch.equal(each, wanted)


# -- how products are cut up: on any machine -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stages": 1}, "two stages"),
        ({"block_k": 384}, "multiples of"),
        ({"rows_per_program": 20}, "boxes"),
        ({"block_n": 64}, "boxes"),
    ],
)
def test_what_cannot_be_cut_up_is_refused(change, named, ops):
    fields = dict(zip(MatmulConfig.__dataclass_fields__, CONFIGS[0], strict=True))
    config = list({**fields, **change}.values())
    x, weight = torch.zeros(4, 1024, dtype=HALF), torch.zeros(64, 1024, dtype=HALF)
    with pytest.raises(RuntimeError, match=named):
        ops.linear.triton(x, weight, None, config, True)


def test_boxes_that_straddle_halves_are_refused(ops):
    x, weight = torch.zeros(4, 1024, dtype=HALF), torch.zeros(2 * 72, 1024, dtype=HALF)
    with pytest.raises(RuntimeError, match="divide 72"):
        ops.linear_silu_mul.triton(x, weight, None, CONFIGS[2], True)


@pytest.mark.parametrize(
    "change",
    [
        {"stages": 1},
        {"prefetch_columns": 1},
        {"block_k": 96},
        {"rows_per_program": 100},
        {"block_n": 128},
        {"block_n": 4},
        {"warps": 16},
        {"split": 2},
    ],
    ids=str,
)
def test_gates_that_cannot_be_cut_up_are_refused(change, ops):
    fields = dict(zip(MatmulConfig.__dataclass_fields__, TALLER[0], strict=True))
    x, weight = torch.zeros(80, 1024, dtype=HALF), torch.zeros(2 * 3584, 1024, dtype=HALF)
    with pytest.raises(RuntimeError, match="tiled|isn't split"):
        ops.linear_silu_mul.triton(x, weight, None, list({**fields, **change}.values()), True)


ROWS = torch.arange(80 * 1032, dtype=torch.float32).to(HALF)


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (ROWS[: 80 * 1024].view(80, 1024), False),
        (ROWS.view(80, 1032)[:, :1024], False),
        (ROWS.view(80, 1032)[:, 4:1028], True),  # begins within 16 bytes
        (ROWS[: 79 * 1028 + 1024].as_strided((80, 1024), (1028, 1)), True),  # the second row does
        (ROWS[:1024].expand(80, 1024), True),
    ],
    ids=["whole", "apart", "begins within", "lies within", "one row"],
)
@pytest.mark.parametrize("config", [TALLER[0], CONFIGS[1]], ids=str)
def test_tokens_that_the_copy_engine_cannot_bring_are_copied(config, x, copied, ops, monkeypatch):
    seen = []
    monkeypatch.setattr(streamed, "launch", lambda kernel, grid, tokens, *rest, **named: seen.append(tokens))
    ops.linear_silu_mul.triton(x, torch.zeros(2 * 3584, 1024, dtype=HALF), None, config, True)
    (tokens,) = seen
    assert torch.equal(tokens.base, x)
    assert (tokens.base.data_ptr() != x.data_ptr()) is copied
    assert (tokens.base.data_ptr() % 16, tokens.strides[0] * 2 % 16, tokens.strides[0] >= 1024) == (0, 0, True)


def test_more_than_a_tile_is_refused_where_squares_are_left(ops):
    x, weight = torch.zeros(4, 1024, dtype=HALF), torch.zeros(256, 1024, dtype=HALF)
    with pytest.raises(RuntimeError, match="32 at most"):
        ops.linear_add.triton(x, weight, None, torch.zeros(4, 256, dtype=HALF), CONFIGS[3], True)


@pytest.mark.parametrize(("size", "box"), list(itertools.product((64, 80, 96, 128), (8, 16, 32))))
def test_heads_that_no_box_fits_turn_otherwise(size, box):
    streamed_config = MatmulConfig(8, box, 128, 1, 4, 4, 0, STREAMED, 2 * box)
    assert _boxes_fit_heads(streamed_config, size // 2) is (size // 2 % box == 0)
    assert _boxes_fit_heads(MatmulConfig(16, 64, 128, 1, 4, 4, 0, 0, 24), size // 2)
