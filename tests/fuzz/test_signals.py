"""SIGTERM and SIGINT at drawn moments: the exit code says which, and nothing is left behind.

Each command runs in a session of its own, with a temporary directory and a working directory of its own.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = """
import time
import torch
from outrider import get_backend
device = get_backend("sim")
stream = device.create_stream("a")
with device.on(stream):
    value = torch.zeros(64, device=device.device)
    for step in range(400):
        value += 1
        time.sleep(0.005)
"""
LIMIT_S = 10.0
"""A command that was told to end takes no longer."""
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
TYPES = {signal.SIGTERM: "Terminated", signal.SIGINT: "Interrupted"}
CASES = 50
SEED = 20_4


@dataclass(frozen=True)
class Command:
    """A command line; about how long it runs, in seconds; what it may leave in its working directory."""

    line: str
    usual_s: float
    writes: tuple[str, ...] = ()


GENERATE = "generate --prompt def --max-tokens 256"
COMMANDS = [
    Command(f"{GENERATE} --backend cpu", 4),
    Command(f"{GENERATE} --backend cpu --json", 4),
    Command(f"{GENERATE} --backend sim --speculate ngram --json", 5),
    Command(f"{GENERATE} --backend cpu --compare --json", 5),
    Command("bench decode --backend cpu --new-tokens 64 --json", 5),
    Command("bench kernels --backend cpu --tokens 1 --json", 2),
    Command("bench peers --backend cpu --shape llama-3.1-8b --batch 1 --prompt-tokens 8 --new-tokens 2 --json", 5),
    Command("bench startup --backend cpu --json", 5),
    Command("conform --backend cpu --level L1 --json", 8),
    Command("conform --backend sim --level L2", 10),
    Command("conform --backend cpu --level L1 --workers 2 --json", 10),
    Command("explore decode --backend sim --iterations 5 --json", 8),
    Command("explore --backend sim --corrected --iterations 200 --json read-after-write", 5),
    Command("sanitize --backend sim --json -- script.py", 4),
    Command("trace --backend sim --json -- script.py", 4, ("trace.json", "trace.html")),
    Command("backends --open --json", 3),
    Command("doctor --open --json", 3),
    Command("ci-matrix --json", 0.8),
    Command("new-backend gizmo --json", 1, ("outrider-gizmo",)),
    Command("models --json", 2),
    Command("fences --backend sim --json", 2),
]


@dataclass
class Seen:
    """What became of one command."""

    met: bool
    code: int
    handled: bool
    out: str
    err: str
    took_s: float


def processes(marker: str) -> set[int]:
    """The processes that have inherited ``marker``, zombies apart: theirs is empty."""
    found = set()
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                environment = (place / "environ").read_bytes()
            except OSError:
                continue
            if marker.encode() in environment:
                found.add(int(place.name))
    return found


def handles_signals(process: int) -> bool:
    """Whether a process handles or ignores SIGTERM. Python itself does neither."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return bool(sum(int(status[which], 16) for which in ("SigCgt", "SigIgn")) & 1 << (signal.SIGTERM - 1))


def interrupt(line, number, when, place, *, to_group=False, program=None):
    """Start a command, wait as ``when`` does, send the signal, and look at what is left. ``when`` gets the process and the
    marker.
    """
    marker = f"OUTRIDER_TEST_CASE={uuid.uuid4().hex}"
    name, _, value = marker.partition("=")
    work, scratch, caches = place / "work", place / "tmp", place / "cache"
    for directory in (work, scratch, caches):
        directory.mkdir(parents=True)
    (work / "script.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        name: value,
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(caches),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),  # torch makes it when it's imported, and keeps it
        "OMP_NUM_THREADS": "1",
    }
    with open(place / "out", "w+") as out, open(place / "err", "w+") as err:
        child = subprocess.Popen(
            program or [sys.executable, "-m", "outrider.cli.main", *line.split()],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            when(child, marker)
            met = child.poll() is None
            handled = met and handles_signals(child.pid)
            began = time.monotonic()
            if met:
                (os.killpg if to_group else os.kill)(child.pid, number)
            code = child.wait(timeout=LIMIT_S)
            seen = Seen(met, code, handled, "", "", time.monotonic() - began)
            deadline = time.monotonic() + 2.0
            while (alive := processes(marker)) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not alive, f"processes live on: {[Path(f'/proc/{p}/cmdline').read_bytes() for p in alive]}"
        finally:
            for process in processes(marker):
                os.kill(process, signal.SIGKILL)
            child.wait()
        for file, field in ((out, "out"), (err, "err")):
            file.seek(0)
            setattr(seen, field, file.read())
    return seen


def check(command, number, seen, place):
    """The exit code, standard output, and what lies about."""
    scripted = "--json" in command.line.split()
    if not seen.met:
        assert seen.code in (0, 1), seen
    elif not seen.handled and seen.code in (-number, 1):
        assert seen.out == "", seen  # it came before Python had begun with us
        assert seen.code == -number or "KeyboardInterrupt" in seen.err, seen
    elif seen.code != CODES[number]:
        # It came while the result was being written, or after that.
        assert seen.code in (0, 1), seen
        assert not scripted or json.loads(seen.out).get("error", {}).get("type") not in TYPES.values(), seen
        seen.met = False
    if seen.code >= 0 and not (seen.met and not seen.handled):
        assert "Traceback" not in seen.err, seen
    if scripted and seen.out:
        assert seen.out.count("\n") == 1, seen
        answer = json.loads(seen.out)
        if seen.code == CODES[number]:
            assert answer["error"]["type"] == TYPES[number], seen
    assert not (scripted and seen.code >= 0 and seen.handled and not seen.out), seen
    assert [*(place / "tmp").rglob("*")] == [], seen
    new = {path.name for path in (place / "work").iterdir()} - {"script.py", "__pycache__"}
    assert new <= set(command.writes), (new, seen)
    for path in (place / "work").glob("*.json"):
        json.loads(path.read_text())
    assert [path.name for path in (place / "cache").rglob("*") if path.is_file() and path.name != "plugins.json"] == [], seen


def drawn():
    """The cases: each command once at least, then commands at random."""
    draw = random.Random(SEED)
    chosen = [*COMMANDS, *draw.choices(COMMANDS, k=CASES - len(COMMANDS))]
    return [
        pytest.param(
            command, number, draw.random(), draw.random() < 0.3, id=f"{index}-{command.line.replace(' ', '_')}-{number.name}"
        )
        for index, (command, number) in enumerate((c, draw.choice([*CODES])) for c in chosen)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "number", "part", "to_group"), drawn())
def test_ends_cleanly_at_any_moment(command, number, part, to_group, tmp_path, record_property):
    for attempt in range(4):  # a command that was done before is asked earlier
        place = tmp_path / str(attempt)
        moment = command.usual_s * part * 0.6**attempt
        seen = interrupt(command.line, number, lambda child, marker, s=moment: wait(child, s), place, to_group=to_group)
        check(command, number, seen, place)
        if seen.met:
            break
    print(
        f"SEEN {command.line} | {number.name} at {moment:.2f} s{' to its group' if to_group else ''} | met {seen.met} "
        f"handled {seen.handled} code {seen.code} in {seen.took_s:.2f} s"
    )
    record_property("met", seen.met)


def wait(child, seconds):
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=seconds)


def test_a_command_with_a_child_of_its_own(tmp_path):
    command = Command("conform --backend cpu --level L1 --json", 8)

    def when(child, marker):
        while child.poll() is None and len(processes(marker)) < 2:
            time.sleep(0.02)

    seen = interrupt(command.line, signal.SIGTERM, when, tmp_path)
    assert (seen.met, seen.handled, seen.code) == (True, True, 143)
    check(command, signal.SIGTERM, seen, tmp_path)
