"""Kernels are compiled by other processes, and an engine asks for its kernels before it waits for the first of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from outrider import Engine, SamplingParams
from outrider.model import Decoder
from outrider.model.config.shapes import SHAPES
from outrider.registry import get_backend
from outrider.speculative.eagle import EagleProposer
from outrider_bench.random_weights import random_decoder, random_eagle
from outrider_proof.tiny import plain_config
from outrider_triton import launch as launching
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import compile_only

CHILD = Path(__file__).with_name("workers_child.py")


def printed_by(child, *arguments, cache):
    """Return what a child process prints that compiles kernels into an empty cache."""
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(child), *arguments]
    result = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_workers_compile_and_this_process_loads(broken, tmp_path):
    """Two variants, twice: by two workers, and then by nobody, since the cache has them. Without workers, by this process."""
    found = json.loads(printed_by(CHILD, *(["broken"] if broken else []), cache=tmp_path))
    assert found["compiled"] == [["silu_mul", not broken]] * 2 + [["silu_mul", True]] * 2
    assert found["workers"] == [2, 2]
    assert found["running"] == 0
    assert found["loaded"] == ["silu_mul"] * 4


def test_operators_return_zeros_and_run_nothing(device, pdl):
    """Memory that an operator would fill is zero, and memory of the caller stays as it is."""
    ops = torch.ops.outrider
    x, weight = torch.randn(3, 16, device=device), torch.ones(16, device=device)
    residual = x.clone()
    with compile_only():
        torch.empty(1 << 12, device=device).fill_(7.0)  # so that freed memory isn't zero by luck
        normed = ops.rms_norm.triton(x, weight, 1e-5, pdl)
        added = ops.add_rms_norm.triton(x, None, residual, weight, 1e-5, pdl)
    assert torch.equal(normed, torch.zeros_like(x))
    assert torch.equal(added, torch.zeros_like(x))
    assert torch.equal(residual, x)
    assert not torch.equal(ops.rms_norm.triton(x, weight, 1e-5, pdl), normed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_an_iteration_of_padding_asks_for_the_kernels_of_all_others(monkeypatch):
    """All but the mask of guided requests; and the tokens are those of an engine that asks for none."""
    backend, calls, tokens = get_backend("cpu"), [], []
    real = launching.launch

    def noted(kernel, grid, *arguments, **settings):
        calls.append((kernel.fn.__name__, launching._ahead.get()))
        return real(kernel, grid, *arguments, **settings)

    for name, module in list(sys.modules.items()):
        if name.startswith("outrider_triton.") and getattr(module, "launch", None) is real:
            monkeypatch.setattr(module, "launch", noted)
    model = random_decoder(SHAPES["tiny"], backend=backend, dtype=torch.float32)
    for ahead in (True, False):
        kernels = TritonKernels(DEVICES["L4"])
        if not ahead:
            monkeypatch.setattr(kernels, "compile_ahead", lambda: None)
        target = Decoder(model.config, model.weights, kernels)
        proposer = EagleProposer(random_eagle(target, backend=backend), draft_tokens=2)
        sizes = {"max_requests": 2, "max_context": 96, "prefill_chunk": 24, "num_pages": 20, "draft_tokens": 2}
        config = plain_config(mode="fused", dtype="float32", **sizes)
        calls.clear()
        engine = Engine(target, backend, proposer=proposer, config=config)
        first_run = next(number for number, (_, only_compiled) in enumerate(calls) if not only_compiled)
        asked = {name for name, _ in calls[:first_run]}
        assert (asked >= {name for name, _ in calls} - {"apply_token_bitmask"}) is ahead
        params = (SamplingParams(max_tokens=5, ignore_eos=True), SamplingParams(max_tokens=5, temperature=1.0, seed=3))
        tokens.append([each.token_ids for each in engine.generate([[1, 2, 3], [7] * 30], list(params))])
    assert tokens[0] == tokens[1]
