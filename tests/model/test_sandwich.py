"""Layers that norm their results (Gemma 4): logits and tokens of transformers, engines, both kinds of heads, refusals."""

import json
import re

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from disaggregation.couple import Couple
from disaggregation.test_sides import NEW, state
from model.test_decoder import PROMPT, TOLERANCE, Driver, agree, engines_agree, expect
from model.test_mixtures import edited, expect_refusal, reshaped, without
from model.wrong_configs import WRONG_CONFIGS
from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.model import KVCache, ModelRanks, Shard, Shards, load_decoder, plan_decoder
from outrider.model.config.checkpoint_config import read_model_config
from outrider.registry import get_backend
from outrider.transports.link import LocalTransport
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import SANDWICHES, write_checkpoint

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma")
    return path, write_checkpoint(path, "gemma4_text")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """With experts next to each MLP."""
    path = tmp_path_factory.mktemp("mixture")
    return path, write_checkpoint(path, "gemma4_text-experts")


@pytest.fixture(params=["gemma", "mixture"], ids=["dense", "experts"])
def either(request):
    """One of the two checkpoints."""
    return request.getfixturevalue(request.param)


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", SANDWICHES)
def test_tokens_and_logits_of_transformers(tmp_path, backend, name, chunk):
    agree(tmp_path, backend, write_checkpoint(tmp_path, name), chunk=chunk)


def nested(path, target, model_type, *, published):
    """The same model as a multimodal checkpoint has it, next to tensors of a tower."""
    edited(
        path,
        target,
        lambda tensors: (
            {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
            | {f"model.{name}.weight": torch.randn(3) for name in ("vision_tower.encoder.a", "embed_vision.b")}
        ),
    )
    file = target / "config.json"
    text = json.loads(file.read_text())
    if published:  # transformers writes the heads of each layer
        del text["per_layer_config"]
        text |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    whole = {"model_type": model_type, "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    file.write_text(json.dumps(whole | {key: text[key] for key in ("bos_token_id", "eos_token_id")}))
    return target


@pytest.mark.parametrize("published", [False, True])
def test_a_checkpoint_with_a_vision_tower_runs_on_text(tmp_path, backend, either, published):
    agree(nested(either[0], tmp_path, "gemma4", published=published), backend, either[1])


@pytest.mark.sample(1, per="device")
@pytest.mark.parametrize("speculate", ["none", "ngram", "suffix", "draft-model"])
@pytest.mark.parametrize("device", ["cpu", "sim", "sim:like=npu", "sim:kernels=host-plans"])
def test_engines_give_the_tokens_of_transformers(either, device, speculate):
    engines_agree(*either, device, speculate)


@pytest.mark.sample(1, per="changes")
@pytest.mark.parametrize("changes", [{"mode": "fused"}, {"batch_invariant": True}, {"kv_dtype": "plain", "num_pages": 30}])
def test_other_settings_give_the_tokens_of_transformers(either, changes):
    path, reference = either
    expected = tuple(expect(reference, PROMPT, NEW_TOKENS)[0])
    device = "sim" if "mode" in changes else "cpu"
    config = plain_config(**{"max_context": 96, "page_size": 4, "max_requests": 2} | changes)
    engine = Engine.from_checkpoint(path, get_backend(device), speculate="ngram", config=config)
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert completion.token_ids == expected


def test_log_probabilities_are_those_of_capped_logits(gemma):
    path, reference = gemma
    logits = expect(reference, PROMPT, 3)[1]
    assert logits.abs().max() < 3
    engine = Engine.from_checkpoint(path, get_backend("cpu"), config=plain_config(max_context=96, dtype="float32"))
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True))
    wanted = logits.log_softmax(-1).max(-1).values
    assert torch.allclose(torch.tensor([entry.logprob for entry in completion.logprobs]), wanted, atol=1e-4)


def test_pages_in_fp8_give_the_tokens_of_rounded_keys_and_values(backend, either, monkeypatch):
    def rounding(update):
        def update_rounded(cache, *keys_and_values, **options):
            return update(cache, *(each.to(torch.float8_e4m3fn).to(each.dtype) for each in keys_and_values[:2]), **options)

        return update_rounded

    path, reference = either
    reference.generation_config.eos_token_id = None
    unrounded = expect(reference, PROMPT, NEW_TOKENS)[1]
    for kind in (DynamicLayer, DynamicSlidingWindowLayer):
        monkeypatch.setattr(kind, "update", rounding(vars(kind)["update"]))
    expected, logits = expect(reference, PROMPT, NEW_TOKENS)
    assert (logits[0] - unrounded[0]).abs().max() > 0.1
    model = load_decoder(path, backend=backend, dtype=torch.float32, kv_dtype="fp8")
    tokens, ours = Driver(model).greedy(PROMPT, NEW_TOKENS)
    assert tokens == expected
    assert torch.allclose(ours, logits, rtol=0, atol=TOLERANCE)


def test_the_factor_of_embeddings_is_rounded_to_the_dtype(tmp_path, backend):
    reference = write_checkpoint(tmp_path, "gemma4_text").to(torch.bfloat16)
    tokens = torch.arange(40)
    rows = load_decoder(tmp_path, backend=backend, dtype=torch.bfloat16).embed(tokens)
    assert torch.equal(rows, reference.get_input_embeddings()(tokens))


def test_pages_have_the_heads_of_their_layer(backend, gemma):
    config = load_decoder(gemma[0], backend=backend, dtype=torch.float32).config
    cache = KVCache.allocate(config, pages=3, page_size=4, dtype=torch.float32, device=backend.device)
    assert [tuple(keys.shape) for keys, _ in cache.layers] == [(3, 4, 2, 16), (3, 4, 1, 32), (3, 4, 1, 32)]
    stored = sum(keys.nbytes + values.nbytes for keys, values in cache.layers)
    assert 3 * KVCache.page_bytes(config, page_size=4, dtype=torch.float32) == stored
    sizes = [(shape.kv_heads, shape.head_size, shape.window) for shape in config.attention_shapes(torch.float32, page_size=4)]
    assert sizes == [(2, 16, 7), (1, 32, 0)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("model.layers.1.layer_scalar"), "missing: 'model.layers.1.layer_scalar' [1]"),
        (
            without("model.layers.1.post_feedforward_layernorm.weight"),
            "missing: 'model.layers.1.post_feedforward_layernorm.weight' [32]",
        ),
        (
            lambda tensors: tensors | {"model.layers.1.self_attn.v_proj.weight": torch.zeros(32, 32)},
            "not expected: 'model.layers.1.self_attn.v_proj.weight' [32, 32]",
        ),
        (
            reshaped("model.layers.1.self_attn.k_proj.weight", 64, 32),
            "tensor 'model.layers.1.self_attn.k_proj.weight' has shape [64, 32], expected [32, 32]",
        ),
    ],
)
def test_a_broken_checkpoint_names_the_tensor(tmp_path, backend, gemma, change, told):
    expect_refusal(gemma[0], tmp_path, backend, re.escape(told), change)


@pytest.mark.parametrize(("config", "told"), WRONG_CONFIGS["gemma4"], ids=lambda value: next(iter(value)))
def test_a_config_that_cannot_be(tmp_path, backend, gemma, config, told):
    expect_refusal(gemma[0], tmp_path, backend, told, **config)


@pytest.mark.parametrize("shards", [Shards(attention=Shard(0, 2), mlp=Shard(0, 2)), Shards(mlp=Shard(1, 2))])
def test_several_ranks_are_refused(backend, either, shards):
    with pytest.raises(ConfigError, match="a gemma4_text model runs on one rank here, and there are 2"):
        plan_decoder(either[0], backend=backend, dtype=torch.float32, ranks=ModelRanks(shards))


def test_a_published_config(tmp_path):
    """As of Gemma 4 31B: every sixth layer is full, with heads of twice the size."""
    text = {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    config = read_model_config(tmp_path)
    assert config.sandwich.full_layers == tuple(range(5, 60, 6))
    assert (config.of_layer(5).num_kv_heads, config.of_layer(5).head_size, config.of_layer(4).head_size) == (4, 512, 256)
    assert config.windows[:6] == (1024,) * 5 + (0,)
    assert config.tie_embeddings


def test_pages_of_both_kinds_move_between_engines(gemma):
    """Prefill and decode apart give the tokens of one engine."""

    def engine():
        config = plain_config(dtype="float64", max_context=64, page_size=4, max_requests=3, num_pages=40)
        return Engine.from_checkpoint(gemma[0], CpuBackend(), speculate="ngram", config=config)

    prompts = [(3, 1, 4, 1, 5, 9, 2, 6), (8, 9), tuple(range(10, 30))]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    alone = [each.token_ids for each in engine().generate(prompts, params)]
    sides = Couple(engine(), engine(), LocalTransport())
    for prompt in prompts:
        sides.submit(state(prompt, ignore_eos=True))
    sides.run()
    assert [sides.tokens(key) for key in range(len(prompts))] == alone
    assert sides.decode.counts["arrived"] > 0
    sides.close()
