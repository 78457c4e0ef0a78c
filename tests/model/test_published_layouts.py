"""Layouts of published checkpoints that differ from what transformers writes: the tokens are those of transformers, plain and
with drafts."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM

from model.cached_checkpoints import write_scales
from model.harness import Driver
from model.quantized_checkpoints import write_awq, write_fp8, write_gptq
from model.test_dflash import envelope
from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.errors import CheckpointError
from outrider.model import load_decoder
from outrider.model.layers.inputs import KeptRows
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import write_eagle
from outrider_proof.tiny import plain_config
from tiny_checkpoints import rewrite, write_checkpoint, write_dflash, write_eagle3, write_mtp, write_peagle

PROMPTS, COUNT = [[5, 6, 7, 8, 5, 6], [9]], 10
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


def oracle(model):
    """Return the greedy tokens of transformers' model in float64."""
    model, found = model.double(), []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        for _ in range(COUNT):
            with torch.no_grad():
                logits = model(tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat((tokens, logits.argmax().view(1, 1)), dim=1)
        found.append(tuple(tokens[0, len(prompt) :].tolist()))
    return found


def engine_of(directory, speculate="none", *, draft=None, max_context=48, kv_dtype="auto", **options):
    config = plain_config(dtype="float64", draft_tokens=3, max_context=max_context, kv_dtype=kv_dtype)
    return Engine.from_checkpoint(directory, CpuBackend(), draft_dir=draft, speculate=speculate, config=config, **options)


def tokens_of(engine):
    return [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]


def check(directory, model, speculate="draft-model", *, draft=None, **options):
    """Compare with transformers' ``model``, plain and with drafts: by default the checkpoint drafts for itself."""
    expected = oracle(model)
    assert tokens_of(engine_of(directory, **options)) == expected
    draft = directory if speculate == "draft-model" and draft is None else draft
    drafting = engine_of(directory, speculate, draft=draft, **options)
    assert tokens_of(drafting) == expected
    return drafting


# -- heads of multi-token prediction inside the model's checkpoint ---------------------------------------------------


def write_mimo(directory):
    """Write a MiMo checkpoint: Qwen2's decoder and heads of multi-token prediction. Return transformers' Qwen2 model."""
    model = write_checkpoint(directory, "qwen2")
    heads = write_mtp(directory / "heads")
    rewrite(
        directory,
        lambda state: state | heads,
        model_type="mimo",
        architectures=["MiMoForCausalLM"],
        num_nextn_predict_layers=2,
        attention_bias=True,
        head_dim=8,
        auto_map={"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
    )
    return model


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mimo")
    return directory, write_mimo(directory)


def test_mimo_drafts_with_the_heads_in_its_own_checkpoint(mimo):
    directory, model = mimo
    inside = check(directory, model, "mtp")
    outside = engine_of(directory, "mtp", draft=directory / "heads")
    assert inside.proposer.depth == outside.proposer.depth == 2
    for mine, other in zip(inside.proposer._heads, outside.proposer._heads, strict=True):
        assert torch.equal(mine.weights.fusion, other.weights.fusion)


def test_heads_inside_are_checked(mimo, tmp_path):
    directory, _ = mimo
    for path in ("config.json", "model.safetensors"):
        (tmp_path / path).write_bytes((directory / path).read_bytes())
    rewrite(tmp_path, lambda state: state | {"model.mtp_layers.0.extra": torch.zeros(1)})
    engine_of(tmp_path)
    with pytest.raises(CheckpointError, match="not expected: 'model.mtp_layers.0.extra'"):
        engine_of(tmp_path, "mtp")


def test_a_model_without_heads_is_refused_before_it_is_read(tmp_path):
    write_checkpoint(tmp_path, "llama")
    read = []
    with pytest.raises(CheckpointError, match=r"has no heads of multi-token prediction; expected tensors model\.mtp_layers"):
        engine_of(tmp_path, "suffix+mtp", progress=lambda *told: read.append(told))
    assert read == []


# -- EAGLE and EAGLE-3 heads -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    return directory, write_checkpoint(directory, "llama", num_hidden_layers=4)


def without(*names):
    return lambda state: {key: value for key, value in state.items() if key not in names}


def test_eagle3_without_an_output_head_takes_the_targets(target, tmp_path):
    directory, model = target
    write_eagle3(tmp_path, draft_vocab=96)
    rewrite(tmp_path, without("lm_head.weight", "d2t", "t2d"))
    head = check(directory, model, "eagle3", draft=tmp_path).proposer.head
    hidden = torch.randn(2, 32, dtype=torch.float64)
    normed = head.kernels.rms_norm(hidden, head.weights.final_norm, head.config.rms_eps)
    assert torch.equal(head.logits(hidden), head.target.logits(normed))


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, (1, 2, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ()),
    ],
)
def test_eagle3_reads_the_states_that_its_producer_means(target, tmp_path, fields, layers):
    """Numbers in eagle_config count outputs of layers if the first one is 1, else inputs; 4 is the output of all layers."""
    directory, model = target
    write_eagle3(tmp_path, layers=None)
    rewrite(tmp_path, lambda state: None if layers else without("fc.weight")(state), **fields)
    engine = check(directory, model, "eagle3", draft=tmp_path)
    assert engine.proposer.aux_hidden_state_layers == layers
    assert engine.proposer.reads_hidden is (layers == ())


def test_the_output_of_the_last_layer_is_the_state_before_the_final_norm(target):
    """Also for a prompt whose last layer keeps the last rows alone."""
    directory, model = target
    decoder = load_decoder(directory, backend=CpuBackend(), dtype=torch.float64)
    driver = Driver(decoder)
    inputs = driver.inputs([(driver.sequence(), [5, 6, 7]), (driver.sequence(), [8, 9])])
    kept = KeptRows.last_of_each(inputs.attention, torch.tensor([2, 4]))
    with torch.no_grad():
        whole, (first, last) = decoder.forward_with_aux_hidden_states(inputs, driver.cache, (2, 4))
        rows, (_, again) = decoder.forward_with_aux_hidden_states(replace(inputs, kept=kept), driver.cache, (2, 4))
        states = model.double().model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    torch.testing.assert_close(first[:3], states.hidden_states[2][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(decoder.kernels.rms_norm(last, decoder.weights.norm, decoder.config.rms_eps), whole)
    torch.testing.assert_close(whole[:3], states.last_hidden_state[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(again, last)
    assert torch.equal(rows, whole[[2, 4]])


@pytest.mark.parametrize("copy", [True, False])
def test_eagle_with_an_output_head(target, tmp_path, copy):
    """A copy of the target's takes no memory; another one drafts."""
    directory, model = target
    write_eagle(tmp_path)
    own = load_file(directory / "model.safetensors")["lm_head.weight"]
    own = own if copy else own.flip(0)
    rewrite(tmp_path, lambda state: state | {"lm_head.weight": own})
    head = check(directory, model, "eagle", draft=tmp_path).proposer.head
    assert (head.weights.head is None) is copy
    hidden = torch.randn(2, 32, dtype=torch.float64)
    torch.testing.assert_close(head.logits(hidden), hidden @ own.double().T)
    if copy:
        tokens_of(engine_of(directory, "eagle", draft=tmp_path, draft_vocabulary=40))
    else:
        with pytest.raises(ConfigError, match="has another one of its own .lm_head.weight.; leave it out"):
            engine_of(directory, "eagle", draft=tmp_path, draft_vocabulary=40)


def test_a_draft_token_that_is_listed_twice_is_refused(target, tmp_path):
    """Its probability would count once in verification, and twice in sampling."""
    directory, _ = target
    write_eagle3(tmp_path)
    rewrite(tmp_path, lambda state: state["d2t"].__setitem__(1, state["d2t"][0] - 1))
    with pytest.raises(CheckpointError, match=r"'d2t' points to token \d+ more than once \(1 repetitions"):
        engine_of(directory, "eagle3", draft=tmp_path)


@pytest.mark.parametrize("speculate", ["eagle", "eagle3", "dflash", "peagle", "mtp", "draft-model"])
def test_a_draft_of_another_kind_is_refused_by_its_name(target, tmp_path, speculate):
    directory, _ = target
    writers = {"eagle": write_eagle, "eagle3": write_eagle3, "peagle": write_peagle, "dflash": write_dflash, "mtp": write_mtp}
    for kind, write in writers.items():
        write(tmp_path / kind)
        if kind != speculate:
            name = "no heads of multi-token" if speculate == "mtp" else f"a draft for speculate '{kind}', not '{speculate}'"
            with pytest.raises(CheckpointError, match=name):
                engine_of(directory, speculate, draft=tmp_path / kind)


# -- names, files and the output head --------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [True, False])
def test_another_output_head_than_the_config_says(tmp_path, copy):
    """transformers ties the output head to the embedding only if the files don't hold another one."""
    write_checkpoint(tmp_path, "llama-tied")
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda state: state | {"lm_head.weight": table.clone() if copy else table.flip(0)})
    engine = check(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert engine.model.config.tie_embeddings is copy


def test_a_tied_table_under_the_name_of_the_head(tmp_path):
    """As ``safetensors.torch.save_model`` stores a model."""
    model = write_checkpoint(tmp_path, "llama-tied")
    save_model(model, str(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    check(tmp_path, model)


@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
def test_names_without_model(tmp_path, family):
    """As a base model is saved, with the output head of the causal model if it has one of its own."""
    write_checkpoint(tmp_path, family)
    rewrite(tmp_path, lambda state: {key.removeprefix("model."): value for key, value in state.items()})
    check(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_a_tensor_in_two_shards(tmp_path):
    """Equal copies are one tensor; others are refused."""
    model = write_checkpoint(tmp_path, "llama", shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    (first, name), *_, (_, other) = sorted(index.items(), key=lambda item: item[1])
    tensor = load_file(tmp_path / name)[first]
    for values, refused in ((tensor, False), (tensor + 1, True)):
        save_file(load_file(tmp_path / other) | {first: values}, tmp_path / other)
        if refused:
            with pytest.raises(CheckpointError, match=f"holds '{first}', which .* places in '{name}', with other values"):
                engine_of(tmp_path)
        else:
            check(tmp_path, model)


# -- quantised weights and caches ------------------------------------------------------------------------------------

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    return directory, write_checkpoint(directory, "llama", **WIDE)


def with_weights(plain, state):
    """A copy of transformers' model with the weights that a quantised checkpoint stands for."""
    model = copy.deepcopy(plain[1])
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("static", [False, True])
def test_scales_of_a_cache_that_the_config_does_not_announce(plain, tmp_path, static):
    """Without a scheme the cache is plain, and in fp8 on request; the word ``static`` is a scheme."""
    model = with_weights(plain, write_fp8(plain[0], tmp_path))
    cached = write_scales(tmp_path, model)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    del said["kv_cache_scheme"]
    rewrite(tmp_path, quantization_config=said | ({"kv_cache_scheme": "static"} if static else {}))
    engine = check(tmp_path, cached if static else model, quantized="dequantize")
    assert (engine.model.cache_dtype == torch.float8_e4m3fn) is static
    asked = engine_of(tmp_path, quantized="dequantize", kv_dtype="fp8")
    assert tokens_of(asked) == oracle(cached)


@pytest.mark.parametrize(
    ("layout", "packing", "symmetric"),
    [("gptq", "auto_round:auto_gptq", True), ("gptq", None, False), ("gptq_v2", "auto_round:gptqmodel", False)],
)
def test_auto_round_packed_as_gptq(plain, tmp_path, layout, packing, symmetric):
    """All modules but one, which ``extra_config`` leaves out."""
    state, left_out = write_gptq(plain[0], tmp_path, layout=layout, sym=symmetric), "model.layers.1.mlp.down_proj"
    own = {f"{left_out}.weight": load_file(plain[0] / "model.safetensors")[f"{left_out}.weight"]}
    said = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": symmetric, "data_type": "int"}
    said |= {"extra_config": {left_out: {"bits": 16}}} | ({} if packing is None else {"packing_format": packing})
    rewrite(
        tmp_path,
        lambda state: {key: value for key, value in state.items() if not key.startswith(left_out)} | own,
        quantization_config=said,
    )
    check(tmp_path, with_weights(plain, state | own), "ngram")


@pytest.mark.parametrize("expressions", [False, True])
def test_auto_round_packed_as_awq_with_another_group_in_single_modules(plain, tmp_path, expressions):
    """The modules have names or expressions. A name takes precedence, else the first expression."""
    state = write_awq(plain[0], tmp_path)
    said = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 64, "sym": False}
    groups = {key.removesuffix(".weight"): {"group_size": 32} for key in state if "_proj" in key}
    assert len(groups) == 14
    if expressions:
        down = "model.layers.1.mlp.down_proj"
        other = {"group_size": 128}
        groups = {r"layers\.1\.mlp\.down": other, r"_proj$": {"group_size": 32}, ".*": other, down: groups[down]}
    said |= {"packing_format": "auto_round:auto_awq", "extra_config": groups}
    rewrite(tmp_path, quantization_config=said)
    check(tmp_path, with_weights(plain, state), "ngram")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"packing_format": "auto_round:mx_fp"}, "packing_format is 'auto_round:mx_fp', which isn't supported"),
        ({"data_type": "mx_fp4"}, "data_type is 'mx_fp4', expected int"),
        ({"extra_config": {"lm_head": 4}}, "extra_config is .*, expected a JSON object of objects"),
        ({"bits": 3}, "bits is 3, expected 4 or 8"),
        (
            {"extra_config": {"(.*)*_proj": {"bits": 8}}},
            r"the expression '\(\.\*\)\*_proj' .* can't be used: a repeat in a repeat",
        ),
    ],
)
def test_what_auto_round_says_that_is_refused(plain, tmp_path, said, message):
    write_gptq(plain[0], tmp_path)
    rewrite(tmp_path, quantization_config={"quant_method": "auto-round", "bits": 4, "group_size": 32} | said)
    with pytest.raises(CheckpointError, match=message):
        engine_of(tmp_path)


# -- rope ------------------------------------------------------------------------------------------------------------


def generated(model):
    """The greedy tokens of transformers' ``generate``, whose cache keeps keys as they were rotated."""
    model, found = model.double(), []
    model.generation_config.eos_token_id = None
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
        )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize("original", [4, 12])
def test_longrope_on_both_sides_of_the_original_context(tmp_path, original):
    """A prompt beyond the original context, and outputs that reach beyond it; each twice, from the prefix cache."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 4.0, 8.0]}
    model = write_checkpoint(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    expected = generated(model)
    for speculate in ("none", "draft-model"):
        engine = engine_of(tmp_path, speculate, draft=tmp_path if speculate == "draft-model" else None)
        assert [tokens_of(engine), tokens_of(engine)] == [expected, expected], speculate
    rewrite(tmp_path, rope_parameters=rope | {"long_factor": [1.0]})
    with pytest.raises(
        CheckpointError, match="longrope has 1 factors in a list, expected half the rotated size of a head, 4"
    ):
        engine_of(tmp_path)


def test_ministral3_scales_queries_beyond_the_original_context(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 4}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.9}
    model = write_checkpoint(tmp_path, "ministral3", seed=3, head_dim=8, rope_parameters=rope)
    check(tmp_path, model)
    rewrite(tmp_path, rope_parameters=rope | {"llama_4_scaling_beta": 0.0})
    assert tokens_of(engine_of(tmp_path)) != oracle(model), "the factors make no difference"


# -- other drafts ----------------------------------------------------------------------------------------------------


def test_a_draft_model_of_a_shorter_context(target, tmp_path):
    directory, model = target
    for path in ("config.json", "model.safetensors"):
        (tmp_path / path).write_bytes((directory / path).read_bytes())
    rewrite(tmp_path, max_position_embeddings=8)
    assert check(directory, model, draft=tmp_path).max_context == 48


def test_dflash_with_sliding_layers_and_a_draft_vocabulary(target, tmp_path):
    directory, model = target
    write_dflash(tmp_path / "head")
    envelope(tmp_path)
    drafting = check(directory, model, "dflash", draft=tmp_path / "head")
    assert drafting.proposer.head.draft_vocab_size == 40
    assert drafting.proposer.head.config.windows == (5, 0)
