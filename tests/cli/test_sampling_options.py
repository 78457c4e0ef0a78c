"""``outrider generate`` with sampling options: they reach the engine, and bad values are refused by name."""

import json
import re

import pytest

COMMON = ("generate", "--prompt", "def read(", "--dtype", "float32", "--max-tokens", "24", "--json")


def test_each_option_changes_what_is_drawn(outrider):
    hot = (*COMMON, "--temperature", "1.2", "--seed", "5")
    base = outrider(*hot).json["token_ids"]
    assert outrider(*hot, "--top-k", "0", "--top-p", "1").json["token_ids"] == base
    greedy = outrider(*COMMON).json["token_ids"]
    assert outrider(*hot, "--top-k", "1").json["token_ids"] == greedy
    assert outrider(*hot, "--top-p", "0.0001").json["token_ids"] == greedy


def test_a_stop_string_ends_the_text(outrider):
    text = outrider(*COMMON).json["text"]
    stop = text[12:17]
    start = text.find(stop)
    result = outrider(*COMMON, "--stop", "never there", "--stop", stop).json
    assert result["text"] == text[:start]
    assert result["finish_reason"] == "stop"
    printed = outrider(*COMMON[:-1], "--stop", stop).out
    assert printed.startswith(text[:start] + "\n")


def test_an_output_follows_a_guide(outrider, tmp_path):
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
    (tmp_path / "schema.json").write_text(schema)
    (tmp_path / "grammar.gbnf").write_text('root ::= "[" [0-9]{2} "]"')
    for given in (schema, str(tmp_path / "schema.json")):
        found = outrider(*COMMON, "--max-tokens", "60", "--guide", f"json-schema={given}", "--compare").json
        assert json.loads(found["text"])["ok"] in (True, False)
        assert found["same_tokens"] is True
    assert re.fullmatch(r"\[\d\d\]", outrider(*COMMON, "--guide", f"grammar={tmp_path / 'grammar.gbnf'}").json["text"])
    assert re.fullmatch("[xy]{4}", outrider(*COMMON, "--guide", "regex=[xy]{4}").json["text"])
    assert outrider(*COMMON, "--guide", "choice=red", "--guide", "choice=dark blue").json["text"] in ("red", "dark blue")
    assert outrider(*COMMON, "--guide", "json-object").json["text"].startswith("{")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--guide", "regex=(", "--guide", "choice=a"), "an output matches one guide"),
        (("--guide", "regex=a", "--guide", "regex=b"), "an output matches one guide"),
        (("--guide", "regex=("), "isn't a regular expression"),
        (("--guide", "regex"), "expected json-object, or a kind with its value"),
        (("--guide", "json-object=x"), "expected json-object, or a kind with its value"),
        (("--guide", "yaml=a"), "has the kind 'yaml'; expected one of json-object"),
        (("--guide", 'json-schema={"not": {}}'), "'not' at #"),
        (("--guide", "json-schema=missing.json"), "missing.json"),
    ],
)
def test_a_guide_that_is_wrong(outrider, options, message):
    result = outrider(*COMMON, *options)
    assert (result.code, message in result.out + result.err) == (2, True), result.out
