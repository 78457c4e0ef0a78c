"""Ranks as processes that are killed, stopped or out of memory, many times in a row: ``killing.py [TIMES] [BACKEND]``.

Each time one of two ranks of ``outrider generate --tensor-parallel 2`` is lost in the middle of its work. The command must
end within 10 seconds with one error that names the rank, and leave no process and no port. ``test_killing.py`` does it behind
the marker ``slow``.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 10.0
CROWDED = 2.0
"""From so many processes that want each core on, all of this takes longer in proportion."""
TIMES = 50
SAID = 64
"""Characters of text, more than the line in which a library may say its version."""
HOW = ("kill", "stop", "memory")


def limit_s() -> float:
    """The time that ranks have to end, on a machine that does other things too."""
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
    return LIMIT_S * max(1.0, crowd / CROWDED)


def children(parent: int) -> list[int]:
    """Processes whose parent is ``parent``, in order of their start."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append((int(fields[19]), int(entry.name)))
    return [number for _, number in sorted(found)]


def listening(processes: list[int]) -> set[str]:
    """Sockets that these processes listen at."""
    inodes = set()
    for number in processes:
        for descriptor in Path(f"/proc/{number}/fd").glob("*"):
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
            except OSError:
                continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {line[1] for line in lines if line[3] == "0A" and line[9] in inodes}


def still_listening(addresses: set[str]) -> set[str]:
    """Those of the addresses at which somebody listens."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return addresses & {line[1] for line in lines if line[3] == "0A"}


def lose(how: str, victim: int, draw: random.Random, backend: str) -> tuple[float, str]:
    """Lose one rank; how long the command took to end, and what it said."""
    command = [sys.executable, "-m", "outrider.cli.main", "generate", "--prompt", "def f(n):", "--max-tokens", "1500"]
    command += ["--backend", backend, "--tensor-parallel", "2", "--max-context", "1600", "--dtype", "float32"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    began = process.stdout.read(SAID)  # tokens came: all ranks work
    assert len(began) == SAID, process.communicate()[1]
    time.sleep(draw.random())
    ranks = children(process.pid)
    ports = listening([process.pid, *ranks])
    started = time.monotonic()
    if how == "memory":
        resource.prlimit(ranks[victim], resource.RLIMIT_AS, (1 << 20, 1 << 20))  # from now on it gets no more
    else:
        os.kill(ranks[victim], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    if how == "memory":  # it works on until it asks for more
        while ranks[victim] in children(process.pid):
            time.sleep(0.02)
        started = time.monotonic()
    _, said = process.communicate(timeout=60)
    seconds = time.monotonic() - started
    left = [number for number in ranks if Path(f"/proc/{number}").exists()]
    assert not left, f"processes are left: {left}"
    assert not still_listening(ports), f"ports are left: {still_listening(ports)}"
    assert process.returncode == 1, (process.returncode, said)
    errors = [line for line in said.splitlines() if line.startswith("outrider: ") and " tokens/s " not in line]
    assert len(errors) == 1, said
    assert f"rank {victim} " in errors[0], errors[0]
    assert "last decided" in errors[0], errors[0]
    assert "last called" in errors[0], errors[0]
    assert seconds < limit_s(), f"{seconds:.1f} s: {errors[0]}"
    return seconds, errors[0]


def lose_one(number: int, backend: str = "cpu") -> tuple[str, int, float, str]:
    """The loss with this number: how, of which rank, how long the command took to end, and what it said."""
    how, victim = HOW[number % len(HOW)], number // len(HOW) % 2
    return how, victim, *lose(how, victim, random.Random(number), backend)


def main() -> int:
    """Lose ranks in turn; 1 where something was wrong with a loss, which is told, and the next one tried."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else TIMES
    backend = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    wrong = 0
    for number in range(times):
        try:
            how, victim, seconds, said = lose_one(number, backend)
        except AssertionError as error:
            wrong += 1
            print(f"{number}: WRONG: {error}", flush=True)
        else:
            print(f"{number}: rank {victim}, {how}: {seconds:.1f} of {limit_s():.0f} s: {said[:200]}", flush=True)
    print(f"{times} losses, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
