"""The overlapped engine gives the reference's tokens, and each fence that is left out is noticed."""

from __future__ import annotations

import pytest
import torch

from opencl.dropped_fences import race_without, tokens_without
from outrider.engine.fences import FENCES
from outrider_proof.decode_program import HostProgram, Serving, check_tokens
from outrider_proof.engine_setups import Models, prompt_and_media, random_host_program, reference_tokens

OF_HOST_LENGTHS = {"lengths_on_host", "params_free", "params_bound"}
"""Fences of devices with host lengths in graphs, which OpenCL is not."""
WRONG_TOKENS = ("shared_reads_done", "draft_outputs_ready", "plan_ready", "results_ready")
"""Fences without which late producers give wrong tokens, beyond the errors of the others."""


@pytest.fixture(autouse=True)
def one_thread():
    """Compute with one thread: the operands are tiny, and further threads would wait actively for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def serve(backend, proposer: str, program: HostProgram) -> None:
    engines = [Models(proposer, backend).engine(program) for _ in range(1 + any(each.moves for each in program.arrivals))]
    serving = Serving(engines, program, lambda arrival: prompt_and_media(proposer, arrival))
    serving.step_until_idle()
    check_tokens(serving.tokens, serving.ended, [reference_tokens(proposer, each) for each in program.arrivals])


@pytest.mark.slow
@pytest.mark.parametrize("queues", ["in-order", "out-of-order"])
@pytest.mark.parametrize("proposer", ["none", "eagle", "mtp", "ngram", "eagle-tree", "ngram, images"])
def test_overlapped_tokens_are_those_of_the_reference(opencl, proposer, queues):
    for seed in range(4):
        serve(opencl(queues=queues), proposer, random_host_program(seed))


def test_late_producers_without_a_fence_give_wrong_tokens(opencl):
    assert tokens_without(opencl, "draft_outputs_ready") == "wrong tokens"


@pytest.mark.slow
@pytest.mark.parametrize("fence", [None, *WRONG_TOKENS])
def test_late_producers_show_which_fences_tokens_depend_on(opencl, fence):
    assert tokens_without(opencl, fence) == ("same tokens" if fence is None else "wrong tokens")


@pytest.mark.slow
@pytest.mark.parametrize("fence", [None, *(spec.name for spec in FENCES)])
def test_the_attached_sanitizer_finds_each_fence_that_is_left_out(opencl, fence):
    found, implied = race_without(opencl, fence)
    if fence is None or fence in OF_HOST_LENGTHS:
        assert not found
        return
    assert found
    if fence not in ("draft_on_host", "pages_ready"):  # two engines share one host thread: a host wait may count for both
        assert implied == (fence,)


@pytest.mark.slow
def test_sanitize_reports_a_missing_wait_and_is_silent_on_its_twin(opencl, outrider, tmp_path):
    program = """
import torch
from outrider import get_backend
backend = get_backend("opencl")
a, b, ready = backend.create_stream("a"), backend.create_stream("b"), backend.create_event("ready")
with backend.on(a):
    x = torch.zeros(4)
a.synchronize()
with backend.on(a):
    x.fill_(1)
a.record(ready)
{wait}
with backend.on(b):
    y = x + 1
backend.synchronize()
"""
    for name, wait, code in (("racy", "", 1), ("right", "b.wait(ready)", 0)):
        script = tmp_path / f"{name}.py"
        script.write_text(program.format(wait=wait))
        result = outrider("sanitize", "--backend", "opencl", "--json", "--", str(script))
        assert result.code == code, result.err
        findings = result.json["reports"][0]["findings"]
        assert [finding["kind"] for finding in findings] == (["read_after_write"] if code else [])
