"""Quantised products through rings: what is launched. That it is known beforehand is in ``test_random_shapes.py``.

The kernels are in Gluon, which the interpreter doesn't know; they are compiled in ``test_compile.py``, and held against the
reference on a device by ``quantized_on_device.py``.
"""

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from kernels.unfused import attended_mlp
from outrider.device import AttentionMetadata, ResidualStream, RotaryArgs
from outrider.device.kernels.formats import FP8, INT4
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS, WeightFormat
from outrider_triton.blocks import DeferredQuantized
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products import streamed
from outrider_triton.products.operands import QuantizedProduct
from outrider_triton.quantized.plan import plan
from outrider_triton.tiles.configs import SCALED_BLOCKS, STREAMED, MatmulConfig

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 4096, 14336, 32, 8, 128
TURNED = (HEADS + 2 * KV_HEADS) * SIZE
BF16 = torch.bfloat16
BY_ROW = WeightFormat(elements=FP8, activations=FP8)


@pytest.fixture(scope="module", autouse=True)
def _weights_without_values():
    """Weights of which nothing reads the values, since no kernel runs: random values take longer than all else here."""
    with pytest.MonkeyPatch.context() as patch:
        for elements in {type(each.elements) for each in WEIGHT_FORMATS.values()}:
            patch.setattr(elements, "random_data", lambda self, like, generator: like)
        yield


@pytest.fixture
def launched(instead_of_launching):
    """Kernels that were launched, their descriptors' blocks and their constants; nothing runs."""
    calls = []

    def launch(kernel, grid, *arguments, pdl, warps=0, **settings):
        known = dict(zip(kernel.arg_names, arguments, strict=False))
        blocks = tuple(tuple(known[each].block_shape) for each in ("x", "w") if hasattr(known.get(each), "block_shape"))
        calls.append((kernel.__name__, blocks, settings))
        if kernel.__name__.startswith(("streamed", "multiply_scaled", "add_shared")):
            assert set(known) | set(settings) | {"PDL"} >= set(kernel.arg_names), "an operand is missing"

    instead_of_launching(launch)
    return calls


@pytest.fixture(scope="module")
def weights():
    shapes = {"output": (HIDDEN, HIDDEN), "gates": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "turned": (TURNED, HIDDEN)}
    return {name: BY_ROW.random_weight(*shape, device=torch.device("cpu")) for name, shape in shapes.items()}


@pytest.fixture
def kernels():
    return TritonKernels(DEVICES["H200"])


def gates(kernels, weights, m):
    added = QuantizedProduct(torch.zeros(m, HIDDEN, dtype=BF16), weights["output"], None)
    residual, norm = torch.zeros(m, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
    return kernels.quantized.norm_linear_quantized(added, residual, norm, 1e-5, weights["gates"])


def turns(kernels, weights, m):
    added = QuantizedProduct(torch.zeros(m, 2 * INNER, dtype=BF16), weights["down"], None, gated=True)
    residual, norm = torch.zeros(m, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
    caches = (torch.zeros(2, 64, KV_HEADS, SIZE, dtype=BF16) for _ in range(2))
    angles = torch.zeros(m, SIZE, dtype=BF16)
    rotary = RotaryArgs(angles, angles, *caches, torch.arange(m))
    return kernels.quantized.norm_linear_quantized_rope_write_cache(
        added, residual, norm, 1e-5, weights["turned"], None, rotary
    )


@pytest.mark.parametrize("m", [1, 4, 8, 9, 16, 32])
def test_products_come_through_rings_and_one_turns_its_rows(m, launched, kernels, weights):
    assert gates(kernels, weights, m).shape == (m, 2 * INNER)
    assert turns(kernels, weights, m).shape == (m, HEADS, SIZE)
    names = [name for name, *_ in launched]
    between = ["streamed_linear", "add_rms_norm_quantize"]
    assert names == ["quantize_rows", *between, "streamed_linear", "silu_mul_quantize", *between, "streamed_rope_write_cache"]
    for name, blocks, settings in launched:
        if name.startswith("streamed"):
            assert settings["ROWS"] == 1
            assert blocks[0] == (next(room for room in (8, 16, 32) if room >= m), 128)


def activated(kernels, weights, batch, width):
    """A layer from attention on, and the next one up to its queries."""
    q, caches, metadata = attending(batch, width)
    m, norm = batch * width, torch.ones(HIDDEN, dtype=BF16)
    residual = torch.zeros(m, HIDDEN, dtype=BF16)
    operands = q, *caches, metadata, weights["output"], None, residual, norm, 1e-5, weights["gates"], None
    made = attended_mlp(kernels, *operands, weights["down"], None, scale=0.1)
    angles = torch.zeros(m, SIZE, dtype=BF16)
    rotary = RotaryArgs(angles, angles, *caches, torch.arange(m))
    kernels.quantized.norm_linear_quantized_rope_write_cache(made, residual, norm, 1e-5, weights["turned"], None, rotary)
    return made


class FakeTensor(NamedTuple):
    """What is asked of tokens on a device that isn't here."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, int]

    def numel(self):
        return prod(self.shape)


@pytest.mark.parametrize(
    ("form", "dtype", "columns", "librarys"),
    [
        ("fp8", BF16, 4096, True),
        ("fp8-tensor", BF16, 4096, True),
        ("fp8", torch.float16, 4096, False),  # its product is in bfloat16
        ("fp8", BF16, 4104, False),  # it takes multiples of 16 columns
        ("fp8-block", BF16, 4096, False),
        ("int8", BF16, 4096, False),
        ("int4", BF16, 4096, False),
    ],
)
def test_of_more_than_64_tokens_e4m3_by_rows_alone_is_the_librarys(form, dtype, columns, librarys, kernels):
    """Where it takes both operands as they're stored."""
    few = WEIGHT_FORMATS[form].random_weight(256, columns, device=torch.device("cpu"))
    repeated = {name: getattr(few, name).repeat(112, 1) for name in ("data", "scales")}
    weight = replace(few, shape=(256 * 112, columns), **repeated)
    way, most = plan(kernels.facts, weight), []
    for m in (64, 65, 128, 129):
        x = FakeTensor(torch.device("cuda"), dtype, (m, columns))
        most.append(kernels.quantized.quantized_config(x, weight, way) is None)
    assert most == [False, librarys, librarys, True]
    assert (128 in {each.block_m for each in kernels.quantized.every_config(x, weight, way)}) is not librarys


@pytest.mark.parametrize(("form", "tiles"), [("fp8", (STREAMED, 64)), ("fp8-block", (SCALED_BLOCKS, 128))])
def test_a_small_product_of_128_tokens_is_not_the_librarys(form, tiles, kernels):
    """The library's is slow where rows are few: it doesn't share columns among multiprocessors."""
    weight = WEIGHT_FORMATS[form].random_weight(4096, 4096, device=torch.device("cpu"))
    x = FakeTensor(torch.device("cuda"), BF16, (128, 4096))
    config = kernels.quantized.quantized_config(x, weight, plan(kernels.facts, weight), parts=False)
    assert config is not None
    assert (config.descriptor, config.block_m) == tiles


@pytest.fixture(scope="module")
def block_weights(weights):
    way = WEIGHT_FORMATS["fp8-block"]
    return {name: way.random_weight(*weight.shape, device=torch.device("cpu")) for name, weight in weights.items()}


@pytest.mark.parametrize("m", [32, 33, 64, 65, 128, 129])
def test_of_33_to_128_tokens_blocks_are_multiplied_in_shares(m, launched, kernels, block_weights):
    """Tiles that several programs share are added up: those of the output and of ``down``, where tiles are few."""
    shares = ["multiply_scaled_blocks", "add_shared_tiles"] if 32 < m <= 128 else []
    assert gates(kernels, block_weights, m).shape == (m, 2 * INNER)
    assert turns(kernels, block_weights, m).shape == (m, HEADS, SIZE)
    names = [name for name, *_ in launched if "scaled" in name or "shared" in name]
    assert names == [*shares, *shares[:1], *shares, *shares]
    rows = {blocks for name, blocks, _ in launched if name == "multiply_scaled_blocks"}
    assert rows == ({((64 if m <= 64 else 128, 128), (128, 128))} if shares else set())


@pytest.mark.parametrize("m", [1, 4, 16, 32])
def test_gate_and_up_end_in_their_activation(m, launched, kernels, weights):
    made = activated(kernels, weights, m, 1)
    assert (made.x.shape, made.gated, made.weight is weights["down"]) == ((m, INNER), False, True)
    assert made.maxima.shape[1] == m
    names = [name for name, *_ in launched if name not in ("paged_attention_ring", "join_splits")]
    between = ["streamed_linear", "add_rms_norm_quantize"]
    rest = ["quantize_by_maxima", *between, "streamed_rope_write_cache"]
    assert names == ["quantize_rows", *between, "streamed_silu_mul", *rest]


def test_what_leaves_its_activation_to_others(launched, kernels, weights):
    """More tokens than a ring takes, and weights that aren't by row."""
    made = activated(kernels, weights, 65, 1)
    assert (made.x.shape, made.gated, made.maxima) == ((65, 2 * INNER), True, None)
    way = WeightFormat(elements=FP8, columns=128, rows=128, activations=FP8, activation_group=128)
    blocks = way.random_weight(2 * INNER, HIDDEN, device=torch.device("cpu"))
    assert activated(kernels, {**weights, "gates": blocks}, 4, 1).gated
    assert "streamed_silu_mul" not in {name for name, *_ in launched}


def ends(kernels, weights, m):
    """A draft's fusion, a stack's first product behind no norm, and its last: for a draft, and for a final norm."""
    x, norm = torch.zeros(m, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
    angles = torch.zeros(m, SIZE, dtype=BF16)
    rotary = RotaryArgs(angles, angles, *attending(1, 1)[1], torch.arange(m))
    tokens, embedding = torch.zeros(m, dtype=torch.int64), torch.zeros(3, INNER - HIDDEN, dtype=BF16)
    assert kernels.fuse_embedding(tokens, embedding, x, weights["down"]).shape == x.shape
    kernels.quantized.linear_quantized_rope_write_cache(x, weights["turned"], None, rotary)
    few = torch.zeros(m, INNER, dtype=BF16), torch.zeros(132, m)
    made = QuantizedProduct(few[0], weights["down"], None, maxima=few[1])
    assert kernels.quantized.linear_quantized_add(made, x) is x
    kernels.quantized.linear_quantized_add_rms_norm(made, x, norm, 1e-5)


@pytest.mark.parametrize("m", [1, 4, 16, 32])
def test_the_ends_of_a_stack_take_no_kernel_more_than_its_middle(m, launched, kernels, weights):
    ends(kernels, weights, m)
    fused = ["embed_beside_quantize", "streamed_linear"]
    first, last = ["quantize_rows", "streamed_rope_write_cache"], ["quantize_by_maxima", "streamed_linear"]
    assert [name for name, *_ in launched] == [*fused, *first, *last, *last, "add_rms_norm"]
    added = [settings["ADD"] for name, _, settings in launched if name == "streamed_linear"]
    assert added == [False, True, False]


def attending(batch, width):
    """Queries, caches, and their metadata."""
    rows, pages = batch * width, 40
    metadata = AttentionMetadata(
        query_start=torch.arange(0, rows + 1, width, dtype=torch.int32),
        seq_lens=torch.full((batch,), 16 * pages, dtype=torch.int32),
        block_table=torch.zeros(batch, pages, dtype=torch.int32),
        max_query=width,
        max_kv=16 * pages,
        settled=True,
    )
    q, *caches = (
        torch.zeros(rows, HEADS, SIZE, dtype=BF16),
        *(torch.zeros(2, 16, KV_HEADS, SIZE, dtype=BF16) for _ in range(2)),
    )
    return q, caches, metadata


@pytest.fixture
def four_bits():
    way, shapes = WeightFormat(elements=INT4, columns=128), {"down": (HIDDEN, INNER), "turned": (TURNED, HIDDEN)}
    return {name: way.random_weight(*shape, device=torch.device("cpu")) for name, shape in shapes.items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("m", "turned"), [(1, True), (4, True), (5, True), (16, True), (17, False), (64, False)])
def test_queries_and_keys_of_four_bits_turn_in_the_ring(m, turned, launched, kernels, four_bits):
    assert turns(kernels, four_bits, m).shape == (m, HEADS, SIZE)
    names = [name for name, *_ in launched]
    if turned:
        # One token's SwiGLU is the product's own.
        assert names == [*(["silu_mul"] if m > 1 else []), "streamed_planes", "add_rms_norm", "streamed_planes"]
        gated = [settings["GATED"] for name, _, settings in launched if name == "streamed_planes"]
        assert gated == [m == 1, False]
    else:
        assert names == ["silu_mul", "linear_planes", "add_rms_norm", "linear_planes", "add_parts_rope_write_cache"]
    halves = [settings["HALF"] for name, _, settings in launched if name == "streamed_planes"]
    assert halves == ([0, SIZE // 2] if turned else [])


@pytest.mark.parametrize(("m", "turned"), [(1, True), (16, True), (17, False)])
def test_queries_and_keys_of_four_bits_turn_without_a_norm(m, turned, launched, kernels, four_bits):
    rotary = RotaryArgs(*[torch.zeros(m, SIZE, dtype=BF16)] * 2, *attending(1, 1)[1], torch.arange(m))
    made = kernels.quantized.linear_quantized_rope_write_cache(
        torch.zeros(m, HIDDEN, dtype=BF16), four_bits["turned"], None, rotary
    )
    assert made.shape == (m, HEADS, SIZE)
    behind = ["streamed_planes"] if turned else ["linear_planes", "add_parts_rope_write_cache"]
    assert [name for name, *_ in launched] == ["lay_in_planes", *behind]


@pytest.mark.parametrize("m", [1, 4, 32])
def test_blocks_of_one_piece_of_columns_come_through_rings(m, launched, kernels):
    """Each piece has its own scales. Gates and rotations of such weights keep to their own kernels."""
    way = WeightFormat(elements=FP8, columns=128, rows=128, activations=FP8, activation_group=128)
    cpu, norm, residual = torch.device("cpu"), torch.ones(HIDDEN, dtype=BF16), torch.zeros(m, HIDDEN, dtype=BF16)
    first, second = way.random_weight(HIDDEN, INNER, device=cpu), way.random_weight(2 * INNER, HIDDEN, device=cpu)
    added = QuantizedProduct(torch.zeros(m, 2 * INNER, dtype=BF16), first, None, gated=True)
    kernels.quantized.norm_linear_quantized(added, residual, norm, 1e-5, second)
    names = [name for name, *_ in launched]
    assert names == ["silu_mul_quantize", "streamed_linear", "add_rms_norm_quantize", "streamed_linear"]
    for name, _, settings in launched:
        if name == "streamed_linear":
            assert (settings["ROWS"], settings["BLOCKS"]) == (128, True)


@pytest.mark.parametrize("count", [1, 2])
def test_the_norm_of_a_recurrent_block_quantises_its_rows(count, launched, kernels):
    """A second projection, which isn't quantised, reads the norm that the same kernel stores."""
    weight = BY_ROW.random_weight(HIDDEN, HIDDEN, device=torch.device("cpu"))
    small = torch.zeros(16, HIDDEN, dtype=BF16)
    norm, rows = torch.ones(HIDDEN, dtype=torch.float32), torch.zeros(4, HIDDEN, dtype=BF16)
    pending = DeferredQuantized(kernels.quantized, QuantizedProduct(torch.zeros(4, HIDDEN, dtype=BF16), weight, None))
    block = SimpleNamespace(norm=norm, eps=1e-6, projections=(weight, small)[:count])
    made = kernels._projections(ResidualStream(kernels, rows, pending), block)
    assert [each.shape for each in made] == [(4, HIDDEN), (4, 16)][:count]
    names = [name for name, *_ in launched]
    assert names[:4] == ["quantize_rows", "streamed_linear", "add_rms_norm_quantize", "streamed_linear"]
    assert len(names) == 3 + count


@pytest.mark.parametrize("other", ["groups", "another device", "columns in no units"])
def test_what_does_not_come_through_rings(other, launched):
    """Each of these keeps to its own kernels."""
    kernels = TritonKernels(DEVICES["L4" if other == "another device" else "H200"])
    columns, way = (1056 if other == "columns in no units" else 1024), BY_ROW
    if other == "groups":
        way = WeightFormat(elements=FP8, columns=64, rows=64, activations=FP8, activation_group=64)
    weight = way.random_weight(1024, columns, device=torch.device("cpu"))
    kernels.linear_quantized(torch.zeros(4, columns, dtype=BF16), weight)
    assert [name for name, *_ in launched][:2] == ["quantize_rows", "linear_quantized"]


@pytest.mark.parametrize(("columns", "allowed"), [(128, True), (256, True), (512, False), (384, False), (64, False)])
def test_a_unit_of_eight_bits_has_one_piece_or_two(columns, allowed, launched, weights):
    """More would be brought, and not multiplied."""
    weight, x = weights["output"], torch.zeros(4, 3072, dtype=torch.float8_e4m3fn)
    out, scales = torch.zeros(4, HIDDEN, dtype=BF16), torch.ones(4, 1)
    config = MatmulConfig(8, 32, columns, 1, 4, 4, 0, STREAMED, 32)
    own, quantized = (x, weight.data[:, :3072].contiguous(), None, out, config, True), (scales, weight.scales, 1)
    if allowed:
        streamed.multiply(*own, quantized=quantized)
        assert [name for name, *_ in launched] == ["streamed_linear"]
    else:
        with pytest.raises(RuntimeError, match="one or two pieces of 128"):
            streamed.multiply(*own, quantized=quantized)
