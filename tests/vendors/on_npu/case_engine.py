"""The engine through the plugin ``npu`` on the emulation: float16 and pages of 128, so that attention is CANN's operator.

Trees, schedules and the sanitizer are in ``case_matrix.py``.
"""

from pathlib import Path

import emulation
import pytest

import outrider
from outrider import Engine, SamplingParams
from outrider_conformance import engines
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config

BUNDLED = Path(outrider.__file__).parent / "bundled"
TOKENS = 16
SUFFIXES = ("def read(", "class A", "return x", "for i in")


def fresh():
    made = emulation.make()
    made.control.reset()
    return made


def engine_on(backend, *, speculate="eagle", **config):
    config = {"max_requests": 3, "page_size": 128, "max_context": 256, "draft_tokens": 3, "dtype": "float16"} | config
    return Engine.from_checkpoint(
        BUNDLED / "target",
        backend,
        draft_dir=BUNDLED / "eagle" if speculate == "eagle" else None,
        speculate=speculate,
        config=plain_config(**config),
    )


@pytest.fixture(scope="module")
def plain():
    """Plain greedy decoding on the reference."""
    found = engines.run(engine_on(CpuBackend(), speculate="none"), max_tokens=TOKENS)
    return found.tokens


@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlapped"])
@pytest.mark.parametrize("speculate", ["none", "eagle", "ngram"])
def test_tokens_equal_plain_decoding_on_the_reference(plain, fused_calls, graphs, overlap, speculate):
    engine = engine_on(fresh(), speculate=speculate, overlap=overlap, graphs=graphs)
    assert engines.run(engine, max_tokens=TOKENS).tokens == plain
    assert len(fused_calls) > TOKENS


@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
def test_eagle_with_prefixes_shared_beyond_the_caches_pages(graphs):
    """Four requests of two pages each, the first the same one, in a cache of seven: eight blocks for the operator."""

    def tokens(backend, **config):
        engine = engine_on(backend, max_requests=4, num_pages=7, prefill_chunk=160, **config)
        first = (engine.tokenizer.encode("import os\nimport sys\n") * 40)[:130]
        sampling = SamplingParams(max_tokens=6)
        engine.generate([first], sampling)
        done = engine.generate([[*first, *engine.tokenizer.encode(text)] for text in SUFFIXES], sampling)
        return [completion.token_ids for completion in done]

    assert tokens(fresh(), overlap=True, graphs=graphs) == tokens(CpuBackend())
