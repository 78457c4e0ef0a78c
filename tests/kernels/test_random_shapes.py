"""Random shapes, formats and devices: every product and attention has a configuration that fits or a documented refusal, and
warm-up asks for every kernel that a batch needs later.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from drawing import some_and_many
from kernels.devices import DEVICES
from outrider.device import (
    AttentionBlock,
    AttentionMetadata,
    AttentionTokens,
    ExpertsBlock,
    HeadNorms,
    LayerRows,
    MlpBlock,
    ResidualStream,
    RotaryArgs,
)
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS
from outrider.device.kernels.weights import linear
from outrider.model.checkpoint.files import TensorSlice
from outrider.model.config.shapes import SHAPES
from outrider.model.quantization.loading import slice_weight
from outrider_triton.experts.mixtures import ExpertProducts
from outrider_triton.kernelset import TritonKernels
from outrider_triton.quantized.plan import plan
from outrider_triton.tiles.configs import STREAMED, AttentionConfig
from outrider_triton.tiles.derive.attention import (
    AttentionHeads,
    attention_bytes,
    derive_attention_launch,
    streamed_attention_bytes,
    unsplit_programs,
)
from outrider_triton.tiles.derive.fits import GATED, OPERATORS, UNQUANTIZED, shared_bytes, tile_tokens
from outrider_triton.tiles.selection import TileSelection
from outrider_triton.tiles.store.table import load

META = torch.device("meta")
TOKENS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 313, 314, 511, 512, 513, 1024, 4096, 8192, 16384)
PAGE, CAPACITY, CHUNK = 16, 4096, 512
STREAMED_ALONE = ("linear_rope", "linear_silu_mul")
"""Operators of quantised weights that have only streamed kernels: their callers use two kernels without a configuration."""

sizes = st.one_of(
    st.sampled_from((8, 40, 96, 1536, 4304, 11008, 13696, 18944, 152064)),
    st.builds(lambda unit, count: unit * count, st.sampled_from((16, 32, 64, 128)), st.integers(1, 200)),
)
inner_sizes = st.one_of(st.sampled_from((48, 96, 192, 352, 768, 1408)), st.integers(1, 48).map(lambda count: 32 * count))
formats = st.sampled_from((None, *WEIGHT_FORMATS))
experts = st.tuples(st.sampled_from((8, 16, 32, 60, 64, 128, 256, 512)), st.integers(1, 10)).filter(lambda e: e[1] <= e[0])


def weight(form: str | None, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A weight without values, in groups that divide its columns."""
    if form is None:
        return torch.empty(rows, columns, dtype=dtype, device=META)
    return WEIGHT_FORMATS[form].fitted(columns).random_weight(rows, columns, device=META, scales_dtype=dtype)


def storage(facts, form, rows, columns, **options):
    """How a product stores its operands; None if the reference multiplies by the weight."""
    if form is None:
        return UNQUANTIZED
    made = weight(form, rows, columns)
    product_plan = plan(facts, made, **options)
    return None if product_plan is None else product_plan.stored(made.format)


def products_fit(device, form, rows, columns, half):
    facts = DEVICES[device]
    stored = storage(facts, form, rows, columns)
    assume(stored is not None)
    assert stored is not None
    tiles = TileSelection(facts)
    operators = OPERATORS if form is None else ("linear", "linear_parts", *STREAMED_ALONE)
    for operator in (each for each in operators if rows % 2 == 0 or each not in GATED):
        key = {"n": rows, "k": columns, "half": half if operator == "linear_rope" else 0, "stored": stored}
        known = {tiles.derived(operator, m=m, **key) for m in tiles.token_counts(operator)}
        for m in TOKENS:
            config = tiles.derived(operator, m=m, **key)
            assert config in known, (operator, m)
            if config is not None:
                assert shared_bytes(facts, operator, config, stored) <= facts.shared_bytes, (operator, m)
                assert config.block_m >= min(m, 4), (operator, m)
                if config.descriptor == STREAMED:  # a ring reads its weight once, or for each 64 quantised tokens
                    most = m if form is None else min(m, 64)
                    assert config.block_m >= tile_tokens(most, rows, columns, operator, stored), (operator, m)
                assert config.split == 1 or operator in ("linear_parts", "linear"), (operator, m)
            else:  # the library multiplies, or two kernels do
                two = operator == "linear_add_scaled" or (form is not None and operator in STREAMED_ALONE)
                assert m > 64 or two, (operator, m)


def experts_fit(device, form, routed, hidden, inner):
    facts, (count, chosen) = DEVICES[device], routed
    storages = tuple(storage(facts, form, *shape, planes=False) for shape in ((2 * inner, hidden), (hidden, inner)))
    assume(None not in storages)
    operators = ("linear_silu_mul", "linear") if form is None else ("linear_parts", "linear_parts")
    mixtures = ExpertProducts(facts)

    def configs(tokens):
        return mixtures._configs(tokens, chosen, (count, inner, hidden), operators, storages)

    known = {configs(tokens) for tokens in mixtures._token_counts(count, chosen)}
    for tokens in (*range(1, 300), *TOKENS):
        size, *tilings = configs(tokens)
        assert (size, *tilings) in known, tokens
        assert bool(size) is (tokens > 32), tokens
        for operator, tiling, stored in zip(operators, tilings, storages, strict=True):
            assert shared_bytes(facts, operator, tiling, stored) <= facts.shared_bytes, tokens
            assert tiling.block_m == size or (not size and tiling.block_m >= tokens), tokens
            assert (tiling.split, tiling.rows_per_program) == (1, 0), tokens
            assert tiling.descriptor == 0 or form is None, tokens  # shares of units are for single products


def with_published_experts(test):
    """The test with the experts of two published shapes as explicit examples."""
    for shape, device in itertools.product(("qwen3-30b-a3b", "mixtral-8x7b"), ("H100", "H200", "L4", "MI300X", "RTX 3090")):
        config, routed = SHAPES[shape], SHAPES[shape].experts
        sizes = {"hidden": config.hidden_size, "inner": routed.intermediate_size}
        test = example(device=device, form=None, routed=(routed.count, routed.per_token), **sizes)(test)
    return test


def attention_fits(device, group, kv_heads, size, bytes_of, page, batch, max_query, max_kv, tuned):
    facts = DEVICES[device]
    heads = AttentionHeads(group=group, kv_heads=kv_heads, size=size, bytes=bytes_of, page=page)
    made = derive_attention_launch(facts, heads, batch=batch, max_query=max_query, max_kv=max_kv, tuned=tuned)
    used = attention_bytes(facts, heads, made.block_rows, made.block_kv)
    if made.streamed:
        used = streamed_attention_bytes(heads, made.block_rows, made.block_kv, made.stages)
        assert tuned or made.stages > 1
    assert used <= facts.shared_bytes
    assert made.block_rows >= group
    # A long context is divided among the processors.
    programs = made.split * unsplit_programs(heads, made.block_rows, batch, max_query)
    assert programs * (1 + made.streamed) >= facts.processors or made.split == 32 or max_kv < 32768
    assert made.split * made.block_kv <= max(max_kv, made.block_kv)


test_some_products_fit, test_many_products_fit = some_and_many(
    example(device="H100", form="fp8", rows=8, columns=1536, half=32)(products_fit),
    given(
        device=st.sampled_from(tuple(DEVICES)),
        form=formats,
        rows=sizes,
        columns=sizes,
        half=st.sampled_from((32, 40, 48, 64, 96, 128)),
    ),
    some=20,
    many=200,
)
test_some_experts_fit, test_many_experts_fit = some_and_many(
    with_published_experts(example(device="H200", form="fp8-block", routed=(128, 8), hidden=2048, inner=768)(experts_fit)),
    given(device=st.sampled_from(tuple(DEVICES)), form=formats, routed=experts, hidden=sizes, inner=inner_sizes),
    some=12,
    many=500,
)
test_some_attention_fits, test_much_attention_fits = some_and_many(
    attention_fits,
    given(
        device=st.sampled_from(tuple(DEVICES)),
        group=st.integers(1, 16),
        kv_heads=st.integers(1, 64),
        size=st.sampled_from((64, 72, 80, 96, 112, 128, 192, 256)),
        bytes_of=st.sampled_from((2, 4)),
        page=st.sampled_from((0, 1, 8, 16, 24, 64)),
        batch=st.integers(1, 300),
        max_query=st.integers(1, 300),
        max_kv=st.integers(1, 131072),
        tuned=st.sampled_from((None, AttentionConfig(128, 8, 8, 2), AttentionConfig(128, 8, 4, 2, True))),
    ),
    some=100,
    many=2000,
)


# -- warm-up -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Two layers and an output head, without values."""

    form: str | None
    hidden: int
    inner: int
    routed: tuple[int, int] | None
    """Experts and experts per token; None: an MLP."""
    kv_heads: int
    group: int
    size: int
    dtype: torch.dtype = torch.bfloat16
    head_norms: bool = False
    bias: bool = False
    vocabulary: int = 32000
    tied: bool = False
    """True if the output head is the table of embeddings, which isn't quantised."""
    shard: tuple[int, int] = (0, 1)
    """Rank and number of ranks that divide the heads, the inner size and the vocabulary; these are one rank's."""

    def empty(self, *shape):
        return torch.empty(shape, dtype=self.dtype, device=META)

    def weight(self, *shape, dim=None):
        """This rank's rows (``dim`` 0) or columns (1) of a weight, or a whole one."""
        if dim is None or self.form is None:
            return weight(self.form, *shape, self.dtype)
        (rank, ranks), share = self.shard, shape[dim]
        whole = self.weight(*(size * (ranks if each == dim else 1) for each, size in enumerate(shape)))
        return slice_weight(whole, TensorSlice(dim, rank * share, (rank + 1) * share))

    def head(self):
        return self.empty(self.vocabulary, self.hidden) if self.tied else self.weight(self.vocabulary, self.hidden, dim=0)

    def layer(self):
        rows, columns = (self.group + 2) * self.kv_heads * self.size, self.group * self.kv_heads * self.size
        norms = HeadNorms(self.empty(self.size), self.empty(self.size), 1e-6) if self.head_norms else None
        options = {"norm": self.empty(self.hidden), "eps": 1e-5}
        yield AttentionBlock(
            **options,
            qkv=self.weight(rows, self.hidden, dim=0),
            output=self.weight(self.hidden, columns, dim=1),
            scale=0.1,
            qkv_bias=self.empty(rows) if self.bias else None,
            head_norms=norms,
        )
        if self.routed is None:
            gate_up, down = self.weight(2 * self.inner, self.hidden, dim=0), self.weight(self.hidden, self.inner, dim=1)
            yield MlpBlock(**options, gate_up=gate_up, down=down)
            return
        count, chosen = self.routed
        stacks = (
            self.weight(count * 2 * self.inner, self.hidden, dim=0),
            self.weight(count * self.hidden, self.inner, dim=1),
        )
        if self.form is None:
            stacks = stacks[0].view(count, -1, self.hidden), stacks[1].view(count, -1, self.inner)
        router = self.empty(count, self.hidden)
        yield ExpertsBlock(**options, router=router, per_token=chosen, renormalize=True, gate_up=stacks[0], down=stacks[1])

    def cache(self, dtype):
        pages = torch.empty(4 * CAPACITY // PAGE, PAGE, self.kv_heads, self.size, dtype=dtype, device=META)
        return pages, pages.clone()


def integers(*shape):
    return torch.empty(shape, dtype=torch.int32, device=META)


def forward(kernels, model, blocks, caches, batch, queries, *, prefill):
    """Compute two layers, the head and a draft's input for a batch; each layer's cache is one of ``caches``."""
    tokens = batch * queries
    metadata = AttentionMetadata(
        query_start=integers(batch + 1),
        seq_lens=integers(batch),
        block_table=integers(batch, CAPACITY // PAGE),
        max_query=queries,
        max_kv=CAPACITY,
        uniform=not prefill,
        host_query_start=tuple(range(0, tokens + 1, queries)) if prefill else None,
        host_context=(0,) * batch if prefill else None,
    )
    angles, slots = model.empty(tokens, model.size), torch.empty(tokens, dtype=torch.int64, device=META)
    stream = ResidualStream(kernels, model.empty(tokens, model.hidden))
    for cache in caches:
        rotary = RotaryArgs(angles, angles, *cache, slots)
        stream = kernels.attention_block(stream, blocks[0], AttentionTokens(metadata, rotary, LayerRows()))
        step = kernels.mlp_block if model.routed is None else kernels.experts_block
        stream = step(stream, blocks[1])
    rows = stream.norm(blocks[0].norm, 1e-5)
    linear(kernels, rows[:batch] if prefill else rows, blocks[2])
    step(ResidualStream(kernels, rows), blocks[1]).add()
    if not prefill:
        table = model.empty(model.vocabulary, model.hidden)
        kernels.fuse_embedding(torch.empty(tokens, dtype=torch.int64, device=META), table, rows, blocks[3])


@pytest.fixture
def asked(instead_of_launching, monkeypatch):
    """Variants of kernels that are asked for: the name, constants, warps, and properties of operands that select one."""
    variants = {}

    def select(value, *, specialized):
        if isinstance(value, torch.Tensor):
            return value.dtype
        if isinstance(value, int) and not isinstance(value, bool):
            return (value == 1, value % 16 == 0, value >> 31) if specialized else value >> 31
        return (str(getattr(value, "layout", "")), *value.block_shape) if hasattr(value, "block_shape") else type(value)

    def record(kernel, grid, *operands, pdl, warps=0, **constants):
        if min(grid) < 1:
            return
        excluded = getattr(kernel, "kwargs", None) or vars(kernel)  # of the interpreter, or of the compiler
        names = excluded["do_not_specialize"] or ()
        selected = (
            select(each, specialized=name not in names) for name, each in zip(kernel.arg_names, operands, strict=False)
        )
        variants.setdefault((kernel.fn.__name__, *selected, warps, *map(str, constants.items())))

    monkeypatch.setattr("triton.knobs.runtime.interpret", False)  # nothing runs, and the interpreter has fewer products
    instead_of_launching(record)
    return variants


def warm_up_asks_for_every_kernel(asked, device, model, drafted, narrow, batches):
    warm_up(asked, device, model, drafted, narrow, batches, None)


def warm_up(asked, device, model, drafted, narrow, batches, table):
    """A warm-up has prompts of two lengths, and iterations of one request."""
    kernels = TritonKernels(DEVICES[device], table=table)
    kernels.attention.prompts.measure = kernels.attention.prompts._call_own_candidates
    blocks = *model.layer(), model.head(), model.weight(model.hidden, 2 * model.hidden)
    # A draft's cache is in its own dtype.
    caches = [model.cache(torch.float8_e4m3fn if narrow and kernels.cache_formats else model.dtype), model.cache(model.dtype)]
    asked.clear()
    with kernels.every_variant():
        forward(kernels, model, blocks, caches, 1, CHUNK, prefill=True)
        forward(kernels, model, blocks, caches, 1, 2, prefill=True)
        forward(kernels, model, blocks, caches, 1, drafted + 1, prefill=False)
    known = {**asked}
    for batch in batches:
        for prefill, queries in ((False, drafted + 1), (True, max(1, CHUNK // (2 * batch)))):
            asked.clear()
            forward(kernels, model, blocks, caches, batch, queries, prefill=prefill)
            assert {name for name, *_ in asked.keys() - known.keys()} == set(), (batch, queries)


HEADS = {"kv_heads": 2, "group": 4, "size": 128}
FOUND = (
    example(
        device="A100",
        model=Model(form=None, hidden=2048, inner=1408, routed=(60, 4), **HEADS),
        drafted=0,
        narrow=False,
        batches=(3, 9, 14, 15),
    ),
    example(
        device="H200",
        model=Model(form="int8", hidden=512, inner=96, routed=(512, 10), **HEADS),
        drafted=0,
        narrow=True,
        batches=(2, 3, 5, 200),
    ),
    example(
        device="H100",
        model=Model(form="int4", hidden=128, inner=48, routed=None, kv_heads=1, group=1, size=64),
        drafted=0,
        narrow=False,
        batches=(1, 2),
    ),
    example(
        device="H200",
        model=Model(form="int4", hidden=896, inner=4864, routed=None, kv_heads=2, group=7, size=64),
        drafted=1,
        narrow=False,
        batches=(2, 8),
    ),
    example(
        device="MI300X",
        model=Model(form="fp8-tensor", hidden=320, inner=1728, routed=None, kv_heads=2, group=3, size=16, vocabulary=32001),
        drafted=1,
        narrow=True,
        batches=(120, 28),
    ),
)


def has_whole_groups(model):
    """Whether groups of columns divide a model's rows, and no block has rows of two experts."""
    if model.form is None:
        return True
    format = WEIGHT_FORMATS[model.form]
    rows_of_experts = (model.hidden, 2 * model.inner) if model.routed is not None and format.rows else ()
    return (model.inner % 8 == 0 or not format.is_grouped) and not any(rows % format.rows for rows in rows_of_experts)


models = st.builds(
    Model,
    form=formats,
    hidden=st.one_of(st.sampled_from((64, 320, 576, 896, 960)), st.integers(1, 40).map(lambda count: 128 * count)),
    inner=st.one_of(inner_sizes, st.sampled_from((8, 24, 341, 1365, 1728, 2240, 4304, 4864, 6912))),
    routed=st.one_of(st.none(), experts),
    kv_heads=st.sampled_from((1, 2, 3, 4, 5, 8, 16)),
    group=st.integers(1, 8),
    size=st.sampled_from((16, 32, 64, 80, 96, 128, 192, 256)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    head_norms=st.booleans(),
    bias=st.booleans(),
    vocabulary=st.sampled_from((512, 32000, 32001, 37984, 49155, 128256, 151936, 262144)),
    tied=st.booleans(),
    shard=st.sampled_from(((0, 1), (0, 2), (1, 2), (1, 4), (2, 4))),
).filter(has_whole_groups)
test_warm_up_asks_for_every_kernel, test_warm_up_asks_for_every_kernel_of_many = some_and_many(
    warm_up_asks_for_every_kernel,
    lambda test: reduce(
        lambda made, found: found(made),
        FOUND,
        given(
            device=st.sampled_from(tuple(DEVICES)),
            model=models,
            drafted=st.sampled_from((0, 1, 3, 7)),
            narrow=st.booleans(),
            batches=st.lists(st.integers(1, 256), min_size=2, max_size=3),
        )(test),
    ),
    some=1,
    many=100,
)


def test_short_prompts_ask_for_kernels_of_large_batches(asked, monkeypatch):
    """A prefill chunk may be shorter than a batch whose quantised products the library computes."""
    monkeypatch.setattr(sys.modules[__name__], "CHUNK", 64)
    model = Model(form="fp8-tensor", hidden=512, inner=96, routed=None, **HEADS)
    warm_up_asks_for_every_kernel(asked, "A100", model, 0, False, (3, 200))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("form", "table"),
    [(None, load("NVIDIA H200")), *((form, None) for form in (None, "fp8", "fp8-block", "int8", "int4"))],
    ids=["shipped table", "None", "fp8", "fp8-block", "int8", "int4"],
)
def test_warm_up_asks_for_every_kernel_of_a_published_shape(form, table, asked):
    """Quantised products change kernels at 17, 33, 65 and 129 tokens, and split attention with the number of requests."""
    model = Model(form=form, hidden=4096, inner=14336, routed=None, kv_heads=8, group=4, size=128)
    batches = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 48, 64, 65, 128, 129)
    warm_up(asked, "H200", model, 0, False, batches, table)
    for each in (model, replace(model, head_norms=True)):
        warm_up(asked, "H200", each, 3, True, (1, 2, 3, 4, 8, 16, 40), table)
