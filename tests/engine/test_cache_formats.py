"""An engine whose KV cache is in fp8: the tokens of plain decoding with such a cache, in every mode; sizes; hand-overs."""

from dataclasses import replace

import pytest
import torch

from engine.test_hand_over import finish, until_output
from model.cached_checkpoints import write_cached
from outrider import SamplingParams
from outrider.device import ConfigError
from outrider.engine.engine import Engine
from outrider.engine.setup.loading import LoadingArguments, load_checkpoint
from outrider.registry import Registry
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import write_eagle
from outrider_proof.tiny import plain_config
from outrider_sanitizer import watch
from tiny_checkpoints import write_checkpoint

PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), (8, 9), (7, 7, 7), (44,), tuple(range(10, 50))]
MODES = {
    "staged": {},
    "overlap": {"overlap": True},
    "graphs": {"graphs": True, "overlap": True},
    "fused": {"mode": "fused", "overlap": True},
    "few pages": {"overlap": True, "num_pages": 17, "prefill_chunk": 7},  # requests are preempted, and prompts cut up
}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint with scales of heads, an EAGLE head for it, and transformers with the same cache."""
    directory = tmp_path_factory.mktemp("cached")
    reference = write_cached(directory, "llama", strategy="attn_head")
    write_eagle(directory / "eagle")
    return directory, reference.double()


def config(**fields):
    return plain_config(**{"dtype": "float64", "max_context": 64, "page_size": 4, "max_requests": 5} | fields)


def engine_of(directory, backend, speculate="none", **fields):
    draft = directory / "eagle" if speculate == "eagle" else directory if speculate == "draft-model" else None
    made = Engine.from_checkpoint(directory, backend, speculate=speculate, draft_dir=draft, config=config(**fields))
    assert made._parts.cache.layers[0][0].dtype is torch.float8_e4m3fn
    return made


def tokens_of(directory, backend, speculate="none", prompts=PROMPTS, **fields):
    return [each.token_ids for each in engine_of(directory, backend, speculate, **fields).generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def plain(written):
    """Tokens of plain decoding, one request at a time, on the host."""
    return [tokens_of(written[0], CpuBackend(), prompts=[prompt], max_requests=1)[0] for prompt in PROMPTS]


def test_plain_decoding_has_the_tokens_of_transformers(written, plain):
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        made = list(prompt)
        for token in tokens:
            with torch.no_grad():
                logits = written[1](torch.tensor([made])).logits[0, -1]
            assert token == int(logits.argmax())
            made.append(token)


DRAFTS = {"none": {}, "eagle": {}, "ngram": {}, "draft-model": {}, "eagle tree": {"draft_topk": 2}}
"""The draft model is the target itself: its cache is in fp8 too."""
FAST = {("few pages", "eagle")}


@pytest.mark.sample(1, per="mode")
@pytest.mark.parametrize(
    ("mode", "draft"),
    [
        pytest.param(mode, draft, marks=() if mode == "graphs" or (mode, draft) in FAST else pytest.mark.slow)
        for mode in MODES
        for draft in DRAFTS
    ],
)
@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding_on_sim(written, plain, mode, draft):
    backend = Registry().create("sim:strategy=random,seed=3")
    with watch(backend) as report:
        engine = engine_of(written[0], backend, draft.split()[0], **MODES[mode], **DRAFTS[draft])
        assert [each.token_ids for each in engine.generate(PROMPTS, GREEDY)] == plain
    report.raise_if_any()
    assert report.operations > 100
    assert (engine.stats.preemptions > 0) is (mode == "few pages")


def test_a_prefix_is_found_again(written, plain):
    engine = engine_of(written[0], CpuBackend())
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        assert engine.generate([prompt], GREEDY)[0].token_ids == tokens
    assert engine.stats.prefix_hits >= 8


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "fields",
    [{"speculate": "eagle"}, {"speculate": "eagle", "draft_topk": 2}, {"batch_invariant": True}, {"prefix_cache": False}],
)
def test_tokens_are_those_of_plain_decoding_on_the_host(written, plain, fields):
    assert tokens_of(written[0], CpuBackend(), **fields) == plain


def loaded(directory, **fields):
    return load_checkpoint(directory, CpuBackend(), LoadingArguments(config=config(**fields))).config


def test_the_same_memory_holds_more_tokens_and_the_choice_is_told(written):
    fields = {"kv_memory": 1e-4, "max_context": None}
    kept, wide = loaded(written[0], **fields), loaded(written[0], kv_dtype="plain", **fields)
    assert (kept.kv_dtype, wide.kv_dtype) == ("fp8", "plain")
    assert 7.5 < (kept.num_pages - 1) / (wide.num_pages - 1) < 8.5  # float64
    (said,) = [each for each in kept.chosen if each.name == "kv_dtype"]
    assert "kv_cache_scheme: 96 bytes a token in place of 768" in str(said)
    assert not [each for each in wide.chosen if each.name == "kv_dtype"]


def test_a_draft_keeps_its_own_dtype(written, tmp_path):
    engine = Engine.from_checkpoint(
        written[0], CpuBackend(), speculate="eagle", draft_dir=written[0] / "eagle", config=config()
    )
    assert {cache.dtype for cache in engine.proposer.caches} == {torch.float64}
    write_checkpoint(tmp_path, "llama")
    engine = Engine.from_checkpoint(
        tmp_path, CpuBackend(), speculate="draft-model", draft_dir=written[0], config=config(kv_dtype="plain")
    )
    assert {cache.dtype for cache in engine.proposer.caches} == {torch.float8_e4m3fn}, "its own checkpoint says so"
    assert engine.model.cache_dtype is torch.float64
    assert [each.token_ids for each in engine.generate(PROMPTS[:1], GREEDY)]


@pytest.mark.parametrize("other", ["cpu", "sim"])
def test_a_request_moves_with_its_bytes_and_not_into_another_dtype(written, plain, other):
    first, second = (
        Engine.from_checkpoint(written[0], Registry().create(name), config=config(page_size=size))
        for name, size in (("sim", 4), (other, 3))
    )
    request = first.add_request(PROMPTS[1], GREEDY)
    until_output(first, request, 3)
    handed = first.hand_over(request)
    assert {each.dtype for each in handed.keys_values} == {torch.float8_e4m3fn}
    wide = Engine.from_checkpoint(written[0], CpuBackend(), config=config(kv_dtype="plain"))
    with pytest.raises(ConfigError, match=r"kv_dtype: torch.float8_e4m3fn there, torch.float64 here"):
        wide.take_over(handed)
    assert finish(second, second.take_over(handed)).token_ids == plain[1]


def test_what_cannot_be_is_refused(written):
    with pytest.raises(ConfigError, match="kv_dtype is 'int3'; expected one of auto, plain, fp8"):
        config(kv_dtype="int3")
    model = load_checkpoint(written[0], CpuBackend(), LoadingArguments(config=config())).model
    with pytest.raises(ConfigError, match="kv_dtype is plain, and the model was loaded for a fp8 KV cache"):
        Engine(model, CpuBackend(), config=replace(config(), kv_dtype="plain"))
    loading = LoadingArguments(config=config(kv_dtype="fp8"), through_transformers=True)
    with pytest.raises(ConfigError, match="through_transformers"):
        load_checkpoint(written[0], CpuBackend(), loading)
