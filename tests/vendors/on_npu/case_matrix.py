"""Drawn host programs (arrivals, aborts, preemptions, prefix hits) through the plugin, each under a schedule of its own and
watched: tokens equal plain decoding, nothing is lost, the sanitizer is silent. The same file serves ``npu`` and ``rocm``.
"""

import importlib
import os

import pytest

from outrider.cli.decode_program import DecodeExplorer

emulation = importlib.import_module(os.environ.get("EMULATION_MODULE", "emulation"))
PROGRAMS = int(os.environ.get("EMULATION_PROGRAMS", "3"))


@pytest.fixture(scope="module")
def backend():
    return emulation.make()


@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("speculate", ["eagle", "ngram", "none"])
def test_drawn_programs_each_under_its_own_schedule(backend, speculate, topk, graphs):
    if speculate == "none" and topk > 1:
        pytest.skip("plain decoding drafts no trees")
    explorer = DecodeExplorer(backend, speculate=speculate, draft_topk=topk, graphs=graphs)
    for seed in range(PROGRAMS):
        program = explorer.program(seed)
        backend.control.reset()
        result = backend.control.explore(
            lambda device, program=program: explorer.run(program, device), strategy="mixed", iterations=1, seed=seed
        )
        assert result.failure is None, (seed, program, str(result.failure.error))
        assert result.runs == 1
