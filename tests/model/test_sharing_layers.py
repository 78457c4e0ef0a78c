"""Layers that share keys and values, and per-layer embeddings (Gemma 4 E2B and E4B): logits and tokens of transformers,
engines, pages, rows that sharing layers leave out, quantised copies, refusals.
"""

import json
import re
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from tests.engine.conftest import replayed_prefill
from tests.engine.test_prefill_graphs import noted_replays
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from disaggregation.couple import Couple
from disaggregation.test_sides import NEW, state
from model.harness import Driver
from model.test_decoder import PROMPT, TOLERANCE, agree, engines_agree, expect
from model.test_mixtures import edited, expect_refusal, reshaped, without
from model.wrong_configs import WRONG_CONFIGS
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, KernelSet, QuantizedWeight
from outrider.device.kernels.weights import quantized_products
from outrider.engine.setup.facts import collect_facts
from outrider.model import KeptRows, KVCache, ModelRanks, Shard, Shards, load_decoder, plan_decoder
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.layers.layer_weights import PerLayerInputWeights
from outrider.model.quantization.writing import quantize_checkpoint
from outrider.registry import get_backend
from outrider.speculative.lookup import NgramProposer
from outrider.transports.link import LocalTransport
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import write_eagle
from outrider_proof.tiny import plain_config
from outrider_sanitizer import watch
from tiny_checkpoints import SHARING_SANDWICHES, rewrite, write_checkpoint

NEW_TOKENS = 20
UNREAD = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")


@pytest.fixture(scope="module")
def e2b(tmp_path_factory):
    """Seven layers, of which the last four read the pages of layers 1 and 2, with MLPs of twice the size."""
    path = tmp_path_factory.mktemp("e2b")
    return path, write_checkpoint(path, "gemma4_text-e2b")


@pytest.fixture(scope="module")
def e4b(tmp_path_factory):
    """Twelve layers, every sixth of which is full; the last five read the pages of layers 5 and 6."""
    path = tmp_path_factory.mktemp("e4b")
    return path, write_checkpoint(path, "gemma4_text-e4b")


@pytest.fixture(params=["e2b", "e4b"])
def small(request):
    """One of the two checkpoints."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", SHARING_SANDWICHES)
def test_tokens_and_logits_of_transformers(tmp_path, backend, name, chunk):
    agree(tmp_path, backend, write_checkpoint(tmp_path, name), chunk=chunk)


def test_a_multimodal_checkpoint_with_unread_keys_runs_on_text(tmp_path, backend, e2b):
    """As E2B is published: sharing layers have keys and values that nobody reads, next to towers for images and sounds."""

    def published(tensors):
        made = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
        layers = [f"model.language_model.layers.{index}.self_attn" for index in range(3, 7)]
        made |= {f"{layer}.{part}": torch.randn(3) for layer in layers for part in UNREAD}
        towers = ("vision_tower.encoder.a", "embed_vision.b", "audio_tower.layers.c", "embed_audio.d")
        return made | {f"model.{name}.weight": torch.randn(3) for name in towers}

    edited(e2b[0], tmp_path, published)
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    del text["per_layer_config"]
    text |= {"global_head_dim": 32, "num_global_key_value_heads": None}
    whole = {
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {},
        "audio_config": {},
        "tie_word_embeddings": True,
    }
    file.write_text(json.dumps(whole | {key: text[key] for key in ("bos_token_id", "eos_token_id")}))
    agree(tmp_path, backend, e2b[1])


@pytest.mark.sample(2, per="small,device")
@pytest.mark.parametrize("speculate", ["none", "ngram", "suffix", "draft-model"])
@pytest.mark.parametrize("device", ["cpu", "sim", "sim:like=npu", "sim:kernels=host-plans"])
def test_engines_give_the_tokens_of_transformers(small, device, speculate):
    engines_agree(*small, device, speculate)


@pytest.mark.parametrize(
    ("device", "speculate", "changes"),
    [
        ("sim", "ngram", {"mode": "fused"}),
        ("sim", "ngram", {"graphs": True, "overlap": True}),
        ("sim", "eagle", {"mode": "fused"}),
        ("cpu", "eagle", {"draft_tokens": 3}),
        ("cpu", "ngram", {"batch_invariant": True}),
        ("sim", "none", {"batch_invariant": True, "prefill_chunk": 6}),
        ("cpu", "ngram", {"kv_dtype": "plain", "num_pages": 30}),
    ],
)
def test_other_settings_give_the_tokens_of_transformers(tmp_path, small, device, speculate, changes):
    path, reference = small
    expected = tuple(expect(reference, PROMPT, NEW_TOKENS)[0])
    draft = None
    if speculate == "eagle":
        write_eagle(draft := tmp_path)
    config = plain_config(**{"max_context": 96, "page_size": 4, "max_requests": 2} | changes)
    engine = Engine.from_checkpoint(path, get_backend(device), draft_dir=draft, speculate=speculate, config=config)
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert completion.token_ids == expected


def test_exact_engines_give_equal_tokens_in_bfloat16_with_and_without_drafts(small):
    """Whatever the batch, so also the rows of verification."""
    prompts = [PROMPT * 2, [9, 2, 9, 2, 9, 2, 9, 2, 9], [5, 6] * 7]
    found = []
    for speculate, chunk in (("none", 256), ("ngram", 7)):
        config = plain_config(
            max_context=96, page_size=4, max_requests=3, batch_invariant=True, dtype="bfloat16", prefill_chunk=chunk
        )
        engine = Engine.from_checkpoint(small[0], get_backend("cpu"), speculate=speculate, config=config)
        results = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        found.append([each.token_ids for each in results])
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["staged", "fused"])
def test_nothing_is_read_before_it_is_written(e2b, mode):
    backend = get_backend("sim")
    config = plain_config(max_requests=3, max_context=96, page_size=4, prefill_chunk=8, mode=mode, overlap=True)
    with watch(backend) as report:
        model = load_decoder(e2b[0], backend=backend, dtype=torch.float32)
        proposer = NgramProposer(vocab_size=model.config.vocab_size, draft_tokens=2)
        engine = Engine(model, backend, config=config, proposer=proposer)
        results = engine.generate([PROMPT, [9, 2, 9, 2, 9, 2]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert results[0].token_ids == tuple(expect(e2b[1], PROMPT, 8)[0])
    assert not report.findings, str(report)


def test_prompts_are_replayed_from_graphs(e2b, monkeypatch):
    """The table of per-layer embeddings is read by the token ids of the replay, and the kept rows are its own."""
    backend, found = get_backend("sim"), noted_replays(monkeypatch)
    config = plain_config(max_requests=3, max_context=96, page_size=4, prefill_chunk=24, mode="fused", overlap=True)
    prompts = [PROMPT, [9, 2, 9, 2, 9, 2], PROMPT[3:14]]
    with replayed_prefill(24), watch(backend) as report:
        engine = Engine.from_checkpoint(e2b[0], backend, speculate="ngram", config=config)
        results = engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert [each.token_ids for each in results] == [tuple(expect(e2b[1], prompt, 8)[0]) for prompt in prompts]
    assert len(found) > 1
    assert not report.findings, str(report)


def test_pages_in_fp8_give_the_tokens_of_rounded_keys_and_values(backend, small, monkeypatch):
    def rounding(update):
        def update_rounded(cache, *keys_and_values, **options):
            return update(cache, *(each.to(torch.float8_e4m3fn).to(each.dtype) for each in keys_and_values[:2]), **options)

        return update_rounded

    path, reference = small
    reference.generation_config.eos_token_id = None
    unrounded = expect(reference, PROMPT, NEW_TOKENS)[1]
    for kind in (DynamicLayer, DynamicSlidingWindowLayer):
        monkeypatch.setattr(kind, "update", rounding(vars(kind)["update"]))
    expected, logits = expect(reference, PROMPT, NEW_TOKENS)
    assert (logits[0] - unrounded[0]).abs().max() > 0.01
    model = load_decoder(path, backend=backend, dtype=torch.float32, kv_dtype="fp8")
    assert model.cache_dtype is torch.float8_e4m3fn
    tokens, ours = Driver(model).greedy(PROMPT, NEW_TOKENS)
    assert tokens == expected
    assert torch.allclose(ours, logits, rtol=0, atol=TOLERANCE)


def test_scales_of_pages_are_those_of_the_layer_that_wrote_them(tmp_path, backend, e2b):
    """Without the rounding of fp8, scaled pages give the logits of plain ones."""
    scales = {}
    for index in range(7):  # those of sharing layers are of no use
        scales |= {f"model.layers.{index}.self_attn.{part}_scale": torch.tensor([2.0 + index]) for part in "kv"}
    quantize_checkpoint(e2b[0], tmp_path / "made", format="fp8")
    declared = json.loads((tmp_path / "made/config.json").read_text())["quantization_config"]
    declared["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    edited(tmp_path / "made", tmp_path / "scaled", lambda tensors: tensors | scales, quantization_config=declared)
    options = {"backend": backend, "dtype": torch.float64, "quantized": "dequantize"}
    plain, scaled = load_decoder(tmp_path / "made", **options), load_decoder(tmp_path / "scaled", **options)
    assert scaled.cache_dtype is torch.float8_e4m3fn
    found = [float(layer.cache.output_scales[0]) for layer in scaled.weights.layers]
    assert found == [2.0, 3.0, 4.0, 3.0, 3.0, 4.0, 4.0]
    layers = [replace(layer, cache=replace(layer.cache, dtype=torch.float64)) for layer in scaled.weights.layers]
    wide = type(scaled)(scaled.config, replace(scaled.weights, layers=tuple(layers)), scaled.kernels)
    logits = [driver.logits([(driver.sequence(), PROMPT)]) for driver in map(Driver, (plain, wide))]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-9)


def with_plain_activations(record):
    """The weights of a layer, quantized ones for activations that aren't quantized."""
    if isinstance(record, QuantizedWeight):
        return replace(record, activations=None, activation_group=0)
    if isinstance(record, PerLayerInputWeights):
        return PerLayerInputWeights(*map(with_plain_activations, record))
    if is_dataclass(record):
        return replace(record, **{each.name: with_plain_activations(getattr(record, each.name)) for each in fields(record)})
    return record


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_quantised_copies(tmp_path, e2b, format, device):
    """Products with quantised weights give the logits of dequantized ones; those of per-layer inputs are quantised, too."""
    quantize_checkpoint(e2b[0], tmp_path / "made", format=format, group=8 if format == "int4" else None)
    logits = []
    for mode in ("dequantize", "kernels"):
        model = load_decoder(tmp_path / "made", backend=get_backend(device), dtype=torch.float32, quantized=mode)
        layers = tuple(map(with_plain_activations, model.weights.layers))
        driver = Driver(type(model)(model.config, replace(model.weights, layers=layers), model.kernels))
        logits.append(driver.logits([(driver.sequence(), PROMPT)]).cpu())
        assert sum(quantized_products(layers).values()) == (7 * 6 if mode == "kernels" else 0)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_engines_over_quantised_copies_draft_without_changing_tokens(tmp_path, e2b, format):
    quantize_checkpoint(e2b[0], tmp_path / "made", format=format, group=8 if format == "int4" else None)
    found = []
    for speculate in ("none", "ngram"):
        config = plain_config(max_context=96, page_size=4, prefill_chunk=9)
        engine = Engine.from_checkpoint(tmp_path / "made", get_backend("cpu"), speculate=speculate, config=config)
        results = engine.generate([PROMPT, PROMPT[:9] * 2], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        found.append([each.token_ids for each in results])
    assert found[0] == found[1]


def without_projection(tensors):
    tensors["model.per_layer_model_projection.weight"].zero_()


def test_per_layer_inputs_are_rounded_as_in_transformers(tmp_path, backend):
    """Their part of the table to the bit; that of the embedding has a norm, whose kernels round otherwise."""
    write_checkpoint(tmp_path, "gemma4_text-e2b")
    for has_projection in (True, False):
        if not has_projection:
            rewrite(tmp_path, without_projection)
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model
        model, tokens = load_decoder(tmp_path, backend=backend, dtype=torch.bfloat16), torch.arange(40)
        with torch.no_grad():
            embeddings = reference.embed_tokens(tokens)
            expected = reference.project_per_layer_inputs(embeddings, reference.get_per_layer_inputs(tokens))
        found = model._per_layer(tokens, model.embed(tokens))
        assert found.shape == expected.shape == (40, 7, 8)
        close = 2**-7 if has_projection else 0.0
        torch.testing.assert_close(found, expected, rtol=close, atol=close)


def test_only_layers_with_keys_and_values_have_pages(backend, e2b, e4b):
    shapes = {"sliding": (3, 4, 2, 16), "full": (3, 4, 2, 32)}
    for path, kinds, read in (
        (e2b[0], ["sliding", "sliding", "full"], [0, 1, 2, 1, 1, 2, 2]),
        (e4b[0], [*["sliding"] * 5, "full", "sliding"], [*range(7), 6, 6, 6, 6, 5]),
    ):
        config = read_model_config(path)
        cache = KVCache.allocate(config, pages=3, page_size=4, dtype=torch.float32, device=backend.device)
        assert [tuple(keys.shape) for keys, _ in cache.layers] == [shapes[kind] for kind in kinds]
        assert [config.cache_index(layer) for layer in range(config.num_layers)] == read
        stored = sum(keys.nbytes + values.nbytes for keys, values in cache.layers)
        assert 3 * KVCache.page_bytes(config, page_size=4, dtype=torch.float32) == stored


class Counting(KernelSet):
    """The references, and the numbers of rows of queries and of products with each layer's down projection."""

    def __init__(self):
        self.attended, self.multiplied = [], []

    def linear(self, x, weight, bias=None):
        self.multiplied.append((weight.data_ptr(), x.shape[0]))
        return super().linear(x, weight, bias)

    def paged_attention(self, q, k_cache, v_cache, metadata, **more):
        self.attended.append(q.shape[0])
        return super().paged_attention(q, k_cache, v_cache, metadata, **more)


@pytest.mark.parametrize("captured", [(), (0, 2), (3, 1), (5, 7)])
def test_sharing_layers_compute_the_kept_rows_alone(small, captured):
    """Unless the states of all rows are captured in one of these layers."""
    backend, kernels = get_backend("cpu"), Counting()
    backend.use_kernels(kernels)
    model = load_decoder(small[0], backend=backend, dtype=torch.float32)
    config, whole, pruned = model.config, Driver(model), Driver(model)
    first = config.num_writing_layers
    batches = [[(driver.sequence(), PROMPT), (driver.sequence(), PROMPT[:3])] for driver in (whole, pruned)]
    with torch.no_grad():
        for length in (None, 4):  # the second pass continues both sequences
            new = [[(sequence, tokens[:length]) for sequence, tokens in batch] for batch in batches]
            inputs, others = (driver.inputs(each, padding=2) for driver, each in zip((whole, pruned), new, strict=True))
            wanted, states = model.forward_with_aux_hidden_states(inputs, whole.cache, captured)
            last = others.attention.query_start[1:].to(torch.int64) - 1
            others = replace(others, kept=KeptRows.last_of_each(others.attention, last))
            kernels.attended.clear()
            found, also = model.forward_with_aux_hidden_states(others, pruned.cache, captured)
            rows = others.tokens.shape[0]
            narrow = [rows] * (first - 1) + [2] * (config.num_layers - first + 1)
            assert kernels.attended == ([rows] * config.num_layers if max(captured, default=0) >= first else narrow)
            torch.testing.assert_close(found, wanted[last], rtol=0, atol=1e-4)
            assert all(torch.equal(one, other) for one, other in zip(states, also, strict=True))
            for one, other in zip(whole.cache.layers, pruned.cache.layers, strict=True):
                assert all(torch.equal(a[1:], b[1:]) for a, b in zip(one, other, strict=True))


def test_captured_states_are_those_of_transformers(backend, small):
    path, reference = small
    driver = Driver(load_decoder(path, backend=backend, dtype=torch.float32))
    with torch.no_grad():
        states = reference(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        inputs = driver.inputs([(driver.sequence(), PROMPT)])
        final, captured = driver.model.forward_with_aux_hidden_states(inputs, driver.cache, (6, 1, 4))
    for found, layer in zip(captured, (6, 1, 4), strict=True):
        torch.testing.assert_close(found, states[layer][0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(final, states[-1][0], rtol=1e-4, atol=1e-3)


def test_chunks_of_prompts_leave_out_rows_of_sharing_layers(e2b):
    """An engine multiplies the rows of a prompt in three of seven layers, but for one row of each chunk."""
    backend, kernels = get_backend("cpu"), Counting()
    backend.use_kernels(kernels)
    config = plain_config(max_context=96, page_size=4, prefill_chunk=8, max_requests=1, prefix_cache=False)
    engine = Engine.from_checkpoint(e2b[0], backend, speculate="none", config=config)
    down = {layer.down.data_ptr(): index for index, layer in enumerate(engine.model.weights.layers)}
    kernels.multiplied.clear()
    (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=1, ignore_eos=True))
    assert result.token_ids == tuple(expect(e2b[1], PROMPT, 1)[0])
    rows = [0] * 7
    for pointer, count in kernels.multiplied:
        if pointer in down:
            rows[down[pointer]] += count
    assert rows == [len(PROMPT)] * 2 + [3] * 5


def test_memory_is_predicted_from_the_headers(tmp_path, backend, e2b, e4b):
    """Weights are counted without the tensors that nobody reads, and a pass holds the inputs of all layers."""
    unread = {f"model.layers.5.self_attn.{part}": torch.zeros(32, 32) for part in UNREAD[:2]}
    paths = e2b[0], edited(e2b[0], tmp_path / "unread", lambda tensors: tensors | unread), e4b[0]
    plans = [plan_decoder(path, backend=backend, dtype=torch.float32) for path in paths]
    for plan, path in zip(plans, (e2b[0], e2b[0], e4b[0]), strict=True):
        stored = sum(each.numel() for each in load_decoder_tensors(path)) * 4
        assert plan.weight_bytes == stored
    assert [plan.config.inner_width for plan in plans] == [96, 96, 48]
    proposer = NgramProposer(vocab_size=96, draft_tokens=2)
    facts = [collect_facts(backend, plan, proposer) for plan in (plans[0], without_inputs(plans[0]))]
    assert facts[0].prompt_token_bytes - facts[1].prompt_token_bytes == 4 * 7 * 8
    assert facts[0].cached_bytes == 4 * 2 * 2 * (16 + 16 + 32)


def load_decoder_tensors(path):
    """The tensors of a checkpoint that transformers wrote."""
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors").values()


def without_inputs(plan):
    return replace(plan, config=replace(plan.config, sandwich=replace(plan.config.sandwich, input_size=0)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("model.embed_tokens_per_layer.weight"), "missing: 'model.embed_tokens_per_layer.weight' [96, 56]"),
        (
            reshaped("model.per_layer_model_projection.weight", 48, 32),
            "'model.per_layer_model_projection.weight' has shape [48, 32], expected [56, 32]",
        ),
        (without("model.per_layer_projection_norm.weight"), "missing: 'model.per_layer_projection_norm.weight' [8]"),
        (
            without("model.layers.4.per_layer_input_gate.weight"),
            "missing: 'model.layers.4.per_layer_input_gate.weight' [8, 32]",
        ),
        (
            reshaped("model.layers.0.per_layer_projection.weight", 8, 32),
            "'model.layers.0.per_layer_projection.weight' has shape [8, 32], expected [32, 8]",
        ),
        (
            without("model.layers.0.post_per_layer_input_norm.weight"),
            "missing: 'model.layers.0.post_per_layer_input_norm.weight' [32]",
        ),
        (without("model.layers.2.self_attn.k_norm.weight"), "missing: 'model.layers.2.self_attn.k_norm.weight' [32]"),
        (
            reshaped("model.layers.3.mlp.up_proj.weight", 48, 32),
            "'model.layers.3.mlp.up_proj.weight' has shape [48, 32], expected [96, 32]",
        ),
        (
            lambda tensors: tensors | {"model.layers.2.self_attn.v_norm.weight": torch.zeros(32)},
            "not expected: 'model.layers.2.self_attn.v_norm.weight' [32]",
        ),
        (
            lambda tensors: tensors | {"model.layers.3.self_attn.sinks": torch.zeros(4)},
            "not expected: 'model.layers.3.self_attn.sinks' [4]",
        ),
    ],
)
def test_a_broken_checkpoint_names_the_tensor(tmp_path, backend, e2b, change, told):
    expect_refusal(e2b[0], tmp_path, backend, re.escape(told), change)


@pytest.mark.parametrize(("config", "told"), WRONG_CONFIGS["gemma4-e2b"], ids=lambda value: next(iter(value)))
def test_a_config_that_cannot_be(tmp_path, backend, e2b, config, told):
    expect_refusal(e2b[0], tmp_path, backend, told, **config)


@pytest.mark.parametrize("shards", [Shards(attention=Shard(0, 2), mlp=Shard(0, 2)), Shards(mlp=Shard(1, 2))])
def test_several_ranks_are_refused(backend, small, shards):
    with pytest.raises(ConfigError, match="a gemma4_text model runs on one rank here, and there are 2"):
        plan_decoder(small[0], backend=backend, dtype=torch.float32, ranks=ModelRanks(shards))


_PUBLISHED = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
}


@pytest.mark.parametrize(
    ("sizes", "period", "last_read", "token_bytes"),
    [
        (
            {
                "hidden_size": 1536,
                "intermediate_size": 6144,
                "num_hidden_layers": 35,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 20,
                "use_double_wide_mlp": True,
            },
            5,
            (13, 14),
            18432,
        ),
        (
            {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 42,
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 18,
                "use_double_wide_mlp": False,
            },
            6,
            (22, 23),
            57344,
        ),
    ],
    ids=["E2B", "E4B"],
)
def test_published_configs(tmp_path, sizes, period, last_read, token_bytes):
    kinds = ["full_attention" if index % period == period - 1 else "sliding_attention" for index in range(42)]
    text = _PUBLISHED | sizes | {"layer_types": kinds[: sizes["num_hidden_layers"]]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    config = read_model_config(tmp_path)
    first = sizes["num_hidden_layers"] - sizes["num_kv_shared_layers"]
    assert config.cached_layers == tuple(range(first))
    shared = {config.cached_layers[config.cache_index(layer)] for layer in range(first, config.num_layers)}
    assert shared == set(last_read)
    assert KVCache.page_bytes(config, page_size=1, dtype=torch.bfloat16) == token_bytes
    wide = sizes["intermediate_size"] * (2 if sizes["use_double_wide_mlp"] else 1)
    assert (config.of_layer(first - 1).intermediate_size, config.of_layer(first).intermediate_size, config.inner_width) == (
        sizes["intermediate_size"],
        wide,
        wide,
    )
    assert config.per_layer_width == 256 * config.num_layers
    assert config.tie_embeddings


def test_pages_of_both_kinds_move_between_engines(e2b):
    """Prefill and decode apart give the tokens of one engine."""

    def engine():
        config = plain_config(dtype="float64", max_context=64, page_size=4, max_requests=3, num_pages=40)
        return Engine.from_checkpoint(e2b[0], CpuBackend(), speculate="ngram", config=config)

    prompts = [(3, 1, 4, 1, 5, 9, 2, 6), (8, 9), tuple(range(10, 30))]
    alone = [each.token_ids for each in engine().generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))]
    sides = Couple(engine(), engine(), LocalTransport())
    for prompt in prompts:
        sides.submit(state(prompt, ignore_eos=True))
    sides.run()
    assert [sides.tokens(key) for key in range(len(prompts))] == alone
    assert sides.decode.counts["arrived"] > 0
    sides.close()
