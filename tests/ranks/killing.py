"""Lose ranks at random moments: ``killing.py [--times 20] [--seed 0] [--backend cpu] [--json FILE]``.

Each time one of two ranks of ``outrider generate --tensor-parallel 2`` is killed, stopped or left without memory, while it
starts or while it decodes. The command must end within 10 seconds with one error that names the rank, and leave no process
and no port. ``test_killing.py`` does it with few losses, marked ``slow``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT_S = 10.0
CROWDED = 2.0
"""From so many processes that want each core on, all of this takes longer in proportion."""
SAID = 64
"""Characters of text, more than the line in which a library may say its version."""
LOSSES = (
    *(("kill", "decode"), ("stop", "decode"), ("memory", "decode")),
    *(("kill", "start"), ("stop", "start")),
)
"""How a rank is lost, and in which phase."""
START_S, DECODE_S = 4.0, 1.0
"""Seconds from the beginning of a phase within which a rank is lost."""


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
    """Return the addresses at which a process still listens."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return addresses & {line[1] for line in lines if line[3] == "0A"}


@dataclass(frozen=True)
class Loss:
    """A lost rank: how and in which phase it was lost, and how the command ended."""

    how: str
    phase: str
    victim: int
    wait_s: float
    """Seconds from the beginning of the phase to the loss."""
    end_s: float
    """Seconds from the loss to the end of the command."""
    limit_s: float
    said: str


def started_ranks(process: subprocess.Popen[str], count: int) -> list[int]:
    """The processes of all ranks, once they are there."""
    until = time.monotonic() + 60
    while len(children(process.pid)) < count and time.monotonic() < until:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    return children(process.pid)


def lose(how: str, phase: str, victim: int, wait_s: float, backend: str) -> Loss:
    """Lose one rank of a command, and check how the command ends."""
    command = [sys.executable, "-m", "outrider.cli.main", "generate", "--prompt", "def f(n):", "--max-tokens", "1500"]
    command += ["--backend", backend, "--tensor-parallel", "2", "--max-context", "1600", "--dtype", "float32"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        return lose_rank_of(process, how, phase, victim, wait_s)
    finally:
        process.kill()  # the ranks end with it
        process.communicate()


def lose_rank_of(process: subprocess.Popen[str], how: str, phase: str, victim: int, wait_s: float) -> Loss:
    """Lose one rank of a running command, and check how the command ends."""
    assert process.stdout is not None
    if phase == "decode":
        began = process.stdout.read(SAID)  # tokens came: all ranks work
        assert len(began) == SAID, process.communicate()[1]
    ranks = started_ranks(process, 2)
    time.sleep(wait_s)
    ports = listening([process.pid, *ranks])
    started = time.monotonic()
    if how == "memory":
        resource.prlimit(ranks[victim], resource.RLIMIT_AS, (1 << 20, 1 << 20))  # from now on it gets no more
        while ranks[victim] in children(process.pid):  # it works on until it asks for more
            time.sleep(0.02)
        started = time.monotonic()
    else:
        os.kill(ranks[victim], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    _, said = process.communicate(timeout=90)
    seconds = time.monotonic() - started
    left = [number for number in ranks if Path(f"/proc/{number}").exists()]
    assert not left, f"processes are left: {left}"
    assert not still_listening(ports), f"ports are left: {still_listening(ports)}"
    assert process.returncode == 1, (process.returncode, said)
    errors = [line for line in said.splitlines() if line.startswith("outrider: ") and " tokens/s " not in line]
    assert len(errors) == 1, said
    wanted = {"kill": f"rank {victim} was ended by SIGKILL", "stop": f"rank {victim} hangs"}.get(how, f"rank {victim} ")
    assert wanted in errors[0], errors[0]
    if phase == "decode":
        assert "last decided" in errors[0], errors[0]
        assert "last called" in errors[0], errors[0]
    assert seconds < limit_s(), f"{seconds:.1f} s: {errors[0]}"
    return Loss(how, phase, victim, wait_s, seconds, limit_s(), errors[0])


def lose_one(number: int, seed: int = 0, backend: str = "cpu", decode_s: float = DECODE_S) -> Loss:
    """Make the loss with this number: each kind in turn, of a random rank, at a random moment."""
    draw = random.Random(f"{seed} {number}")
    how, phase = LOSSES[number % len(LOSSES)]
    return lose(how, phase, draw.randrange(2), draw.random() * (START_S if phase == "start" else decode_s), backend)


def main() -> int:
    """Lose ranks in turn. Return 1 if a check of a loss failed, after the other losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--decode-s", type=float, default=DECODE_S, help="less than the command decodes for")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    losses: list[Loss] = []
    wrong: list[str] = []
    for number in range(given.times):
        try:
            loss = lose_one(number, given.seed, given.backend, given.decode_s)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            wrong.append(f"{number}: {error}")
            print(f"{number}: WRONG: {error}", flush=True)
        else:
            losses.append(loss)
            about = f"rank {loss.victim}, {loss.how} {loss.wait_s:.2f} s into the {loss.phase}"
            print(f"{number}: {about}: {loss.end_s:.1f} of {loss.limit_s:.0f} s: {loss.said[:160]}", flush=True)
    longest = max((loss.end_s for loss in losses), default=0.0)
    print(f"{given.times} losses, {len(wrong)} wrong, the longest end took {longest:.1f} s", flush=True)
    if given.json is not None:
        found = {"seed": given.seed, "backend": given.backend, "times": given.times, "longest_s": longest, "wrong": wrong}
        given.json.write_text(json.dumps({**found, "losses": [asdict(loss) for loss in losses]}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
