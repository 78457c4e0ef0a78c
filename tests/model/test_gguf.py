"""GGUF files: logits and tokens of transformers with the same values, tokens of the original tokenizer, clear errors."""

import json

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model.gguf_files import add_tokenizer, write_gguf
from model.test_decoder import agree
from outrider.errors import CheckpointError
from outrider.model import find_checkpoint, load_decoder
from outrider.model.checkpoint import gguf_checkpoint
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.config.rope import RopeConfig, inverse_frequencies
from outrider.model.media.tokenizer import Tokenizer as OurTokenizer
from tiny_checkpoints import write_checkpoint

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
FAMILIES = ("llama", "llama-biases", "llama-tied", "llama-mha", "mistral-window", "qwen2", "qwen3", "qwen3_moe")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


def window(writer):
    writer.add_sliding_window(7)


def model_of(tmp_path, family, **shape):
    return write_checkpoint(tmp_path / "source", family, **shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(tmp_path, backend, family):
    reference = model_of(tmp_path, family)
    write_gguf(tmp_path / "m.gguf", reference, metadata=[window] if family == "mistral-window" else [])
    agree(find_checkpoint(tmp_path / "m.gguf"), backend, reference)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_type(tmp_path, backend, kind, family):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    reference = model_of(tmp_path, family, **sizes, **({"moe_intermediate_size": 256} if family == "qwen3_moe" else {}))
    write_gguf(tmp_path / "m.gguf", reference, kind=kind)
    # Activations of these are rounded to 16 bits: the same rounding in transformers' products changes its logits by 0.03.
    tolerance = 5e-2 if kind in ("Q4_0", "Q4_1", "Q8_0") else 1e-3
    agree(find_checkpoint(tmp_path / "m.gguf"), backend, reference, chunk=8, tolerance=tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_transformers_reads_the_same_values(tmp_path, family):
    """Its own reader of GGUF, which knows nothing of ours: every tensor to the bit."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    reference = model_of(tmp_path, family, hidden_size=64, intermediate_size=64, head_dim=16)
    kind = "F16" if family == "qwen3_moe" else "Q8_0"
    write_gguf(tmp_path / "m.gguf", reference, kind=kind, metadata=[lambda writer: writer.add_vocab_size(96)])
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=reference)["tensors"]
    ours = open_checkpoint(find_checkpoint(tmp_path / "m.gguf"))
    stacks = {name for name in theirs if name not in ours.tensors}
    assert all(".experts." in name for name in stacks)
    for name in theirs.keys() - stacks:
        assert torch.equal(ours.read_tensor(name).float(), theirs[name].float()), name


def test_values_beyond_float16_stay_as_they_are():
    values = torch.tensor([0.1, 65504.0, 7e4, -1e30])
    assert gguf_checkpoint._round_to_float16(values).tolist() == [0.0999755859375, 65504.0, *values[2:].tolist()]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rope_of_llama_3_is_found_by_its_frequencies(tmp_path, backend, factor):
    rope = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    reference = model_of(tmp_path, "llama", rope_parameters=rope, head_dim=32)
    plain = inverse_frequencies(RopeConfig(theta=1000.0), 32)
    scaled = 1 / reference.model.rotary_emb.inv_freq
    write_gguf(tmp_path / "m.gguf", reference, rope_freqs=(plain.float() * scaled).numpy())
    agree(find_checkpoint(tmp_path / "m.gguf"), backend, reference)
    write_gguf(tmp_path / "other.gguf", reference, rope_freqs=np.full(16, 3, np.float32))
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight isn't what Llama 3's rope gives"):
        find_checkpoint(tmp_path / "other.gguf")


def test_yarn(tmp_path, backend):
    rope = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    reference = model_of(tmp_path, "qwen2", rope_parameters=rope)

    def scaling(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    write_gguf(tmp_path / "m.gguf", reference, metadata=[scaling])
    agree(find_checkpoint(tmp_path / "m.gguf"), backend, reference)


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": rf"{WORDS}|\p{{N}}{{1,3}}|{REST}",
    "qwen2": rf"{WORDS}|\p{{N}}|{REST}",
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
}
"""The expressions in the tokenizer.json of Llama 3, of Qwen 2 and of Qwen 3.5."""


def trained(pre):
    """A byte-level tokenizer that splits text as the published ones of that name."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    first = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated") if pre in SPLITS else pre_tokenizers.Digits(True)
    tokenizer.pre_tokenizer = level if pre == "gpt-2" else pre_tokenizers.Sequence([first, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["it's 12345 and 67 apples\n\n  def f(x):\n    return x", "ÀÉ déjà 数字 99"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


@pytest.mark.sample(2)
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "qwen35", "smollm", "gpt-2"])
def test_tokens_are_those_of_the_original_tokenizer(tmp_path, pre):
    original = trained(pre)
    count = original.get_vocab_size()
    model = model_of(tmp_path, "llama", vocab_size=count)
    write_gguf(tmp_path / "m.gguf", model, metadata=[lambda writer: _add(writer, original, pre)])
    ours = OurTokenizer.from_checkpoint(find_checkpoint(tmp_path / "m.gguf"))

    @settings(max_examples=25, deadline=None, database=None)
    @given(st.text(st.sampled_from(list("aei t's1234 \n\té数!?(\u0301\u0902")) | st.characters(codec="utf-8"), max_size=40))
    def same(text):
        text += "<tool>it's 12<|end|>"
        assert ours.encode(text) == original.encode(text).ids
        assert ours.decode(ours.encode(text), special_tokens=True) == original.decode(
            original.encode(text).ids, skip_special_tokens=False
        )

    same()


def test_tokens_of_sentencepiece(tmp_path):
    import sentencepiece

    lines = ["the quick brown fox jumps over the lazy dog", "def read(path): return path.read_text()", "it's 1234"]
    (tmp_path / "text").write_text("\n".join(lines * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), vocab_size=330, model_type="bpe", byte_fallback=True
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))

    def add(writer):
        writer.add_tokenizer_model("llama")
        numbers = range(pieces.vocab_size())
        writer.add_token_list([pieces.id_to_piece(number) for number in numbers])
        writer.add_token_scores([pieces.get_score(number) for number in numbers])
        kinds = ((pieces.is_unknown, 2), (pieces.is_control, 3), (pieces.is_byte, 6))
        writer.add_token_types([next((kind for test, kind in kinds if test(number)), 1) for number in numbers])
        writer.add_bos_token_id(pieces.bos_id())
        writer.add_eos_token_id(pieces.eos_id())
        writer.add_unk_token_id(pieces.unk_id())

    write_gguf(tmp_path / "m.gguf", model_of(tmp_path, "llama", vocab_size=330), metadata=[add])
    ours = OurTokenizer.from_checkpoint(find_checkpoint(tmp_path / "m.gguf"))
    for text in (*lines, "read it", "the é dog", "over 12"):
        assert ours.encode(text, special_tokens=False) == pieces.encode(text)


def _add(writer, tokenizer, pre):
    add_tokenizer(writer, tokenizer, pre)
    writer.add_chat_template([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])


def test_template_start_and_end_come_along(tmp_path):
    original = trained("qwen2")
    model = model_of(tmp_path, "qwen2", vocab_size=original.get_vocab_size())

    def more(writer):
        _add(writer, original, "qwen2")
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_eot_token_id(1)

    write_gguf(tmp_path / "m.gguf", model, metadata=[more])
    directory = find_checkpoint(tmp_path / "m.gguf")
    said = json.loads((directory / "tokenizer_config.json").read_text())
    assert said["chat_template"] == [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert said["eos_token"] == "<|end|>"
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [0, 1]
    assert OurTokenizer.from_checkpoint(directory).encode("a")[0] == 0


def test_a_cache_entry_is_used_until_the_file_changes(tmp_path):
    write_gguf(tmp_path / "m.gguf", model_of(tmp_path, "llama"))
    first = find_checkpoint(tmp_path / "m.gguf")
    (first / "mark").touch()
    assert (find_checkpoint(tmp_path / "m.gguf") / "mark").exists()
    write_gguf(tmp_path / "m.gguf", model_of(tmp_path, "qwen2"))
    assert not (find_checkpoint(tmp_path / "m.gguf") / "mark").exists()


def test_parts_are_one_checkpoint(tmp_path, backend):
    reference = model_of(tmp_path, "llama")
    write_gguf(tmp_path / "whole.gguf", reference)
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    for part, tensors in enumerate((reader.tensors[:5], reader.tensors[5:]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part:05}-of-00002.gguf", "llama")
        if part == 1:
            for key, field in reader.fields.items():
                if key.startswith("llama."):
                    writer.add_key_value(key, field.contents(), field.types[0])
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    agree(find_checkpoint(tmp_path / "m-00001-of-00002.gguf"), backend, reference)
    with pytest.raises(CheckpointError, match="is part 2 of 2; expected the first part"):
        find_checkpoint(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002.gguf: no such file"):
        find_checkpoint(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("without", "change", "says"),
    [
        (
            "general.architecture",
            lambda w: w.add_string("general.architecture", "mamba"),
            "its architecture is 'mamba'; supported are llama",
        ),
        (
            "llama.block_count",
            lambda w: w.add_string("llama.block_count", "two"),
            "llama.block_count is 'two', expected int",
        ),
        (
            "llama.embedding_length",
            lambda w: w.add_bool("llama.embedding_length", True),
            "llama.embedding_length is True, expected int",
        ),
        (None, lambda w: w.add_rope_dimension_count(4), "rope.dimension_count is 4, only the head size 8"),
        (
            None,
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "scaling.type is 'longrope'; supported are none",
        ),
        (None, lambda w: w.add_tokenizer_model("rwkv"), "tokenizer.ggml.model is 'rwkv'; supported are gpt2, llama"),
        (None, lambda w: w.add_tensor("blk.0.ssm_a", np.zeros(4, np.float32)), "'blk.0.ssm_a' isn't one of a llama model"),
        (
            None,
            lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(256, np.int8)),
            "has type I8, which isn't supported; supported are F32, F16, BF16, Q4_0",
        ),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, without, change, says):
    write_gguf(tmp_path / "m.gguf", model_of(tmp_path, "llama"), without=without, metadata=[change])
    with pytest.raises(CheckpointError, match=says) as caught:
        find_checkpoint(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_broken_files_give_an_error_that_names_the_file(tmp_path, backend):
    """Truncations, and random bytes in the header. A value that only the config refuses is named in the unpacked config."""
    write_gguf(tmp_path / "m.gguf", model_of(tmp_path, "llama"))
    whole = (tmp_path / "m.gguf").read_bytes()
    random = np.random.default_rng(1)
    variants = [whole[: int(len(whole) * share)] for share in (0, 0.0001, 0.001, 0.01, 0.5, 0.99)]
    places = random.integers(0, 1200, 24)
    variants += [whole[:at] + bytes(random.integers(0, 256, 8, dtype=np.uint8)) + whole[at + 8 :] for at in places]
    loaded, errors = 0, []
    for number, content in enumerate(variants):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        try:
            load_decoder(find_checkpoint(path), backend=backend, dtype=torch.float32)
            loaded += 1
        except CheckpointError as error:
            errors.append((str(error), str(path)))
    assert loaded < 10
    unpacked = str(tmp_path / "assets")
    assert [text for text, path in errors if not text.startswith((path, unpacked))] == []


def test_the_package_gguf_is_asked_for(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", model_of(tmp_path, "llama"))
    monkeypatch.setattr("outrider.model.checkpoint.gguf_checkpoint.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install 'outrider\[gguf\]'"):
        find_checkpoint(tmp_path / "m.gguf")
