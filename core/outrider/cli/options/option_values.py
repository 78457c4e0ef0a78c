"""Values that options accept, one check, metavar and message for each kind, and the options that most commands have.

The checks run while the command line is parsed. None needs torch, so a wrong value ends a command before anything is loaded.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from outrider.bundled import SMOLLM2_HEADS
from outrider.cli.terminal.files import output_problem
from outrider.device.errors import ConfigError, OutriderError
from outrider.device.plugin import ENTRY_POINT_GROUP
from outrider.errors import RequestError, shown
from outrider.registry.backends import AUTO, parse_spec
from outrider.registry.plugins import installed_entry_points

GENERAL = "General"
"""Heading of the options that every command has. They come last in the help."""
_HEADINGS: Mapping[str, str] = MappingProxyType(
    {
        "Sampling": "--temperature --top-k --top-p --stop --guide",
        "Speculation": "--draft --draft-tokens --draft-topk --draft-length --draft-layers --draft-weights "
        "--draft-vocabulary --accept-length",
        "Engine": "--dtype --kv-dtype --kv-memory --page-size --max-context --max-requests --prefill-chunk --mode --graphs "
        "--overlap --exact --quantize --quantized --through-transformers --trust-remote-code",
        "Server": "--served-model-name --api-key-file --allow-origin --chat-template --tool-format --reasoning-format "
        "--kv-events --drain-seconds",
        "Prefill and decode in separate processes": "--role --prefill-server --decode-server --decode-secret-file "
        "--transport",
        "Several devices": "--tensor-parallel --data-parallel --expert-parallel",
        GENERAL: "--json --verbose",
    }
)
"""Headings of the help, and the options below each. All other options of a command come first."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
KV_DTYPES = ("auto", "plain", "fp8")
WEIGHT_FORMATS = ("fp8", "fp8-tensor", "fp8-block", "int8", "int4", "int4-zeros", "int4-32", "mxfp4")
TOOL_FORMATS = (
    *("deepseek", "functiongemma", "gemma", "glm", "harmony", "hermes", "json", "kimi", "kimi-k3", "lfm2", "llama3"),
    *("minimax", "minimax-m3", "mistral", "none", "pythonic", "qwen3", "qwen3-coder", "qwen3-xml", "seed"),
)
REASONING_FORMATS = ("gemma", "harmony", "kimi-k3", "minimax-m3", "mistral", "none", "seed", "think")
SHAPES = (
    *("gpt-oss-20b", "gpt-oss-120b"),
    *("llama-2-7b", "llama-2-13b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b", "mistral-7b"),
    *("mixtral-8x7b", "phi-3-mini", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"),
    *("qwen2.5-72b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b"),
    *("qwen3.5-27b", "qwen3.5-35b-a3b", "tiny"),
)
_MAX_INT = 2**31 - 1
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?(:[\w./-]+\.(gguf|GGUF))?")


class UsageError(ConfigError):
    """Raised for a wrong command line. The exit code is 2."""


@contextmanager
def checking_options() -> Generator[None]:
    """Turn errors of the scope into :class:`UsageError`: the scope checks options and files, and loads nothing."""
    try:
        yield
    except (ConfigError, RequestError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; check the name and the directories before it") from error


@dataclass(frozen=True, slots=True)
class Value:
    """A kind of option value, with its check and its name in the help. ``problem`` returns what is wrong with a value, or
    None for a valid one.
    """

    metavar: str
    problem: Callable[[Any], str | None] = lambda value: None
    choices: Sequence[str] = ()
    """Values that shell completion offers."""


def option(*names: str, value: Value | None = None, help: str = "", **others: Any) -> Any:
    """Return the declaration of an option for ``Annotated``. ``value`` is None for a flag."""
    name = names[0].partition("/")[0]
    heading = next((heading for heading, options in _HEADINGS.items() if name in options.split()), None)
    if value is None:
        return typer.Option(*names, rich_help_panel=heading, help=help, **others)
    kind = value

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is not None and (problem := kind.problem(each)):
                raise UsageError(f"{parameter.opts[0]} is {_shown(each)}; {problem}")
        return value

    if kind.choices:
        others["autocompletion"] = lambda incomplete: [each for each in kind.choices if each.startswith(incomplete)]
    return typer.Option(*names, metavar=kind.metavar, callback=check, rich_help_panel=heading, help=help, **others)


def _shown(value: object) -> str:
    return shown(str(value) if isinstance(value, Path) else value)


def closest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for the end of a message, such as ``; did you mean 'eagle'?``, or an empty text."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def text(metavar: str = "TEXT") -> Value:
    """Return the kind of value that accepts every text."""
    return Value(metavar)


def whole(least: int = 1, most: int = _MAX_INT) -> Value:
    """Return the kind of value that accepts whole numbers from ``least`` to ``most``."""

    def problem(given: int) -> str | None:
        if least <= given <= most:
            return None
        only_least = most == _MAX_INT and given < least
        return f"expected a whole number {f'of at least {least}' if only_least else f'from {least} to {most}'}"

    return Value("N", problem)


def number(least: float, most: float = math.inf, *, above: bool = False) -> Value:
    """Return the kind of value that accepts finite numbers from ``least`` to ``most``. ``above`` excludes
    ``least`` itself.
    """
    expected = f"expected a number {'above' if above else 'of at least'} {least:g}"
    expected += "" if most == math.inf else f", at most {most:g}"

    def problem(given: float) -> str | None:
        valid = math.isfinite(given) and (least < given if above else least <= given) and given <= most
        return None if valid else expected

    return Value("X", problem)


def one_of(*names: str, metavar: str | None = None) -> Value:
    """Return the kind of value that accepts one of ``names``. ``metavar`` stands for names that are too many for the help."""
    return Value(metavar or "|".join(names), lambda given: None if given in names else _expected(given, names), names)


def _expected(given: str, names: Sequence[str]) -> str:
    return f"expected one of {', '.join(names)}{closest(given, names)}"


def parsed(metavar: str, parse: Callable[[str], object]) -> Value:
    """Return the kind of value that accepts texts which ``parse`` accepts. The message of its error is the problem."""

    def problem(given: str) -> str | None:
        try:
            parse(given)
        except OutriderError as error:
            return str(error)
        return None

    return Value(metavar, problem)


def installed_plugin(entry_points: str, *names: str, prefix: str = "", metavar: str = "NAME") -> Value:
    """Return the kind of ``names`` and the plugins of a group of entry points, also after ``prefix``. Loads no plugin.

    Options of the plugin may follow its name and a colon.
    """

    def problem(given: str) -> str | None:
        try:
            name = parse_spec(given.removeprefix(prefix)).name
        except ConfigError as error:
            return str(error)
        installed = installed_entry_points(entry_points)
        known = dict.fromkeys((*names, *sorted({point.name for point in installed.entry_points})))
        return None if name in known else "; ".join((_expected(name, list(known)), *installed.notes))

    return Value(metavar, problem, names)


def _problem_of_checkpoint(given: Path) -> str | None:
    if given.expanduser().exists() or _REPOSITORY.fullmatch(str(given)):
        return None
    return "expected a directory or a GGUF file that exists, or OWNER/NAME on the Hugging Face Hub"


def _problem_of_draft(given: Path) -> str | None:
    problem = None if str(given) in SMOLLM2_HEADS else _problem_of_checkpoint(given)
    return problem and f"{problem}, or a bundled head: {', '.join(SMOLLM2_HEADS)}"


def _problem_of_input(given: Path) -> str | None:
    if given.is_dir():
        return "is a directory; name a file"
    if str(given) != "-" and not given.exists():
        return "there is no such file; check the name and the directories before it"
    return None


def _problem_of_directory(given: Path) -> str | None:
    return "is a file; name a directory" if given.exists() and not given.is_dir() else None


def _problem_of_vocabulary(given: str) -> str | None:
    if given.isascii() and given.isdigit():
        return None if 0 < int(given[:20]) <= _MAX_INT else "expected a number of tokens of at least 1"
    return _problem_of_input(Path(given))


def _problem_of_shape(given: str) -> str | None:
    name, _, ranks = given.rpartition("/")
    if given in SHAPES or (name in SHAPES and ranks.isdecimal()) or Path(given).exists():
        return None
    return f"{_expected(given, SHAPES)}; or one of them and /RANKS, or the path of a config.json"


BACKEND = installed_plugin(ENTRY_POINT_GROUP, AUTO, metavar="NAME[:DEVICE]")
DRAFT_CHECKPOINT = Value("DIR|OWNER/NAME|HEAD", _problem_of_draft)
CHECKPOINT = Value("DIR|FILE.gguf|OWNER/NAME", _problem_of_checkpoint)
INPUT_FILE = Value("FILE", _problem_of_input)
DIRECTORY = Value("DIR", _problem_of_directory)
DRAFT_VOCABULARY = Value("N|FILE", _problem_of_vocabulary)
SHAPE = Value("NAME|FILE", _problem_of_shape)

JsonOption = Annotated[bool, option("--json", help="Print one JSON object on standard output.")]
VerboseOption = Annotated[
    bool,
    option("--verbose", help="Also say what the engine chose, compiled and captured, on standard error."),
]
BackendOption = Annotated[
    str | None,
    option(
        "--backend",
        value=BACKEND,
        help="Backend: a name such as cpu, NAME:1 for a device, NAME:key=value for options, or auto. "
        "Without it OUTRIDER_BACKEND decides, then probing.",
    ),
]


def output_file(*suffixes: str) -> Value:
    """Return the kind of value that accepts the path of a writable file whose name ends in one of ``suffixes``, if any."""
    return Value("FILE", lambda given: output_problem(given, *suffixes))
