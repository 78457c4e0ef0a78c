"""Tuning without a device: what is measured in which order, what is kept where, and what an early end leaves."""

from __future__ import annotations

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from outrider.device import CapabilityError, ConfigError, KernelSet, WrappedKernels
from outrider.model.config.shapes import decoder_shape, shape_config
from outrider_triton.kernelset import TritonKernels
from outrider_triton.tiles.configs import LARGE_M, MatmulConfig
from outrider_triton.tiles.derive.fits import OPERATORS
from outrider_triton.tiles.derive.products import rank_configs
from outrider_triton.tiles.measure import tuner
from outrider_triton.tiles.store.choices import TunedStore, merge_choices
from outrider_triton.tiles.store.table import layer_of

FACTS = replace(DEVICES["H200"], name="made up")
SHAPE = decoder_shape(shape_config("llama-3.2-1b"), torch.bfloat16)
GATES = ("linear_silu_mul", "bfloat16", 2 * SHAPE.inner, SHAPE.hidden)


class Ruler:
    """Stands in for a chain: a layer's time by what its table chooses for the gates; each measurement takes its time."""

    right = True
    took = now = 0.0

    def __init__(self, shape, kernels, _device, **_):
        self.shape, self.kernels, self.context = shape, kernels, 640

    def prepare(self, batch, width, _context):
        self.groups, self.m = batch * self.shape.kv_heads, batch * width

    def attempt(self, table):
        self.kernels.tiles.table = table
        type(self).now += self.took
        us = 100.0
        for operator, dtype, n, k in table.entries:
            entry = table.entry(operator, dtype, n=n, k=k, m=self.m, layer=layer_of(self.shape))
            if entry is not None and entry.config is not None and "silu" in operator:
                us -= entry.config.stages
        return us

    def run_layers(self, _):
        wrong = isinstance(self.kernels, TritonKernels) and not self.right
        return torch.full((4,), 2.0 if wrong else 1.0)


class Here:
    """Stands in for the processes that compile."""

    def __init__(self, _device, **_):
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, jobs):
        self.asked += list(jobs)

    def wait(self, job, _timeout):
        assert job in self.asked
        return True


@pytest.fixture
def kernels(monkeypatch):
    module = SimpleNamespace(mem_get_info=lambda device: (1 << 34, 1 << 35), empty_cache=lambda: None)
    monkeypatch.setattr(tuner, "Chain", type("Own", (Ruler,), {}))
    monkeypatch.setattr(tuner, "KernelCompilers", Here)
    monkeypatch.setattr(tuner, "normal", lambda device, *size: torch.empty(size, device="meta"))
    monkeypatch.setattr(tuner, "microseconds", lambda module, call, *, calls: 5.0)
    monkeypatch.setattr(tuner.torch, "get_device_module", lambda device: module)
    return TritonKernels(FACTS, device=torch.device("meta"))


def tuned(kernels, directory, seconds=60.0, shapes=(SHAPE,)):
    said = []
    results = kernels.tune(shapes, deadline_s=seconds, directory=directory, progress=lambda *line: said.append(line))
    return results, said


def test_what_is_faster_is_kept_and_another_process_takes_it_over(kernels, tmp_path):
    (result,), said = tuned(kernels, tmp_path)
    assert result.complete
    assert result.after_us < result.before_us
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)
    assert said[-1][0] == said[-1][1] == max(total for _, total, _ in said)
    best = max(config.stages for config in tuner.candidates(kernels, SHAPE, GATES, 8))
    other = TritonKernels(FACTS)
    assert other.use_tuned(tmp_path) == result.kept > 20
    weight = torch.empty(2 * SHAPE.inner, SHAPE.hidden, dtype=torch.bfloat16)
    for own in (kernels, other):
        both = [own.dense.matmul_config(name, weight[:4], weight) for name in ("linear_silu_mul", "scaled_silu_mul")]
        assert best in [config.stages for config in both if config is not None]
        assert own.dense.matmul_config("linear", weight[:4, : SHAPE.hidden], weight) is not None
    for elsewhere in (replace(FACTS, name="another"), replace(FACTS, processors=78)):
        assert TritonKernels(elsewhere).use_tuned(tmp_path) == 0
    alone = TritonKernels(FACTS, takes_over=False)
    assert (alone.use_tuned(tmp_path), alone.tiles.table) == (0, None)


def test_a_wrong_winner_is_left_out(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(tuner.Chain, "right", False)
    (result,), said = tuned(kernels, tmp_path)
    assert any("wrong" in text for _, _, text in said)
    assert result.after_us == result.before_us
    derived, kept = TritonKernels(FACTS), TritonKernels(FACTS)
    assert kept.use_tuned(tmp_path) == result.kept
    weight = torch.empty(2 * SHAPE.inner, SHAPE.hidden, dtype=torch.bfloat16, device="meta")
    for name, m in itertools.product(("linear_silu_mul", "scaled_silu_mul"), tuner.MEASURED_BATCHES):
        own, before = (each.dense.matmul_config(name, weight[:m], weight) for each in (kept.for_shape(SHAPE), derived))
        assert own == before


def test_the_deadline_ends_it_and_what_was_chosen_stays(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(tuner.Chain, "took", 0.01)
    monkeypatch.setattr(tuner, "time", SimpleNamespace(monotonic=lambda: tuner.Chain.now))
    (first, second), _ = tuned(
        kernels, tmp_path, seconds=1.2, shapes=(SHAPE, decoder_shape(shape_config("qwen3-0.6b"), torch.bfloat16))
    )
    assert 1.2 <= tuner.Chain.now < 1.3
    assert not (first.complete and second.complete)
    assert first.kept > 0
    assert TritonKernels(FACTS).use_tuned(tmp_path) >= first.kept
    (late,), _ = tuned(kernels, tmp_path, seconds=0.0)
    assert (late.measured, late.kept, late.complete) == (0, 0, False)


def test_ctrl_c_keeps_what_was_written(kernels, tmp_path):
    def stop(done, total, text):
        if done > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kernels.tune([SHAPE], deadline_s=60, directory=tmp_path, progress=stop)
    assert TritonKernels(FACTS).use_tuned(tmp_path) > 0


def test_who_cannot_tune_says_so(tmp_path):
    with pytest.raises(CapabilityError, match="don't tune"):
        KernelSet().tune([SHAPE], deadline_s=1, directory=tmp_path)
    assert KernelSet().use_tuned(tmp_path) == 0
    with pytest.raises(CapabilityError, match="on a device alone"):
        TritonKernels(FACTS).tune([SHAPE], deadline_s=1, directory=tmp_path)
    with pytest.raises(ConfigError, match="bfloat16"):
        TritonKernels(FACTS, device=torch.device("meta")).tune(
            [replace(SHAPE, dtype=torch.float16)], deadline_s=1, directory=tmp_path
        )
    assert WrappedKernels(TritonKernels(FACTS)).tunes


ROW = {"operator": "linear", "dtype": "bfloat16", "n": 64, "k": 256, "m": 8, "us": 1.0, "torch_us": 2.0}
FINE = {**ROW, "config": [16, 64, 128, 1, 4, 3, 0, 0, 0]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({**ROW, "config": [1, 2]}),
        json.dumps({**FINE, "n": "x"}),
        json.dumps({**FINE, "m": 16}),  # another choice's name
        json.dumps({**FINE, "operator": "linear_everything"}),
        json.dumps({**FINE, "config": [128, 128, 256, 1, 8, 9, 0, 0, 0]}),  # more than the device has
        json.dumps({**FINE, "config": [-16, 64, 128, 1, 4, 3, 0, 0, 0]}),
        "[" * 100_000,
        json.dumps({**FINE, "us": 1}).replace('"n": 64', '"n": 1e999'),
    ],
)
def test_a_bad_file_is_a_miss(text, tmp_path):
    store = TunedStore(tmp_path, FACTS)
    store.write([FINE])
    assert store.load() == [FINE]
    (path,) = store.home.iterdir()
    path.write_text(text)
    assert store.load() == []
    store.write([FINE])
    assert store.load() == [FINE]


RING = {**ROW, "n": 4096, "k": 4096, "config": [8, 32, 128, 1, 4, 6, 0, 2, 32]}
TALLER = {**ROW, "operator": "linear_silu_mul", "n": 28672, "k": 4096, "m": 128, "config": [128, 16, 64, 1, 8, 4, 5, 3, 112]}
ATTENTION = {"groups": 8, "max_kv": 640, "head_size": 128, "group": 4, "config": [64, 4, 4, 2, False]}


@pytest.mark.parametrize("row", [FINE, RING, TALLER, ATTENTION], ids=["product", "ring", "tall", "attention"])
@pytest.mark.parametrize("wrong", [0, -1, 3, 1.0, 1 << 20, None, "8", True])
def test_a_damaged_cut_is_a_miss_and_not_a_launch_that_fails(row, wrong, tmp_path):
    store = TunedStore(tmp_path, FACTS)
    store.write([row])
    assert store.load() == [row]
    for place in range(4):  # the sizes of blocks, splits and warps
        config = list(row["config"])
        config[place] = wrong
        store.write([{**row, "config": config}])
        fewer = row is ATTENTION and place == 3 and wrong == 3  # so many stages are as good as others
        assert store.load() == ([{**row, "config": config}] if fewer else [])


@pytest.mark.parametrize("device", ["H100", "H20", "A100"])
def test_what_is_derived_can_be_kept(device, tmp_path):
    store = TunedStore(tmp_path, DEVICES[device])
    for operator, n, k, m in (
        (operator, n, k, m)
        for operator in OPERATORS
        for n, k in ((28672, 4096), (9728, 896), (4096, 14336), (1000, 64))
        for m in (1, 32, 64, 128)
    ):
        for config in rank_configs(DEVICES[device], operator, m=m, n=n, k=k, half=64):
            row = {**ROW, "operator": operator, "n": n, "k": k, "m": m, "config": config.as_list()}
            assert store._fits(row), row


REFUSED = [
    *((RING, {place: wrong}) for place, wrong in ((1, 64), (4, 8), (5, 1), (8, 20), (8, 0))),
    *((TALLER, {place: wrong}) for place, wrong in ((0, 256), (1, 4), (1, 128), (3, 2), (4, 16), (5, 1), (6, 1), (6, 256))),
    *((TALLER, {place: wrong}) for place, wrong in ((8, 0), (8, 100), (0, 4), (2, 8), (8, 16 << 40))),
    *((ATTENTION, {0: block, 3: 3, 4: True}) for block in (16, 32, 256, 1024)),
    *((ATTENTION, changes) for changes in ({2: 8, 3: 3, 4: True}, {3: 3, 4: 2}, {3: 64}, {2: 32})),
    (FINE, {8: 72}),  # more rows than a block has: the rest is nobody's
    (FINE, {"operator": "linear_rope", 8: 40}),  # pairs of them
    *((TALLER, changes) for changes in ({"operator": "scaled_silu_mul"}, {"operator": "linear"}, {"n": 28672 + 16})),
    (RING, {"k": 4096 + 128}),
    *((ATTENTION, changes) for changes in ({"groups": 0}, {"groups": 4, "max_kv": 0})),
    *((FINE, {"m": m}) for m in (0, 129)),
]
OLDER = [(TALLER, {4: 4, 5: 3, 6: 4}), (RING, {5: 3}), (ATTENTION, {3: 3, 4: True})]  # an A100 has none of them


@pytest.mark.parametrize(
    ("device", "row", "changes"), [*(("H200", *each) for each in REFUSED), *(("A100", *each) for each in OLDER)], ids=str
)
def test_what_no_kernel_takes_is_a_miss(device, row, changes, tmp_path):
    store = TunedStore(tmp_path, DEVICES[device])
    config = [changes.get(place, value) for place, value in enumerate(row["config"])]
    store.write([{**row, **{name: value for name, value in changes.items() if isinstance(name, str)}, "config": config}])
    assert store.load() == []


@pytest.mark.parametrize("config", [[16, 32, 64, 1, 4, 3, 0, 0, 64], [16, 32, 64, 1, 4, 3, 0, LARGE_M, 32]], ids=str)
def test_a_product_of_more_rows_than_a_block_is_refused(config):
    x, weight = torch.zeros(4, 256, dtype=torch.float16), torch.zeros(256, 256, dtype=torch.float16)
    ops, residual = torch.ops.outrider, torch.zeros(4, 256, dtype=torch.float16)
    calls = [
        lambda: ops.linear.triton(x, weight, None, config, False),
        lambda: ops.linear_parts.triton(x, weight, config, False),
        lambda: ops.linear_add.triton(x, weight, None, residual, config, False),
        lambda: ops.linear_silu_mul.triton(x, weight, None, config, False, torch.ones(1, 4), 1e-5),
    ]
    if config[7] != LARGE_M:
        calls.append(lambda: ops.linear_silu_mul.triton(x, weight, None, config, False))
    for call in calls:
        with pytest.raises(RuntimeError, match="than a block has, and an unstreamed"):
            call()


def test_a_file_is_whole_or_as_before(tmp_path, monkeypatch):
    store = TunedStore(tmp_path, FACTS)
    store.write([FINE])
    real = Path.write_text

    def half(self, text, **options):
        real(self, text[: len(text) // 2], **options)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space"):
        store.write([{**FINE, "us": 3.0}])
    assert store.load() == [FINE]
    assert len(os.listdir(store.home)) == 1


def test_threads_may_keep_the_same_choice_at_the_same_time(tmp_path):
    store, times = TunedStore(tmp_path, FACTS), range(100)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: store.write([{**FINE, "us": float(number)}]), times))
    (kept,) = store.load()
    assert kept["us"] in times
    assert len(os.listdir(store.home)) == 1


def test_a_choice_of_this_machine_goes_before_the_shipped_one():
    from outrider_triton.tiles.store.table import load

    shipped = load("NVIDIA H200")
    config = [16, 32, 128, 1, 4, 3, 0, 0, 0]
    rows = [
        {**FINE, "n": 6144, "k": 4096, "config": config},
        {"groups": 8, "max_kv": 640, "head_size": 128, "group": 4, "config": [64, 4, 4, 2]},
    ]
    table = merge_choices(shipped, FACTS, rows)
    assert table.entry("linear", "bfloat16", n=6144, k=4096, m=8).config == MatmulConfig(*config)
    assert table.entry("linear", "bfloat16", n=6144, k=4096, m=4) == shipped.entry("linear", "bfloat16", n=6144, k=4096, m=4)
    assert table.attention_config(8, 128, 4).block_kv == 64
    assert len(table.attention) == len(shipped.attention) + 1
