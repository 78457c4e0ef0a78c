#!/usr/bin/env python3
"""Run commands at the same time and fail if they took longer than a limit that scales with the speed of the machine.

    python .ci/timed_tests.py [--limit-s SECONDS] -- COMMAND ... [-- COMMAND ...]

The output of the last command appears as it comes, that of the others after it. The exit status is that of the first command
in the list that failed, or 1 if only the time was over the limit. A failure ends no other command, so that one call shows
every error.

Time is wall time on idle cores: ``wall_s * (1 - taken_share)``. ``taken_share`` is the share of the machine's CPU time that
other processes and other virtual machines took during the run. Only Linux reports this share; elsewhere it is 0.

The limit is ``limit_s`` on the reference machine. Elsewhere it is multiplied by the time of a calibration loop divided by the
time of the same loop on the reference machine. The loop runs before and after the commands, and the faster run counts. Its
time is CPU time, because ``taken_share`` already covers other processes. A faster machine has a smaller limit: half at
least.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LIMIT_S = 480.0
"""Default limit in seconds of wall time on the reference machine, two idle cores."""

REFERENCE_LOOP_S = 1.75
"""CPU seconds of `calibration_loop` on the reference machine.

This is the fastest of five runs on 2026-11-28, on 2 virtual cores of an AMD EPYC, with Python 3.11 and torch 2.13. All tests
together took 13 to 16 minutes there before they were sorted into `make test` and `make test-slow`.
"""

LEAST_SCALE = 0.5
"""Smallest factor of the limit: a faster CPU does not shorten waits and reads of files."""


def calibration_loop() -> float:
    """Return the CPU seconds of a fixed amount of work: integer arithmetic in Python, then matrix products in torch."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(256, 256)
    began = time.process_time()
    table: dict[int, int] = {}
    for number in range(12_000_000):
        table[number & 1023] = table.get(number & 511, 0) ^ number
    for _ in range(2000):
        matrix = (matrix @ matrix).clamp(0.0, 1.0)
    return time.process_time() - began


@dataclass(frozen=True, kw_only=True)
class CpuClock:
    """CPU seconds since an unspecified moment."""

    own_s: float
    """CPU time that this process and its finished descendants used."""

    busy_s: float = 0.0
    """CPU time that all processes and other virtual machines used; 0 where the system does not report it."""

    total_s: float = 0.0
    """CPU time of all cores, used or not; 0 where the system does not report it."""

    @classmethod
    def now(cls) -> CpuClock:
        """Read the counters of this process and of the system."""
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(each.ru_utime + each.ru_stime for each in usage)
        try:
            with open("/proc/stat", encoding="ascii") as file:
                # user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
                seconds = [int(field) / os.sysconf("SC_CLK_TCK") for field in file.readline().split()[1:9]]
        except OSError:
            return cls(own_s=own_s)
        return cls(own_s=own_s, busy_s=sum(seconds) - sum(seconds[3:5]), total_s=sum(seconds))

    def share_of_others(self, end: CpuClock) -> float:
        """Return the share of the CPU time between this reading and ``end`` that others used, from 0 to 1."""
        total_s = end.total_s - self.total_s
        others_s = (end.busy_s - self.busy_s) - (end.own_s - self.own_s)
        return min(max(others_s / total_s, 0.0), 1.0) if total_s > 0 else 0.0


def scaled_limit(limit_s: float, loop_s: float) -> float:
    """Return the limit in seconds for a machine on which the calibration loop takes ``loop_s`` CPU seconds."""
    return limit_s * max(loop_s / REFERENCE_LOOP_S, LEAST_SCALE)


def run_together(commands: list[list[str]]) -> list[int]:
    """Run ``commands`` at the same time and return their exit codes; print the output of all but the last afterwards."""
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands[:-1]]
        others = [
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            for command, output in zip(commands[:-1], outputs, strict=True)
        ]
        last = subprocess.run(commands[-1], check=False).returncode
        codes = [process.wait() for process in others]
        for output in outputs:
            output.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(output.read())
            sys.stdout.buffer.flush()
        return [*codes, last]


def run_within(commands: list[list[str]], limit_s: float, calibrate: Callable[[], float] = calibration_loop) -> int:
    """Run ``commands`` and print the time, the limit and the calibration; return the exit status of the whole."""
    first_loop_s = calibrate()
    start, began = CpuClock.now(), time.monotonic()
    codes = run_together(commands)
    wall_s, end = time.monotonic() - began, CpuClock.now()
    loop_s = min(first_loop_s, calibrate())
    taken_share = start.share_of_others(end)
    idle_s, scaled_s = wall_s * (1 - taken_share), scaled_limit(limit_s, loop_s)
    print(
        f"time: {idle_s:.1f} s on idle cores ({wall_s:.1f} s of wall time, of which other processes took {taken_share:.0%}; "
        f"{end.own_s - start.own_s:.1f} CPU s)\n"
        f"limit: {scaled_s:.1f} s ({limit_s:.0f} s where the calibration loop takes {REFERENCE_LOOP_S:.2f} CPU s; "
        f"here it takes {loop_s:.2f} CPU s)",
        flush=True,
    )
    if idle_s > scaled_s:
        print(
            f"FAILED: {idle_s - scaled_s:.1f} s over the limit. Shorten the slowest tests or mark repeats slow.",
            flush=True,
        )
        codes.append(1)
    return next((code for code in codes if code), 0)


def split_commands(words: list[str]) -> Iterator[list[str]]:
    """Yield the non-empty commands that ``--`` separates."""
    command: list[str] = []
    for word in [*words, "--"]:
        if word != "--":
            command.append(word)
        elif command:
            yield command
            command = []


def main(arguments: list[str]) -> int:
    """Parse the command line and run its commands."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    parser = argparse.ArgumentParser(usage="timed_tests.py [--limit-s SECONDS] -- COMMAND ... [-- COMMAND ...]")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="seconds on the reference machine (default: %(default)s)"
    )
    limit_s = parser.parse_args(options).limit_s
    commands = list(split_commands(arguments[len(options) :]))
    if not commands:
        parser.error("expected at least one command after `--`")
    return run_within(commands, limit_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
