"""The decoder against transformers: the same logits and the same greedy tokens for every family and rope scaling."""

import functools

import pytest
import torch
import transformers

from model.harness import Driver
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, KernelSet
from outrider.model import EagleHead, RopeConfig, load_decoder
from outrider.model.config.shapes import decoder_shape
from outrider.registry import get_backend
from outrider_proof import tiny
from outrider_proof.tiny import plain_config
from tiny_checkpoints import FAMILIES, ROPES, rewrite, write_checkpoint

PROMPT = [1, 17, 44, 90, 5, 61, 61, 8, 33, 72, 12, 51, 3, 29, 88, 40, 7, 19, 66, 25, 31]
STEPS = 14
TOLERANCE = 1e-4


def expect(model, prompt, count):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    # min_new_tokens bans the end token from the choice; the raw logits tell what plain greedy decoding would take
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def agree(directory, backend, reference, *, chunk=None, tolerance=TOLERANCE):
    driver = Driver(load_decoder(directory, backend=backend, dtype=torch.float32))
    reference.generation_config.eos_token_id = None
    expected, logits = expect(reference, PROMPT, STEPS)
    tokens, ours = driver.greedy(PROMPT, STEPS, chunk=chunk)
    assert tokens == expected
    assert torch.allclose(ours, logits, rtol=0, atol=tolerance), (ours - logits).abs().max()


ENGINE_PROMPTS = ((*PROMPT, *PROMPT), (*PROMPT, 4, 4), (9, 2, 9, 2, 9, 2, 9, 2, 9))
ENGINE_TOKENS = 14


@functools.cache
def expected_of_engines(reference):
    """Greedy tokens of a model of transformers for ``ENGINE_PROMPTS``, computed once for all engines that are compared."""
    reference.generation_config.eos_token_id = None
    return [tuple(expect(reference, prompt, ENGINE_TOKENS)[0]) for prompt in ENGINE_PROMPTS]


def engines_agree(path, reference, device, speculate, *, draft=None):
    """Three requests give transformers' tokens, in prefill chunks and then from the prefix cache; return the engine."""
    expected = expected_of_engines(reference)
    config = plain_config(max_requests=3, max_context=96, page_size=4, prefill_chunk=16, draft_tokens=3)
    draft = path if speculate == "draft-model" else draft
    engine = Engine.from_checkpoint(path, get_backend(device), draft_dir=draft, speculate=speculate, config=config)
    params = SamplingParams(max_tokens=ENGINE_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time from the pages of the prefix cache
        assert [result.token_ids for result in engine.generate(ENGINE_PROMPTS, params)] == expected
    assert engine.stats.prefix_hits > 0
    return engine


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_family(tmp_path, backend, name, shards):
    reference = write_checkpoint(tmp_path, name, shards=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    agree(tmp_path, backend, reference, chunk=None if shards == 1 else 8)


@pytest.mark.sample(1, per="rope")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope(tmp_path, backend, name, rope):
    reference = write_checkpoint(tmp_path, name, rope_parameters=dict(ROPES[rope]))
    agree(tmp_path, backend, reference)


def edited(directory, name, **keys):
    """A checkpoint whose config.json says ``keys`` by hand, and transformers' model of it."""
    write_checkpoint(directory, name)
    rewrite(directory, **keys)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("within", [None, 128])
@pytest.mark.parametrize("rope", ["llama3", "yarn", "dynamic"])
def test_the_original_context_beside_the_rope(tmp_path, backend, rope, within):
    """It goes before what the rope says, as in transformers, which reads it so when it makes the model."""
    said = {key: value for key, value in ROPES[rope].items() if key != "original_max_position_embeddings"}
    said |= {} if within is None else {"original_max_position_embeddings": within}
    agree(tmp_path, backend, edited(tmp_path, "llama", rope_parameters=said, original_max_position_embeddings=16))


def test_a_yarn_whose_factor_is_null(tmp_path, backend):
    """It's that of the two contexts."""
    agree(tmp_path, backend, edited(tmp_path, "qwen2", rope_parameters=ROPES["yarn"] | {"factor": None}))


def test_a_yarn_whose_truncate_is_null(tmp_path, backend):
    """It's false."""
    agree(tmp_path, backend, edited(tmp_path, "qwen2", rope_parameters=ROPES["yarn"] | {"truncate": None}))


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_sections_that_are_left_of_a_vision_language_model(tmp_path, backend, rope):
    """Its decoder as a model of text: transformers passes over them, whatever they sum to."""
    agree(tmp_path, backend, edited(tmp_path, "qwen2", rope_parameters=ROPES[rope] | {"mrope_section": [16, 24, 24]}))


@pytest.mark.parametrize("windows", [["full_attention", "sliding_attention", "full_attention"], ["sliding_attention"] * 3])
def test_a_mistral_with_layer_types(tmp_path, backend, windows):
    """Ministral as it's published."""
    agree(tmp_path, backend, edited(tmp_path, "mistral-window", layer_types=windows))


@pytest.mark.sample(1, per="original")
@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("original", [12, 21, 22, 30])
def test_dynamic_rope_past_the_original_context(tmp_path, backend, original, chunk):
    """Prompt and generation on either side of the length where the base begins to grow."""
    rope = ROPES["dynamic"]
    reference = write_checkpoint(tmp_path, "llama", rope_parameters=dict(rope), max_position_embeddings=original)
    agree(tmp_path, backend, reference, chunk=chunk)


def test_what_dynamic_rope_lets_prompts_share():
    rope = RopeConfig(kind="dynamic", factor=2.0, original_context=100)
    assert rope.sharing_key(99) == rope.sharing_key(100) == 0
    assert rope.sharing_key(101) != rope.sharing_key(102)
    assert RopeConfig().sharing_key(101) == 0


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_chunks(tmp_path, backend, chunk):
    reference = write_checkpoint(tmp_path, "mistral-window")
    agree(tmp_path, backend, reference, chunk=chunk)


def test_ragged_batch_with_padding(tmp_path, backend):
    """Sequences of different lengths, some in prefill and some in decode, give what each gives alone."""
    reference = write_checkpoint(tmp_path, "llama")
    driver = Driver(load_decoder(tmp_path, backend=backend, dtype=torch.float32))
    prompts = [PROMPT[:5], PROMPT[3:16], PROMPT]
    sequences = [driver.sequence() for _ in prompts]
    driver.logits([(sequences[0], prompts[0][:4]), (sequences[1], prompts[1][:9])])
    batch = [(sequences[0], prompts[0][4:]), (sequences[1], prompts[1][9:]), (sequences[2], prompts[2])]
    logits = driver.logits(batch, padding=3)
    start = 0
    for (_, new), prompt in zip(batch, prompts, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0, -len(new) :]
        assert torch.allclose(logits[start : start + len(new)], expected, rtol=0, atol=TOLERANCE)
        start += len(new)


def test_captured_states_are_the_residual_stream(tmp_path, backend):
    reference = write_checkpoint(tmp_path, "llama")
    driver = Driver(load_decoder(tmp_path, backend=backend, dtype=torch.float32))
    with torch.no_grad():
        states = reference(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        inputs = driver.inputs([(driver.sequence(), PROMPT)])
        final, captured = driver.model.forward_with_aux_hidden_states(inputs, driver.cache, (2, 0, 3))
    assert torch.allclose(final, states[3][0], atol=TOLERANCE)
    assert torch.allclose(reference.model.norm(captured[2]), states[3][0], atol=TOLERANCE)
    assert torch.allclose(captured[0], states[2][0], atol=TOLERANCE)
    assert torch.equal(captured[1], states[0][0])
    with pytest.raises(ConfigError, match=r"no layers \[4\]"):
        driver.model.forward_with_aux_hidden_states(inputs, driver.cache, (4,))


def test_metadata_is_settled_behind_the_first_layer(tmp_path, backend, monkeypatch):
    """What was written right before the forward may still be under way in the first layer, and in none behind it."""
    write_checkpoint(tmp_path, "llama")
    driver = Driver(load_decoder(tmp_path, backend=backend, dtype=torch.float32))
    attend, seen = driver.model.kernels.paged_attention, []

    def watched(q, k_cache, v_cache, metadata, **more):
        seen.append(metadata.settled)
        return attend(q, k_cache, v_cache, metadata, **more)

    monkeypatch.setattr(driver.model.kernels, "paged_attention", watched)
    inputs = driver.inputs([(driver.sequence(), PROMPT)])
    for _ in range(2):
        driver.model.forward(inputs, driver.cache)
    layers = driver.model.config.num_layers
    assert seen == 2 * [False, *[True] * (layers - 1)]
    assert not inputs.attention.settled


def test_embeddings_replace_tokens(tmp_path, backend):
    write_checkpoint(tmp_path, "llama")
    driver = Driver(load_decoder(tmp_path, backend=backend, dtype=torch.float32))
    plain = driver.logits([(driver.sequence(), PROMPT)])
    other = [0 if index % 3 == 0 else token for index, token in enumerate(PROMPT)]
    embedded = torch.tensor([index % 3 == 0 for index in range(len(PROMPT))])
    embeddings = driver.model.embed(torch.tensor(PROMPT))
    replaced = driver.logits([(driver.sequence(), other)], embeddings=embeddings, embedded=embedded)
    assert torch.equal(plain, replaced)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path, backend, dtype):
    write_checkpoint(tmp_path, "llama", initializer_range=0.1)
    wide = Driver(load_decoder(tmp_path, backend=backend, dtype=torch.float32)).greedy(PROMPT, 1)[1]
    driver = Driver(load_decoder(tmp_path, backend=backend, dtype=dtype))
    logits = driver.greedy(PROMPT, 1)[1]
    assert logits.dtype == dtype
    tolerance = {torch.float64: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
    assert torch.allclose(logits.float(), wide, rtol=0, atol=tolerance), (logits - wide).abs().max()


def test_layers_and_heads_compute_with_kernels_for_their_shape():
    class ForShape(KernelSet):
        def __init__(self, shape):
            self.shape = shape

    class Choosing(KernelSet):
        """These mustn't compute what a layer does."""

        rms_norm = add_rms_norm = linear = silu_mul = paged_attention = None

        def for_shape(self, shape):
            return ForShape(shape)

    model = tiny.decoder(kernels=Choosing())
    assert isinstance(model.kernels, ForShape)
    assert model.kernels.shape == decoder_shape(model.config, torch.float64)
    head = EagleHead(tiny.eagle_head().config, tiny.eagle_head().weights, model)
    assert head.kernels is model.kernels
    assert Driver(model).greedy([1, 2, 3], 4)[0] == Driver(tiny.decoder()).greedy([1, 2, 3], 4)[0]


class NormedHeads(KernelSet):
    """Counts its calls; the kernels that the reference calls inside aren't asked for the heads by anybody else."""

    calls = 0

    def head_norm_rope_write_cache(self, qkv, norms, rotary):
        self.calls += norms is not None
        return super().head_norm_rope_write_cache(qkv, norms, rotary)


@pytest.mark.parametrize(("family", "normed"), [("qwen3", True), ("llama", False)])
def test_heads_that_are_normed_are_one_call_of_a_layer(tmp_path, family, normed):
    """A kernel set can do the norms, the rotation and the write in one kernel."""
    write_checkpoint(tmp_path, family)
    backend = get_backend("cpu")
    kernels = NormedHeads()
    backend.use_kernels(kernels)
    driver = Driver(load_decoder(tmp_path, backend=backend, dtype=torch.float32))
    driver.logits([(driver.sequence(), PROMPT)])
    assert kernels.calls == (driver.model.config.num_layers if normed else 0)
