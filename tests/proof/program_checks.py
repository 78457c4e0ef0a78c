"""Run one host program of one setup, and check its tokens, acceptance, pages and statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider import Engine
from outrider.device import Backend, OutriderError
from outrider_proof.decode_program import HostProgram, WrongTokens, check_tokens, draft_length_of
from outrider_proof.engine_setups import random_host_program, reference_tokens
from outrider_proof.explorations import implied_by
from outrider_proof.fence_log import FenceLog
from outrider_proof.monitors import OverlapMonitor
from outrider_sanitizer import RaceError, watch
from outrider_sanitizer import Report as Findings
from outrider_sim.exploration import run_once
from outrider_sim.strategies import make_strategy
from proof.setups import EngineSetup, RecordedServing, engines_for, simulated_device, synchronous_acceptance


class WrongCounts(OutriderError):
    """The statistics of an engine contradict its outputs."""


@dataclass
class CheckResult:
    """The result of one run of a program under one schedule."""

    error: str = ""
    """Class name of the error; empty if the run passed."""
    text: str = ""
    """Message of the error."""
    implied: tuple[str, ...] = ()
    """Fences that the sanitizer's findings imply."""
    left_out: int = 0
    """Number of waits or records of the dropped fence that were not carried out."""
    covered: bool = False
    """True if other fences or stream order already give every order of the dropped fence."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts that :func:`serve` returns."""


def serve(setup: EngineSetup, program: HostProgram, log: FenceLog) -> dict[str, int]:
    """Run the program, compare its results with references and return counts of requests, iterations and launches.

    Raises :class:`WrongTokens`, :class:`WrongCounts`, the errors of :class:`OverlapMonitor` and the errors of the engine.
    """
    pace = OverlapMonitor()
    engines = engines_for(setup, program, lambda fence: pace.wrap(log.wrap(fence)))
    for engine in engines:
        pace.watch(engine, overlap=True)
    free = [(engine.free_pages, engine.free_rows) for engine in engines]
    served = RecordedServing(engines, program, setup.proposer)
    stop = pace.observe(engines[0].backend)
    try:
        served.step_until_idle()
    except Exception as error:
        pace.raise_if_any(error)  # the recorded fault is the cause of the error
        raise
    finally:
        stop()
    pace.raise_if_any()
    expected = [reference_tokens(setup.proposer, arrival) for arrival in program.arrivals]
    check_tokens(served.tokens, served.ended, expected)
    if [(engine.free_pages, engine.free_rows) for engine in engines] != free:
        raise WrongTokens("pages or rows weren't given back at the end")
    # If the draft length varies between iterations, acceptance depends on the iterations that a request is in.
    proposer = engines[0].proposer
    changing = proposer.depends_on_other_requests or draft_length_of(program, proposer) is not None
    reference = {} if changing else synchronous_acceptance(setup.proposer, program)
    ours = served.acceptance()
    for index in ours.keys() & reference.keys():
        if ours[index] != reference[index]:
            raise WrongTokens(
                f"request {index}: {ours[index]} iterations and tokens, the synchronous engine {reference[index]}"
            )
    records = served.records.values()
    _check_stats(engines, served, pace)
    return {
        "requests": len(program.arrivals),
        "aborted": sum(reason == "abort" for reason in served.ended.values()),
        "preempted": sum(record.preemptions > 0 for record in records),
        "prefix_hits": sum(record.prefill_start > 0 for record in records),
        "moved": served.moved,
        "compared": len(ours.keys() & reference.keys()),
        "iterations": sum(iterations for iterations, _ in ours.values()),
        "verified": sum(tokens for _, tokens in ours.values()),
        "launches": pace.launches,
        "ran_ahead": pace.ran_ahead,
    }


def _check_stats(engines: Sequence[Engine], served: RecordedServing, pace: OverlapMonitor) -> None:
    """Compare the engines' statistics with their outputs. Raises :class:`WrongCounts`."""
    records, stats = served.records.values(), [engine.stats for engine in engines]
    found = {name: sum(getattr(each, name) for each in stats) for name in ("iterations", "emitted_tokens")}
    wanted = {"iterations": pace.launches, "emitted_tokens": sum(map(len, served.tokens.values()))}
    if not served.moved:  # the record of a request that moved begins again in the other engine
        found |= {name: sum(getattr(each, name) for each in stats) for name in ("verified_tokens", "request_iterations")}
        wanted |= {
            "verified_tokens": sum(record.verified_tokens for record in records),
            "request_iterations": sum(record.iterations for record in records),
        }
    if found != wanted:
        raise WrongCounts(f"the engine's stats say {found}, its outputs {wanted}")


def run_once_checked(
    setup: EngineSetup,
    program: HostProgram,
    *,
    strategy: str = "program",
    seed: int = 0,
    watched: bool = True,
    drop_fence: str | None = None,
    half: str = "wait",
    consumer: str | None = None,
) -> CheckResult:
    """Run the program once under one schedule and return its outcome.

    ``watched`` runs it with the sanitizer; a finding then is the outcome. ``drop`` names the fence to leave out, ``half`` its
    wait or record, and ``consumer`` the stream whose waits are left out (None: every stream).
    """
    backend = simulated_device(setup.like, setup.emulations)
    log = FenceLog(lambda stream: backend.control.steps(stream)[1], drop=drop_fence, half=half, consumer=consumer)
    outcome = CheckResult()
    reports: list[Findings] = []

    def run(device: Backend) -> None:
        if not watched:
            outcome.counts = serve(setup, program, log)
            return
        problem: Exception | None = None
        with watch(device) as report:
            try:
                outcome.counts = serve(setup, program, log)
                device.synchronize()
            except Exception as error:
                problem = error
        reports.append(report)
        report.raise_if_any()
        if problem is not None:
            raise problem

    # Compute the references on the host first: this work must not be part of the schedule.
    for arrival in program.arrivals:
        reference_tokens(setup.proposer, arrival)
    if not program.draft_lengths and not program.by_load:
        synchronous_acceptance(setup.proposer, program)
    error = run_once(backend, run, make_strategy(strategy, seed, {}))
    outcome.left_out = log.left_out
    outcome.covered = bool(log.left_out) and log.covered
    if error is not None:
        outcome.error, outcome.text = type(error).__name__, str(error)[:2000]
        if isinstance(error, RaceError):
            outcome.implied = implied_by(reports[0].findings, log)
    return outcome


def prove_program(setup: EngineSetup, number: int, schedules: int) -> dict[str, Any]:
    """Run one host program under many schedules, the first two watched, and return its record for proof.json."""
    program = random_host_program(number)
    start = time.perf_counter()
    record: dict[str, Any] = {"setup": setup.name, "program": number, "schedules": 0, "failures": []}
    for seed in range(schedules):
        strategy = "program" if seed == 0 else "mixed"
        outcome = run_once_checked(setup, program, strategy=strategy, seed=number * schedules + seed, watched=seed < 2)
        record["schedules"] += 1
        if outcome.error:
            record["failures"].append({"seed": seed, "error": outcome.error, "text": outcome.text})
        else:
            record |= outcome.counts
    return record | {"seconds": round(time.perf_counter() - start, 2)}


def ordered_otherwise(setup: EngineSetup, fence: str) -> str:
    """Return why a setup passes without this fence although work on both sides uses it; empty if the fence is needed."""
    if fence == "draft_outputs_ready" and setup.proposer == "none":
        return "nothing is drafted"
    if fence == "params_free" and setup.proposer.startswith(("none", "ngram")):
        return "the host has waited for the lengths, after the only stage that has parameters"
    return ""


def drop_fence(setup: EngineSetup, fence: str, half: str, consumer: str | None, programs: Sequence[int]) -> dict[str, Any]:
    """Leave half a fence out of one program after the other, until a watched run has a finding.

    The result is *live* if the findings imply that fence alone. The result is *unused* if no wait or record was left out, or
    if other fences give the same order.
    """
    left_out, covered = 0, True
    for number in programs:
        outcome = run_once_checked(setup, random_host_program(number), drop_fence=fence, half=half, consumer=consumer)
        left_out += outcome.left_out
        covered = covered and (outcome.covered or not outcome.left_out)
        if outcome.error:
            what = "live" if outcome.implied == (fence,) else f"{outcome.error}, not named alone"
            return {"result": what, "implied": list(outcome.implied), "program": number, "text": outcome.text}
    if left_out and not covered and not ordered_otherwise(setup, fence):
        return {"result": "not found", "left_out": left_out}
    return {"result": "unused", "left_out": left_out, "why": ordered_otherwise(setup, fence)}


def measure_rate(setup: EngineSetup, fence: str, consumer: str | None, number: int, schedules: int) -> dict[str, Any]:
    """Count the schedules of one program in which a dropped wait shows without the sanitizer, by error class."""
    shown: dict[str, int] = {}
    program = random_host_program(number)
    for seed in range(schedules):
        outcome = run_once_checked(
            setup, program, strategy="mixed", seed=seed, watched=False, drop_fence=fence, consumer=consumer
        )
        if outcome.error:
            shown[outcome.error] = shown.get(outcome.error, 0) + 1
    return {"runs": schedules, "shown": shown}
