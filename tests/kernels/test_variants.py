"""What is compiled beforehand covers what may be chosen later, and running it changes no result."""

import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from triton.runtime._async_compile import active_mode
from triton.runtime.errors import OutOfResources

from kernels.devices import DEVICES, SMALL
from outrider.device import AttentionMetadata, DecoderShape, KernelSet
from outrider_triton import kernelset, workers
from outrider_triton.attention import cached
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import compile_only, launch, vocabulary_shares
from outrider_triton.products import dense
from outrider_triton.tiles.configs import AttentionConfig, MatmulConfig
from outrider_triton.tiles.derive.fits import MAX_TOKENS_TUNED, PREFILL_SAMPLE_TOKENS
from outrider_triton.tiles.selection import TileSelection, VariantScope, attention_configs, share_counts
from outrider_triton.tiles.store.table import ANY_LAYER, AttentionEntry, ProductEntry, Table, layer_of, load

TINY = MatmulConfig(16, 16, 32, 1, 4, 2, 0, 0)
SPLIT = MatmulConfig(16, 16, 32, 2, 4, 2, 0, 0)
BOTH = TINY, SPLIT
FACTS = DEVICES["H200"]
TABLE = Table(
    device="made up",
    software={},
    entries={
        (operator, "bfloat16", 32, 64): {
            ANY_LAYER: (
                ProductEntry(m=4, config=small, us=1.0, torch_us=2.0),
                ProductEntry(m=128, config=large, us=1.0, torch_us=2.0),
            )
        }
        for operator, small, large in (("linear", TINY, None), ("linear_parts", TINY, SPLIT))
    },
    attention=(
        AttentionEntry(groups=8, max_kv=64, config=AttentionConfig(32, 2, 4, 2), head_size=16, group=2),
        AttentionEntry(groups=128, max_kv=64, config=AttentionConfig(16, 1, 4, 2), head_size=16, group=2),
    ),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("facts", "table"),
    [
        (DEVICES["H200"], None),
        (DEVICES["H200"], TABLE),
        (DEVICES["H200"], load("NVIDIA H200")),
        (DEVICES["L4"], None),
    ],
    ids=["derived", "made up", "shipped", "small"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (4, 4)])
def test_every_attention_is_known_beforehand(facts, table, dtype, heads):
    kernels = TritonKernels(facts, table=table)
    q, k_cache = torch.empty(1, heads[0], 64, dtype=dtype), torch.empty(1, 16, heads[1], 64, dtype=dtype)
    known = {
        capacity: set(
            attention_configs(
                lambda *sizes: kernels.attention.config_for(q, k_cache, *sizes), max_query=256, capacity=capacity
            )
        )
        for capacity in (96, 784, 4096)
    }
    draw = random.Random(7)
    for _ in range(3000):
        capacity = draw.choice(list(known))
        batch, queries = 1 + int(2 ** draw.uniform(0, 6)), int(2 ** draw.uniform(0, 8))
        config = kernels.attention.config_for(q, k_cache, batch, queries, draw.randint(1, capacity))
        assert tuple(config) in known[capacity], (batch, queries, capacity)


@pytest.mark.parametrize("device", ["H200", "MI300X"])
def test_every_share_is_known_beforehand(device):
    processors = DEVICES[device].processors
    for vocabulary in (257, 32000, 128256):
        known = share_counts(vocabulary, processors)
        assert {vocabulary_shares(rows, vocabulary, processors) for rows in (*range(1, 1300), 16384)} <= set(known)


def known_configs(kernels, operator, n, k, half=0):
    """Configurations that samples of the scope need."""
    counts = kernels.tiles.token_counts(operator)
    return {kernels.tiles.product(operator, "bfloat16", m=m, n=n, k=k, half=half) for m in counts} - {None}


def test_every_product_is_known_beforehand_in_each_layer():
    """A target and a draft may have a weight of one size, and each its own choice for it."""
    shapes = [DecoderShape(hidden=64, heads=2, kv_heads=2, head_size=16, inner=size, vocabulary=99) for size in (64, 96)]
    one, other = (
        {layer_of(shape): (ProductEntry(m=8, config=c, us=1.0, torch_us=2.0),)} for shape, c in zip(shapes, BOTH, strict=True)
    )
    table = replace(TABLE, entries={("linear", "bfloat16", 32, 64): {**one, **other}})
    kernels = TritonKernels(FACTS, table=table)
    x, weight = torch.empty(128, 64, dtype=torch.bfloat16), torch.empty(32, 64, dtype=torch.bfloat16)
    for shape, own, others in zip(shapes, BOTH, BOTH[::-1], strict=True):
        layer = kernels.for_shape(shape)
        with layer.every_variant():
            counts = list(layer.dense.samples("linear", x, weight))
        known = {layer.dense.matmul_config("linear", torch.empty(m, 64, dtype=torch.bfloat16), weight) for m in counts} - {
            None
        }
        assert {layer.dense.matmul_config("linear", x[:m], weight) for m in range(1, 129)} - {None} == known
        assert own in known
        assert others not in known
    with kernels.every_variant():
        both = [list(kernels.for_shape(shape).dense.samples("linear", x, weight)) for shape in (*shapes, *shapes)]
    assert [bool(each) for each in both] == [True, True, False, False]  # each once


@pytest.fixture
def launched(monkeypatch):
    """The kernels' operators that were called, with their configurations."""
    calls = []
    real = torch.ops.outrider

    class Packet:
        def __init__(self, name):
            self.name = name

        def triton(self, *arguments):
            calls.append((self.name, *(tuple(each) for each in arguments if isinstance(each, list | tuple))))
            return getattr(real, self.name).triton(*arguments)

    class Namespace:
        def __getattr__(self, name):
            return Packet(name)

    for module in (kernelset, cached, dense):
        monkeypatch.setattr(module, "_TRITON", Namespace())
    return calls


def test_results_are_the_same_in_the_scope(device, pdl, launched):
    facts = replace(SMALL, early_starts=pdl)
    kernels = TritonKernels(facts, table=TABLE)
    generator = torch.Generator().manual_seed(3)

    def normal(*size, dtype=torch.bfloat16):
        return torch.randn(*size, generator=generator).to(dtype).to(device)

    x, weight, norm = normal(6, 64), normal(32, 64), normal(32)
    residual = normal(6, 32)
    q, cache = normal(3, 4, 16), normal(8, 16, 2, 16)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 3], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([9], dtype=torch.int32, device=device),
        block_table=torch.tensor([[1, 2, 3, 0]], dtype=torch.int32, device=device),
        max_query=3,
        max_kv=9,
    )
    logits = normal(3, 5000, dtype=torch.float32)
    rows = torch.zeros(3, dtype=torch.float32, device=device), torch.arange(3, device=device), torch.arange(3, device=device)

    drafts = logits[:2].argmax(-1).unsqueeze(0)

    def run():
        kept, keys, values = residual.clone(), cache.clone(), cache.clone()
        found = torch.zeros(1, 2, dtype=torch.int64, device=device)
        moved = torch.tensor([20, 33], device=device), torch.tensor([17, 18], device=device)
        kernels.move_cache(keys, values, *moved)
        return [
            kernels.linear(x, weight),
            kernels.dense.linear_add_rms_norm(x, weight, None, kept, norm, 1e-5),
            kept,
            kernels.paged_attention(q, cache, cache, metadata, scale=0.25),
            kernels.sample(logits, *rows),
            *kernels.verify_checked(logits.unsqueeze(0), drafts, *(each[:1] for each in rows), found),
            found,
            keys,
            values,
        ]

    outside = run()
    once = list(launched)
    launched.clear()
    with kernels.every_variant():
        inside = run()
    for before, after in zip(outside, inside, strict=True):
        assert torch.equal(before, after)
    known = known_configs(kernels, "linear_parts", 32, 64)
    assert {call for call in launched if call[0] == "linear_parts"} == {("linear_parts", tuple(c.as_list())) for c in known}
    assert {TINY, SPLIT} < known
    assert len({call for call in launched if call[0] == "paged_attention"}) >= 3
    assert set(once) <= set(launched)
    # A batch with a grammar has its logits looked at first, and none has come yet.
    assert "verify_chain" in {call[0] for call in launched} - {call[0] for call in once}
    launched.clear()
    run()
    assert launched == once


def test_kernels_of_the_interface_need_no_scope():
    assert KernelSet().every_variant() is None
    assert KernelSet().compiled() == {}


def test_what_is_only_compiled_is_not_launched():
    calls = []

    class Kernel:
        def run(self, *arguments, grid, warmup, **settings):
            calls.append((arguments, grid, warmup, settings))

    launch(Kernel(), (2,), "x", pdl=True, warps=4)
    with compile_only():
        launch(Kernel(), (3,), "y", pdl=False, warps=8)
        launch(Kernel(), (0,), "z", pdl=False, warps=8)
    launch(Kernel(), (4,), "x", pdl=False, warps=4)
    assert [(arguments, grid, warmup) for arguments, grid, warmup, _ in calls] == [
        (("x",), (2,), False),
        (("y",), (3,), True),
        (("x",), (4,), False),
    ]
    assert calls[0][3] == {"launch_pdl": True, "PDL": True, "num_warps": 4}


def test_variants_are_compiled_and_loaded_by_threads(monkeypatch):
    """Each thread loads onto the device of the thread that launches, and the scope waits for all of them."""
    loaded, finished, both, current = [], [], threading.Barrier(2, timeout=30), threading.local()
    active = SimpleNamespace(get_current_device=lambda: 3, set_current_device=partial(setattr, current, "device"))
    monkeypatch.setattr(workers, "driver", SimpleNamespace(active=active))

    class Made:
        def __init__(self, name):
            self.name = name

        @property
        def run(self):
            if self.name == "too large":
                raise OutOfResources(2, 1, "shared memory")
            both.wait()  # it takes two threads here, too
            loaded.append((self.name, current.device))

    def compiling(name):
        both.wait()  # it takes two threads to get here
        return Made(name)

    scope = VariantScope()
    with scope.entered(), scope.entered():
        mode = active_mode.get()
        for name in ("one", "two") if os.cpu_count() > 1 else ():
            mode.submit(name, lambda name=name: compiling(name), finished.append)
        first = mode.submit("too large", lambda: Made("too large"), finished.append)
        assert finished[-1] is first  # the next launch finds it
    assert active_mode.get() is None
    assert scope.depth == 0
    if os.cpu_count() > 1:
        assert set(loaded) == {("one", 3), ("two", 3)}
    assert {each.name for each in finished if isinstance(each, Made)} >= {"too large"}


def test_a_kernel_that_cannot_be_loaded_leaves_later_launches_as_they_are(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 0, set_current_device=lambda _: None)
    monkeypatch.setattr(workers, "driver", SimpleNamespace(active=active))
    with pytest.raises(MemoryError, match="no memory"), workers.compiling(processors=1):
        active_mode.get().submit("one", Mock(side_effect=MemoryError("no memory")), lambda _: None)
    assert active_mode.get() is None
    with workers.compiling(processors=1):
        pass


def test_only_gates_of_prefill_are_compiled_for_thousands_of_tokens():
    """Other products of so many rows, such as logits, would only need memory."""
    tiles = TileSelection(DEVICES["H200"])
    assert max(tiles.token_counts("linear_silu_mul")) == PREFILL_SAMPLE_TOKENS
    assert max(tiles.token_counts("linear")) == MAX_TOKENS_TUNED + 1
    assert max(TileSelection(DEVICES["MI300X"]).token_counts("linear_silu_mul")) == MAX_TOKENS_TUNED + 1


def test_ways_to_attend_are_listed_once_for_alike_sizes():
    """In the scope, and by as many queries as bound the same powers of two; then they're forgotten."""
    asked = []

    def config(batch, queries, cached):
        asked.append((batch, queries, cached))
        return (queries,)

    scope = VariantScope()
    with scope.entered():
        found = [scope.attention_configs("heads", config, max_query=each, capacity=64) for each in (5, 8, 7)]
        once = len(asked)
        assert found[0] == found[1] == found[2] == attention_configs(config, max_query=5, capacity=64)
        assert len(asked) == 2 * once  # the last of them asks again
        scope.attention_configs("others", config, max_query=8, capacity=64)
        scope.attention_configs("heads", config, max_query=9, capacity=64)
        scope.attention_configs("heads", config, max_query=8, capacity=128)
        assert len(asked) > 5 * once
    before = len(asked)
    with scope.entered():
        scope.attention_configs("heads", config, max_query=8, capacity=64)
    assert len(asked) == before + once


@pytest.mark.slow
def test_the_place_of_a_batch_in_its_buffer_needs_no_other_variant(tmp_path):
    """Else kernels would be compiled one by one while graphs are captured: the warm-up has one batch size."""
    child = Path(__file__).with_name("batches_child.py")
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, str(child)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout)
    assert counts == dict.fromkeys(("accept_sampling", "partial_residual", "partial_softmax", "place_tokens"), 1)
