"""Images in a chat with a vision model: the tokens that the engine gives for them."""

import base64
import io
import json

import httpx
import pytest
from PIL import Image
from tokenizers import AddedToken, decoders

from outrider import Engine, SamplingParams
from outrider.errors import RequestError
from outrider.model import MediaProcessor, load_decoder, load_vision
from outrider.model.media.vision import decode_image
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import VISION_TOKENS, picture
from outrider_proof.tiny import plain_config
from serve.running import running
from tiny_checkpoints import word_tokenizer
from tiny_vision_checkpoints import write_vision_checkpoint

SPECIAL = {
    "<|vision_start|>": VISION_TOKENS["vision_start_token_id"],
    "<|vision_end|>": VISION_TOKENS["vision_end_token_id"],
    "<|image_pad|>": VISION_TOKENS["image_token_id"],
}
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}"
)


def test_an_image_is_turned_as_its_camera_says():
    data, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6  # orientation: turn to the right
    Image.new("RGB", (2, 1)).save(data, "jpeg", exif=turned)
    assert decode_image(data.getvalue()).size == (1, 2)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:60], lambda data: data.replace(b"IDAT", b"\0DAT")])
def test_a_broken_image_is_an_error_of_the_request(damage):
    data = io.BytesIO()
    Image.fromarray(picture(16, 16)).save(data, "png")
    with pytest.raises(RequestError, match="can't be read as an image"):
        decode_image(damage(data.getvalue()))


def write_tokenizer(directory, size):
    taken = {token: spelling for spelling, token in SPECIAL.items()}
    tokenizer = word_tokenizer([taken.get(token, f"w{token}") for token in range(size)])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(spelling, special=True) for spelling in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


class Model:
    def __init__(self, directory, family):
        write_vision_checkpoint(directory, family)
        self.directory, self.backend = directory, CpuBackend()
        config = plain_config(page_size=4, max_context=128, prefill_chunk=64)
        self.target = load_decoder(directory, backend=self.backend, dtype=config.torch_dtype)
        self.tower = load_vision(directory, backend=self.backend, dtype=config.torch_dtype)
        self.config, self.processor = config, MediaProcessor.from_checkpoint(directory)
        write_tokenizer(directory, self.target.config.vocab_size)

    def engine(self):
        return Engine(self.target, self.backend, config=self.config, vision=self.tower)


SLOWLY = [pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2_vl", "qwen3_vl_moe")]


@pytest.fixture(scope="module", params=["qwen3_vl", *SLOWLY])
def model(request, tmp_path_factory):
    return Model(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="module")
def http(model):
    with running(model.engine(), model.directory) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def url_of(pixels, kind="png"):
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return f"data:image/{kind};base64,{base64.b64encode(held.getvalue()).decode()}"


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def chat(http, content, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0, **more}
    return http.post("/v1/chat/completions", json={**body, "ignore_eos": True, "return_token_ids": True})


def test_images_are_seen_where_they_stand(http, model):
    one, two = picture(20, 28), picture(12, 16, seed=3)
    answer = chat(
        http, [{"type": "text", "text": "w5 w9"}, image(url_of(one)), {"type": "text", "text": "w7"}, image(url_of(two))]
    )
    start, end, pad = SPECIAL.values()
    tokens = [5, 9, start, pad, end, 7, start, pad, end]
    media = [model.processor.image(each) for each in (one, two)]
    engine = model.engine()
    (expected,) = engine.generate([tokens], SamplingParams(max_tokens=6, ignore_eos=True), media=[media])
    assert answer.json()["choices"][0]["token_ids"] == list(expected.token_ids)
    features = sum(each.grid.features(engine.model.config.vision) for each in media)
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens) - 2 + features
    other = chat(
        http, [{"type": "text", "text": "w5 w9"}, image(url_of(two)), {"type": "text", "text": "w7"}, image(url_of(one))]
    )
    assert other.json()["choices"][0]["token_ids"] != list(expected.token_ids)


def test_a_placeholder_that_a_user_writes_is_no_place(http):
    """This tokenizer of whole words can't spell it as text, so that it's refused; others can."""
    answer = chat(http, [{"type": "text", "text": "<|image_pad|>"}, image(url_of(picture(20, 28)))])
    assert answer.status_code == 400
    assert "sanitize" in answer.json()["error"]["message"]


WRONG = [
    "http://127.0.0.1/x.png",
    "file:///etc/passwd",
    "data:image/png;base64,%%%",
    "data:image/png;base64,AAAA",
    "data:,x",
    "",
]


@pytest.mark.parametrize("url", WRONG)
def test_what_is_no_image(http, url):
    answer = chat(http, [image(url)])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"


def test_a_strip_and_too_many_tokens(http):
    assert chat(http, [image(url_of(picture(2, 900)))]).status_code == 400
    assert chat(http, [image(url_of(picture(40, 40)))] * 30).status_code == 400
