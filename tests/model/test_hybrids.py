"""Hybrid models against transformers: logits and greedy tokens of random configs, with prompts in chunks."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.harness import Driver
from model.hybrid_checkpoints import FAMILIES, MtpOracle, config_values, greedy, logits, random_model, save
from model.quantized_checkpoints import write_compressed, write_fp8
from outrider import Engine, SamplingParams
from outrider.cli.options.models import Speculation
from outrider.device import QuantizedWeight, SplitWeight
from outrider.device.kernels.weights import quantized_products
from outrider.errors import CheckpointError
from outrider.model import load_decoder
from outrider.model.quantization.writing import quantize_checkpoint
from outrider_proof import tiny
from tiny_checkpoints import rewrite

LENGTHS = (1, 2, 3, 5, 63, 64, 65, 130)
CHUNKS = (1, 3, 64, 130)


def check(family, seed, directory, backend, *, lengths=LENGTHS, chunks=CHUNKS, count=6):
    model = random_model(family, seed)
    model.save_pretrained(directory)
    ours = load_decoder(directory, backend=backend, dtype=torch.float32)
    draw = random.Random(seed)
    lengths = draw.sample(lengths, 3)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]
    driver = Driver(ours, pages=512)
    together = [(driver.sequence(), prompt) for prompt in prompts]
    made = driver.logits(together, padding=2)[: sum(lengths)].split(lengths)
    for prompt, each in zip(prompts, made, strict=True):
        torch.testing.assert_close(each, logits(model, prompt), rtol=1e-3, atol=1e-3)
        chunk = draw.choice(chunks)
        tokens, _ = driver.greedy(prompt, count, chunk=chunk)
        assert tokens == greedy(model, prompt, count), (prompt, chunk)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_config_of_each_family(family, tmp_path, backend):
    check(family, 1, tmp_path, backend, lengths=(1, 3, 66), chunks=(2, 64), count=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 25))
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_configs(family, seed, tmp_path, backend):
    check(family, seed, tmp_path, backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_in_the_checkpoint(family, tmp_path, backend):
    """Its results over a whole text equal transformers' parts, and what it drafts doesn't change the tokens."""
    model = random_model(family, 3)
    oracle, nested = MtpOracle(model, 4), family != "qwen3_next"
    save(model, tmp_path, head=oracle, nested=nested)
    assert Speculation.with_defaults(None, model=tmp_path, draft=None, draft_tokens=3).kind == "mtp"
    config = tiny.plain_config(dtype="float32", max_context=128, page_size=4, prefill_chunk=9, draft_tokens=3)
    engine = Engine.from_checkpoint(tmp_path, backend, speculate="mtp", config=config)
    head = engine.proposer.head
    prompt = [number % model.config.vocab_size for number in range(3, 60, 5)]
    driver = Driver(engine.model)
    states = driver.hidden([(driver.sequence(), prompt)])
    draft = Driver(engine.model, config=head.config)
    with torch.no_grad():
        made = head.forward(draft.inputs([(draft.sequence(), prompt[1:])]), states[:-1], draft.cache)
    torch.testing.assert_close(made, oracle(model, prompt), rtol=1e-3, atol=1e-3)
    (found,) = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    assert list(found.token_ids) == greedy(model, prompt, 12)


def test_a_tied_table_under_the_name_of_the_output_head(tmp_path, backend):
    """In a nested checkpoint with a prediction head, as ``safetensors.torch.save_model`` stores the table."""
    tied = next(seed for seed in range(99) if config_values("qwen3_5", seed)["tie_word_embeddings"])
    model = random_model("qwen3_5", tied)
    save(model, tmp_path, head=MtpOracle(model, 4), nested=True)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({"lm_head.weight" if "embed_tokens" in key else key: tensors[key] for key in tensors}, path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.language_model.embed_tokens", "lm_head"))
    config = tiny.plain_config(dtype="float32", max_context=128, page_size=4, draft_tokens=3)
    engine = Engine.from_checkpoint(tmp_path, backend, speculate="mtp", config=config)
    (found,) = engine.generate([[3, 8, 13]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert list(found.token_ids) == greedy(model, [3, 8, 13], 12)


def rewritten_config(directory, change):
    """Apply ``change`` to the content of config.json."""
    raw = json.loads((directory / "config.json").read_text())
    change(raw)
    (directory / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(mtp_num_hidden_layers=2), "the head has 2 layers, expected 1"),
        (lambda raw: raw.update(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings is true"),
        (lambda raw: raw.update(mtp_num_hidden_layers=None), None),
    ],
)
def test_a_head_that_is_not_supported_leaves_the_model_usable(change, message, tmp_path, backend):
    """A head is chosen by default, so its error says how to decode without it. Cache scales of a head are accepted."""
    model = random_model("qwen3_5", 3)
    save(model, tmp_path, head=MtpOracle(model, 4))
    shard = tmp_path / "model-00002-of-00002.safetensors"
    scales = {f"mtp.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    save_file(load_file(shard) | scales, shard, metadata={"format": "pt"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(scales, shard.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    rewritten_config(tmp_path, change)
    config = tiny.plain_config(max_context=64, page_size=4)
    if message is not None:
        with pytest.raises(CheckpointError, match=rf"{message}.*\(--speculate none\)"):
            Engine.from_checkpoint(tmp_path, backend, speculate="mtp", config=config)
    engine = Engine.from_checkpoint(tmp_path, backend, speculate="none" if message else "mtp", config=config)
    assert list(engine.generate([PROMPT], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == greedy(
        model, PROMPT, 4
    )


@pytest.mark.parametrize("nested", [False, True])
def test_a_config_without_layers_of_a_head_decodes_without_it(nested, tmp_path):
    """By default: tensors of a head are ignored if the config says that it has 0 layers."""
    save(random_model("qwen3_5", 3), tmp_path, head=MtpOracle(random_model("qwen3_5", 3), 4), nested=nested)
    rewritten_config(tmp_path, lambda raw: (raw["text_config"] if nested else raw).update(mtp_num_hidden_layers=0))
    assert Speculation.with_defaults(None, model=tmp_path, draft=None, draft_tokens=3).kind == "none"


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5}
LONGROPE |= {
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
PUBLISHED = {
    "interval": ({"num_hidden_layers": 5, "layer_types": None}, {"full_attention_interval": 2}),
    "text fields under the outer model type": ({}, {"model_type": "qwen3_5"}),
    "one key head": ({"linear_num_key_heads": 1, "linear_num_value_heads": 7, "linear_conv_kernel_dim": 6}, {}),
    "yarn": ({"rope_parameters": {**LONGROPE, "rope_type": "yarn"}}, {}),
    "longrope": ({"head_dim": 16, "rope_parameters": LONGROPE}, {}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_that_are_written_in_other_ways(name, tmp_path, backend):
    shape, fields = PUBLISHED[name]
    model = random_model("qwen3_5", 6, **shape, **{key: each for key, each in fields.items() if key != "model_type"})
    model.save_pretrained(tmp_path)
    rewritten_config(tmp_path, lambda raw: (raw.update(fields), raw.pop("layer_types") if name == "interval" else None))
    ours = load_decoder(tmp_path, backend=backend, dtype=torch.float32)
    driver = Driver(ours)
    torch.testing.assert_close(driver.logits([(driver.sequence(), PROMPT)]), logits(model, PROMPT), rtol=1e-3, atol=1e-3)
    assert driver.greedy(PROMPT, 3, chunk=4)[0] == greedy(model, PROMPT, 3)


SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
SIZES |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
PROMPT = [1, 17, 34, 30, 5, 21, 21, 8, 33, 12]


@pytest.mark.parametrize("form", ["fp8 in blocks", "int4-g32-asymmetric", "int8-w8a16"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_quantized_weights(family, form, tmp_path, backend):
    """Slices of one stored weight, such as the queries and gates of each head, keep their scales."""
    dense = {"mlp_only_layers": list(range(9))} if family == "qwen3_next" else {}
    model = random_model(family, 5, **SIZES, **dense)
    model.save_pretrained(tmp_path / "plain")
    if form == "fp8 in blocks":
        state = write_fp8(tmp_path / "plain", tmp_path / "quantized", block=(32, 32))
    else:
        state = write_compressed(tmp_path / "plain", tmp_path / "quantized", form)
    with torch.no_grad():
        wanted = torch.func.functional_call(model, state, (torch.tensor([PROMPT]),)).logits[0]
    for mode in ("dequantize", "kernels"):
        ours = load_decoder(tmp_path / "quantized", backend=backend, dtype=torch.float32, quantized=mode)
        driver = Driver(ours)
        made = driver.logits([(driver.sequence(), PROMPT)])
        if mode == "dequantize" or form != "fp8 in blocks":  # fp8 quantizes activations, too
            torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)
    assert made.argmax(-1).eq(wanted.argmax(-1)).float().mean() > 0.6
    assert sum(quantized_products(ours.weights).values()) == 4 * len(ours.weights.layers)


def test_a_quantized_copy_has_the_large_products_of_recurrent_layers(tmp_path, backend):
    model = random_model("qwen3_5", 5, **SIZES)
    model.save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "int8", format="int8")
    ours = load_decoder(tmp_path / "int8", backend=backend, dtype=torch.float32)
    recurrent = [layer for layer in ours.weights.layers if layer.recurrent is not None]
    assert recurrent
    for layer in recurrent:
        assert isinstance(layer.qkv, SplitWeight)
        projection, gates = layer.qkv.parts
        assert isinstance(projection, QuantizedWeight)
        assert isinstance(gates, torch.Tensor)
        assert isinstance(layer.output, QuantizedWeight)
    driver = Driver(ours)
    made = driver.logits([(driver.sequence(), PROMPT)])
    assert made.argmax(-1).eq(logits(model, PROMPT).argmax(-1)).float().mean() > 0.6


BAD_VALUES = (0, -1, 2.5, "4", True, [], {}, 1 << 40)
BAD_FIELDS = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "layer_types",
    "mamba_ssm_dtype",
    "attn_output_gate",
    "output_gate_type",
    "attention_bias",
)
OTHER_VARIANTS = (
    {"linear_num_key_heads": 5, "linear_num_value_heads": 7},
    {"layer_types": ["linear_attention"] * 9},
    {"layer_types": ["sliding_attention"] * 3},
    {"attention_bias": True},
    {"model_type": "qwen4_exp"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.01}},
)


def broken_variants(family, directory):
    """(name, words that the error must have, and a function that breaks the checkpoint in ``directory``)."""

    def config(change):
        return lambda: rewrite(directory, **change)

    def tensors(change):
        return lambda: rewrite(directory, change)

    for field in BAD_FIELDS:
        for value in BAD_VALUES:
            yield f"{field} = {value!r}", field, config({field: value})
    for change in OTHER_VARIANTS:
        yield f"{change}", "", config(change)
    for key in load_file(directory / "model.safetensors"):
        if "linear_attn" in key or "self_attn" in key or "norm" in key:
            yield f"without {key}", key, tensors(lambda held, key=key: held.pop(key))
            yield (
                f"{key} is longer",
                key,
                tensors(lambda held, key=key: held.update({key: torch.cat((held[key], held[key]))})),
            )
            stray = key.replace("linear_attn", "linear_attention").replace("self_attn", "attention")
            if stray != key:
                yield (
                    f"{stray}, too",
                    stray,
                    tensors(lambda held, key=key, stray=stray: held.update({stray: held[key].clone()})),
                )


HARMLESS = {"attn_output_gate = True"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_broken_variants_are_clear_errors(family, every, tmp_path, backend):
    model = random_model(family, 8)
    model.save_pretrained(tmp_path)
    whole = {name: (tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")}
    variants = list(broken_variants(family, tmp_path))
    assert len(variants) > 100
    for name, words, apply in variants[::every]:
        for file, content in whole.items():
            (tmp_path / file).write_bytes(content)
        apply()
        if name in HARMLESS:
            continue
        with pytest.raises(CheckpointError) as caught:
            load_decoder(tmp_path, backend=backend, dtype=torch.float32)
        assert words in str(caught.value), (name, str(caught.value))
        assert str(tmp_path) in str(caught.value), (name, str(caught.value))
