"""``outrider generate`` with sampling options: they reach the engine, and bad values are refused by name."""

import json
import re

import pytest

COMMON = ("generate", "--prompt", "def read(", "--dtype", "float32", "--max-tokens", "24", "--json")


def test_each_option_changes_what_is_drawn(outrider):
    hot = (*COMMON, "--temperature", "1.2", "--seed", "5")
    base = outrider(*hot).json["token_ids"]
    assert outrider(*hot, "--top-k", "0", "--top-p", "1", "--min-p", "0").json["token_ids"] == base
    greedy = outrider(*COMMON).json["token_ids"]
    assert outrider(*hot, "--top-k", "1").json["token_ids"] == greedy
    assert outrider(*hot, "--top-p", "0.0001").json["token_ids"] == greedy
    assert outrider(*hot, "--min-p", "1").json["token_ids"] == greedy
    for option in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert outrider(*COMMON, option, "2").json["token_ids"] != greedy


def test_a_stop_string_ends_the_text(outrider):
    text = outrider(*COMMON).json["text"]
    stop = text[12:17]
    start = text.find(stop)
    result = outrider(*COMMON, "--stop", "never there", "--stop", stop).json
    assert result["text"] == text[:start]
    assert result["finish_reason"] == "stop"
    printed = outrider(*COMMON[:-1], "--stop", stop).out
    assert printed.startswith(text[:start] + "\n")


def test_logprobs(outrider):
    result = outrider(*COMMON, "--logprobs", "2").json
    assert [entry["token"] for entry in result["logprobs"]] == result["token_ids"]
    for entry in result["logprobs"]:
        assert entry["top"][0] == [entry["token"], entry["logprob"]], "greedy takes the likeliest"
        assert len(entry["top"]) == 2


def test_an_output_follows_a_guide(outrider, tmp_path):
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
    (tmp_path / "schema.json").write_text(schema)
    (tmp_path / "grammar.gbnf").write_text('root ::= "[" [0-9]{2} "]"')
    for given in (schema, str(tmp_path / "schema.json")):
        found = outrider(*COMMON, "--max-tokens", "60", "--json-schema", given, "--compare").json
        assert json.loads(found["text"])["ok"] in (True, False)
        assert found["same_as_plain"] is True
    assert re.fullmatch(r"\[\d\d\]", outrider(*COMMON, "--grammar", str(tmp_path / "grammar.gbnf")).json["text"])
    assert re.fullmatch("[xy]{4}", outrider(*COMMON, "--regex", "[xy]{4}").json["text"])
    assert outrider(*COMMON, "--choice", "red", "--choice", "dark blue").json["text"] in ("red", "dark blue")
    assert outrider(*COMMON, "--json-object").json["text"].startswith("{")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--regex", "(", "--choice", "a"), "--regex and --choice given"),
        (("--regex", "("), "isn't a regular expression"),
        (("--json-schema", '{"not": {}}'), "'not' at #"),
        (("--json-schema", "missing.json"), "missing.json"),
    ],
)
def test_a_guide_that_is_wrong(outrider, options, message):
    result = outrider(*COMMON, *options)
    assert (result.code, message in result.out + result.err) == (1, True), result.out


def test_samples(outrider):
    hot = (*COMMON, "--temperature", "1", "--seed", "5")
    result = outrider(*hot, "--n", "3").json
    assert len({tuple(sample["token_ids"]) for sample in result["samples"]}) == 3
    assert result["samples"][0]["token_ids"] == outrider(*hot).json["token_ids"]
    assert "--- sample 2" in outrider(*[option for option in hot if option != "--json"], "--n", "3").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", "0"), "top_p is 0.0; expected a number above 0"),
        (("--top-k", "-1"), "top_k is -1; expected"),
        (("--n", "2"), "n is 2 at temperature 0"),
        (("--logprobs", "21"), "logprobs is 21, this engine reports 20"),
        (("--stop", ""), "stop is"),
        (("--compare", "--n", "2"), "--n is 2"),
    ],
)
def test_bad_values(outrider, options, message):
    result = outrider(*COMMON, *options)
    assert result.code == 1
    assert message in result.json["error"]["message"]
