"""Prefill and decode apart, with KV caches in fp8: their bytes land in the other engine's pages."""

import pytest
import torch

from disaggregation.couple import Couple
from disaggregation.test_sides import NEW, state
from model.cached_checkpoints import write_cached
from outrider import Engine, SamplingParams
from outrider.disaggregation.codec import server_fit
from outrider.transports.link import LocalTransport
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import write_eagle
from outrider_proof.tiny import plain_config

PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6), (8, 9), tuple(range(10, 30))]


def engine_of(directory, **fields):
    config = {"dtype": "float64", "max_context": 64, "page_size": 4, "max_requests": 3, "overlap": True, "num_pages": 40}
    return Engine.from_checkpoint(
        directory, CpuBackend(), speculate="eagle", draft_dir=directory / "eagle", config=plain_config(**config | fields)
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cached")
    write_cached(directory, "llama", strategy="attn_head")
    write_eagle(directory / "eagle")
    return directory


def test_tokens_are_those_of_one_engine(written):
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    alone = [each.token_ids for each in engine_of(written).generate(PROMPTS, params)]
    sides = Couple(engine_of(written), engine_of(written), LocalTransport())
    assert sides.decode.engine._parts.cache.layers[0][0].dtype is torch.float8_e4m3fn
    for prompt in PROMPTS:
        sides.submit(state(prompt, ignore_eos=True))
    sides.run()
    assert [sides.tokens(key) for key in range(len(PROMPTS))] == alone
    assert sides.decode.counts["arrived"] > 0
    sides.close()


def test_engines_whose_caches_differ_do_not_fit(written):
    kept, wide = server_fit(engine_of(written)), server_fit(engine_of(written, kv_dtype="plain"))
    assert {name for name in kept if kept[name] != wide[name]} == {"kv_dtype"}
