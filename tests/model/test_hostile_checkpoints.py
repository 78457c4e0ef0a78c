"""Checkpoints that were made to break the loader: refused by name, before anything is allocated or gone through."""

import json
import os
import re
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from model.wrong_configs import WRONG_CONFIGS
from outrider.device import ConfigError
from outrider.errors import CheckpointError, RequestError, shown
from outrider.model import (
    MediaProcessor,
    RopeConfig,
    Tokenizer,
    load_decoder,
    load_eagle,
    load_eagle3,
    load_mtp,
    load_through_transformers,
    load_vision,
    open_head,
)
from outrider.model.checkpoint.files import read_json, wrap_read_errors
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.config_fields import check_fields, number, record, whole_number
from outrider.model.layers.rotary import make_rotary
from outrider_proof.checkpoints import picture, write_eagle
from tiny_checkpoints import byte_level_tokenizer, write_checkpoint, write_eagle3, write_eagle_variant
from tiny_vision_checkpoints import write_vision_checkpoint


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    write_checkpoint(root / "llama", "llama")
    byte_level_tokenizer(280).save(str(root / "llama" / "tokenizer.json"))
    write_checkpoint(root / "mistral", "mistral-window")
    write_vision_checkpoint(root / "vision", "qwen2_5_vl")
    write_eagle(root / "eagle")
    write_eagle_variant(root / "bin", fmt="bin")
    write_eagle3(root / "eagle3")
    return root


@pytest.fixture(scope="module")
def target(sound, backend):
    return load_decoder(sound / "llama", backend=backend, dtype=torch.float32)


@pytest.fixture
def copy(sound, tmp_path):
    def make(name):
        shutil.copytree(sound / name, tmp_path / name)
        return tmp_path / name

    return make


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


ODD = [0, -1, 10**7, 10**12, 10**30, 10**400, 1.5, float("nan"), float("inf"), "3", True, [[1]], {}]


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"],
)
def test_sizes(copy, key):
    directory = copy("llama")
    for value in [*ODD, None]:
        if value == 10**7 and key in ("vocab_size", "max_position_embeddings"):
            continue  # it could be
        edit(directory / "config.json", **{key: value})
        said = re.escape(f"config.json: {key} is {shown(value)}, expected a whole number from 1 to")
        with pytest.raises(CheckpointError, match=said):
            read_model_config(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *WRONG_CONFIGS["decoder"],
        ({"eos_token_id": [1] * 10_000}, "eos_token_id is .*a list of at most 4096"),
        ({"model_type": "x" * 10**6}, "model_type is 'xxxx"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values(copy, backend, changes, message):
    directory = copy("llama")
    (directory / "generation_config.json").unlink()
    edit(directory / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_decoder(directory, backend=backend, dtype=torch.float32)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


LAYERS, WHOLE = "eagle_aux_hidden_state_layer_ids", "{} is .*, expected a whole number"
BAD_LAYERS = [[0, 1], ["0", "1", "2"], [True] * 3, [10**30] * 3, [0] * 10**5, "012", {}, [[0]] * 3]
BAD_SIZES, BAD_COUNTS = [0, -1, 97, 10**30, "40", True, 40.0, [40]], [None, 0, -1, 10**30, "1", True, 1.0]
ODD_VALUES = [
    (None, "mistral", "sliding_window", [10**30, -1, 1.5, "7", True, [7]], WHOLE),
    (load_eagle3, "eagle3", "draft_vocab_size", BAD_SIZES, f"{WHOLE} from 1 to"),
    (load_eagle3, "eagle3", "eagle_config", [{LAYERS: each} for each in BAD_LAYERS], f".*{LAYERS}"),
    (load_mtp, "eagle", "num_nextn_predict_layers", BAD_COUNTS, "{} is .*, expected the number of heads"),
]


@pytest.mark.parametrize(("load", "name", "key", "values", "message"), ODD_VALUES)
def test_odd_values(copy, target, backend, load, name, key, values, message):
    directory = copy(name)

    def read():
        if load is None:
            return read_model_config(directory)
        return load(open_head(directory, target=target, backend=backend, dtype=torch.float32))

    for value in values:
        edit(directory / "config.json", **{key: value})
        with pytest.raises(CheckpointError, match=r"config\.json: " + message.format(key)) as caught:
            read()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [-1, 10**30, "1", [True], {"a": 1}])
def test_ends_of_the_generation_config(copy, value):
    directory = copy("llama")
    edit(directory / "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id: special token"):
        read_model_config(directory)


def test_a_long_context_has_no_table(copy, backend):
    directory = copy("llama")
    edit(directory / "config.json", max_position_embeddings=1 << 24)
    rope, size = RopeConfig(), 128
    one = {"kernels": backend.kernels_in_use, "dtype": torch.float32, "device": backend.device}
    short, long = make_rotary(rope, size, 1 << 17, **one), make_rotary(rope, size, 1 << 24, **one)
    assert short.__qualname__ != long.__qualname__
    positions = torch.tensor([0, 1, 65535, 65536, (1 << 17) + 255])
    for ours, wanted in zip(long(positions, None), short(positions, None), strict=True):
        assert torch.equal(ours, wanted)
    assert load_decoder(directory, backend=backend, dtype=torch.float32).config.max_context == 1 << 24


ENTRIES = {
    "directory": (lambda path: path.mkdir(), "is a directory, expected a regular file"),
    "pipe": (os.mkfifo, "is a pipe, a socket or a device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe, a socket or a device"),
    "nowhere": (lambda path: path.symlink_to("nowhere"), "is a link to a file that isn't there"),
    "itself": (lambda path: path.symlink_to(path), "can't be read"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_what_is_no_file(copy, backend, name, entry):
    directory = copy("llama")
    make, message = ENTRIES[entry]
    (directory / name).unlink()
    make(directory / name)
    for load in (load_decoder, load_through_transformers):
        with pytest.raises(CheckpointError, match=f"{name}: {message}"):
            Tokenizer.from_checkpoint(directory) if name == "tokenizer.json" else load(
                directory, backend=backend, dtype=torch.float32
            )


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin"])
def test_pipes_in_place_of_other_tensor_files(copy, backend, name):
    directory = copy("llama")
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / name)
    with pytest.raises(CheckpointError, match=f"{name}: is a pipe"):
        load_decoder(directory, backend=backend, dtype=torch.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 10**6, "isn't valid JSON: RecursionError"),
        (b'{"a":' * 10**5, "isn't valid JSON: RecursionError"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "its values are nested more than 64 deep"),
        (b'{"a": 1' + b"0" * 10**4 + b"}", "isn't valid JSON"),
        (b"\xff\xfe{}", "isn't valid JSON: UnicodeDecodeError"),
        (b"null", "expected a JSON object, found NoneType"),
        (b"", "isn't valid JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json(copy, content, message):
    path = copy("llama") / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read_model_config(path.parent)


def test_a_file_is_read_up_to_a_limit(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    with pytest.raises(CheckpointError, match=r"has 1099511627776 bytes, expected at most"):
        read_json(path)
    (tmp_path / "tokenizer.json").symlink_to(path)
    with pytest.raises(CheckpointError, match=r"has 1099511627776 bytes, expected at most"):
        Tokenizer.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "names", [["x" * 5000 + ".safetensors"], ["\0.safetensors"], [f"{i}.safetensors" for i in range(5000)]]
)
def test_names_in_an_index(copy, backend, names):
    directory = copy("llama")
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {str(index): name for index, name in enumerate(names)}})
    )
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        load_decoder(directory, backend=backend, dtype=torch.float32)


def stored(path, change):
    """Rewrite torch's archive."""
    with zipfile.ZipFile(path) as archive:
        parts = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            change(archive, name, content)


def test_a_torch_archive_does_not_unpack_to_more_than_it_is(copy, target, backend):
    path = copy("bin") / "pytorch_model.bin"

    def pack(archive, name, content):
        content = bytes(10**7) if name.endswith("data/0") else content
        archive.writestr(name, content, compress_type=zipfile.ZIP_DEFLATED)

    stored(path, pack)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: can't be read as a torch file .*larger than the file"):
        load_eagle(open_head(path.parent, target=target, backend=backend, dtype=torch.float32))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.zeros(1).expand(1 << 30)}, r"tensor 'a' has shape \[1073741824\], but fewer values"),
        (dict.fromkeys(map(str, range(100)), torch.zeros(10_000)), "its tensors share their values"),
        ({"a": torch.zeros(3, 3).to_sparse()}, "holds other objects than tensors: 'torch._utils _rebuild_sparse"),
        ({"a": bytearray(3)}, "holds other objects than tensors"),
        ({1: torch.zeros(1)}, "expected a flat mapping of names to tensors"),
        ([torch.zeros(1)], "expected a flat mapping of names to tensors"),
    ],
    ids=lambda value: str(type(value)),
)
def test_states_of_torch(copy, target, backend, state, message):
    path = copy("bin") / "pytorch_model.bin"
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin: .*{message}"):
        load_eagle(open_head(path.parent, target=target, backend=backend, dtype=torch.float32))


def test_the_older_format_of_torch(copy, target, backend):
    """Its storages are allocated as its pickle says, before they're read."""
    path = copy("bin") / "pytorch_model.bin"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*not a zip file"):
        load_eagle(open_head(path.parent, target=target, backend=backend, dtype=torch.float32))


@pytest.mark.parametrize(("changes", "message"), WRONG_CONFIGS["vision tower"], ids=str)
def test_vision(copy, backend, changes, message):
    directory = copy("vision")
    config = json.loads((directory / "config.json").read_text())
    edit(directory / "config.json", vision_config=config["vision_config"] | changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_vision(directory, backend=backend, dtype=torch.float32)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(("changes", "message"), WRONG_CONFIGS["image processor"], ids=str)
def test_image_processors(copy, changes, message):
    directory = copy("vision")
    edit(directory / "preprocessor_config.json", **changes)
    with pytest.raises(CheckpointError, match=rf"preprocessor_config\.json: .*{message}"):
        MediaProcessor.from_checkpoint(directory)


@pytest.mark.parametrize(("changes", "message"), WRONG_CONFIGS["through transformers"], ids=str)
def test_through_transformers(copy, backend, changes, message):
    directory = copy("mistral")
    edit(directory / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_through_transformers(directory, backend=backend, dtype=torch.float32)
    assert str(directory) in str(caught.value)


def test_sizes_of_pictures_as_published(copy):
    directory = copy("vision")
    for size in ({"min_pixels": 64, "max_pixels": 1600}, {"shortest_edge": 64, "longest_edge": 1600}):
        edit(directory / "preprocessor_config.json", size=size)
        (directory / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
        processor = MediaProcessor.from_checkpoint(directory)
        assert processor.image(picture(64, 64)).grid.patches <= 1600 // 16
        assert processor.video([picture(64, 64)], frames_per_second=1).grid.patches <= 1600 // 16
    (directory / "video_preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 10**12}}))
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config\.json: size\.shortest_edge is 1000000000000"):
        MediaProcessor.from_checkpoint(directory)


@pytest.mark.parametrize("length", [0, 1 << 30, 1 << 40, (1 << 64) - 1])
def test_length_of_a_header(copy, backend, length):
    directory = copy("llama")
    with (directory / "model.safetensors").open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(1 << 35)  # takes no room
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*its header would be {length} bytes long"):
        load_decoder(directory, backend=backend, dtype=torch.float32)


def test_files_beside_those_of_the_checkpoint(copy, backend):
    directory = copy("mistral")
    os.mkfifo(directory / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: is a pipe"):
        load_through_transformers(directory, backend=backend, dtype=torch.float32)
    (directory / "tokenizer.model").unlink()
    shutil.copy(directory / "model.safetensors", directory / "one.safetensors")
    keys = load_file(directory / "one.safetensors")
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, "one.safetensors")})
    )
    with pytest.raises(CheckpointError, match="is the index of several files, but there's a single one as well"):
        load_through_transformers(directory, backend=backend, dtype=torch.float32)
    (directory / "model.safetensors").unlink()
    load_through_transformers(directory, backend=backend, dtype=torch.float32)


def test_masks_of_a_whole_context(tmp_path, backend):
    """GPT-2 keeps a mask of context times context, whatever its tensors are."""
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=96)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", n_positions=1 << 22)
    with pytest.raises(CheckpointError, match="values, but the files hold"):
        load_through_transformers(tmp_path, backend=backend, dtype=torch.float32)


def test_tokenizers(copy):
    directory = copy("llama")
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_checkpoint(directory)
    with pytest.raises(RequestError, match="half a character at 1"):
        tokenizer.encode("a\ud800")
    for content in (b"", b"{}", b"null", b"\xff" * 100, b"[" * 10**5, path.read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: can't be read as a tokenizer"):
            Tokenizer.from_checkpoint(directory)


def spoil_tokenizer(directory, **changes):
    edit(directory / "tokenizer.json", **changes)
    return Tokenizer.from_checkpoint(directory)


def test_a_pattern_that_never_ends(copy, capfd):
    """The library gives up after so many steps, with a panic, which is no Exception."""
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = spoil_tokenizer(copy("llama"), pre_tokenizer=pattern)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: can't be read as a tokenizer: PanicException.*retry-limit"):
        tokenizer.encode("a" * 40 + "b")


def test_replacements_of_replacements(copy):
    ten = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its replacements make a text 1000000000 times as long"):
        spoil_tokenizer(copy("llama"), normalizer={"type": "Sequence", "normalizers": [ten] * 9})


class PanicException(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        RecursionError(),
        MemoryError(),
        OverflowError("x"),
        TypeError("x"),
        KeyError("x"),
        AttributeError("x"),
        PanicException("x\ny"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_guard(tmp_path, error):
    with (
        pytest.raises(CheckpointError, match=f"f: can't be read as a thing: {type(error).__name__}") as caught,
        wrap_read_errors(tmp_path / "f", "a thing"),
    ):
        raise error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), RequestError("x")], ids=repr)
def test_what_passes_the_guard(tmp_path, error):
    with pytest.raises(type(error)), wrap_read_errors(tmp_path, "a thing"):
        raise error


def test_fields():
    fields = {"a": whole_number(1, 3), "b": record({"c": number(0, 1, empty=False)})}
    assert check_fields({"a": None, "b": {"c": 0.5, "d": 1}, "e": 1}, fields) == {"a": None, "b": {"c": 0.5}}
    with pytest.raises(ConfigError, match=r"b\.c is None, expected a number from 0 to 1"):
        check_fields({"b": {"c": None}}, fields)
