"""Run the engine on several simulated ranks: random host programs, layouts, proposers and modes, watched by the sanitizer.

Each run must satisfy: the tokens equal those of one rank, the sanitizer has no finding on any rank, every rank ends, and no
rank loses a page or row. ``inject`` puts a divergence into the last rank. The engine must tolerate a divergence of the device
(a tie, one ulp), of the host (slow) or of its memory. A divergence of the replicated decisions (a missing abort, a different
draft length, a different bucket) must be found and named.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.terminal.report import CommandReport
from outrider.device import ConfigError
from outrider_proof.decode_program import HostProgram, Serving, WrongTokens, check_tokens, limited_prefill_graphs

if TYPE_CHECKING:
    from outrider import Engine
    from outrider.device import Backend, Fence
    from outrider.engine.ranks.ranks import Ranks
    from outrider_proof.rank_exploration import RanksWanted
    from outrider_sanitizer import Report
    from outrider_sanitizer import Report as Findings


def run_watched(
    backends: Sequence[Backend],
    body: Callable[[int], None],
    *,
    lost: Sequence[str],
    on_report: Callable[[Report], None] = lambda report: None,
) -> None:
    """Run ``body(rank)`` for each of ``backends`` in its own thread, on the current schedule.

    ``on_report`` receives the sanitizer's report before the threads start. Raises :class:`RaceError` if the sanitizer has a
    finding, then the error of a body, then :class:`WrongTokens` if ``lost`` names pages or rows.
    """
    from outrider_sanitizer import RaceError, watch_ranks
    from outrider_sanitizer.races.race import control_of

    # The engine orders accesses to whole tensors of rows, not to single rows.
    with watch_ranks(backends, rows_apart=False) as report:
        on_report(report)
        problem: Exception | None = None
        try:
            control_of(backends[0]).run_threads(*((lambda rank=rank: body(rank)) for rank in range(len(backends))))
        except Exception as error:
            problem = error
    if not report.clean:
        # A race explains wrong tokens, so it is the error; the error that ended the run may explain a missing collective.
        raise RaceError(report) from problem
    if problem is not None:
        raise problem
    if lost:
        raise WrongTokens("; ".join(lost))


TOLERATED = ("tie", "ulp", "slow", "memory")
"""Names of the divergences that the engine must tolerate."""
NAMED = ("abort", "length", "bucket")
"""Names of the divergences that the sanitizer must find and name."""
IMAGE_PROPOSERS = ("ngram, images", "eagle, images")
"""Proposers of the tiny vision-language model."""
HYBRID_PROPOSERS = (
    *("none", "ngram", "suffix", "draft-model", "mtp-chain", "eagle, untrained"),
    *("hybrid-draft", "hybrid-draft, itself", "suffix+hybrid-draft, itself"),
)
"""Proposers whose target can have recurrent layers: they draft chains."""
_HYBRID_FRACTION = 0.2
"""Fraction of programs whose target has recurrent layers."""
_SCHEDULE_SEED_STRIDE = 1_000_003
"""Difference between the seeds of two schedules of one program."""
_PERSONALITIES = ("cuda", "rocm", "cuda", "npu")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """A configuration: ``tensor`` times ``data`` ranks of personality ``like``; ``mode`` is staged, graphs or fused."""

    tensor: int
    data: int
    proposer: str
    mode: str
    like: str
    expert: bool = False
    """True if the ranks divide the experts of a mixture; False for a dense model, or if they share each expert."""

    @property
    def ranks(self) -> int:
        """The number of ranks, tensor-parallel times data-parallel."""
        return self.tensor * self.data

    def __str__(self) -> str:
        divided = ", experts divided" if self.expert else ""
        return f"tensor {self.tensor}, data {self.data}{divided}, {self.proposer}, {self.mode}, like {self.like}"


def layouts(ranks: int) -> list[tuple[int, int]]:
    """Return each (tensor, data) layout of so many ranks that divides the heads of the tiny model."""
    return [(tensor, ranks // tensor) for tensor in (1, 2, 4) if ranks % tensor == 0 and ranks // tensor <= ranks]


def random_rank_setup(seed: int, wanted: RanksWanted) -> RankSetup:
    """Return the random setup of program ``seed``."""
    from outrider_proof.engine_setups import MIXTURE, MODES, WIDE_HYBRID
    from outrider_proof.proposers import MAKERS

    rng = random.Random(f"ranks {seed}")
    chosen = wanted.layout() if wanted.tensor or wanted.data else rng.choice(layouts(wanted.ranks))
    mode, like = rng.choice(MODES), rng.choice(_PERSONALITIES)
    proposer = rng.choice(("eagle", "mtp", *IMAGE_PROPOSERS, *sorted(MAKERS)))
    if rng.random() < _HYBRID_FRACTION:
        proposer = rng.choice(HYBRID_PROPOSERS) + WIDE_HYBRID
    if like == "npu" and (mode == "fused" or chosen[1] > 1):
        like = "cuda"  # it rebinds parameters instead of fusing, and plans on the host, which an idle rank can't
    mixture = random.Random(f"experts {seed}").choice(("none", "shared", "divided"))
    if mixture != "none" and proposer in MAKERS:
        proposer += MIXTURE
    divided = proposer.endswith(MIXTURE) and mixture == "divided" and chosen != (1, 1)
    return RankSetup(tensor=chosen[0], data=chosen[1], proposer=proposer, mode=mode, like=like, expert=divided)


class RankExplorer:
    """A runner of programs on ranks. It opens the devices once for each number of ranks and personality."""

    def __init__(self, registry: Any, *, wrap: Callable[[int, Fence], Fence] | None = None) -> None:
        """Create an explorer; ``wrap(rank, fence)`` becomes the ``wrap_fence`` of each rank's engine."""
        self.registry = registry
        self.wrap = wrap
        self._devices: dict[tuple[int, str, str], list[Backend]] = {}
        self.change: Callable[[int, Engine], None] | None = None
        """The function that is called with each rank and its new engine; None calls nothing."""
        self.report: Findings | None = None

    def devices(self, setup: RankSetup, inject: str | None = None) -> list[Backend]:
        """Return one simulated device per rank of the setup; ``inject="memory"`` limits the last to 48 MiB."""
        key = (setup.ranks, setup.like, "memory" if inject == "memory" else "")
        if key not in self._devices:
            last = ",memory=48MiB" if inject == "memory" else ""
            self._devices[key] = [
                self.registry.create(
                    f"sim:{rank}{f',like={setup.like}' if rank == 0 else ''}{last if rank == setup.ranks - 1 else ''}"
                )
                for rank in range(setup.ranks)
            ]
        return self._devices[key]

    def run_program(self, setup: RankSetup, program: HostProgram, *, inject: str | None = None) -> dict[str, int]:
        """Run one program on the current schedule and return counts of its requests. Raises the first error found."""
        from outrider.engine.ranks.ranks import ParallelConfig, Ranks
        from outrider_proof.engine_setups import reference_tokens
        from outrider_sanitizer.races.race import control_of

        backends = self.devices(setup, inject)
        store = control_of(backends[0]).create_store()
        wanted = [reference_tokens(setup.proposer, arrival) for arrival in program.arrivals]
        counts: dict[str, int] = {}
        lost: list[str] = []

        def body(rank: int) -> None:
            parallel = ParallelConfig(tensor=setup.tensor, data=setup.data, expert=setup.expert)
            ranks = Ranks(backends[rank], parallel, rank=rank, store=store)
            last = rank == setup.ranks - 1
            if last and inject in ("tie", "ulp", "slow"):
                control_of(backends[rank]).diverge(inject)
            engine = self._engine(setup, program, backends[rank], ranks)
            if self.change is not None:
                self.change(rank, engine)
            if last and inject in NAMED:
                _inject_divergence(engine, inject)
            before = (engine.free_pages, engine.free_rows)
            if rank:
                engine.follow()
            else:
                counts.update(_serve(engine, setup, program, wanted))
                engine.close()
            backends[rank].synchronize()
            if (engine.free_pages, engine.free_rows) != before:
                lost.append(f"rank {rank}: {before} pages and rows were free, now {(engine.free_pages, engine.free_rows)}")
            ranks.close()

        with limited_prefill_graphs(program):  # for all ranks: each of their threads would end the scope for the others
            run_watched(backends, body, lost=lost, on_report=self._watched)
        return counts

    def _watched(self, report: Findings) -> None:
        self.report = report

    def _engine(self, setup: RankSetup, program: HostProgram, backend: Backend, ranks: Ranks) -> Engine:
        from outrider_proof.engine_setups import Models

        wrap = None if self.wrap is None else partial(self.wrap, ranks.rank)
        return Models(setup.proposer, backend, ranks).engine(program, mode=setup.mode, wrap=wrap)


def _serve(engine: Engine, setup: RankSetup, program: HostProgram, wanted: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Serve all requests on the first rank and compare their tokens with those of one rank.

    Returns how many requests there were, were aborted, and were moved. Raises :class:`WrongTokens` for other tokens.
    """
    from outrider_proof.engine_setups import prompt_and_media

    serving = Serving([engine], program, partial(prompt_and_media, setup.proposer))
    serving.step_until_idle()
    check_tokens(serving.tokens, serving.ended, wanted)
    return {
        "requests": len(wanted),
        "aborted": sum(reason == "abort" for reason in serving.ended.values()),
        "moved": serving.moved,
    }


def _inject_divergence(engine: Engine, inject: str) -> None:
    """Change the decisions that a follower rank receives, or the bucket that it picks."""
    from outrider.engine.ranks.records import DecisionRecord, decode_call

    decision_log: Any = engine._decision_log
    next_record = decision_log.next

    def other() -> DecisionRecord:
        record: DecisionRecord = next_record()
        drafted: Any = (record.decisions or {}).get("drafted")
        changed = record
        if inject == "abort":
            changed = replace(record, calls=tuple(each for each in record.calls if decode_call(each)[0] != "abort"))
        elif inject == "length" and drafted:
            changed = replace(record, decisions={**(record.decisions or {}), "drafted": drafted - 1})
        decision_log._record = changed
        return changed

    decision_log.next = other
    if inject == "bucket":
        step: Any = engine._step
        runner = step.step.runner
        smallest = runner.bucket

        def larger(count: int, kind: Any) -> int:
            size: int = smallest(count, kind)
            return next((other for other in runner.buckets if other > size), size)

        runner.bucket = larger


def explore_engine(wanted: RanksWanted, explorer: RankExplorer | None = None) -> CommandReport:
    """Run programs, each under its own schedule, until one fails, and return the report.

    ``explorer`` provides open devices; None opens new ones.
    """
    from outrider_proof.engine_setups import random_host_program

    if wanted.inject is not None and wanted.inject not in (*TOLERATED, *NAMED):
        raise ConfigError(f"--inject {wanted.inject} on the engine: expected one of {', '.join((*TOLERATED, *NAMED))}")
    explorer = explorer or RankExplorer(wanted.registry)
    outcomes: list[dict[str, Any]] = []
    began = time.monotonic()
    failed = False
    for number in range(wanted.seed, wanted.seed + wanted.iterations):
        outcomes.append(_run_once(explorer, random_rank_setup(number, wanted), number, random_host_program(number), wanted))
        failed = outcomes[-1]["error"] is not None
        if failed:
            break
    data = {
        "program": "ranks",
        "ranks": wanted.ranks,
        "inject": wanted.inject,
        "seed": wanted.seed,
        "runs": len(outcomes),
        "failed": failed,
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": outcomes,
    }
    return CommandReport(data=data, render=lambda console: _render(console, data), exit_code=1 if failed else 0)


def _run_once(
    explorer: RankExplorer, setup: RankSetup, number: int, program: HostProgram, wanted: RanksWanted
) -> dict[str, Any]:
    """Run a program once and return its row of the report. The order is random, or program order with an injected divergence.

    ``error`` is the class of the error and ``named`` the decision in which the ranks first differ, as the sanitizer names it;
    both are None if the program passed. The counts are those of :meth:`RankExplorer.run_program`.
    """
    from outrider_sanitizer.races import decision_named
    from outrider_sanitizer.races.race import control_of
    from outrider_sim.exploration import run_once
    from outrider_sim.strategies import make_strategy

    counts: dict[str, int] = {}

    def run(_: object) -> None:
        counts.update(explorer.run_program(setup, program, inject=wanted.inject))

    backend: Any = explorer.devices(setup, wanted.inject)[0]
    seed = number + _SCHEDULE_SEED_STRIDE * wanted.schedule
    error = run_once(backend, run, make_strategy(wanted.strategy if wanted.inject is None else "program", seed, {}))
    row = {"setup": str(setup), "number": number, **dict.fromkeys(("error", "message", "named", "schedule")), **counts}
    if error is None:
        return row
    cause = error.__cause__
    ended = "" if cause is None else f"\nthe run ended with {type(cause).__name__}: {cause}"
    named = decision_named(explorer.report) if explorer.report is not None else ""
    schedule = control_of(backend).schedule()
    return row | {
        "error": type(error).__name__,
        "message": f"{error}{ended}" or None,
        "named": named or None,
        "schedule": schedule or None,
    }


def _render(console: Console, data: Mapping[str, Any]) -> None:
    rows = data["outcomes"]
    table = Table("program", "setup", "requests", "aborted", "handed over", "", box=None, pad_edge=False)
    for row in rows if len(rows) <= 24 else rows[-24:]:
        cells = (row["number"], row["setup"], row.get("requests", ""), row.get("aborted", ""), row.get("moved", ""))
        table.add_row(*map(str, cells), Text(row["error"] or "right", style="bold red" if row["error"] else "green"))
    console.print(table)
    if data["failed"]:
        last = rows[-1]
        console.print(Text(f"program {last['number']} failed: {last['error']}", style="bold red"))
        console.print(last["message"], markup=False, highlight=False)
        if last["named"]:
            console.print(Text(f"the ranks first differ in the decision {last['named']!r}", style="bold yellow"))
    console.print(f"{data['runs']} programs on {data['ranks']} ranks in {data['seconds']} s")
