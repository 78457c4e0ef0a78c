"""Without the extra, the core says what to install."""

import json
import logging
import socket
import warnings

import pytest

from outrider import errors
from outrider.cli.main import main
from outrider.cli.terminal.environment import spans_from_environment
from outrider.device import ConfigError
from outrider.engine.requests.sampling import TokenLogprobs
from outrider.model import Tokenizer
from outrider.serve import config
from outrider.serve.api.service import TextOffsets, completion_logprobs
from outrider.serve.command import _read_tool_format
from outrider.serve.http import request_middleware
from tiny_checkpoints import sentencepiece_tokenizer


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name in ("fastapi", "uvicorn") else object())
    with pytest.raises(
        ConfigError, match=r"needs fastapi, uvicorn, which are not installed; run: pip install 'outrider\[serve\]'"
    ):
        config.require_serve()


def test_the_command_says_so_too(monkeypatch, capsys):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "fastapi" else object())
    assert main(["serve"]) == 1
    assert "pip install 'outrider[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--role", "router"], "--role"),
        (["--role", "decode"], "--prefill-server"),
        (["--role", "prefill", "--chat-template", "/dev/null"], "--chat-template has no effect with --role prefill"),
        (["--role", "prefill", "--tensor-parallel", "2"], "--tensor-parallel has no effect with --role prefill"),
        (["--role", "prefill", "--expert-parallel"], "--expert-parallel has no effect with --role prefill"),
        (["--transport", "nixl"], "--transport has no effect with --role all"),
        (["--tool-format", "odd"], "hermes"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
    ],
)
def test_options_that_are_wrong(options, said, capsys):
    assert main(["serve", *options]) in (1, 2)
    assert said in capsys.readouterr().err


@pytest.fixture
def unloaded(monkeypatch):
    """Fails where a command begins to load a model."""

    def load(*arguments, **options):
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr("outrider.serve.connection.engine_process.EngineProcess", load)
    monkeypatch.setattr("outrider.cli.options.option_records.load", load)


@pytest.mark.parametrize("role", ["all", "prefill", "decode"])
@pytest.mark.parametrize("taken", [True, False])
def test_a_place_where_nothing_can_listen_is_found_before_the_model_is_loaded(unloaded, role, taken, tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("k" * 16)
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = ("127.0.0.1", other.getsockname()[1]) if taken else ("192.0.2.1", 0)
        given = ["serve", "--role", role, "--host", host, "--port", str(port), "--api-key-file", str(keys)]
        given += ["--prefill-server", "127.0.0.1:1"] if role == "decode" else []
        assert main(given) == 2
    said = capsys.readouterr().err
    assert f"nothing can listen at {host}, port {port}: " in said
    assert ("Address already in use" if taken else "Cannot assign requested address") in said


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("chat_template.jinja", "{% for", "can't be read as Jinja"),
        ("chat_template.jinja", " ", "the chat template is empty"),
        ("tokenizer.json", "{", "tokenizer.json"),
    ],
)
def test_broken_words_of_a_checkpoint_are_found_before_its_weights_are_loaded(
    unloaded, bundled_target, tmp_path, file, text, said, capsys
):
    for each in bundled_target.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / file).write_text(text)
    assert main(["serve", "--port", "0", "--model", str(tmp_path), "--speculate", "none"]) == 1
    assert said in capsys.readouterr().err


def test_a_warning_is_a_line_of_the_log(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        request_middleware.log_to_stderr("json")
        warnings.warn("a library's word", FutureWarning, stacklevel=1)
        logging.captureWarnings(False)
    line = json.loads(capsys.readouterr().err)
    assert line["level"] == "warning"
    assert "FutureWarning: a library's word" in line["event"]


@pytest.mark.parametrize("data", ["é日🙂a".encode(), b"\x80\x80a", b"\xf0\x9fa\xe6b", b"\xff\xf0\x9f\x99\x82\xf0a"])
def test_offsets_count_the_characters_before_a_token(bundled_target, data):
    tokenizer = Tokenizer.from_checkpoint(bundled_target)
    of_byte = {tokenizer.bytes_of(token): token for token in range(tokenizer.vocab_size)}
    tokens = [of_byte[bytes([byte])] for byte in data]
    tokens[2:2] = tokenizer.special_tokens  # without text
    offsets = TextOffsets(tokenizer, [])
    assert [offsets.add(token) for token in tokens] == [len(tokenizer.decode(tokens[:end])) for end in range(len(tokens))]


def test_offsets_after_a_run_of_bytes_count_the_text_of_the_run(tmp_path):
    """Each byte of an invalid run is one character."""
    sentencepiece_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    tokens = [tokenizer.token_id(each) for each in ("▁a", "<0xF0>", "<0x9F>", "a", "<0xC3>", "<0xA9>", "a", "a")]
    offsets = TextOffsets(tokenizer, [tokenizer.token_id("a")])
    assert [offsets.add(token) for token in tokens] == [0, 2, 3, 4, 5, 6, 6, 7]


def test_logprobs_of_impossible_tokens_are_json(bundled_target):
    tokenizer = Tokenizer.from_checkpoint(bundled_target)
    logprobs = completion_logprobs(tokenizer, [TokenLogprobs(5, float("-inf"), ((6, float("-inf")),))], [7])
    assert json.loads(json.dumps(logprobs, allow_nan=False))["text_offset"] == [7]


def test_an_empty_response_template_is_an_error(bundled_target):
    from outrider.serve.api.prompt_builder import PromptResources

    with pytest.raises(ConfigError, match="must be a non-empty dict"):
        PromptResources(bundled_target, response_template={})


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    from outrider.serve.command import read_api_keys

    file = tmp_path / "keys"
    file.write_text("\ufeff# ours\none\n\n two \n", encoding="utf-8")
    monkeypatch.setenv("OUTRIDER_API_KEY", "three, four")
    assert read_api_keys(file) == ("three", "four", "one", "two")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no API key"):
        read_api_keys(file)
    monkeypatch.setenv("OUTRIDER_API_KEY", "")
    assert read_api_keys(None) == ()
    monkeypatch.setenv("OUTRIDER_API_KEY", " ,")
    with pytest.raises(ConfigError, match="OUTRIDER_API_KEY is ' ,', which has no key"):
        read_api_keys(None)


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("none", False), ("otlp", True)])
def test_open_telemetry_s_variable_turns_spans_on(monkeypatch, value, wanted):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", value)
    assert spans_from_environment() is wanted


def test_another_exporter_of_spans_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER is 'zipkin'; expected otlp"):
        spans_from_environment()


def test_a_tool_format_is_a_name_or_a_file(tmp_path):

    file = tmp_path / "own.json"
    file.write_text('{"fields": {}}')
    assert _read_tool_format("hermes") == ("hermes", None)
    assert _read_tool_format(str(file)) == (None, {"fields": {}})
    file.write_text("[]")
    with pytest.raises(ConfigError, match="has a list; expected a JSON object"):
        _read_tool_format(str(file))
