"""Where a checkpoint is found, and which formats are refused by name."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from tokenizers.pre_tokenizers import ByteLevel

from outrider.device import ConfigError
from outrider.errors import CheckpointError
from outrider.model import Tokenizer, find_checkpoint, has_tokenizer, load_decoder
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.config.checkpoint_config import read_model_config
from tiny_checkpoints import write_checkpoint

COMMIT = "0" * 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, "llama")
    return directory


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the Hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def keep(hub, name, source, revision="main"):
    """Put a snapshot into the cache as the Hub's library does: files are links to blobs."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(COMMIT)
    for file in source.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot


@pytest.mark.parametrize("given", ["owner/tiny", "owner/tiny@main", f"owner/tiny@{COMMIT}"])
def test_a_name_of_the_hub_is_its_snapshot_in_the_cache(hub, checkpoint, backend, given):
    snapshot = keep(hub, "owner/tiny", checkpoint)
    assert find_checkpoint(given) == snapshot
    assert load_decoder(find_checkpoint(given), backend=backend, dtype=torch.float32).config.family == "llama"


@pytest.mark.parametrize("given", ["owner/other", "owner/tiny@v2"])
def test_what_the_cache_lacks_needs_the_network(hub, checkpoint, given):
    keep(hub, "owner/tiny", checkpoint)
    with pytest.raises(CheckpointError, match=r"no such directory, the Hub's cache doesn't hold it, and the Hub can't be"):
        find_checkpoint(given)


def test_a_directory_comes_before_a_name(hub, checkpoint, tmp_path, monkeypatch):
    keep(hub, "owner/tiny", checkpoint)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    assert str(find_checkpoint("owner/tiny")) == "owner/tiny"


@pytest.mark.parametrize(
    "given", ["missing", "./owner/tiny", "/no/such/place", "owner/tiny/deeper", "../owner/tiny", "a b/c"]
)
def test_what_is_no_name_is_a_path(hub, given):
    with pytest.raises(CheckpointError, match="no such file; expected a checkpoint directory"):
        read_model_config(find_checkpoint(given))


FORMATS = [
    ("model-q4_k_m.gguf", "a GGUF file of llama.cpp"),
    ("Model.Q4_K_M.GGUF", "a GGUF file of llama.cpp"),
    ("consolidated.00.pth", "weights as Meta publishes them"),
    ("consolidated.safetensors", "weights as Mistral publishes them"),
    ("tf_model.h5", "TensorFlow weights"),
    ("model.onnx", "an ONNX graph"),
    ("rank0.engine", "a compiled TensorRT engine"),
    ("adapter_config.json", "a LoRA adapter.*merge_and_unload"),
]


@pytest.mark.parametrize(("file", "says"), FORMATS)
@pytest.mark.parametrize("config", [True, False], ids=["with-config", "alone"])
def test_other_formats_are_refused_by_name(checkpoint, tmp_path, file, says, config):
    (tmp_path / file).write_text("{}")
    if config:
        shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=rf"{file}: is {says}"):
        read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{file}: is {says}"):
        find_checkpoint(tmp_path)
    if not file.lower().endswith(".gguf"):  # which is a checkpoint by itself
        with pytest.raises(CheckpointError, match=rf"{file}: is {says}"):
            find_checkpoint(tmp_path / file)


def test_what_is_read_comes_from_the_hub_and_no_copy_of_it(repository):
    read = [
        *("config.json", "model.safetensors", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja"),
        "additional_chat_templates/tools.jinja",
    ]
    copies = ["consolidated.safetensors", "original/model.safetensors", "onnx/weights.bin", "pytorch_model.bin", "code.py"]
    for name in (*read, *copies):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("{}")
    found = find_checkpoint("owner/online")
    assert sorted(path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()) == sorted(read)


def test_a_vocabulary_and_merges_of_the_hub_are_a_tokenizer(repository):
    alphabet = sorted(ByteLevel.alphabet())
    (repository / "vocab.json").write_text(json.dumps({each: index for index, each in enumerate([*alphabet, "de", "def"])}))
    (repository / "merges.txt").write_text("#version: 0.2\nd e\nde f\n")
    (repository / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (repository / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (repository / "model.safetensors").write_text("")
    found = Tokenizer.from_checkpoint(find_checkpoint("owner/online"))
    assert found.encode("def", special_tokens=False) == [257]


def test_a_vocabulary_of_word_pieces_is_a_tokenizer(repository):
    (repository / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s")))
    (repository / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (repository / "model.safetensors").write_text("")
    assert has_tokenizer(repository)
    with pytest.raises(CheckpointError, match=r"vocab\.txt: can't be read as a tokenizer"):
        Tokenizer.from_checkpoint(repository)  # nothing says which tokenizer of such words it is
    (repository / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    found = Tokenizer.from_checkpoint(find_checkpoint("owner/online"))
    assert found.encode("hello worlds") == [2, 5, 6, 7, 3]
    assert found.decode([5, 6, 7]) == "hello worlds"
    with pytest.raises(ConfigError, match=r"vocab\.txt: tokens have no bytes of their own"):
        found.token_bytes(8)


def test_merges_come_only_where_they_are_needed(repository):
    """A cache without them serves without a network where there's a tokenizer.json."""
    for name in ("tokenizer.json", "merges.txt", "pytorch_model.bin"):
        (repository / name).write_text("{}")
    assert {path.name for path in find_checkpoint("owner/online").iterdir()} == {"tokenizer.json", "pytorch_model.bin"}


@pytest.mark.parametrize(
    ("file", "says"), [each for each in FORMATS if each[0] != "adapter_config.json"] + [("Q4/a.gguf", "a GGUF file")]
)
def test_other_formats_are_refused_by_name_without_their_weights(repository, tmp_path, file, says):
    (repository / file).parent.mkdir(exist_ok=True)
    (repository / file).write_text("")
    (repository / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"^owner/online/{file}: is {says}"):
        find_checkpoint("owner/online")
    assert [path.name for path in (tmp_path / "snapshot").rglob("*")] == ["config.json"]


def test_without_the_network_no_list_of_files_is_needed(hub, checkpoint, tmp_path):
    (tmp_path / "source").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "source")
    snapshot = keep(hub, "owner/tiny", tmp_path / "source")
    assert find_checkpoint("owner/tiny") == snapshot


@pytest.mark.parametrize("option", ["--model", "--draft"])
def test_the_command_line_refuses_them_by_name(outrider, tmp_path, option):
    """An adapter comes without config.json, and what is read first is that file."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    result = outrider("generate", "--prompt", "a", "--backend", "cpu", "--speculate", "eagle", option, str(tmp_path))
    assert result.code == 1
    assert "adapter_config.json: is a LoRA adapter" in result.err


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], "fetch model.safetensors.index.json too"),
        (["pytorch_model-00001-of-00002.bin"], "fetch pytorch_model.bin.index.json too"),
        (["model.fp16.safetensors"], "there are model.fp16.safetensors: give one of them that name, if it's the whole"),
    ],
)
def test_tensor_files_by_other_names_are_named(checkpoint, tmp_path, backend, names, told):
    shutil.copy(checkpoint / "config.json", tmp_path)
    for name in names:
        shutil.copy(checkpoint / "model.safetensors", tmp_path / name)
    with pytest.raises(CheckpointError, match=f"no tensor files; expected .*{told}"):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)


def test_a_directory_that_is_not_there_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="missing: no such directory; expected a checkpoint directory as Hugging Face"):
        open_checkpoint(tmp_path / "missing")


def test_a_file_is_no_directory(checkpoint):
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a file; expected a directory"):
        find_checkpoint(checkpoint / "model.safetensors")


def test_other_formats_beside_ours_do_no_harm(checkpoint, tmp_path, backend):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    for name in ("model.gguf", "consolidated.safetensors", "tf_model.h5"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert load_decoder(tmp_path, backend=backend, dtype=torch.float32).config.family == "llama"


def test_an_adapter_beside_the_weights_is_refused(checkpoint, tmp_path, backend):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CheckpointError, match="is a LoRA adapter"):
        load_decoder(tmp_path, backend=backend, dtype=torch.float32)


def test_silu_by_its_other_name(checkpoint, tmp_path):
    raw = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"hidden_act": "swish"}))
    assert read_model_config(tmp_path) == read_model_config(checkpoint)


def test_a_sentencepiece_model_alone_is_a_tokenizer(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece", reason="not run: the extra sentencepiece isn't installed")
    (tmp_path / "text").write_text("\n".join(f"def read(self, n{i}): return {i}  # line {i}" for i in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    assert has_tokenizer(tmp_path)
    ours = Tokenizer.from_checkpoint(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in ("def read(self, n7): return 1", "héllo  wörld ☃", "\n\tx"):
        assert ours.encode(text, special_tokens=False) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_a_broken_sentencepiece_model_is_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x07nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: can't be read as a tokenizer"):
        Tokenizer.from_checkpoint(tmp_path)
