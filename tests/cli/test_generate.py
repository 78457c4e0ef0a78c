"""``outrider generate`` on the bundled model: what it prints, what scripts get, and bad input."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from outrider import Engine, SamplingParams
from outrider.bundled import bundled
from outrider.cli.commands.generate import split_text
from outrider.cli.terminal.report import highlighter

PROMPT = "def read("


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the bundled model and its head, to be spoilt; returns the two directories."""
    for part in ("target", "eagle"):
        shutil.copytree(bundled(part), tmp_path / part)
    return tmp_path / "target", tmp_path / "eagle"


def test_accepted_drafts_are_green_in_a_terminal(monkeypatch):
    """The text of draft tokens alone, and the same text without colours or in a file."""
    engine = Engine.from_checkpoint(bundled("target"), "cpu", draft_dir=bundled("eagle"), speculate="eagle")
    with closing(engine):
        outputs = list(engine.stream(PROMPT, SamplingParams(max_tokens=40)))
        parts = [split_text(output, engine.tokenizer) for output in outputs]
        whole = [engine.tokenizer.decode(output.tokens[: output.drafted]) for output in outputs]
    assert "".join(drafted + own for drafted, own in parts) == "".join(output.text for output in outputs)
    assert [drafted for drafted, _ in parts] == whole
    assert sum(map(bool, whole)) > 3
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert highlighter()("a b") == "\x1b[32ma b\x1b[0m"
        monkeypatch.setenv("NO_COLOR", "1")
        assert highlighter()("a b") == "a b"
    os.close(leader)


def test_the_same_tokens_with_and_without_speculation(outrider):
    common = ("generate", "--prompt", PROMPT, "--max-tokens", "64", "--dtype", "float32", "--json", "--speculate")
    eagle, plain = (outrider(*common, kind).json for kind in ("eagle", "none"))
    assert eagle["token_ids"] == plain["token_ids"]
    assert len(eagle["token_ids"]) == 64
    assert eagle["text"] == plain["text"]
    assert eagle["finish_reason"] == "length"
    assert eagle["backend"] == "cpu"
    assert eagle["acceptance_length"] > 2 > plain["acceptance_length"] == 1
    assert eagle["iterations"] < plain["iterations"] == 63
    assert eagle["tokens_per_s"] > 0


def test_streams_text_and_sums_up(outrider):
    result = outrider("generate", "--prompt", PROMPT, "--max-tokens", "24", "--compare")
    text = outrider("generate", "--prompt", PROMPT, "--max-tokens", "24", "--dtype", "float32", "--json").json["text"]
    assert result.code == 0
    assert result.out == f"{text}\n"
    first, second, last = result.err.splitlines()
    assert re.fullmatch(r"outrider: [\d.]+ tokens/s on cpu in float32, eagle accepts [\d.]+", first)
    assert re.fullmatch(r"outrider: [\d.]+ tokens/s without speculation", second)
    assert last == "outrider: same tokens as non-speculative greedy decoding: yes"


def test_compare_that_differs_is_exit_1(outrider, monkeypatch):
    from outrider.engine.engine import Engine

    honest = Engine.stream
    calls = []

    def stream(self, tokens, params, **options):
        calls.append(1)
        return honest(self, tokens if len(calls) == 1 else tokens[:-1], params, **options)

    monkeypatch.setattr(Engine, "stream", stream)
    result = outrider("generate", "--prompt", PROMPT, "--max-tokens", "24", "--compare")
    assert result.code == 1
    assert "same tokens as non-speculative greedy decoding: no" in result.err
    assert "first difference: at token" in result.err


@pytest.mark.parametrize("spoilt", [False, True])
def test_compare_warns_of_acceptance_near_chance(outrider, checkpoint, spoilt):
    """A head that reads other states than it was trained with: hardly any draft is accepted, and the tokens are the same."""
    target, head = checkpoint
    if spoilt:
        state = load_file(head / "model.safetensors")
        save_file(state | {"fc.weight": state["fc.weight"].flip(1)}, head / "model.safetensors")
    options = ("--model", str(target), "--draft", str(head), "--speculate", "eagle", "--prompt", PROMPT, "--max-tokens", "12")
    result = outrider("generate", *options, "--compare")
    assert result.code == 0
    assert ("hardly any draft was accepted" in " ".join(result.err.split())) is spoilt


def test_prompt_from_a_file(outrider, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    common = ("generate", "--max-tokens", "8", "--json")
    assert outrider(*common, "--prompt-file", str(file)).json["text"] == outrider(*common, "--prompt", PROMPT).json["text"]


def test_a_checkpoint_without_a_tokenizer_serves_token_ids(outrider, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(bundled("target") / name)
    ids = [5, 17, 300, 41]
    common = ("generate", "--model", str(tmp_path), "--max-tokens", "6")
    given = ("--token-ids", ",".join(map(str, ids)))
    expected = outrider("generate", "--model", str(bundled("target")), "--max-tokens", "6", "--json", *given).json
    found = outrider(*common, *given, "--json").json
    assert found["token_ids"] == expected["token_ids"]
    assert (found["text"], expected["text"] != "") == ("", True)
    printed = outrider(*common, *given).out
    assert ",".join(map(str, found["token_ids"])) in printed
    assert "no tokenizer; give the prompt as --token-ids" in outrider(*common, "--prompt", PROMPT).err
    assert "stop strings" in outrider(*common, *given, "--stop", "x").err


def test_a_model_without_a_head_decodes_plainly(outrider):
    result = outrider("generate", "--model", str(bundled("target")), "--prompt", PROMPT, "--max-tokens", "8", "--json").json
    assert result["speculate"] == "none"


def test_the_environment_names_the_backend(outrider, monkeypatch):
    monkeypatch.setenv("OUTRIDER_BACKEND", "no-such-chip")
    result = outrider("generate", "--prompt", PROMPT)
    assert result.code == 1
    assert "no backend named 'no-such-chip'" in result.err
    assert "OUTRIDER_BACKEND asks for it" in result.err
    assert outrider("generate", "--prompt", PROMPT, "--max-tokens", "2", "--backend", "cpu").code == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--prompt", ""], "UsageError", "--prompt is empty"),
        ([], "UsageError", "neither --prompt TEXT nor --prompt-file F"),
        (["--prompt", "a", "--prompt-file", "/dev/null"], "UsageError", "both --prompt TEXT and --prompt-file F"),
        (["--prompt-file", "/no/such/file"], "UsageError", "--prompt-file is '/no/such/file'; there is no such file"),
        (["--prompt", "x = 1\n" * 4000], "RequestError", "don't fit in the context"),
        (["--token-ids", "1,two"], "UsageError", "--token-ids is '1,two'; expected whole numbers"),
        (["--token-ids", "1", "--prompt", "a"], "UsageError", "--token-ids is a prompt, and so are"),
        (["--token-ids", "999999"], "RequestError", "999999"),
        (["--prompt", "a", "--max-tokens", "0"], "UsageError", "--max-tokens is 0"),
        (["--prompt", "a", "--top-p", "0"], "UsageError", "--top-p is 0.0; expected a number above 0"),
        (["--prompt", "a", "--seed", str(2**70)], "UsageError", "--seed is"),
        (
            ["--prompt", "a", "--speculate", "medusa"],
            "UsageError",
            "--speculate is 'medusa'; expected one of eagle, eagle3, peagle",
        ),
        (["--prompt", "a", "--speculate", "suffix+"], "UsageError", "--speculate is 'suffix+'; "),
        (
            ["--prompt", "a", "--speculate", "ngram", "--draft", "."],
            "UsageError",
            "--speculate ngram needs no draft, and --draft names .; leave one of them out",
        ),
        (["--prompt", "a", "--compare", "--temperature", "1"], "UsageError", "--compare compares greedy decoding"),
        (
            ["--prompt", "a", "--backend", "no-such-chip"],
            "UsageError",
            "--backend is 'no-such-chip'; expected one of auto, cpu",
        ),
        (["--prompt", "a", "--backend", "cpu:seed=1"], "ConfigError", "has no option 'seed'"),
        (["--prompt", "a", "--backend", "cpu:1"], "BackendLoadError", "there is only device 0"),
        (["--prompt", "a", "--backend", ":"], "UsageError", "isn't a name"),
        (["--prompt", "a", "--model", "/no/such/model"], "UsageError", "--model is '/no/such/model'"),
    ],
)
def test_bad_input(outrider, arguments, kind, message):
    result = outrider("generate", *arguments)
    assert (result.code, result.out) == (2 if kind == "UsageError" else 1, "")
    assert message in result.err
    error = outrider("generate", *arguments, "--json").json["error"]
    assert error["type"] == kind
    assert message in error["message"]


def test_not_text(outrider, tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"a\xff")
    result = outrider("generate", "--prompt-file", str(file))
    assert result.code == 2
    assert "not UTF-8 text" in result.err


def test_installed_but_unable(outrider, install):
    install("chip", usable=False, reason="no device found", advice="plug one in")
    install("broken", "import no_such_vendor_package")
    install("chop", priority=1)
    for name, kind, message in (
        ("chip", "BackendLoadError", "installed but can't run here: no device found; plug one in"),
        ("broken", "BackendLoadError", "no_such_vendor_package"),
        ("auto", "AmbiguousBackend", "'chop' (outrider-chop 1.0)"),
    ):
        result = outrider("generate", "--prompt", "a", "--backend", name, "--json")
        assert result.code == 1
        assert result.json["error"]["type"] == kind
        assert message in result.json["error"]["message"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not run: there is no /dev/full")
@pytest.mark.parametrize("arguments", [[], pytest.param(["--json"], marks=pytest.mark.slow)])
@pytest.mark.slow
def test_full_disk_while_streaming(child, arguments):
    with open("/dev/full", "w") as full:
        result = child("generate", "--prompt", PROMPT, "--max-tokens", "8", *arguments, stdout=full)
    assert result.code == 1
    assert "no space left on the device" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not run: there is no /dev/full")
def test_a_full_standard_error_takes_no_text_with_it(child):
    with open("/dev/full", "w") as full:
        result = child("generate", "--prompt", PROMPT, "--max-tokens", "8", stderr=full, PYTHONUNBUFFERED="")
    assert result.code == 0
    assert len(result.out) > 10


@pytest.mark.slow
def test_bars_and_their_control_codes_are_for_terminals(child):
    """CI systems set FORCE_COLOR, with which rich counts a pipe as a terminal."""
    result = child("generate", "--prompt", PROMPT, "--max-tokens", "2", FORCE_COLOR="1")
    assert result.code == 0
    assert "tokens/s on cpu" in result.err
    assert "loading" not in result.err
    assert "\x1b" not in result.err


def interrupt(process: subprocess.Popen[str], path: Path, characters: int) -> str:
    """Ctrl-C once that much has been streamed; returns what it says on standard error."""
    deadline = time.monotonic() + 240
    while path.stat().st_size < characters:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=240)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler then says where it hangs
        pytest.fail(f"still running after Ctrl-C:\n{process.communicate()[1]}")


def test_ctrl_c_while_streaming_keeps_what_was_streamed(tmp_path):
    path = tmp_path / "out.txt"
    command = [sys.executable, "-X", "faulthandler", "-m", "outrider.cli.main", "generate"]
    arguments = ["--prompt", PROMPT, "--max-tokens", "2000"]
    with (
        path.open("w") as output,
        subprocess.Popen([*command, *arguments], stdout=output, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            errors = interrupt(process, path, 40)
        finally:
            process.kill()
    assert process.returncode == 130
    (said,) = errors.splitlines()
    assert said.startswith("outrider: interrupted after ")
    text = path.read_text()
    assert len(text) > 40
    assert text.endswith("\n")


def test_interrupted_json_is_one_object_with_what_there_is(outrider, monkeypatch):
    from outrider.engine.engine import Engine

    honest = Engine.stream

    def stream(self, tokens, params, **options):
        yield from list(honest(self, tokens, params, **options))[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", stream)
    result = outrider("generate", "--prompt", PROMPT, "--json")
    assert result.code == 130
    assert result.json["error"]["type"] == "Interrupted"
    assert "interrupted after" in result.json["error"]["message"]
    assert result.json["token_ids"]
    assert result.json["text"]
