"""``outrider draft-vocabulary``: the commonest tokens of a text, in a file that drafts are drawn from."""

import json
from collections import Counter

import pytest

from outrider import SamplingParams
from outrider.bundled import bundled
from outrider.cli.options.models import Speculation, load
from outrider.model import DraftVocabulary, Tokenizer

TEXT = "def add(first, second):\n    return first + second\n" * 3 + "# größer\n"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_commonest_tokens_come_first_and_the_end_of_text_is_among_them(outrider, text, tmp_path):
    out = tmp_path / "some.json"
    said = outrider("draft-vocabulary", str(text), "--size", "12", "--out", str(out), "--json").json
    ids = Tokenizer.from_checkpoint(bundled("target")).encode(TEXT, special_tokens=False)
    counts, kept = Counter(ids), json.loads(out.read_text())
    assert kept[0] == 0  # the bundled model's end of text
    assert [counts[token] for token in kept[1:]] == [count for _, count in counts.most_common(11)]
    assert (said["tokens"], said["counted"], said["different"]) == (12, len(ids), len(counts))
    assert said["share"] == pytest.approx(sum(counts[token] for token in kept) / len(ids))
    assert DraftVocabulary.load(out).ids.tolist() == sorted(kept)


def test_a_text_of_few_tokens_gives_few_and_several_files_count_together(outrider, text, tmp_path):
    out = tmp_path / "some.json"
    once = outrider("draft-vocabulary", str(text), "--size", "2000", "--out", str(out), "--json").json
    assert once["tokens"] == once["different"] + 1
    assert once["share"] == 1
    twice = outrider("draft-vocabulary", str(text), str(text), "--size", "2000", "--out", str(out), "--json").json
    assert (twice["counted"], twice["tokens"]) == (2 * once["counted"], once["tokens"])
    shown = outrider("draft-vocabulary", str(text), "--size", "2000", "--out", str(out)).out
    assert "of 2048 tokens, 100.00% of the" in " ".join(shown.split())


def test_a_long_text_is_counted_piece_by_piece(outrider, tmp_path, monkeypatch):
    long, out = tmp_path / "long.txt", tmp_path / "some.json"
    long.write_text(TEXT * 40, encoding="utf-8")
    given = ("draft-vocabulary", str(long), "--size", "99", "--out", str(out), "--json")
    whole = outrider(*given).json
    monkeypatch.setattr("outrider.cli.commands.preparation._PIECE_CHARACTERS", 64)
    pieces = outrider(*given).json
    # A line's end and the next one's indentation are one token, and two where a piece ends between them.
    assert 0 < pieces["counted"] - whole["counted"] <= len(TEXT) * 40 // 64
    assert pieces["different"] - whole["different"] <= 1


def test_an_engine_drafts_from_the_written_file(outrider, text, tmp_path):
    out = tmp_path / "some.json"
    outrider("draft-vocabulary", str(text), "--size", "99", "--out", str(out))
    plain = outrider(
        "generate", "--backend", "cpu", "--prompt", "def add(", "--max-tokens", "12", "--json", "--speculate", "none"
    )
    drafting = Speculation.with_defaults(None, model=None, draft=None, draft_tokens=4, draft_vocabulary=str(out))
    engine = load("cpu", drafting, max_requests=1)
    (drafted,) = engine.generate([engine.tokenizer.encode("def add(")], SamplingParams(max_tokens=12))
    assert list(drafted.token_ids) == plain.json["token_ids"]
    (choice,) = (each for each in engine.chosen if each.name == "draft_vocabulary")
    assert str(out) in choice.why
    engine.close()


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ("nowhere.txt", "--out", "x.json"), "nowhere.txt can't be read (No such file or directory)"),
        (1, (".", "--out", "x.json"), "can't be read (Is a directory)"),
        (1, ("raw", "--out", "x.json"), "isn't text in UTF-8"),
        (1, ("empty", "--out", "x.json"), "there is no token in"),
        (2, ("text.py", "--out", "x.txt"), "expected a file that ends in .json"),
        (2, ("x.json", "--out", "./x.json"), "--out is 'x.json', another file of this command"),
        (2, ("text.py", "--out", "/nowhere/x.json"), "nothing can be written in '/nowhere'"),
        (2, ("text.py", "--out", "x.json", "--model", "nowhere"), "nowhere"),
    ],
)
def test_bad_input(outrider, text, tmp_path, code, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").touch()
    if arguments[0] == "x.json":
        (tmp_path / "x.json").write_text("text")
    result = outrider("draft-vocabulary", *arguments, "--size", "9")
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert not (tmp_path / "x.json").exists() or (tmp_path / "x.json").read_text() == "text"
