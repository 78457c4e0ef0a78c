"""Vision-language models against transformers: positions, features, logits and greedy tokens."""

import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drawing import some_and_many
from model import quantized_checkpoints, vision_checkpoints
from model.harness import Driver
from model.quantized_checkpoints import write_compressed, write_fp8
from outrider.errors import CheckpointError, RequestError
from outrider.model import (
    MediaGrid,
    MediaProcessor,
    expand_placeholders,
    load_decoder,
    load_vision,
    prompt_positions,
    speculative_positions,
)
from outrider.model.config.checkpoint_config import read_model_config
from outrider_proof.checkpoints import IMAGE, VISION_TOKENS, picture
from tiny_vision_checkpoints import VIDEO, VISION_FAMILIES, write_vision_checkpoint

STEPS = 12
CONSECUTIVE = ("qwen2_vl", "qwen2_5_vl")
START, END = VISION_TOKENS["vision_start_token_id"], VISION_TOKENS["vision_end_token_id"]


def frames(count, rows, columns):
    return [picture(rows, columns, seed=10 + index) for index in range(count)]


PROMPTS = {
    "text": lambda processor: ([1, 5, 9, 17, 30, 41], []),
    "image": lambda processor: ([1, 5, *IMAGE, 9, 17], [processor.image(picture(20, 28))]),
    "images-of-several-sizes": lambda processor: (
        [1, *IMAGE, 5, *IMAGE, *IMAGE, 9, 17],
        [processor.image(picture(*size, seed=index)) for index, size in enumerate([(8, 8), (40, 17), (16, 70)])],
    ),
    "video": lambda processor: ([1, 5, *VIDEO, 9, 17], [processor.video(frames(5, 16, 24), frames_per_second=2.0)]),
    "image-and-video": lambda processor: (
        [1, *VIDEO, 5, *IMAGE, 7, *VIDEO, 9, 17],
        [
            processor.video(frames(4, 16, 16), frames_per_second=1.5),
            processor.image(picture(24, 24)),
            processor.video(frames(9, 24, 8), frames_per_second=4.0),
        ],
    ),
}


def reference_inputs(tokens, media, family):
    """What transformers' own processor would hand to its model."""
    token_kinds = {VISION_TOKENS["image_token_id"]: 1, VISION_TOKENS["video_token_id"]: 2}
    inputs = {
        "input_ids": torch.tensor([tokens]),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64),
        "mm_token_type_ids": torch.tensor([[token_kinds.get(token, 0) for token in tokens]]),
    }
    for kind, pixels, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [each for each in media if each.grid.kind == kind]
        if chosen:
            inputs[pixels] = torch.cat([each.pixels for each in chosen])
            inputs[grids] = torch.tensor([[each.grid.frames, each.grid.rows, each.grid.columns] for each in chosen])
            if kind == "video" and family == "qwen2_5_vl":
                inputs["second_per_grid_ts"] = torch.tensor([each.grid.seconds_per_frame for each in chosen])
    return inputs


def ours(directory, backend, tokens, media, *, chunk=None, quantized="kernels"):
    """Greedy tokens and logits, the prompt in chunks, its features in place of the placeholders' embeddings."""
    decoder = load_decoder(directory, backend=backend, dtype=torch.float32, quantized=quantized)
    tower = load_vision(directory, backend=backend, dtype=torch.float32)
    vision = decoder.config.vision
    driver = Driver(decoder)
    positions, delta = prompt_positions(tokens, [each.grid for each in media], vision)
    embedded = torch.tensor([token in (vision.image_token, vision.video_token) for token in tokens])
    embeddings = torch.zeros(len(tokens), decoder.config.feature_size)
    if media:
        embeddings[embedded] = torch.cat(tower.encode(media))
    sequence = driver.sequence()
    for begin in range(0, len(tokens), chunk or len(tokens)):
        part = slice(begin, begin + (chunk or len(tokens)))
        extra = {"embeddings": embeddings[part], "embedded": embedded[part]} if media else {}
        logits = driver.logits([(sequence, tokens[part])], positions=positions[:, part], **extra)[-1]
    sequence.delta = delta
    out, chosen = [], []
    for _ in range(STEPS):
        chosen.append(logits)
        out.append(int(logits.argmax()))
        logits = driver.logits([(sequence, out[-1:])])[-1]
    return out, torch.stack(chosen)


@pytest.mark.sample(4)
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_as_transformers(tmp_path, backend, family, prompt, chunk):
    model = write_vision_checkpoint(tmp_path, family, shards=1 if chunk is None else 3)
    processor = MediaProcessor.from_checkpoint(tmp_path)
    vision = read_model_config(tmp_path).vision
    tokens, media = PROMPTS[prompt](processor)
    tokens = expand_placeholders(tokens, media, vision)
    inputs = reference_inputs(tokens, media, family)
    if media:
        grids = {key: value for key, value in inputs.items() if "pixel" not in key}
        expected, delta = model.model.get_rope_index(**grids)
        positions, our_delta = prompt_positions(tokens, [each.grid for each in media], vision)
        assert torch.equal(positions, expected[:, 0])
        assert our_delta == int(delta) or ("video" in prompt and vision.frame_marks is None)
    model.generation_config.eos_token_id = None
    out = model.generate(
        **inputs,
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    got, logits = ours(tmp_path, backend, tokens, media, chunk=chunk)
    assert got == out.sequences[0, len(tokens) :].tolist()
    expected_logits = torch.cat(out.logits)
    # transformers' chunks of recurrent layers sum in another order.
    limit = 2e-3 if "qwen3_5" in family else 1e-4
    assert torch.allclose(logits, expected_logits, rtol=0, atol=limit), (logits - expected_logits).abs().max()


def check_random_config(directory, backend, family, seed, *, transposed=False):
    """Positions, features, greedy tokens and logits of several prompts, in chunks, are transformers'."""
    model = vision_checkpoints.write(directory, family, seed, transposed=transposed)
    processor = MediaProcessor.from_checkpoint(directory)
    vision = read_model_config(directory).vision
    for number in range(2):
        tokens, media = vision_checkpoints.random_prompt(processor, vision, 10 * seed + number)
        inputs = vision_checkpoints.reference_inputs(tokens, media)
        expected, delta = model.model.get_rope_index(**{key: value for key, value in inputs.items() if "pixel" not in key})
        positions, our_delta = prompt_positions(tokens, [each.grid for each in media], vision)
        assert torch.equal(positions, expected[:, 0])
        assert our_delta == int(delta)
        options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        out = model.generate(**inputs, max_new_tokens=STEPS, **options)
        got, logits = ours(directory, backend, tokens, media, chunk=(None, 5)[number])
        torch.testing.assert_close(logits, torch.cat(out.logits), rtol=1e-3, atol=1e-3)
        assert got == out.sequences[0, len(tokens) :].tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", vision_checkpoints.FAMILIES)
def test_a_random_config_of_each_family(tmp_path, backend, family):
    check_random_config(tmp_path, backend, family, 1, transposed=family == "qwen3_vl_moe")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("family", vision_checkpoints.FAMILIES)
def test_many_random_configs(tmp_path, backend, family, seed):
    check_random_config(tmp_path, backend, family, seed, transposed=family == "qwen3_vl_moe" and seed % 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["fp8 in blocks", "int8-w8a16", "fp8 everywhere"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_quantized_checkpoints(tmp_path, backend, family, form, monkeypatch):
    """The tower is unquantized, as in published ones, or is dequantized."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    sizes |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if family == "qwen3_5" else {}
    model = vision_checkpoints.write(tmp_path, family, 3, **sizes)
    if form == "fp8 in blocks":
        state = write_fp8(tmp_path, tmp_path / "quantized", block=(32, 32), skip=("lm_head", "model.visual"))
    elif form == "fp8 everywhere":
        monkeypatch.setattr(
            quantized_checkpoints, "LINEARS", (*quantized_checkpoints.LINEARS, "attn.qkv", "attn.proj", "fc1")
        )
        state = write_fp8(tmp_path, tmp_path / "quantized", block=(32, 32))
    else:
        state = write_compressed(tmp_path, tmp_path / "quantized", form, ignore=("lm_head", "re:.*visual.*"))
    shutil.copy(tmp_path / "preprocessor_config.json", tmp_path / "quantized")
    processor = MediaProcessor.from_checkpoint(tmp_path / "quantized")
    tokens, media = vision_checkpoints.random_prompt(processor, read_model_config(tmp_path).vision, 4)
    inputs = vision_checkpoints.reference_inputs(tokens, media)
    with torch.no_grad():
        wanted = torch.func.functional_call(model, state, kwargs=inputs, args=()).logits[0, -1]
    _, logits = ours(tmp_path / "quantized", backend, tokens, media, quantized="dequantize")
    torch.testing.assert_close(logits[0], wanted, rtol=1e-3, atol=1e-3)
    _, logits = ours(tmp_path / "quantized", backend, tokens, media)
    assert torch.cosine_similarity(logits[0], wanted, dim=0) > (0.99 if form == "int8-w8a16" else 0.95)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_yarn_with_axes_and_tied(tmp_path, backend, family):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    model = write_vision_checkpoint(tmp_path, family, rope=rope, tie=True)
    tokens = [1, 5, 9, 17, 30, 41]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    assert torch.allclose(ours(tmp_path, backend, tokens, [])[1][0], expected, rtol=0, atol=1e-4)


def check_positions(data, family, index_of):
    """Any mix of text, images and videos has transformers' positions."""
    model, vision = index_of(family)
    tokens, media = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        tokens += [7] * data.draw(st.integers(0, 5))
        kind = data.draw(st.sampled_from(["image", "video"]))
        grid = MediaGrid(
            kind=kind,
            frames=data.draw(st.integers(1, 4)) if kind == "video" else 1,
            rows=2 * data.draw(st.integers(1, 4)),
            columns=2 * data.draw(st.integers(1, 4)),
            seconds_per_frame=data.draw(st.sampled_from([0.25, 0.5, 1.0, 1.7])),
        )
        token = vision.image_token if kind == "image" else vision.video_token
        for run in grid.runs(vision):
            tokens += [7] * data.draw(st.integers(0, 2)) + [START, *[token] * run.features(vision), END]
        media.append(grid)
    tokens += [7]
    kinds = [1 if token == vision.image_token else 2 if token == vision.video_token else 0 for token in tokens]
    grids = {}
    for kind in ("image", "video"):
        chosen = [[grid.frames, grid.rows, grid.columns] for grid in media if grid.kind == kind]
        grids[f"{kind}_grid_thw"] = torch.tensor(chosen) if chosen else None
    if family == "qwen2_5_vl":
        grids["second_per_grid_ts"] = [grid.seconds_per_frame for grid in media if grid.kind == "video"]
    expected, delta = model.get_rope_index(torch.tensor([tokens]), mm_token_type_ids=torch.tensor([kinds]), **grids)
    positions, our_delta = prompt_positions(tokens, media, vision)
    assert torch.equal(positions, expected[:, 0])
    assert our_delta == int(expected[0, 0, -1]) + 1 - len(tokens)
    if all(grid.kind == "image" for grid in media) or vision.frame_marks is not None:
        assert our_delta == int(delta)


test_positions, test_many_positions = some_and_many(
    check_positions, given(data=st.data()), pytest.mark.parametrize("family", VISION_FAMILIES), some=20, many=100
)


@pytest.fixture(scope="module")
def index_of(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = (write_vision_checkpoint(path, family).model, read_model_config(path).vision)
        return made[family]

    return get


def test_speculative_positions_are_from_source():
    positions, deltas = torch.tensor([7, 8, 9, 9, 3]), torch.tensor([-4, -4, -4, -4, 0])
    expected = torch.tensor([[3, 4, 5, 5, 3]] * 3)
    assert torch.equal(speculative_positions(positions, deltas), expected)
    out = torch.full((3, 5), 99)
    for _ in range(2):
        assert speculative_positions(positions, deltas, out=out) is out
        assert torch.equal(out, expected)


def test_media_that_do_not_match(tmp_path):
    write_vision_checkpoint(tmp_path, "qwen2_vl")
    processor = MediaProcessor.from_checkpoint(tmp_path)
    vision = read_model_config(tmp_path).vision
    image = processor.image(picture(16, 16))
    with pytest.raises(RequestError, match=r"places for \['image'\], but no media were given"):
        expand_placeholders([1, *IMAGE], [], vision)
    with pytest.raises(RequestError, match=r"places for \['video'\], but \['image'\] were given"):
        expand_placeholders([1, *VIDEO], [image], vision)
    with pytest.raises(RequestError, match="8 image tokens in a row, but what was given next is a image of 4 features"):
        prompt_positions([vision.image_token] * 8, [image.grid], vision)
    with pytest.raises(RequestError, match="one more image than were given"):
        prompt_positions([1, vision.image_token], [], vision)
    with pytest.raises(RequestError, match="has places for fewer"):
        prompt_positions([1], [image.grid], vision)
    with pytest.raises(RequestError, match="can't be processed"):
        processor.image(picture(1, 900))
    with pytest.raises(RequestError, match="a video of 0 frames"):
        processor.video([], frames_per_second=1.0)
    with pytest.raises(RequestError, match="several sizes"):
        processor.video([picture(16, 16), picture(16, 32)], frames_per_second=1.0)


def test_digest_stands_for_the_content(tmp_path):
    write_vision_checkpoint(tmp_path, "qwen2_vl")
    processor = MediaProcessor.from_checkpoint(tmp_path)
    assert processor.image(picture(16, 16)).digest == processor.image(picture(16, 16)).digest
    assert processor.image(picture(16, 16)).digest != processor.image(picture(16, 16, seed=1)).digest


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tensors_are_checked(tmp_path, backend, family):
    write_vision_checkpoint(tmp_path, family)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    key = next(key for key in state if key.endswith(("visual.merger.mlp.0.bias", "visual.merger.linear_fc1.bias")))
    moved = state.pop(key)
    save_file(state, path)
    stored = key if family in CONSECUTIVE else key.removeprefix("model.")  # the name without a neighbour that tells it
    with pytest.raises(CheckpointError, match=rf"missing: '{re.escape(stored)}'"):
        load_vision(tmp_path, backend=backend, dtype=torch.float32)
    save_file(state | {key: moved, "visual.more": moved.clone()}, path)
    with pytest.raises(CheckpointError, match=r"not expected: 'visual\.more'"):
        load_vision(tmp_path, backend=backend, dtype=torch.float32)
    save_file(state | {key: torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=rf"'{re.escape(key)}' has shape \[3\]"):
        load_vision(tmp_path, backend=backend, dtype=torch.float32)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tensors_of_the_decoder_are_checked(tmp_path, backend, family):
    write_vision_checkpoint(tmp_path, family)
    key = f"model.{'' if family in CONSECUTIVE else 'language_model.'}layers.1.self_attn.k_proj.weight"
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    tensor = state.pop(key)
    save_file(state, path)
    with pytest.raises(CheckpointError, match=rf"missing: '{key}'"):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)
    save_file(state | {key + "s": tensor}, path)
    with pytest.raises(CheckpointError, match=rf"missing: '{key}' .*not expected: '{key}s'"):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)
    save_file(state | {key: torch.zeros(3, 5)}, path)
    with pytest.raises(CheckpointError, match=rf"'{key}' has shape \[3, 5\]"):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)


def test_other_spelling_of_the_names(tmp_path, backend):
    """Some versions of transformers write the decoder below model.language_model."""
    write_vision_checkpoint(tmp_path, "qwen2_vl")
    tokens = [1, 5, 9, 17, 30, 41]
    expected = ours(tmp_path, backend, tokens, [])[1]
    path = tmp_path / "model.safetensors"
    state = load_file(path)

    def spell(key):
        return key.replace("visual.", "model.visual.") if "visual" in key else key.replace("model.", "model.language_model.")

    save_file({spell(key): tensor for key, tensor in state.items()}, path)
    assert torch.equal(ours(tmp_path, backend, tokens, [])[1], expected)
