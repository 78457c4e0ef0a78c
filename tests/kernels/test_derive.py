"""Configurations that nobody measured: one fits for every device and shape, much like what was measured.

That they compile within that is in ``test_compile.py``.
"""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import resources
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from outrider.device import ConfigError
from outrider.model.config.shapes import SHAPES, decoder_shape, shard_config
from outrider_triton.exact import ExactKernels
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import has_kernel
from outrider_triton.tiles.configs import BUCKETS, LARGE_M, PREFILL_GATES, STREAMED, MatmulConfig
from outrider_triton.tiles.derive.attention import AttentionHeads, derive_attention_launch
from outrider_triton.tiles.derive.estimates import estimate_seconds
from outrider_triton.tiles.derive.fits import shared_bytes
from outrider_triton.tiles.derive.products import choose_config, rank_configs
from outrider_triton.tiles.facts import facts_of
from outrider_triton.tiles.selection import TileSelection

FEW_TOKENS = json.loads((Path(__file__).resolve().parents[1] / "data/products_of_few_tokens_h200.json").read_text())
"""Microseconds of products of a weight and few tokens, after the fields of the configuration; of ``linear_parts``, with the
norm that adds the parts. 2026-11-30.
"""
MODELS = sorted(set(SHAPES) - {"tiny"})


def products(shape):
    """(operator, rows of the weight, columns) of everything that a decoder and its EAGLE head multiply."""
    attention = shape.heads * shape.head_size
    rows = attention + 2 * shape.kv_heads * shape.head_size
    hidden, inner = shape.hidden, shape.inner
    return (
        ("linear", rows, hidden),
        ("linear_rope", rows, hidden),
        ("linear_parts", hidden, attention),
        ("linear_add_scaled", hidden, attention),
        ("linear_silu_mul", 2 * inner, hidden),
        ("scaled_silu_mul", 2 * inner, hidden),
        ("linear_parts", hidden, inner),
        ("linear_add", hidden, inner),
        ("linear", shape.vocabulary, hidden),
        ("linear", hidden, shape.fused),
    )


def shards(name):
    """A shape and its shards among 2, 4 and 8, where it can be shared out."""
    config = SHAPES[name]
    for ranks in (1, 2, 4, 8):
        with suppress(ConfigError):
            yield decoder_shape(shard_config(config, ranks), torch.bfloat16)


@pytest.mark.parametrize("case", FEW_TOKENS)
def test_of_the_products_of_few_tokens_that_were_measured_a_fast_one_is_chosen(case):
    operator, *sizes = case.split(", ")
    n, k, m = map(int, sizes)
    chosen = choose_config(DEVICES["H200"], operator, m=m, n=n, k=k)
    measured = [(MatmulConfig(*row[:-1]), row[-1]) for row in FEW_TOKENS[case]]
    alike = [took for config, took in measured if replace(chosen, block_n=config.block_n, stages=config.stages) == config]
    assert max(alike) <= 1.03 * min(took for _, took in measured)


@pytest.mark.parametrize(
    ("device", "group", "fits"),
    [("RTX 3090", 32, True), ("RTX 3090", 64, False), ("MI300X", 64, True), ("MI300X", 128, False), ("H100", 128, True)],
)
@pytest.mark.parametrize("size", [192, 256])
def test_heads_that_fit_no_tile_are_refused_before_the_launch(device, group, size, fits):
    heads = AttentionHeads(group=group, kv_heads=1, size=size, bytes=4)
    refused = nullcontext() if fits else pytest.raises(ConfigError, match=r"shared memory .* a dtype of 16 bits")
    with refused:
        derive_attention_launch(DEVICES[device], heads, batch=1, max_query=4, max_kv=512, tuned=None)
    q, cache = torch.empty(4, group, size), torch.empty(2, 16, 1, size)
    with refused:
        ExactKernels(TritonKernels(DEVICES[device]))._attention_tiles(q, cache)


def test_a_capacity_changes_no_share_of_a_short_context():
    """A capture knows the capacity alone: with many splits a short context is cut as if it were captured for itself."""
    heads = AttentionHeads(group=4, kv_heads=8, size=128, bytes=2)
    facts = DEVICES["H200"]

    def shares(capacity, length):
        made = derive_attention_launch(facts, heads, batch=1, max_query=4, max_kv=capacity, tuned=None)
        share = ceil(ceil(length / made.block_kv) / made.split) * made.block_kv
        return ceil(length / share)

    for length in (100, 640, 1500):
        assert shares(131072, length) >= shares(length, length)
    assert shares(131072, 640) == 10


def test_the_rule_is_near_what_was_measured():
    """Against the table of an H200: what was fastest is nearly as good by the estimate as what the rule chooses, and the
    estimate is within a third of the time measured, where a product was timed alone.
    """
    data = json.loads(resources.files("outrider_triton.tiles.store").joinpath("tuned", "nvidia-h200.json").read_text())
    facts, timed = DEVICES["H200"], 0
    for row in data["matmul"]:
        operator, n, k, m = row["operator"], row["n"], row["k"], max(row["m"], 8)
        ranked = rank_configs(facts, operator, m=m, n=n, k=k, half=64)
        best = estimate_seconds(facts, operator, ranked[0], m=m, n=n, k=k)
        if row["config"] is not None:
            tuned = estimate_seconds(facts, operator, MatmulConfig(*row["config"]), m=m, n=n, k=k)
            assert best <= tuned <= 1.2 * best, (operator, n, k, m, best, tuned)
        if row.get("best"):
            us, *config = row["best"][0]
            timed += 1
            guess = 1e6 * estimate_seconds(facts, operator, MatmulConfig(*config), m=m, n=n, k=k)
            assert 0.67 < guess / us < 1.33, (operator, n, k, m)
    assert timed > 20


def test_the_table_and_the_rule_choose_the_same_kind():
    """Few tokens: rings in the layers of an H200, as measured, parts until the device is full; the library's above."""
    facts = DEVICES["H200"]
    for m, k in itertools.product((8, 16, 32), (4096, 14336)):
        made = choose_config(facts, "linear_parts", m=m, n=4096, k=k)
        assert made.descriptor == STREAMED
        assert -(-4096 // made.rows_per_program) // (1 if made.split == 1 else 2) * made.split in range(100, 265)
    assert choose_config(facts, "linear", m=128, n=6144, k=4096) is None
    assert choose_config(facts, "linear_silu_mul", m=128, n=28672, k=4096) == MatmulConfig(
        128, 16, 64, 1, 8, 4, 5, LARGE_M, 112
    )
    # 132 programs of 136 pairs: 8 of them in a tile of their own, as long as a full one.
    assert choose_config(facts, "linear_silu_mul", m=128, n=34816, k=5120) is None
    assert choose_config(facts, "linear_add_scaled", m=8, n=4096, k=14336) is None
    small = choose_config(DEVICES["RTX 4090"], "linear_parts", m=8, n=4096, k=4096)
    assert small.descriptor == 0
    assert choose_config(facts, "linear", m=129, n=4096, k=4096) is None


def test_gates_of_prefill_are_fused_where_the_last_tiles_matter_little():
    """An H200 takes 1,433 us for Llama-3.1-8B's and 4,096 tokens, and 1,504 us with cuBLAS and the activation's kernel."""
    for device, facts in DEVICES.items():
        tiles = TileSelection(facts)
        for n, k in ((28672, 4096), (65536, 5120), (16384, 2048), (7168, 4096), (1792, 4096)):
            found = [tiles.product("linear_silu_mul", "bfloat16", m=m, n=n, k=k) for m in range(129, 9000, 64)]
            assert found == sorted(found, key=lambda config: config is not None), "more tokens are fused if fewer are"
            assert set(found) - {None} == {tiles.product("linear_silu_mul", "bfloat16", m=4096, n=n, k=k)} - {None}
            if not facts.streams_products or n < 2000:
                assert set(found) == {None}, device
            for config in set(found) - {None}:
                assert shared_bytes(facts, "linear_silu_mul", config) <= facts.shared_bytes
        assert tiles.product("linear", "bfloat16", m=4096, n=28672, k=4096) is None
    llama = TileSelection(DEVICES["H200"]).product("linear_silu_mul", "bfloat16", m=4096, n=28672, k=4096)
    assert llama == MatmulConfig(128, 128, 64, 1, 8, 4, 12, PREFILL_GATES, 132)
    for m, n, k in ((512, 28672, 4096), (4096, 28672, 4100), (4096, 28680, 4096), (4096, 28672, 128)):
        assert TileSelection(DEVICES["H200"]).product("linear_silu_mul", "bfloat16", m=m, n=n, k=k) is None


@pytest.mark.parametrize(("n", "k"), [(96, 5120), (64, 2048), (128, 2048), (24, 5120)])
def test_gates_and_routers_have_small_tiles_of_rows_and_tokens(n, k):
    """An H200 takes 6.1 us for 128 tokens of [96, 5120] in such tiles, and 9.5 us by cuBLAS."""
    for device, m in itertools.product(DEVICES, BUCKETS):
        config = TileSelection(DEVICES[device]).derived("linear", m=m, n=n, k=k)
        assert config.block_m <= 32
        if device == "H200":
            assert config.descriptor == STREAMED
            assert config.rows_per_program <= 16


def test_derived_and_measured_live_together():
    from outrider_triton.tiles.store.table import load

    kernels = TritonKernels(DEVICES["H200"], table=load("NVIDIA H200"))
    known, unknown = torch.empty(6144, 4096, dtype=torch.bfloat16), torch.empty(6144, 2048, dtype=torch.bfloat16)
    assert kernels.dense.matmul_config("linear", known[:4], known) == MatmulConfig(16, 64, 256, 1, 4, 5, 256, 0, 48)
    assert kernels.dense.matmul_config("linear", known[:128], known) is None  # the library won
    expected = choose_config(DEVICES["H200"], "linear", m=4, n=6144, k=2048)
    assert kernels.dense.matmul_config("linear", unknown[:4], unknown) == expected is not None
    assert kernels.dense.matmul_config("linear", unknown.float()[:4], unknown.float()) is None
    wide = torch.empty(4, 8, 128, dtype=torch.float32)
    assert has_kernel(wide), "attention in float32 is no reference's, either"
    assert not has_kernel(wide.double())


def test_facts_come_from_what_a_device_says():
    hopper = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448, warp_size=32,
        shared_memory_per_multiprocessor=233472, L2_cache_size=62914560, regs_per_multiprocessor=65536,
    )  # fmt: skip
    facts = facts_of(hopper)
    assert (facts.architecture, facts.capability, facts.shared_bytes) == ("sm_90", 90, 232448)
    assert (facts.pdl, facts.streams_products) == (True, True)
    assert facts.bytes_per_second == 20e9 * 132  # nothing said
    assert facts_of(SimpleNamespace(**vars(hopper), memory_clock_rate=3201000, memory_bus_width=6016)).bandwidth > 4.5e12
    older = facts_of(SimpleNamespace(major=8, minor=6, multi_processor_count=82))
    assert (older.architecture, older.shared_bytes, older.pdl) == ("sm_86", 99 << 10, False)
    amd = facts_of(SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", warp_size=64, multi_processor_count=304))
    assert (amd.architecture, amd.capability, amd.warp, amd.shared_bytes, amd.streams_products) == (
        "gfx942",
        0,
        64,
        65536,
        False,
    )
