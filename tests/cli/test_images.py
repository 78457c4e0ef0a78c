"""``outrider generate --image`` on a tiny vision-language checkpoint."""

import pytest
import torch
from PIL import Image

from model.test_vision import IMAGE, picture, reference_inputs
from outrider.model import MediaProcessor, expand_placeholders
from outrider.model.config.checkpoint_config import read_model_config
from outrider_proof.checkpoints import VISION_TOKENS
from tiny_checkpoints import word_tokenizer
from tiny_vision_checkpoints import write_vision_checkpoint

NAMES = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


SLOWLY = [pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2_vl", "qwen3_vl_moe")]


@pytest.fixture(scope="module", params=["qwen3_5", *SLOWLY])
def checkpoint(request, tmp_path_factory):
    """A directory with a tokenizer whose words are w0, w1, ..., and two images; transformers' model of it."""
    directory = tmp_path_factory.mktemp("vl")
    model = write_vision_checkpoint(directory, request.param)
    special = {VISION_TOKENS[key]: name for key, name in NAMES.items()}
    tokenizer = word_tokenizer([special.get(index, f"w{index}") for index in range(96)])
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(directory / "tokenizer.json"))
    for seed, size in enumerate([(20, 28), (40, 17)]):
        Image.fromarray(picture(*size, seed=seed)).save(directory / f"{seed}.png")
    model.generation_config.eos_token_id = None
    return directory, model


def expected(directory, model, tokens, seeds):
    processor = MediaProcessor.from_checkpoint(directory)
    media = [processor.image(Image.open(directory / f"{seed}.png").convert("RGB")) for seed in seeds]
    tokens = expand_placeholders(tokens, media, read_model_config(directory).vision)
    inputs = reference_inputs(tokens, media, model.config.model_type)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("w5 w9", [*IMAGE, *IMAGE, 5, 9]),
        ("w1 w5 w9", [1, *IMAGE, *IMAGE, 5, 9]),  # behind the start token
        ("w5 <|image_pad|> w7 <|image_pad|> w9", [5, IMAGE[1], 7, IMAGE[1], 9]),
    ],
)
def test_tokens_are_those_of_generate(outrider, checkpoint, prompt, tokens):
    directory, model = checkpoint
    images = [argument for seed in (0, 1) for argument in ("--image", str(directory / f"{seed}.png"))]
    result = outrider("generate", "--model", str(directory), "--prompt", prompt, *images, "--max-tokens", "6", "--json")
    assert result.code == 0, result.err
    ours, theirs = result.json["token_ids"], expected(directory, model, tokens, (0, 1))
    assert ours == theirs[: len(ours)]
    assert len(ours) == 6 or ours[-1] == 2


def test_what_is_no_image(outrider, checkpoint, tmp_path, monkeypatch):
    directory, _ = checkpoint
    wrong = tmp_path / "text.png"
    wrong.write_text("no image")
    result = outrider("generate", "--model", str(directory), "--prompt", "w5", "--image", str(wrong))
    assert result.code == 1
    assert "text.png: the data can't be read as an image" in result.err
    monkeypatch.setattr("outrider.cli.options.option_records._MAX_IMAGE_BYTES", 4)
    result = outrider("generate", "--model", str(directory), "--prompt", "w5", "--image", str(wrong))
    assert result.code == 1
    assert "expected an image" in result.err
    assert result.err.count("text.png: ") == 1


def test_a_model_of_text_takes_none(outrider, checkpoint):
    directory, _ = checkpoint
    result = outrider("generate", "--prompt", "def", "--image", str(directory / "0.png"))
    assert result.code == 1
    assert "a model of text alone" in result.err
