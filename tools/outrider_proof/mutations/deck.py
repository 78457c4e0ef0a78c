"""The host programs that judge a change of the engine, and the process in which each change is judged."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

from outrider import SamplingParams
from outrider.device.errors import DeviceFault, OutriderError
from outrider_proof.checks import once
from outrider_proof.mutations.sites import Site, apply
from outrider_proof.proposers import EXTREMES
from outrider_proof.setups import (
    MODES,
    PERSONALITIES,
    PROPOSERS,
    Setup,
    alone,
    draw,
    engines_for,
    plain,
    prompt_and_media,
    runs,
    simulated,
)

_ENGINE = (
    "loop",
    "step",
    "stages",
    "plan_stages",
    "prefill",
    "graphs",
    "requests.scheduler",
    "requests.pages",
    "requests.request",
    "requests.batch",
    "state.rows",
    "state.staging",
    "state.buffers",
    "state.plans",
    "state.results",
    "state.intake",
    "state.transfer",
    "state.attention_plans",
)
_SPECULATIVE = ("eagle", "tree", "mtp", "draft_model", "ngram", "cached")
MODULES = (*(f"outrider.engine.{name}" for name in _ENGINE), *(f"outrider.speculative.{name}" for name in _SPECULATIVE))
"""What is changed: everything between the scheduler and the device, and the proposers."""


def programs() -> list[tuple[Setup, int]]:
    """Setups and numbers of host programs: one for each proposer, with modes and personalities in turn; a crowded program,
    one that moves requests between two engines, and any, in turn too. Then drafts that are all accepted, and none, in crowded
    programs, where prefixes are shared and requests are preempted.
    """
    moving = [number for number in range(1, 60, 2) if any(arrival.moves for arrival in draw(number).arrivals)]
    found = []
    for i, proposer in enumerate(PROPOSERS):
        mode, turn = MODES[i % len(MODES)], i // len(MODES)  # each mode meets each personality and kind of program
        setup = Setup(proposer, mode, PERSONALITIES[(i + turn) % len(PERSONALITIES)])
        if not runs(setup):
            setup = Setup(proposer, mode)
        found.append((setup, (2 * i, moving[i % len(moving)], 2 * i + 1)[(i + 2 * turn) % 3]))
    for i, proposer in enumerate(EXTREMES):
        found += [(Setup(proposer, mode, PERSONALITIES[i]), 2 * (i + j) + 30) for j, mode in enumerate(MODES)]
    return found


FAULTY = (("eagle", "staged", "cuda", 12), ("ngram", "graphs", "npu", 14), ("none", "fused", "rocm", 16))
"""Setups and numbers of the programs in which operations fail."""


class Unfit(OutriderError):
    """A program fails on the engine as it is."""


def _judges() -> list[tuple[str, Callable[[], str]]]:
    judges: list[tuple[str, Callable[[], str]]] = [
        (f"{setup.name}, {number}", partial(_judged, setup, number)) for setup, number in programs()
    ]
    judges += [(f"faults in {', '.join(map(str, each))}", partial(_faulted, *each)) for each in FAULTY]
    return judges


def _judged(setup: Setup, number: int) -> str:
    outcome = once(setup, draw(number))
    if outcome.error:
        return outcome.error
    return "" if outcome.counts == _costs.setdefault((setup, number), outcome.counts) else "OtherCosts"


_costs: dict[tuple[Setup, int], dict[str, int]] = {}
"""What programs take on the engine as it is: launches, preemptions, prefix hits and the like."""


def _faulted(proposer: str, mode: str, like: str, number: int) -> str:
    """A program, plain of aborts and moves, in some of whose steps an operation fails on one of the streams: the engine says
    so, and no token is wrong.
    """
    setup = Setup(proposer, mode, like)
    backend = simulated(like, None)
    program = draw(number)
    arrivals = [alone(arrival) for arrival in program.arrivals]
    (engine,) = engines_for(setup, replace(program, arrivals=tuple(arrivals)))
    free = engine.free_pages, engine.free_rows
    ids = [engine.add_request(prompt_and_media(proposer, a)[0], SamplingParams(max_tokens=a.max_tokens)) for a in arrivals]
    got: dict[int, list[int]] = {request: [] for request in ids}
    raised = steps = 0
    while engine.has_unfinished:
        steps += 1
        if steps in (3, 4, 8):
            backend.provoke_fault(backend.streams[(steps + number) % len(backend.streams)])
        try:
            for output in engine.step():
                got[output.request_id] += output.tokens
        except DeviceFault:
            raised += 1
    engine.drain()
    if [tuple(got[request]) for request in ids] != [plain(proposer, arrival) for arrival in arrivals]:
        return "WrongTokens"
    if (engine.free_pages, engine.free_rows) != free:
        return "Leak"
    costs = {"raised": raised, "steps": steps}
    return "" if costs == _costs.setdefault((setup, -number), costs) else "OtherCosts"


def warm() -> None:
    """Load the models and find the right tokens and costs, with the engine as it is. Raises :class:`Unfit`."""
    for name, judge in _judges() * 2:
        error = judge()
        if error:
            raise Unfit(f"{name} fails without any change: {error}")


def judge(site: Site, limit: float) -> tuple[str | None, str | None]:
    """(what killed the change, in which program), in a process of its own; (None, None): it survived."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(site, writer)
    os.close(writer)
    said, end = b"", time.monotonic() + limit
    while time.monotonic() < end:
        ready, _, _ = select.select([reader], [], [], end - time.monotonic())
        piece = os.read(reader, 4096) if ready else b""
        if not piece:
            break
        said += piece
    over = time.monotonic() >= end
    os.close(reader)
    if over:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lines = said.decode().splitlines()
    if over:
        return "hang", lines[-1] if lines else None
    if lines and lines[-1] == "survived":
        return None, None
    *_, at = ["", *lines[: -1 if "\t" in lines[-1] else None]] if lines else ["", ""]
    by = lines[-1].partition("\t")[2] if lines and "\t" in lines[-1] else "crash"
    return by, at


def _child(site: Site, writer: int) -> None:
    """Say the program before it begins, then what it showed; end without what other ends do."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        apply(import_module(site.module), site)
        for name, judge_one in _judges():
            os.write(writer, f"{name}\n".encode())
            error = judge_one()
            if error:
                os.write(writer, f"by\t{error}\n".encode())
                break
        else:
            os.write(writer, b"survived\n")
    except BaseException as error:
        os.write(writer, f"by\t{type(error).__name__}\n".encode())
    finally:
        sys.stdout = sys.stderr = None
        os._exit(0)
