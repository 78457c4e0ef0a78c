"""Text to tokens as transformers does it, and streams of text that are never cut inside a character."""

import json
from os.path import commonprefix

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from outrider import Engine, SamplingParams
from outrider.cli.commands.generate import StreamedOutput
from outrider.errors import CheckpointError
from outrider.model import Tokenizer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import TEXT, byte_level_tokenizer, sentencepiece_tokenizer, write_checkpoint

KINDS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def directory(kind, tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp(kind)
    tokens = {"byte-level": ("<|begin|>", "<|end|>"), "sentencepiece": ("<s>", "</s>")}[kind]
    PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), bos_token=tokens[0], eos_token=tokens[1]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_checkpoint(directory)


def stream(tokenizer, ids):
    decoder = tokenizer.stream()
    pieces = [decoder.push(token) for token in ids]
    return [*pieces, decoder.flush()]


@pytest.mark.parametrize("text", [*TEXT, "", "the", " the", "zebra 🦓"])
def test_as_transformers(directory, tokenizer, text):
    reference = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(st.data())
def test_any_tokens(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("unit", [b"\xef\xbf\xbd", b"\xf0\x9f\x98", b"\xe2\x80", b"\xff"])
def test_broken_characters(tokenizer, unit):
    """In runs longer than the window, which then begins at any byte."""
    byte = {tokenizer.bytes_of(token): token for token in range(tokenizer.vocab_size) if len(tokenizer.bytes_of(token)) == 1}
    for before in range(8):
        text = b"a" + b"\xff" * before + unit * 40 + "\N{GRINNING FACE}b".encode()
        ids = [byte[bytes((each,))] for each in text]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind_of_token", ["broken", "special"])
def test_the_window_of_a_stream_stays_short(kind_of_token):
    """A model may repeat tokens without a whole character up to its limit, for example the end token with ignore_eos."""
    tokenizer = Tokenizer(byte_level_tokenizer())
    broken = next(token for token in range(tokenizer.vocab_size) if tokenizer.bytes_of(token) == b"\xff")
    decoder, lengths = tokenizer.stream(), []
    decode, decoder._decode = decoder._decode, lambda ids: lengths.append(len(ids)) or decode(ids)
    for _ in range(300):
        decoder.push(broken if kind_of_token == "broken" else min(tokenizer.special_tokens))
    assert max(lengths) < 80


@given(text=st.text(alphabet=st.sampled_from("the cat\n日本é🙂👩‍👧é.") | st.characters(codec="utf-8"), max_size=40))
def test_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@given(
    prompt=st.text(alphabet=st.sampled_from("the cat\n日本é🙂👩‍👧é."), max_size=30),
    after=st.data(),
    cut=st.integers(0, 3),
)
def test_text_after_a_prompt_is_what_it_adds_to_the_prompts(tokenizer, prompt, after, cut):
    """Also where the prompt's last tokens are part of a character; a special token begins a new text."""
    prompt = tokenizer.encode(prompt, special_tokens=False)
    ids = after.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    prompt, ids = prompt[: len(prompt) - cut], prompt[len(prompt) - cut :] + ids
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    expected = whole[len(commonprefix((before, whole))) :]  # noqa: RUF071 by characters, as meant
    for sizes in (1, 3):
        decoder = tokenizer.stream(prompt=prompt)
        pieces = [decoder.push(*ids[at : at + sizes]) for at in range(0, len(ids), sizes)]
        assert "".join(pieces) + decoder.flush() == expected
    ended = [*prompt, min(tokenizer.special_tokens)]
    decoder = tokenizer.stream(prompt=ended)
    assert decoder.push(*ids) + decoder.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_a_completion_keeps_its_first_space(tmp_path, stop):
    """As transformers decodes prompt and answer together: of every route to text, with stop strings and without."""
    write_checkpoint(tmp_path, "llama", vocab_size=274, num_hidden_layers=1)
    sentencepiece_tokenizer().save(str(tmp_path / "tokenizer.json"))
    engine = Engine.from_checkpoint(tmp_path, CpuBackend(), config=plain_config())
    prompt = engine.tokenizer.encode("the cat")
    params = SamplingParams(max_tokens=3, stop=stop, logit_bias={engine.tokenizer.token_id("▁the"): 1000})
    output = StreamedOutput(tuple(prompt))
    output.stream(engine, params, None)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    whole = reference.decode([*prompt, *output.tokens], skip_special_tokens=True)
    assert (output.text, whole) == (" the the the", "the cat the the the")


def test_text_comes_early(tokenizer):
    """Words are given out as they end, not at the flush."""
    ids = tokenizer.encode("the cat the cat")
    pieces = stream(tokenizer, ids)
    assert pieces[-1] == ""
    assert "".join(pieces) == "the cat the cat"


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    ids = tokenizer.encode("a🦓b", special_tokens=False)
    pieces = [piece for piece in stream(tokenizer, ids) if piece]
    assert "🦓" in [piece.strip("ab") for piece in pieces]


def test_garbage_is_given_out_before_the_end():
    """Bytes that are no character don't hold the stream back."""
    tokenizer = Tokenizer(byte_level_tokenizer())
    lone = tokenizer.encode("é", special_tokens=False)[0]
    decoder = tokenizer.stream()
    given_out = "".join(decoder.push(lone) for _ in range(10))
    assert len(given_out) >= 9 - 1
    assert given_out + decoder.flush() == tokenizer.decode([lone] * 10)


@pytest.mark.parametrize(
    ("draft", "fits"),
    [
        (byte_level_tokenizer(300), True),
        (byte_level_tokenizer(280), True),  # a smaller vocabulary that begins alike
        (sentencepiece_tokenizer(), False),
        ("{}", True),  # it isn't asked
        (None, True),
    ],
    ids=["the same", "smaller", "other", "broken", "none"],
)
def test_a_draft_of_another_language_is_refused(tmp_path, draft, fits):
    """It would be right and accept nothing. It's told before anything is loaded: there is no config here, and no weight."""
    own, other = tmp_path / "own", tmp_path / "other"
    for each, tokenizer in ((own, byte_level_tokenizer(300)), (other, draft)):
        each.mkdir()
        if tokenizer is not None:
            text = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
            (each / "tokenizer.json").write_text(text)
    told = r"config\.json: no such file" if fits else r"other/tokenizer\.json: .* aren't the target's: token 0 is '<unk>'"
    with pytest.raises(CheckpointError, match=told):
        Engine.from_checkpoint(own, CpuBackend(), draft_dir=other, speculate="draft-model")


def test_errors(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: can't be read as a tokenizer"):
        Tokenizer.from_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_only_the_files_beside_tell_of(tmp_path, kind):
    """Tokens that an edit added there alone, and one that is in the vocabulary already, which it makes a special one."""
    from transformers import AutoTokenizer

    made = KINDS[kind]()
    made.save(str(tmp_path / "tokenizer.json"))
    size, the = made.get_vocab_size(), {"byte-level": "the", "sentencepiece": "\u2581the"}[kind]
    told = {
        str(size): {"content": "<special>", "special": True},
        str(size + 1): {"content": "<spoken>", "lstrip": True},
        str(made.token_to_id(the)): {"content": the, "special": True},
        str(size + 9): "no token",
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": told}))
    ours = Tokenizer.from_checkpoint(tmp_path)
    del told[str(size + 9)]  # transformers fails of it
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": told}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat<special>a", "a <spoken>b", "the the"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == size + 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<later>": size, "<far>": size + 100}))
    older = Tokenizer.from_checkpoint(tmp_path)
    assert (older.token_id("<later>"), older.token_id("<far>"), older.vocab_size) == (size, None, size + 1)
    assert older.encode("a<later>b") == AutoTokenizer.from_pretrained(tmp_path).encode("a<later>b")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json"])
def test_a_broken_file_beside_is_named(tmp_path, name):
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=f"{name}: isn't valid JSON"):
        Tokenizer.from_checkpoint(tmp_path)
