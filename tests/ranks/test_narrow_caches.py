"""Ranks over a KV cache in fp8: each has the scales of its own key heads."""

import pytest
import torch
from threads import run

from model.cached_checkpoints import write_cached
from outrider import Engine, SamplingParams
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.engine.ranks.records import RanksDiffer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config

PROMPTS = [(3,), (1, 2, 3, 4, 5), (7, 8, 9)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two key heads, each with scales of its own."""
    directory = tmp_path_factory.mktemp("cached")
    write_cached(directory, "llama", strategy="attn_head")
    return directory


def engine_of(directory, ranks, **fields):
    config = plain_config(dtype="float64", max_context=40, max_requests=3, page_size=4, **fields)
    backend = CpuBackend() if ranks is None else ranks.backend
    return Engine.from_checkpoint(directory, backend, speculate="ngram", config=config, ranks=ranks)


def tokens_of(engine):
    assert {each.dtype for pair in engine._parts.cache.layers for each in pair} == {torch.float8_e4m3fn}
    made = engine.generate(PROMPTS, SamplingParams(max_tokens=10, ignore_eos=True))
    return [each.token_ids for each in made], [layer.cache.output_scales.shape[0] for layer in engine.model.weights.layers]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [ParallelConfig(tensor=2), ParallelConfig(data=2)], ids=["tensor", "data"])
def test_ranks_serve_what_one_serves(written, layout):
    alone, heads = tokens_of(engine_of(written, None))
    together, own = run(layout, lambda ranks: engine_of(written, ranks), tokens_of)
    assert together == alone
    assert [each * layout.tensor for each in own] == heads


def test_ranks_whose_caches_differ_are_told(written):
    def make(ranks):
        return engine_of(written, ranks, kv_dtype="plain" if ranks.rank else "fp8")

    with pytest.raises(RanksDiffer, match="KV cache"):
        run(ParallelConfig(tensor=2), make, tokens_of)
