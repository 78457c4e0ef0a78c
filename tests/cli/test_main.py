"""Dispatch, exit codes, and what an error looks like to a person and to a script."""

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from rich.table import Table

from outrider.cli import main as cli
from outrider.cli.commands import dispatch
from outrider.cli.terminal.report import CommandReport, Interrupted, to_json, wrap_words
from outrider.cli.terminal.stopping import Stopped, until_stopped
from outrider.device import ConfigError


@pytest.mark.parametrize(
    ("variables", "limited"), [({}, True), ({"GOMP_SPINCOUNT": "7"}, False), ({"OMP_WAIT_POLICY": "ACTIVE"}, False)]
)
@pytest.mark.slow
def test_a_waiting_thread_of_openmp_sleeps_soon(child, variables, limited):
    """libgomp prints its settings when torch loads it: the command has set the variable before."""
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", child("backends", OMP_DISPLAY_ENV="verbose", **variables).err)
    if not spins:
        pytest.skip("not run: this torch doesn't load libgomp")
    assert (spins == ["1000"]) is limited


@pytest.fixture
def command(monkeypatch):
    """Add a command ``x`` that does what it's told."""

    def add(action):
        def x(json_output: cli_json_option() = False) -> CommandReport:
            del json_output
            return action() or CommandReport(data={"done": True}, render=lambda console: console.print("done"))

        monkeypatch.setattr(sys.modules[__name__], "x", x, raising=False)
        monkeypatch.setattr(dispatch, "commands", lambda: {"x": f"{__name__}:x"})
        monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    return add


def cli_json_option():
    from outrider.cli.options.option_values import JsonOption

    return JsonOption


def raising(error):
    def action():
        raise error

    return action


def test_result_for_people_and_for_scripts(outrider, command):
    command(lambda: None)
    assert (outrider("x").code, outrider("x").out) == (0, "done\n")
    assert outrider("x", "--json").json == {"done": True}


def test_without_arguments_it_helps(outrider):
    result = outrider()
    assert result.code == 0
    for name in dispatch.commands():
        assert name in result.out


def test_version(outrider):
    from importlib.metadata import version

    assert outrider("--version").out == f"outrider {version('outrider')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["backends", "--colour"], "No such option: --colour"),
        (["backend"], "No such command 'backend'"),
        (["bench"], "Missing command"),
        (["bench", "decod"], "No such command 'decod'"),
        (["backends", "surplus"], "surplus"),
    ],
)
def test_wrong_usage_is_exit_2(outrider, arguments, message):
    result = outrider(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("outrider: ")
    assert message in result.err
    assert "--help" in result.err
    assert outrider(*arguments, "--json").json["error"]["type"] == "UsageError"


@pytest.mark.parametrize(
    ("error", "code", "kind", "message"),
    [
        (ConfigError("temperature is nan"), 1, "ConfigError", "temperature is nan"),
        (
            FileNotFoundError(2, "No such file or directory", "p.txt"),
            1,
            "FileNotFoundError",
            "p.txt: No such file or directory; check",
        ),
        (PermissionError(13, "Permission denied", "p.txt"), 1, "PermissionError", "p.txt: Permission denied; give yourself"),
        (OSError(28, "No space left on device", "trace.json"), 1, "OSError", "writing trace.json failed: no space left"),
        (BrokenPipeError(32, "Broken pipe"), 1, "BrokenPipeError", "Broken pipe"),
        (KeyboardInterrupt(), 130, "Interrupted", "interrupted"),
        (Interrupted("interrupted after 3 tokens", {"text": "a"}), 130, "Interrupted", "interrupted after 3 tokens"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError", "this is a bug in outrider"),
    ],
)
def test_errors(outrider, command, error, code, kind, message):
    command(raising(error))
    result = outrider("x")
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    scripted = outrider("x", "--json")
    assert scripted.code == code
    assert scripted.json["error"]["type"] == kind
    assert message in scripted.json["error"]["message"]
    if isinstance(error, Interrupted):
        assert scripted.json["text"] == "a"


def test_debug_shows_the_traceback(command, capsys):
    command(raising(ConfigError("temperature is nan")))
    assert cli.main(["x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert cli.main(["--help", "--debug"]) == 0
    assert not capsys.readouterr().err


def test_libraries_that_print_dont_spoil_the_json(outrider, command):
    command(lambda: print("loading…"))
    result = outrider("x", "--json")
    assert result.json == {"done": True}
    assert "loading…" in result.err


def test_json_has_no_nan():
    text = to_json({"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (1, None)}})
    assert json.loads(text) == {"a": None, "b": [1.5, None], "c": {"d": [1, None]}}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not run: there is no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["--version", "--json"], ["--help"]])
def test_full_disk(child, arguments):
    with open("/dev/full", "w") as full:
        result = child(*arguments, stdout=full)
    assert result.code == 1
    assert "no space left on the device" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not run: there is no /dev/full")
@pytest.mark.sample(1, per="arguments")
@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["bogus"], 2), (["bogus", "--json"], 2)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_error_changes_no_exit_code(child, arguments, code, unbuffered):
    with open("/dev/full", "w") as full:
        result = child(*arguments, stderr=full, PYTHONUNBUFFERED=unbuffered)
    assert result.code == code
    assert result.out.count("\n") == (arguments != ["bogus"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", [["backends"], ["--version", "--json"]])
def test_closed_pipe(child, arguments):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        result = child(*arguments, stdout=closed)
    assert (result.code, result.err) == (141, "")


def test_the_installed_command():
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="outrider")
    assert script.load() is cli.main


def test_help_imports_no_torch():
    code = "import sys; from outrider.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# -- standard output with --json ----------------------------------------------------------------------------------------

LOUD = """
import atexit, json, os, subprocess, sys
from outrider.cli.commands import dispatch
from outrider.cli import main as cli
from outrider.cli.options.option_values import JsonOption
from outrider.cli.terminal.report import CommandReport
def x(json_output: JsonOption = False) -> CommandReport:
    os.write(1, b"written to the descriptor\\n")
    print("printed to Python's own stream", file=sys.__stdout__)
    subprocess.run(["echo", "printed by a child"], check=True)
    atexit.register(os.write, 1, b"written at the end\\n")
    return CommandReport(data={"text": "h\\u00e9 \\u20ac \\udc80"}, render=lambda console: None)
sys.modules["loud"] = sys.modules[__name__]
dispatch.commands = lambda: {"x": "loud:x"}
sys.argv = ["outrider", *sys.argv[1:]]
sys.exit(cli.main())
"""


def run_loud(*arguments, shell="", **environment):
    command = [sys.executable, "-c", LOUD, *arguments]
    return subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {shell}', *command], env={**os.environ, **environment}, capture_output=True, check=False
    )


@pytest.mark.parametrize(
    ("shell", "environment"),
    [
        ("", {}),
        ("", {"PYTHONIOENCODING": "ascii"}),
        ("", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ("<&-", {}),
    ],
)
def test_json_is_one_object_whatever_is_written(shell, environment):
    result = run_loud("x", "--json", shell=shell, **environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"text": "hé € \udc80"}
    for text in (b"to the descriptor", b"Python's own", b"by a child", b"at the end"):
        assert text in result.stderr


def test_a_closed_standard_output_is_an_error():
    result = run_loud("x", "--json", shell=">&-")
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"standard output is closed" in result.stderr
    assert b"Traceback" not in result.stderr


def test_arguments_that_are_not_utf_8(outrider):
    result = outrider("x\udcff", "--json")
    assert (result.code, result.json["error"]["type"]) == (2, "UsageError")


def test_help_and_version_with_json(outrider, command):
    command(lambda: None)
    assert outrider("x", "--help", "--json").json == {"exit_code": 0}
    assert list(outrider("--version", "--json").json) == ["outrider"]


# -- ending early -------------------------------------------------------------------------------------------------------


def test_sigterm_ends_as_ctrl_c_does(outrider, command):
    cleaned = []

    def action():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does: it's the same request
            cleaned.append(True)

    command(action)
    result = outrider("x", "--json")
    assert (result.code, result.json["error"]["type"], cleaned) == (143, "Terminated", [True])
    assert outrider("x").code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("error", "kept"),
    [(Interrupted("interrupted after 3 tokens", {"text": "a"}), {"text": "a"}), (ValueError("a library's own"), {})],
    ids=["results", "library"],
)
def test_sigterm_keeps_what_was_made_whatever_is_raised_for_it(outrider, command, error, kept):
    def action():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except KeyboardInterrupt:
            raise error from None

    command(action)
    result = outrider("x", "--json")
    assert (result.code, result.json["error"]["type"]) == (143, "Terminated")
    assert kept.items() <= result.json.items()


def test_a_signal_while_the_command_is_imported_waits():
    with until_stopped(process_ends=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped, match="terminated"):
            stop.ready()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_nothing_heavy_is_imported_before_signals_are_handled():
    code = "import sys; before = set(sys.modules); import outrider.cli.main; print(*(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"typer", "rich", "importlib.metadata", "tempfile", "torch", "pluggy"} & set(found)


def test_a_signal_at_the_end_makes_no_second_object(outrider, command, monkeypatch):
    def write_json(stream, text):
        stream.write(text + "\n")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(dispatch, "write_json", write_json)
    command(lambda: None)
    try:
        result = outrider("x", "--json")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert (result.code, result.json) == (0, {"done": True})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_a_destructor_drops_is_raised_again(outrider, command, number, code):
    class Dropping:
        def __del__(self):
            os.kill(os.getpid(), number)

    def action():
        Dropping()
        time.sleep(10)

    command(action)
    try:
        assert outrider("x", "--json").code == code
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_while_torch_imports_numpy_is_not_lost(number, code):
    """torch's compiled part imports it, and drops what is raised meanwhile."""
    text = f"""
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.matrixlib":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Finder())
from outrider.cli.main import main
sys.exit(main(["generate", "--prompt", "x", "--max-tokens", "1", "--backend", "cpu"]))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (code, "")


def test_sigint_in_a_text_that_is_executed_is_an_exit_code(tmp_path):
    code = """
import os, signal, sys
from outrider.cli.commands import dispatch
from outrider.cli.main import main
def act(arguments, stop):
    stop.ready()
    try:
        exec("os.kill(os.getpid(), signal.SIGINT); [None for _ in range(10)]", globals())
    except KeyboardInterrupt:
        return 130
dispatch.dispatch = act
sys.exit(main())
"""
    (tmp_path / "acting.py").write_text(code)
    assert subprocess.run([sys.executable, "-m", "acting"], cwd=tmp_path, check=False).returncode == 130


@pytest.mark.parametrize(("number", "code"), [("INT", 0), ("TERM", 143)])
def test_a_background_job_ignores_sigint_and_obeys_sigterm(tmp_path, number, code):
    """A shell without job control starts a background job with SIGINT ignored: a Ctrl-C is for the foreground."""
    (tmp_path / "acting.py").write_text(
        f"""
import os, signal, sys
from outrider.cli.commands import dispatch
from outrider.cli.main import main
def act(arguments, stop):
    try:
        stop.ready()
        os.kill(os.getpid(), signal.SIG{number})
        return 0
    except KeyboardInterrupt:
        return 128 + stop.signal
dispatch.dispatch = act
sys.exit(main())
"""
    )
    job = ["sh", "-c", 'trap "" INT; exec "$0" -m acting', sys.executable]
    assert subprocess.run(job, cwd=tmp_path, check=False).returncode == code


def test_a_command_that_exits_is_reported(outrider, command):
    command(raising(SystemExit(7)))
    assert (outrider("x").code, outrider("x", "--json").json["error"]["type"]) == (7, "Exit")
    command(raising(SystemExit("no")))
    assert outrider("x").code == 1


STUCK = """
import hashlib, sys
from outrider.cli import main
from outrider.cli.commands import dispatch
from outrider.cli.terminal import stopping
from outrider.cli.options.option_values import JsonOption
stopping._PATIENCE_S = 0.3

def stuck(json_output: JsonOption = False):
    print("stuck", file=sys.stderr, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)

dispatch.commands = lambda: {"stuck": "__main__:stuck"}
sys.argv = ["outrider", "stuck", "--json"]
sys.exit(main.main())
"""


def test_an_operation_that_does_not_end_does_not_keep_a_signal_off():
    """A compiled function that takes minutes: Python's own handler would run behind it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STUCK], **pipes) as child:
        assert child.stderr.readline() == "stuck\n"
        time.sleep(0.2)  # into the function
        child.send_signal(signal.SIGTERM)
        try:
            assert child.wait(timeout=60) == 143
        finally:
            child.kill()
        assert json.loads(child.stdout.read())["error"]["type"] == "Terminated"


@pytest.mark.parametrize("count", [1, 7, 8, 9, 12, 30])
def test_no_figure_of_a_table_is_cut(command, outrider, count):
    figures = [f"{1234567 * (place + 1)}.125"[place % 5 :] for place in range(count)]
    table = Table(*(f"of place {place}" for place in range(count)), "words", box=None, pad_edge=False)
    table.add_row(*figures, "some words that may go on many lines, and do where there is no room for them " * 2)
    command(lambda: CommandReport(data={}, render=lambda console: console.print(table)))
    shown = outrider("x")
    assert [figure for figure in figures if figure not in shown.out] == []
    assert "…" not in shown.out


def test_a_variable_columns_of_zero_leaves_the_output(command, outrider, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    command(lambda: CommandReport(data={}, render=lambda console: console.print("the result")))
    assert outrider("x").out == "the result\n"


# -- terminals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal():
    """A stream to a terminal of 60 columns, and a function that returns what was written to it."""
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    stream = os.fdopen(follower, "w", encoding="utf-8")

    def written():
        stream.flush()
        found = b""
        while select.select([leader], [], [], 0.1)[0]:
            found += os.read(leader, 65536)
        return found.decode().replace("\r\n", "\n")

    yield stream, written
    stream.close()
    os.close(leader)


def test_a_table_wider_than_the_terminal_becomes_paragraphs(terminal):
    stream, written = terminal
    table = Table("name", "an-unbreakable-header", "about", box=None)
    table.add_row("first", "v" * 34, "some " + "w" * 16 + " words " * 8)
    table.add_row("second", "", "short")
    dispatch._show(lambda console: console.print(table), stream)
    lines = written().splitlines()
    assert lines[:2] == ["first", "  an-unbreakable-header: " + "v" * 34]
    assert lines[-2:] == ["second", "  about: short"]
    words = {word for line in lines for word in line.split()}
    assert words == {"first", "second", "an-unbreakable-header:", "v" * 34, "about:", "some", "w" * 16, "words", "short"}


def test_a_table_that_fits_stays_one(terminal):
    stream, written = terminal
    table = Table("name", "about", box=None, pad_edge=False)
    table.add_row("first", "some words " * 8)
    dispatch._show(lambda console: console.print(table), stream)
    lines = written().splitlines()
    assert lines[0].split() == ["name", "about"]
    assert max(map(len, lines)) <= 60


def test_lines_end_between_words_on_a_terminal_alone(terminal, tmp_path):
    stream, written = terminal
    text = "  " + "words-with-hyphens and " * 6
    stream.write(wrap_words(text, stream))
    lines = written().splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == text.strip()
    with (tmp_path / "file").open("w") as file:
        assert wrap_words(text, file) == text


def test_help_groups_options_and_lists_those_of_every_command(outrider):
    shown = outrider("generate", "--help").out
    headings = [line.removesuffix(":") for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", "Speculation", "Engine", "Sampling", "Several devices", "General"]
    first, *_ = shown.partition("\nOptions:\n")[2].splitlines()
    assert first.split()[:2] == ["--prompt", "TEXT"]
    general = shown.partition("\nGeneral:\n")[2]
    assert all(f"  {option} " in general for option in ("--debug", "--verbose", "--json", "--help"))
    root = outrider("--help").out
    assert all(f"  {option} " in root for option in ("--version", "--debug", "--install-completion"))


def test_a_shell_completes_commands_options_and_values(child):
    for words, completion in (("gen", "generate"), ("generate --temp", "--temperature"), ("generate --dtype b", "bfloat16")):
        line = {"COMP_WORDS": f"outrider {words}", "COMP_CWORD": str(len(words.split()))}
        result = child(_OUTRIDER_COMPLETE="complete_bash", **line)
        assert (result.code, result.out.split(), result.err) == (0, [completion], "")
