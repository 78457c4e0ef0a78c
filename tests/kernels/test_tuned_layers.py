"""Two models whose layers share a product: each keeps what was tuned in its own, a third one has a head start."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import SMALL
from kernels.test_tuner import FACTS, FINE, Ruler, kernels, tuned  # noqa: F401  (a fixture)
from outrider.device import DecoderShape
from outrider.model.config.shapes import decoder_shape, shape_config
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products.dense import DenseProducts
from outrider_triton.tiles.configs import AttentionConfig, MatmulConfig
from outrider_triton.tiles.derive.fits import OPERATORS
from outrider_triton.tiles.measure import tuner
from outrider_triton.tiles.measure.chain import Chain
from outrider_triton.tiles.store import shipping
from outrider_triton.tiles.store.choices import TunedStore, merge_choices
from outrider_triton.tiles.store.table import ANY_LAYER, layer_of, parse

LLAMA, QWEN = (decoder_shape(shape_config(name), torch.bfloat16) for name in ("llama-3.1-8b", "qwen3-8b"))
THIRD = replace(LLAMA, inner=11008)
"""Shares the product behind attention, and attention, with both, and was never tuned."""
OUTPUT, ADDED = (("linear_parts", "bfloat16", 4096, 4096), ("linear_add_scaled", "bfloat16", 4096, 4096))


class Tastes(Ruler):
    """A layer's time, by what it's given behind attention and in it: Llama's likes small blocks, Qwen's large ones."""

    alike = False

    def attempt(self, table):
        self.kernels.tiles.table = table
        given, keys = used(self.kernels, self.shape, sizes=(self.m,)), tuner._Keys.for_shape(self.shape)
        size = sum(given["attention", self.m][1:])
        size += sum(
            sum(config.as_list()) for (key, _), config in given.items() if key in (keys.added, keys.output) and config
        )
        return 100.0 if self.alike else 200.0 + (size if self.shape.inner == LLAMA.inner else -size) / 10


@pytest.fixture
def tastes(kernels, monkeypatch):  # noqa: F811
    monkeypatch.setattr(tuner, "Chain", type("Own", (Tastes,), {}))
    return kernels


def used(kernels, shape, sizes=(1, 8, 9, 16, 24, 32, 64, 100, 128)):  # noqa: F811
    """What layers of this shape ask kernels for, and what they get."""
    own, keys, found = kernels.for_shape(shape), tuner._Keys.for_shape(shape), {}
    attention = torch.empty(0, shape.heads, shape.head_size, dtype=torch.bfloat16)
    cache = torch.empty(0, 16, shape.kv_heads, shape.head_size, dtype=torch.bfloat16)
    for m in sizes:

        def config(key, m=m):
            operator, _, n, k = key
            x, weight = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
            return own.dense.matmul_config(operator, x, weight, half=shape.head_size // 2 if operator == "linear_rope" else 0)

        found |= {(key, m): made for key, made in keys.looked_up(config).items()}
        found["attention", m] = own.attention.config_for(attention, cache, max(1, m // 4), 4, 640)
    return found


def differing(one, other):
    return {key for key in one.keys() & other.keys() if one[key] != other[key]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("shapes", [(LLAMA, QWEN), (QWEN, LLAMA)], ids=["llama first", "qwen first"])
def test_each_shape_keeps_what_was_tuned_in_its_own_layers(shapes, tastes, tmp_path):
    first, second = shapes
    tuned(tastes, tmp_path, shapes=[first])
    before = used(tastes, first)
    (result,), _ = tuned(tastes, tmp_path, shapes=[second])
    assert result.kept > 20
    assert used(tastes, first) == before
    after = used(tastes, second)
    unlike = differing(before, after)
    assert {key for key in unlike if key[0] in (OUTPUT, ADDED)}, "they chose alike, so nothing was tried"
    assert {key for key in unlike if key[0] == "attention"}
    another = TritonKernels(FACTS)
    assert another.use_tuned(tmp_path) == len(list(TunedStore(tmp_path, FACTS).home.iterdir()))
    assert (used(another, first), used(another, second)) == (before, after)


def test_both_shapes_of_one_call_keep_their_own(tastes, tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    tuned(tastes, together, shapes=[LLAMA, QWEN])
    tastes.tiles.table = None
    tuned(tastes, alone, shapes=[LLAMA])
    other = TritonKernels(FACTS)
    other.use_tuned(together)
    assert used(other, LLAMA) == used(tastes, LLAMA)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shapes", [(LLAMA, QWEN), (QWEN, LLAMA)], ids=["llama first", "qwen first"])
def test_where_nothing_won_another_shape_changes_nothing(shapes, tastes, tmp_path, monkeypatch):
    first, second = shapes
    monkeypatch.setattr(tuner.Chain, "alike", True)
    derived = used(tastes, first)
    tuned(tastes, tmp_path, shapes=[first])
    assert used(tastes, first) == derived
    monkeypatch.setattr(tuner.Chain, "alike", False)
    tuned(tastes, tmp_path, shapes=[second])
    assert used(tastes, first) == derived
    assert differing(used(tastes, second), derived)


def test_what_ends_a_layer_is_another_shapes_product_behind_attention(tastes, tmp_path):
    """The product of the gated half may have its sum and norm in one kernel with the next layer's: that is a choice, too."""
    first, second = replace(LLAMA, inner=8192), replace(LLAMA, heads=64)
    x, weight = (torch.empty(rows, 8192, dtype=torch.bfloat16, device="meta") for rows in (8, 4096))

    def ends(shape):
        return tastes.for_shape(shape).dense.matmul_config("linear_add_scaled", x, weight)

    tuned(tastes, tmp_path, shapes=[first])
    before = ends(first)
    assert before is not None
    tuned(tastes, tmp_path, shapes=[second])
    assert ends(first) == before != ends(second)


@pytest.mark.parametrize("left", [(), ("scaled_silu_mul",), ("linear_parts", "linear_silu_mul"), tuple(OPERATORS)], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_all_that_a_layer_asks_for_is_kept(qk_norm, left, device, monkeypatch, unlaunched):
    """Whatever it leaves to the library."""
    shape = DecoderShape(
        hidden=64, heads=4, kv_heads=2, head_size=16, inner=96, vocabulary=99, dtype=torch.bfloat16, qk_norm=qk_norm
    )
    asked, config, keys = set(), DenseProducts.matmul_config, tuner._Keys.for_shape(shape)

    def counted(self, operator, x, weight, *, half=0):
        asked.add((operator, "bfloat16", *weight.shape))
        return None if operator in left else config(self, operator, x, weight, half=half)

    monkeypatch.setattr(DenseProducts, "matmul_config", counted)
    chain = Chain(shape, TritonKernels(SMALL), device)
    chain.prepare(1, 4, 32)
    chain.run_layers(0)
    x = torch.empty(4, 1, dtype=torch.bfloat16, device="meta")

    def choice(key):
        weight = torch.empty(key[2], key[3], dtype=torch.bfloat16, device="meta")
        return chain.kernels.dense.matmul_config(
            key[0], x.expand(4, key[3]), weight, half=8 if key[0] == "linear_rope" else 0
        )

    seen = frozenset(asked)
    assert seen <= keys.looked_up(choice).keys()


def test_a_shape_that_was_never_tuned_has_a_head_start(tastes, tmp_path):
    derived = used(tastes, THIRD)
    tuned(tastes, tmp_path, shapes=[LLAMA, QWEN])
    third, both = used(tastes, THIRD), (used(tastes, LLAMA), used(tastes, QWEN))
    taken = differing(third, derived)
    assert {key[0] for key in taken} >= {"attention"}
    assert {key[0] for key in taken} & {OUTPUT, ADDED}
    for key in taken & (both[0].keys() | both[1].keys()):
        assert third[key] in [each[key] for each in both if key in each]
    again = TritonKernels(FACTS)
    again.use_tuned(tmp_path)
    assert used(again, THIRD) == third  # the same one of the two, whoever reads


def test_kernels_for_a_shape_see_what_is_taken_over_later(tmp_path):
    kernels = TritonKernels(FACTS)  # noqa: F811
    early, x = kernels.for_shape(LLAMA), torch.empty(8, 256, dtype=torch.bfloat16)
    weight = torch.empty(64, 256, dtype=torch.bfloat16)
    TunedStore(tmp_path, FACTS).write([{**FINE, "layer": layer_of(LLAMA)}])
    assert kernels.use_tuned(tmp_path) == 1
    assert early.dense.matmul_config("linear", x, weight) == MatmulConfig(*FINE["config"])


def row(stages, **other):
    return {**FINE, "config": [16, 64, 128, 1, 4, stages, 0, 0, 0], **other}


HEADS = {"groups": 8, "max_kv": 640, "head_size": 128, "group": 4}


def stages_of(table, m=8):
    """Stages of the product, and cached tokens of a block of attention, by layer."""
    found = {}
    for shape in (LLAMA, QWEN, THIRD):
        layer = layer_of(shape)
        attention = table.attention_config(8, 128, 4, layer=layer)
        found[shape] = table.entry("linear", "bfloat16", n=64, k=256, m=m, layer=layer).config.stages, attention
    return [found[shape] for shape in (LLAMA, QWEN, THIRD)]


def test_choices_of_an_older_release_are_every_layers(tmp_path):
    """Rows that name no layer: those of a table that ships, or of a directory."""
    cut = AttentionConfig(64, 4, 4, 2)
    old = [row(2), {**HEADS, "config": [64, 4, 4, 2]}]
    store = TunedStore(tmp_path, FACTS)
    store.write(old)
    table = merge_choices(None, FACTS, store.load())
    assert stages_of(table) == [(2, cut)] * 3
    store.write([row(3, layer=layer_of(LLAMA)), {**HEADS, "layer": layer_of(LLAMA), "config": None}])
    assert len(store.load()) == 4  # nothing was replaced
    for mixed in (merge_choices(None, FACTS, store.load()), merge_choices(table, FACTS, store.load()[::-1])):
        # One's own goes first; before another layer's, what is every layer's.
        assert stages_of(mixed) == [(3, None), (2, cut), (2, cut)]


def test_a_tile_with_room_in_ones_own_layer_goes_before_another_layers_entry():
    rows = [row(3, layer=layer_of(LLAMA)), row(4, m=16, layer=layer_of(QWEN)), {**HEADS, "config": None}]
    assert [stages for stages, _ in stages_of(merge_choices(None, FACTS, rows), m=16)] == [3, 4, 4]


def test_a_table_that_ships_has_a_choice_for_each_layer(tmp_path):
    file, said = tmp_path / "made-up.json", ["--device", "made up", "--date", "2026-11-24"]
    store = TunedStore(tmp_path, FACTS)

    def shipped(*rows):
        store.write(rows)
        paths = [str(path) for path in sorted(store.home.iterdir())]
        shipping.main([str(file), *paths, *said])
        for path in store.home.iterdir():
            path.unlink()
        return parse(json.loads(file.read_text()))

    heads = [{**HEADS, "layer": layer_of(shape), "config": [block, 4, 4, 2]} for shape, block in ((LLAMA, 32), (QWEN, 128))]
    shipped(row(2), {**HEADS, "config": [64, 4, 4, 2]})
    shipped(row(3, layer=layer_of(LLAMA)), heads[0])
    table = shipped(row(4, layer=layer_of(QWEN)), heads[1])
    cuts = [AttentionConfig(block, 4, 4, 2) for block in (32, 128, 64)]
    assert stages_of(table) == [(3, cuts[0]), (4, cuts[1]), (2, cuts[2])]
    again = shipped(row(5, layer=layer_of(QWEN)))
    assert stages_of(again) == [(3, cuts[0]), (5, cuts[1]), (2, cuts[2])]
    assert len(json.loads(file.read_text())["matmul"]) == 3


def test_the_name_of_a_layer():
    assert layer_of(LLAMA) == "4096-32x128-8-14336"
    assert layer_of(QWEN) == "4096-32x128-8-12288-qk_norm"
    assert layer_of(replace(LLAMA, vocabulary=99, fused=0, dtype=torch.float16)) == layer_of(LLAMA)
    unlike = [LLAMA, *(replace(LLAMA, **{size: 2}) for size in ("hidden", "heads", "kv_heads", "head_size", "inner"))]
    unlike += [replace(LLAMA, bias=True), replace(LLAMA, qk_norm=True)]
    assert len({layer_of(shape) for shape in unlike} | {ANY_LAYER}) == 9
