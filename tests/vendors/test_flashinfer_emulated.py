"""The kernel set ``flashinfer`` through the engine, on the simulated device, with a stand-in for FlashInfer: what it is told,
and when the device reads what the host wrote.
"""

import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch

from conformance.test_plans import check_plans
from outrider import Engine, SamplingParams
from outrider.device import AttentionShape, BackendLoadError, CapabilityError, KernelSet
from outrider.registry import get_backend
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.paged_batch import paged_batch
from outrider_flashinfer.buffers import fill_indices, fill_mask, mask_bytes
from outrider_proof import tiny
from outrider_proof.tiny import plain_config
from outrider_sanitizer import watch
from outrider_sim.exploration import run_once
from outrider_sim.strategies import Strategy, make_strategy
from tiny_programs import NEW_TOKENS, PROMPTS, program
from vendors.flashinfer_numerics import CASES, check, check_tokens, generate, random_model

EMULATED = Path(__file__).parent / "emulated_flashinfer"


@pytest.fixture(scope="module")
def kernelset():
    """The plugin's module over the stand-in; it takes float64 and the tiny models' heads too, so that tokens can be equal."""
    ours = ("outrider_flashinfer.kernelset", "outrider_flashinfer.plan")
    with pytest.MonkeyPatch.context() as patch:
        before = {
            name: sys.modules.pop(name) for name in list(sys.modules) if name in ours or name.split(".")[0] == "flashinfer"
        }
        patch.syspath_prepend(EMULATED)
        module = importlib.import_module("outrider_flashinfer.kernelset")
        patch.setattr(module, "DTYPES", (torch.float64, torch.float32, torch.bfloat16))
        patch.setattr(module, "HEAD_SIZES", (8, 64))
        yield module
        for name in [name for name in sys.modules if name in ours or name.split(".")[0] == "flashinfer"]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture
def make(kernelset, monkeypatch):
    """A backend with these kernels. On the simulated device the wrapper is called directly: it's one operation there, whose
    operands are all that it touches, and the plugin's own operator would hide them.
    """
    import flashinfer

    directly = importlib.import_module("outrider_flashinfer.plan")._run

    def made(name="sim"):
        backend = get_backend(name)
        pinned = lambda shape: backend.empty_pinned("FlashInfer's own", shape, torch.int32).tensor  # noqa: E731
        monkeypatch.setattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, "pinned", pinned)
        if name == "sim":
            monkeypatch.setattr(kernelset, "OPERATOR", directly)
        backend.use_kernels(kernelset.FlashInferKernels(backend.kernels, backend, processors=4))
        return backend

    return made


@pytest.fixture(scope="module", autouse=True)
def _plain_first():
    for prompt in PROMPTS:
        tiny.plain(prompt, NEW_TOKENS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
@pytest.mark.parametrize("name", ["eagle", "eagle-tree", "draft-model", "none"])
def test_plain_greedy_tokens_and_silence(make, name, graphs):
    backend = make()
    with watch(backend) as report:
        error = run_once(backend, program(name, graphs=graphs), Strategy())
    if error is not None:
        raise error
    assert report.clean, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seeds", [(1,), pytest.param(range(6), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("name", ["eagle", "eagle-tree"])
def test_under_adversarial_schedules(make, name, seeds):
    for seed in seeds:
        error = run_once(make(), program(name, graphs=True), make_strategy("mixed", seed, {}))
        if error is not None:
            raise AssertionError(f"seed {seed}") from error


def test_pinned_memory_that_is_written_too_early_is_found(make, kernelset, monkeypatch):
    """The sanitizer sees a plan that doesn't wait for its copies: FlashInfer's own pinned tables are among them."""
    monkeypatch.setattr(kernelset.AttentionPlan, "wait", lambda self: None)
    backend = make()
    with watch(backend) as report:
        run_once(backend, program("eagle-tree"), make_strategy("slowest", 0, {"stream": "plan"}))
    assert not report.clean


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_the_kit_passes(make, name):
    check_plans(Lab(make(name)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in ("many", "trees")], ids=lambda case: case.name)
def test_numbers(make, case):
    """The same check runs on a device with FlashInfer itself (tests/kernels)."""
    assert check(make("cpu"), case, size=64) > 0


@pytest.mark.slow
def test_tokens(make):
    """And so does this; in float32 no token differs."""
    backend = make("cpu")
    model = random_model(backend, torch.float32, 64)
    plain = generate(backend, model, None, new_tokens=6, logprobs=2)
    for speculate, config in (("eagle", "graphs"), ("tree", "called")):
        assert check_tokens(backend, model, plain, speculate, config, new_tokens=6) == 0


def test_what_is_planned_is_computed_by_flashinfer(make, monkeypatch):
    """And what isn't, or has a shape that it hasn't, by the kernels beneath."""
    import flashinfer

    backend = make("cpu")
    calls = []
    run = flashinfer.BatchPrefillWithPagedKVCacheWrapper.run
    monkeypatch.setattr(
        flashinfer.BatchPrefillWithPagedKVCacheWrapper, "run", lambda *a, **k: (calls.append(1), run(*a, **k))[1]
    )
    batch = paged_batch(Lab(backend), "a chain", torch.bfloat16)
    planned = batch.planned((17, 40, 3))
    with backend.on(batch.stream):
        batch.attend(planned)
        assert len(calls) == 1
        batch.attend(batch.metadata(batch.made, (17, 40, 3)))
        assert len(calls) == 1
    assert isinstance(backend.kernels_in_use, KernelSet)
    assert backend.kernels_in_use.plans_on_host


def test_it_cant_be_batch_invariant(make):
    with pytest.raises(CapabilityError, match="FlashInfer plans the order of a row's sums for the whole batch"):
        make("cpu").kernels_in_use.batch_invariant()


def test_without_flashinfer_it_says_what_to_install(monkeypatch):
    from outrider_flashinfer import plugin

    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    info = plugin.kernel_info()
    assert (info.usable, info.reason) == (False, "flashinfer isn't installed")
    with pytest.raises(BackendLoadError, match="flashinfer isn't installed; install flashinfer-python 0.6, and nvcc"):
        plugin.create_kernels(get_backend("cpu"))


def test_another_version_is_refused(kernelset, monkeypatch):
    import flashinfer

    from outrider_flashinfer import plugin

    monkeypatch.setattr(flashinfer, "__version__", "0.7.1")
    with pytest.raises(BackendLoadError, match=r"flashinfer 0\.7\.1 is installed, .* install flashinfer-python 0\.6\.14"):
        plugin.create_kernels(get_backend("cpu"))


def test_starting_says_what_is_compiled(make, caplog):
    backend = make()
    importlib.import_module("flashinfer.jit").BUILT.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            paged_batch(Lab(backend), "a chain", torch.bfloat16).planned((1, 1, 1))
    (said,) = [record.message for record in caplog.records]
    assert (
        said == "FlashInfer compiles its attention for head size 64, bfloat16 with nvcc, once on this machine: about a minute"
    )
    assert backend.kernels_in_use.compiled() == {"flashinfer": 1}


def test_an_engine_compiles_before_any_request(make, kernelset):
    """Without graphs too, which plan when they're captured: the warm-up does."""
    backend = make("cpu")
    model = random_model(backend, torch.float32, 64)
    importlib.import_module("flashinfer.jit").BUILT.clear()
    engine = Engine(model, backend, config=plain_config(max_requests=2, max_context=64))
    assert engine.warm_up.compiled == {"flashinfer": 1}
    compiled = list(importlib.import_module("flashinfer.jit").BUILT)
    assert compiled
    engine.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4))
    assert compiled == importlib.import_module("flashinfer.jit").BUILT


def test_a_failed_compilation_is_an_error_with_advice(make, monkeypatch):
    backend = make()
    jit = importlib.import_module("flashinfer.jit")
    jit.BUILT.clear()

    def fails(self):
        raise RuntimeError("Ninja build failed.\nnvcc: not found\n")

    monkeypatch.setattr(jit.Spec, "build_and_load", fails)
    with pytest.raises(BackendLoadError, match="head size 64, bfloat16: RuntimeError: nvcc: not found; it needs ninja"):
        paged_batch(Lab(backend), "a chain", torch.bfloat16).planned((1, 1, 1))


def test_scratch_is_shared_by_what_is_planned_on_one_stream(make, kernelset):
    backend = make()
    attention = backend.kernels_in_use.attention
    one, other = Lab(backend).streams("one", "other")
    first = attention.scratch(one, 1000)
    assert attention.scratch(one, 500) is first
    assert attention.scratch(other, 500) is not first
    assert attention.scratch(one, 2000).numel() == 2000


def test_scratch_has_room_for_every_split(kernelset):
    """By hand: 8 requests of 4 queries, 4 heads a key head, on 132 processors: 8 blocks of 128 rows, split into up to 33."""
    plan = sys.modules["outrider_flashinfer.plan"]
    shape = AttentionShape(heads=32, kv_heads=8, head_size=128, page_size=16, dtype=torch.bfloat16, scale=1.0)
    found = plan.scratch_bytes(shape, batch=8, rows=32, processors=132)
    assert found == 32 * 33 * 128 * 129 * 4 + (1 << 20)


# -- buffers -------------------------------------------------------------------------------------------------------


def test_indices_are_the_pages_in_order():
    table = torch.tensor([[5, 6, 7], [8, 9, 1], [2, 3, 4]], dtype=torch.int32)
    indices = torch.full((9,), -1, dtype=torch.int32)
    fill_indices(indices, torch.tensor([0, 3, 4], dtype=torch.int32), table)
    assert indices[:5].tolist() == [5, 6, 7, 8, 2]
    assert indices[5:].tolist() == [3, 4, 4, 4], "what no sequence needs is a page number all the same"


@pytest.mark.parametrize("lens", [(3, 17), (20, 3)])
def test_a_tree_as_bits(lens):
    nodes, capacity = 3, 20
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]] * 2, dtype=torch.bool)
    packed = torch.zeros((2, mask_bytes(nodes, capacity)), dtype=torch.uint8)
    fill_mask(packed, torch.tensor(lens, dtype=torch.int32), tree)
    for row, length in enumerate(lens):
        for node in range(nodes):
            for token in range(length):
                bit = node * length + token
                found = bool(packed[row, bit // 8] >> (bit % 8) & 1)
                new = token - (length - nodes)
                assert found == (new < 0 or bool(tree[row * nodes + node, new])), (row, node, token)
