"""Each option of each command refuses wrong values while the command line is parsed, before torch is imported."""

import json
import resource
import subprocess
import sys
from typing import get_args

import pytest

from outrider.cli.options import option_values
from outrider.cli.options.option_values import UsageError
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS

PARSE_ALL = """
import json, sys, typer
from outrider.cli.commands.table import commands
from outrider.cli.commands.table import group

def each_command(command, path):
    if not hasattr(command, "targets"):
        yield path, command
        return
    for name in command.list_commands(None):
        yield from each_command(command.get_command(None, name), (*path, name))

def answer(command, path, option, value):
    try:
        with command.make_context(" ".join(path), [option, value], obj=()):
            return None
    except Exception as error:
        if type(error).__name__ == "MissingParameter":  # of another option: this one is accepted
            return None
        return getattr(error, "exit_code", 2 if type(error).__name__ == "UsageError" else 1), (
            error.format_message() if hasattr(error, "format_message") else str(error))

found = []
for path, command in each_command(typer.main.get_command(group(commands(), help="")), ()):
    for each in command.params:
        if each.param_type_name != "option" or getattr(each, "is_flag", False):
            continue
        option = each.opts[0]
        answers = {value: answer(command, path, option, value) for value in WRONG}
        found.append({"command": " ".join(path), "option": option, "metavar": each.metavar, "default": str(each.default),
                      "answers": answers})
print(json.dumps({"options": found, "torch": "torch" in sys.modules}))
"""
WRONG = ("a\udcff", "", "nan", "-inf", "-70000", "eagl", "1e400")
TEXTS = {"TEXT", "NAME", "ADDRESS", "URL", "WORD", "ID", "LABELS", "SCHEDULE", "DIR", "FILE", "KIND[=VALUE]", "NAME|every"}
"""Metavars of values that may be any text: names of things that are looked up later, and of files to write."""
NUMBERS = {"N", "X"}
WIDE = {"--seed": ("-70000",)}
"""Values in the table that these options accept."""


@pytest.fixture(scope="module")
def parsed():
    code = f"WRONG = {WRONG!r}\n{PARSE_ALL}"
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_no_option_needs_torch_to_be_checked(parsed):
    assert not parsed["torch"]
    assert len(parsed["options"]) > 200
    assert {"generate", "serve", "chat", "bench decode", "conform", "explore"} <= {
        each["command"] for each in parsed["options"]
    }


def test_every_option_refuses_wrong_values(parsed):
    """Texts that aren't UTF-8 or are empty, numbers that aren't finite, and all other values that aren't free text."""
    accepted = []
    for each in parsed["options"]:
        for value, answer in each["answers"].items():
            label = f"{each['command']} {each['option']} {value!r}"
            free = each["metavar"] in TEXTS and value and "\udcff" not in value
            optional = not value and each["default"] == ""
            wide = value in WIDE.get(each["option"], ()) and each["command"] in ("generate", "chat")
            if answer is None:
                if not (free or optional or wide):
                    accepted.append(label)
                continue
            code, message = answer
            assert code == 2, (label, message)
            assert each["option"] in message, (label, message)
    assert not accepted


def test_types_are_shown_in_one_way(parsed):
    metavars = {each["metavar"] for each in parsed["options"]}
    assert None not in metavars
    assert "|".join(option_values.DTYPES) in metavars
    numbers = {each["metavar"] for each in parsed["options"] if each["option"] in ("--seed", "--max-tokens", "--iterations")}
    assert numbers == {"N"}


def test_the_names_and_sizes_are_those_of_the_engine():
    from outrider.engine.config import DTYPES, KV_DTYPES, SIZES
    from outrider.model.config.shapes import SHAPES
    from outrider.model.heads.draft_output import DRAFT_FORMATS
    from outrider.model.quantization import QuantizedMode
    from outrider.serve.api.model_formats import REASONING_FORMATS, TOOL_FORMATS

    assert set(option_values.DTYPES) == set(DTYPES)
    assert set(option_values.KV_DTYPES) == set(KV_DTYPES)
    assert set(option_values.WEIGHT_FORMATS) == set(DRAFT_FORMATS) == set(WEIGHT_FORMATS)
    assert set(option_values.SHAPES) == set(SHAPES)
    assert set(option_values.TOOL_FORMATS) == set(TOOL_FORMATS)
    assert set(option_values.REASONING_FORMATS) == set(REASONING_FORMATS)
    for annotation, values in (("Quantized", get_args(QuantizedMode)),):
        assert problem_of(annotation, "zz") is not None
        assert all(problem_of(annotation, value) is None for value in values)
    for annotation, name in (
        ("DraftTokens", "draft_tokens"),
        ("DraftTopk", "draft_topk"),
        ("MaxContext", "max_context"),
        ("PageSize", "page_size"),
        ("MaxRequests", "max_requests"),
    ):
        least, most = SIZES[name]
        assert [problem_of(annotation, size) is None for size in (least - 1, least, most, most + 1)] == [
            False,
            True,
            True,
            False,
        ], name


def problem_of(annotation, value):
    """The message with which the option of outrider.cli.options.models refuses a value, or None."""
    from types import SimpleNamespace

    from outrider.cli.options import models

    (declared,) = getattr(models, f"{annotation}Option").__metadata__
    try:
        declared.callback(SimpleNamespace(opts=["--x"], default=None), value)
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generat",), "did you mean 'generate'?"),
        (("bench", "decod"), "did you mean 'decode'?"),
        (("generate", "hi"), "did you mean --prompt 'hi'?"),
        (("serve", "owner/model"), "did you mean --model 'owner/model'?"),
        (("generate", "--prompt", "a", "--speculate", "eagl"), "did you mean 'eagle'?"),
        (("generate", "--prompt", "a", "--backend", "cpuu:1"), "did you mean 'cpu'?"),
        (("generate", "--prompt", "a", "--dtype", "bfloat"), "did you mean 'bfloat16'?"),
        (("bench", "peers", "--phases", "decode,prefil"), "did you mean 'prefill'?"),
        (("explore", "decode", "--drop-fence", "pages_fre"), "did you mean 'pages_free'?"),
    ],
)
def test_a_close_name_is_suggested(outrider, arguments, message):
    result = outrider(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_wrong_value_ends_at_once(child):
    began = cpu_seconds_of_children()
    result = child("generate", "--prompt", "a", "--temperature", "-1")
    assert result.code == 2
    assert "--temperature is -1.0; expected a number of at least 0" in result.err
    assert cpu_seconds_of_children() - began < 1


def cpu_seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


SERVE = """
import sys
sys.modules["torch"] = None  # an import of torch fails
from outrider.cli.main import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--role", "prefill", "--api-key-file"),
        ("--role", "decode", "--prefill-server", "127.0.0.1:1", "--api-key-file"),
        ("--decode-server", "127.0.0.1:1", "--decode-secret-file"),
    ],
)
def test_a_secret_is_checked_without_torch(tmp_path, arguments):
    (tmp_path / "secret").write_text("short")
    command = [sys.executable, "-c", SERVE, *arguments, str(tmp_path / "secret")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "has 5 bytes; expected a secret of at least 16" in done.stderr
