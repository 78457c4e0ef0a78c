"""Broken configs and tensors of vision towers: clear errors, at load time."""

import json

import pytest
import torch
from safetensors.torch import load_file

from model import vision_checkpoints
from outrider import Engine, SamplingParams
from outrider.errors import CheckpointError, RequestError
from outrider.model import MediaProcessor, load_decoder, load_vision
from outrider_proof.checkpoints import IMAGE, picture
from outrider_proof.tiny import plain_config
from tiny_checkpoints import rewrite
from tiny_vision_checkpoints import write_vision_checkpoint

BAD_VALUES = (0, -1, 2.5, "4", True, [], {}, 1 << 40)
BAD_FIELDS = (
    "depth",
    "hidden_size",
    "out_hidden_size",
    "intermediate_size",
    "num_heads",
    "in_channels",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "num_position_embeddings",
    "hidden_act",
    "deepstack_visual_indexes",
)
HARMLESS = {"deepstack_visual_indexes = []", "intermediate_size = True"}
INDICES = ([0, 0], [1, 0], [7], [-1], [0.5], [None], ["0"], [True], list(range(100)))


def variants(directory, family):
    """(name, words that the error must have, a function that breaks the checkpoint in ``directory``)."""
    whole = json.loads((directory / "config.json").read_text())

    def config(**change):
        return lambda: rewrite(directory, **change)

    def tensors(change):
        return lambda: rewrite(directory, change)

    vision, text = whole["vision_config"], whole["text_config"]
    for field in BAD_FIELDS:
        if field in vision:
            for value in BAD_VALUES:
                yield f"{field} = {value!r}", field, config(vision_config=vision | {field: value})
    stacked = "deepstack_visual_indexes" in vision
    for value in INDICES if stacked else ():
        name = "deepstack_visual_indexes"
        yield f"{name} = {value}", name, config(vision_config=vision | {name: value})
    every = list(range(text["num_hidden_layers"]))
    if stacked:
        change = {"deepstack_visual_indexes": every, "depth": len(every)}
        yield "as many as layers", "deepstack", config(vision_config=vision | change)
    for field in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        for value in (-1, "4", 2.5, None, [3], 1 << 40):
            yield f"{field} = {value!r}", field, config(**{field: value})
    rope = text["rope_parameters"]
    for sections in ([1, 1], [1, 1, 1, 1], [9, 9, 9], [-1, 3, 2], "9", {}, [0, 0, 0]):
        parameters = rope | {"mrope_section": sections}
        yield (
            f"mrope_section = {sections}",
            "sections|mrope_section",
            config(text_config=text | {"rope_parameters": parameters}),
        )
    parameters = rope | {"mrope_interleaved": False}
    yield "axes in sequence", "mrope_interleaved", config(text_config=text | {"rope_parameters": parameters})
    for value in (3, "x", [1]):
        yield f"vision_config = {value!r}", "vision_config", config(vision_config=value)
    for key in load_file(directory / "model.safetensors"):
        if "visual" in key:
            yield f"without {key}", key.removeprefix("model."), tensors(lambda held, key=key: held.pop(key))
            yield f"a longer {key}", key, tensors(lambda held, key=key: held.update({key: torch.cat((held[key],) * 2)}))
            yield f"{key}, too", f"{key}s", tensors(lambda held, key=key: held.update({f"{key}s": held[key].clone()}))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe"])
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_broken_variants_are_clear_errors(tmp_path, backend, family, every):
    write_vision_checkpoint(tmp_path, family)
    whole = {name: (tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")}
    cases = list(variants(tmp_path, family))
    assert len(cases) > 150
    for name, words, apply in cases[::every]:
        for file, content in whole.items():
            (tmp_path / file).write_bytes(content)
        apply()
        if name in HARMLESS:
            continue
        with pytest.raises(CheckpointError) as caught:
            [load(tmp_path, backend=backend, dtype=torch.float32) for load in (load_decoder, load_vision)]
        text = str(caught.value)
        assert any(word in text for word in words.split("|")) or "tensor" in text, (name, text)
        assert str(tmp_path) in text, (name, text)
        assert len(text) < 2000, (name, text)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_copy_of_the_text_model_alone(tmp_path, backend, family):
    """It runs on text, and says why it takes no images."""
    write_vision_checkpoint(tmp_path, family)
    image = MediaProcessor.from_checkpoint(tmp_path).image(picture(16, 16))
    config = plain_config(max_requests=1, dtype="float32")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    whole = Engine.from_checkpoint(tmp_path, backend, speculate="none", config=config).generate([[1, 5, 9]], params)
    rewrite(tmp_path, lambda state: {key: value for key, value in state.items() if "visual" not in key})
    engine = Engine.from_checkpoint(tmp_path, backend, speculate="none", config=config)
    assert engine.generate([[1, 5, 9]], params)[0].token_ids == whole[0].token_ids
    with pytest.raises(RequestError, match="without a vision tower; use Engine.from_checkpoint on a checkpoint with one"):
        engine.add_request([*IMAGE, 5], media=[image])


def test_a_video_without_a_tokenizer_that_spells_its_times(tmp_path):
    """A prompt with a placeholder for each feature is taken; one with a single placeholder can't get its times."""
    vision_checkpoints.write(tmp_path, "qwen3_vl", 1)
    processor = MediaProcessor.from_checkpoint(tmp_path)
    config = plain_config(max_requests=1, dtype="float32")
    engine = Engine.from_checkpoint(tmp_path, "cpu", speculate="none", config=config)
    vision = engine.model.config.vision
    video = processor.video([picture(20, 20)] * 4, frames_per_second=2.0)
    with pytest.raises(RequestError, match="states the time of its frames as text, and this checkpoint has no tokenizer"):
        engine.add_request([1, vision.video_token, 2], media=[video])
    runs = [[vision.video_token] * run.features(vision) for run in video.grid.runs(vision)]
    assert len(runs) > 1
    with pytest.raises(RequestError, match="tokens in a row, but what was given next"):
        engine.add_request([token for run in runs for token in run], media=[video])
    engine.generate([[token for run in runs for token in (5, *run)]], SamplingParams(max_tokens=2), media=[[video]])
