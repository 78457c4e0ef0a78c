"""Layers with quantised weights: what follows their products, and how many kernels a token takes. Also on a device."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")


from kernels.devices import SMALL
from kernels.unfused import UnfusedProducts, attended_mlp, scaled_mm, unfused_mlp
from outrider.device import AttentionMetadata, ResidualStream, RotaryArgs
from outrider.device.kernels.formats import FP8, INT4, INT8
from outrider.device.kernels.weight_formats import WeightFormat
from outrider.device.kernels.weights import linear
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.layer import DecoderLayer
from outrider.model.layers.layer_weights import LayerWeights
from outrider_triton import rows as ops
from outrider_triton.attention import operators as attention_ops
from outrider_triton.blocks import DeferredQuantized
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import launch
from outrider_triton.products.operands import HeadGate, QuantizedProduct
from outrider_triton.quantized import activations as quantized_activation_ops
from outrider_triton.quantized import nibble_planes as nibble_plane_ops
from outrider_triton.quantized import operators as quantized_ops
from outrider_triton.quantized import products as quantized_product_launches
from outrider_triton.quantized.jit.scaled_blocks import add_shared_tiles
from outrider_triton.quantized.plan import plan
from outrider_triton.quantized.products import QuantizedProducts
from outrider_triton.tiles.configs import MatmulConfig

HEADS, KV_HEADS, SIZE, HIDDEN, INNER = 4, 2, 128, 256, 384
ROWS = (HEADS + 2 * KV_HEADS) * SIZE
FORMATS = {
    "int4": WeightFormat(elements=INT4, columns=128),
    "fp8": WeightFormat(elements=FP8, activations=FP8),
}


def normal(*shape, seed=5):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").half().to(torch.get_default_device())
    )


def weight(format, rows, columns, seed=3):
    dice, there = torch.Generator().manual_seed(seed), torch.get_default_device()
    made = FORMATS[format].random_weight(rows, columns, device=torch.device("cpu"), generator=dice)
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
    made = TritonKernels(replace(SMALL, early_starts=pdl))
    torch.set_default_device(device)
    yield made
    torch.set_default_device(None)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that run, in their order."""
    names = []
    for module in (quantized_activation_ops, attention_ops, ops, nibble_plane_ops, quantized_ops):
        real = module.launch

        def counted(kernel, *args, real=real, **settings):
            names.append(kernel.fn.__name__)
            real(kernel, *args, **settings)

        monkeypatch.setattr(module, "launch", counted)
    return names


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
            for operator in ("linear_parts", "linear"):
                kernels.tiles._derived[operator, stored, *each.shape, m, 0] = MatmulConfig(16, 64, 128, split, 1, 2, 0, 0, 64)


@pytest.mark.parametrize(("tiles", "steps", "programs"), [(3, 5, 7), (2, 4, 6), (5, 3, 4), (1, 8, 8), (3, 4, 12), (4, 7, 3)])
@pytest.mark.parametrize("tokens", [33, 64, 100])
def test_parts_of_tiles_that_programs_share_are_added_in_order(tiles, steps, programs, tokens, device, pdl):
    """What programs store of their shares of the units, as ``multiply_scaled_blocks`` does; whole tiles are left alone."""
    block_m, units = 64 if tokens <= 64 else 128, tiles * steps
    sums = torch.randn(units, block_m, 128, generator=torch.Generator().manual_seed(4))
    parts = torch.full((programs, 2, block_m, 128), float("nan"))
    right, whole, made = {}, torch.full((tokens, 128), -1.0), torch.full((tokens, tiles * 128), -1.0, device=device)
    for program in range(programs):
        first, last = (each * units // programs for each in (program, program + 1))
        for tile in range(first // steps, (last - 1) // steps + 1):
            begins, ends = max(first, tile * steps), min(last, (tile + 1) * steps)
            part = sums[begins:ends].sum(0)
            if ends - begins < steps:
                parts[program, int(begins == tile * steps)] = part
                right[tile] = right[tile] + part[:tokens] if tile in right else part[:tokens]
    arguments = parts.to(device), made, tokens, tiles * 128, units, programs
    constants = {"STEPS": steps, "BLOCK_M": block_m, "TOKENS": 16}
    launch(add_shared_tiles, (tiles, block_m // 16), *arguments, **constants, pdl=pdl, warps=4)
    same(made, torch.cat([right.get(tile, whole) for tile in range(tiles)], dim=1).to(device))


@pytest.mark.sample(1)
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_parts_are_added_turned_and_written(split, with_bias, kernels):
    """Bit for bit what adding them up, rounding the sum and turning it does."""
    parts = normal(split, 5, ROWS, seed=2).float() * 1.1
    bias = normal(ROWS) if with_bias else None
    whole = quantized_ops.sum_parts(parts, bias, normal(5, HIDDEN), torch.float16, kernels.pdl)
    given = (parts, bias) if split > 1 else (whole.clone(), None)  # one that isn't split has its bias
    right, own = rotary(5), rotary(5)
    q, k, v = whole.view(5, -1, SIZE).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    kernels.rope_write_cache(q, k, v, *right)
    made = torch.ops.outrider.rope_write_cache.triton_parts(*given, *own, torch.float16, kernels.pdl)
    same(made, q)
    same(own.k_cache, right.k_cache)
    same(own.v_cache, right.v_cache)
    assert not torch.equal(own.k_cache, rotary(5).k_cache)


@pytest.mark.sample(1)
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
    made = kernels.quantized.norm_linear_quantized_rope_write_cache(added, kept, norm, 1e-5, second, bias, once)
    right = UnfusedProducts.norm_linear_quantized_rope_write_cache(kernels, added, residual, norm, 1e-5, second, bias, again)
    for mine, its in ((made, right), (kept, residual), (once.k_cache, again.k_cache), (once.v_cache, again.v_cache)):
        same(mine, its)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("format", "split"), [("int4", 2), ("int4", 1), ("fp8", 1), ("fp8", 2)])
def test_queries_behind_no_norm(format, split, kernels):
    """As the product and the rotation one after the other have it."""
    qkv, bias, x = weight(format, ROWS, HIDDEN, seed=4), normal(ROWS, seed=15), normal(5, HIDDEN)
    split_in(kernels, split, qkv)
    once, again = rotary(5), rotary(5)
    made = kernels.quantized.linear_quantized_rope_write_cache(x, qkv, bias, once)
    right = UnfusedProducts.linear_quantized_rope_write_cache(kernels, x, qkv, bias, again)
    for mine, its in ((made, right), (once.k_cache, again.k_cache), (once.v_cache, again.v_cache)):
        same(mine, its)
    assert not torch.equal(once.k_cache, rotary(5).k_cache)


@pytest.mark.sample(2)
@pytest.mark.parametrize("format", [*FORMATS, "fp8 in groups", "int8"])
def test_embeddings_beside_features(format, kernels, launched):
    """As reading and quantising them one after the other has it; rows of activations that have a scale take a kernel less."""
    way = {
        **FORMATS,
        "fp8 in groups": WeightFormat(elements=FP8, columns=128, rows=128, activations=FP8, activation_group=128),
        "int8": WeightFormat(elements=INT8, activations=INT8),
    }[format]
    dice, there = torch.Generator().manual_seed(3), torch.get_default_device()
    made = way.random_weight(HIDDEN, HIDDEN + 128, device=torch.device("cpu"), generator=dice)
    fusion = replace(made, data=made.data.to(there), scales=made.scales.to(there))
    embedding, hidden, bias = normal(9, HIDDEN), normal(5, 160, seed=6)[:, :128], normal(HIDDEN, seed=7)
    operands = torch.tensor([8, 0, 3, 3, 1]), embedding, hidden, fusion, bias
    mine = kernels.fuse_embedding(*operands)
    few = Counter(launched)
    same(mine, linear(kernels, torch.cat((embedding[operands[0]], hidden), dim=1), fusion, bias))
    own = {"embed_beside_quantize"} & set(few)
    assert own if fusion.activations else {"lay_in_planes"} & set(few)
    assert not own or not {"embed_beside", "quantize_rows"} & set(few)


def largest_of(x):
    """What gates leave of their rows, by two programs."""
    return torch.stack([half.abs().amax(1).float() for half in x.chunk(2, 1)])


@pytest.mark.sample(1, per="left")
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("left", ["gated", "maxima", "rows"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_a_last_layer_adds(format, left, split, kernels):
    """As the product, the sum and the norm one after the other have it: with a norm behind, and without one."""
    down = weight(format, HIDDEN, INNER)
    split_in(kernels, split, down)
    x, bias, norm = normal(5, INNER * (1 + (left == "gated"))), normal(HIDDEN, seed=14), normal(HIDDEN, seed=13)
    made = QuantizedProduct(x, down, bias, left == "gated", largest_of(x) if left == "maxima" else None)
    for behind in (("linear_quantized_add",), ("linear_quantized_add_rms_norm", norm, 1e-5)):
        kept, residual = normal(5, HIDDEN, seed=12), normal(5, HIDDEN, seed=12)
        mine = getattr(kernels.quantized, behind[0])(made, kept, *behind[1:])
        its = getattr(UnfusedProducts, behind[0])(kernels, made, residual, *behind[1:])
        if split == 1 or len(behind) == 1:
            same(mine, its)
            same(kept, residual)
        else:  # the norm adds parts up, and rounds their sum with the residual once
            torch.testing.assert_close(mine, its, rtol=4e-3, atol=4e-3)
            torch.testing.assert_close(kept, residual, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("group", "normed"),
    [
        pytest.param(group, normed, marks=() if (group, normed) in ((0, True), (32, False)) else pytest.mark.slow)
        for group in (0, 32, 256)
        for normed in (True, False)
    ],
)
def test_heads_are_gated_and_quantised(group, normed, kernels, launched):
    """As the gate and the quantisation one after the other have it, by scales of a row, of half a head and of four heads."""
    x, values = normal(5, INNER), normal(5, SIZE + INNER, seed=8)[:, SIZE:].unflatten(1, (6, 64))
    gate = HeadGate(values, normal(64, seed=9), 1e-6) if normed else HeadGate(values)
    rows = quantized_activation_ops.quantized_rows(gate.apply(kernels, x), "fp8", group, None, torch.float16, kernels.pdl)
    made = torch.ops.outrider.gated_rms_norm.triton_quantize(x, *gate, "fp8", group, torch.float16, 0, kernels.pdl)
    for mine, its in zip(made, rows, strict=True):
        same(mine, its)
    launched.clear()
    for format in FORMATS:
        product, residual = QuantizedProduct(x, weight(format, HIDDEN, INNER), None, gate=gate), normal(5, HIDDEN, seed=12)
        right = residual + kernels.linear_quantized(gate.apply(kernels, x), product.weight)
        same(kernels.quantized.linear_quantized_add(product, residual), right)
    assert launched.count("gate_quantize") == 1  # four bits take rows that aren't quantised


CONTEXT = 300


def attention(batch, width, *, padding=0, seed=21):
    """Queries of ``width`` tokens of each of ``batch`` sequences behind CONTEXT others, caches, and their metadata."""
    dice = torch.Generator().manual_seed(seed)
    pages, tokens = -(-(CONTEXT + width) // 16), batch * width
    caches = [torch.randn(batch * pages + 1, 16, KV_HEADS, SIZE, generator=dice, device="cpu").half() for _ in range(2)]
    metadata = AttentionMetadata(
        query_start=torch.arange(0, tokens + 1, width, dtype=torch.int32),
        seq_lens=torch.full((batch,), CONTEXT + width, dtype=torch.int32),
        block_table=torch.arange(1, batch * pages + 1, dtype=torch.int32).view(batch, pages),
        max_query=width,
        max_kv=CONTEXT + width,
    )
    queries = torch.randn(tokens + padding, HEADS, SIZE, generator=dice, device="cpu").half()
    there = torch.get_default_device()
    return queries.to(there), *(cache.to(there) for cache in caches), metadata


@pytest.mark.sample(1)
@pytest.mark.parametrize(("format", "batch", "padding"), [("int4", 1, 0), ("int4", 2, 3), ("fp8", 2, 0), ("fp8", 1, 1)])
def test_a_norm_behind_attention(format, batch, padding, kernels):
    """As attention, and what follows it, one after the other have it, where attention is shared out among programs."""
    operands = attention(batch, 2, padding=padding)
    assert kernels.attention.config(operands[0], operands[1], operands[3])[2] > 1
    output, gates = weight(format, HIDDEN, HEADS * SIZE), weight(format, 2 * INNER, HIDDEN, seed=4)
    split_in(kernels, 1, output, gates)
    m, norm, bias = operands[0].shape[0], normal(HIDDEN, seed=13), normal(HIDDEN, seed=14)
    kept, residual = normal(m, HIDDEN, seed=12), normal(m, HIDDEN, seed=12)
    following = norm, 1e-5, gates, None, weight(format, HIDDEN, INNER, seed=6), None
    made = attended_mlp(kernels, *operands, output, bias, kept, *following, scale=0.1).x
    right = unfused_mlp(kernels, *operands, output, bias, residual, *following, scale=0.1).x
    same(made, right)
    same(kept, residual)
    assert made.isfinite().all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("planes", [nibble_plane_ops.NIBBLE_PLANES, nibble_plane_ops.INT8_COMPONENTS])
def test_attention_leaves_rows_in_planes(planes, kernels):
    """Bit for bit what laying out its result does; rows of padding are zeros."""
    *operands, metadata = attention(3, 2, padding=2)
    held = metadata.query_start, metadata.seq_lens, metadata.block_table, None, 2, CONTEXT + 2, 0.1, 0
    call = *operands, *held, False, [16, 32, 4, 1, 2, 0], kernels.pdl
    made = torch.ops.outrider.paged_attention.triton(*call, planes)
    plain = torch.ops.outrider.paged_attention.triton(*call)
    assert plain[-2:].eq(0).all()
    laid = nibble_plane_ops.permute_rows(plain.flatten(1), kernels.pdl, planes)
    if planes == nibble_plane_ops.INT8_COMPONENTS:  # what lies behind the grains is nobody's
        k, half = HEADS * SIZE, made.shape[1] // 2
        used = [*range(k + 4 * (k // 128)), *range(half, half + k)]
        made, laid = made[:, used], laid[:, used]
    assert torch.equal(made, laid)


@pytest.mark.sample(1, per="format")
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # infinity by itself, in numpy
@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("shares", [1, 3, 130])
@pytest.mark.parametrize("width", [384, 1024, 2500])
def test_rows_are_quantised_by_what_was_left_of_them(width, shares, format, kernels):
    """Bit for bit as by a program that sees the whole row; zeros, infinity and NaN included."""
    x = normal(6, width) * 3
    x[1], x[2, 7], x[3, 5], x[4, 3] = 0, float("inf"), float("nan"), 1000.0
    largest = x.float().abs().nan_to_num(float("inf"), float("inf"))
    maxima = torch.zeros(shares, 6, dtype=torch.float32)
    maxima.scatter_reduce_(0, (torch.arange(width) % shares)[:, None].expand(-1, 6), largest.T, "amax")
    dtype = torch.float8_e4m3fn if format == "fp8" else torch.int8
    made, scales = torch.ops.outrider.quantize_by_maxima.triton(x, maxima, format, dtype, kernels.pdl)
    right, wanted = quantized_activation_ops.quantized_rows(x, format, 0, None, dtype, kernels.pdl)
    torch.testing.assert_close(scales, wanted, rtol=0, atol=0, equal_nan=True)
    assert scales.isnan().flatten().tolist() == [False, False, True, True, False, False]
    real = [0, 1, 4, 5]  # the scale says it of the others
    assert torch.equal(made[real].float(), right[real].float())


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


def inputs_of(m, metadata):
    return ForwardInput(
        tokens=torch.zeros(m, dtype=torch.int64), positions=torch.arange(m), slots=torch.arange(m) + 4, attention=metadata
    )


@pytest.mark.parametrize(("tokens", "group"), [(22, 128), (21, 0)])
def test_kernels_before_the_librarys_products_quantise_its_rows(tokens, group, kernels, launched, monkeypatch):
    blocks = {"rows": 128, "columns": 128, "activation_group": 128} if group else {}
    way = WeightFormat(elements=FP8, activations=FP8, **blocks)
    shapes = {"down": (HIDDEN, INNER), "gate_up": (2 * INNER, HIDDEN)}
    weights = {
        name: way.quantize(normal(*shape, seed=place).bfloat16() / 16) for place, (name, shape) in enumerate(shapes.items())
    }
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(QuantizedProducts, "_derive", lambda *operands, **options: None)
    monkeypatch.setattr(quantized_product_launches, "_library_takes_stored", lambda *operands: True)
    own = TritonKernels(replace(kernels.facts, architecture="sm_90"))
    both, residual, norm = (normal(*shape, seed=9).bfloat16() for shape in ((tokens, 2 * INNER), (tokens, HIDDEN), (HIDDEN,)))
    wanted = residual.clone()
    normed = own.add_rms_norm(own.linear_quantized(own.silu_mul(both), weights["down"]), wanted, norm, 1e-5)
    right = own.linear_quantized(normed, weights["gate_up"])
    launched.clear()
    product = QuantizedProduct(both, weights["down"], None, gated=True)
    made = own.quantized.norm_linear_quantized(product, residual, norm, 1e-5, weights["gate_up"])
    same(residual, wanted)
    same(made, right)
    assert launched == ["silu_mul_quantize", "add_rms_norm_quantize"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_of_a_draft(format, kernels, launched):
    """A layer with nothing ahead of it, and no norm behind it: what turns queries and keys adds parts, and SwiGLU leaves
    rows as the last product takes them.
    """
    own, m, turn = layer(format, kernels), 2, rotary(2)
    _, *caches, metadata = attention(1, m)
    residual = normal(m, HIDDEN, seed=9)
    x = ResidualStream(kernels, residual)
    assert own.forward(x, inputs_of(m, metadata), (turn.cos, turn.sin), tuple(caches)).add() is residual
    found = Counter(launched)
    always = {"add_parts_rope_write_cache": 1, "paged_attention": 1, "join_splits": 1, "rms_norm": 1}
    if format == "int4":
        assert found == {**always, "lay_in_planes": 1, "linear_planes": 4, "add_rms_norm": 1, "silu_mul": 1, "add_parts": 1}
    else:
        assert found == {
            **always,
            "quantize_rows": 2,
            "linear_quantized": 4,
            "add_rms_norm_quantize": 1,
            "silu_mul_quantize": 1,
            "add_parts": 1,
        }


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_of_a_layer(format, kernels, launched):
    """A few tokens behind another layer: four products, and between them what follows each in one kernel. What joins the
    parts of attention leaves them as a product of four bits takes them.
    """
    own = layer(format, kernels)
    m, turn = 2, rotary(2)
    _, *caches, metadata = attention(1, m)
    inputs = inputs_of(m, metadata)
    product = QuantizedProduct(normal(m, 2 * INNER), weight(format, HIDDEN, INNER, seed=3), None, gated=True)
    x = ResidualStream(kernels, normal(m, HIDDEN, seed=9), DeferredQuantized(kernels, product))
    own.forward(x, inputs, (turn.cos, turn.sin), tuple(caches))
    found = Counter(launched)
    always = {"add_parts_rope_write_cache": 1, "paged_attention": 1}
    if format == "int4":
        assert found == {**always, "linear_planes": 4, "add_rms_norm": 2, "silu_mul": 1, "join_splits": 1}
    else:
        assert found == {
            **always,
            "linear_quantized": 4,
            "add_rms_norm_quantize": 2,
            "silu_mul_quantize": 1,
            "join_splits": 1,
            "quantize_rows": 1,
        }
