"""``outrider explore``: run a program under many schedules, and shrink the first that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.options.option_values import (
    BackendOption,
    UsageError,
    closest,
    one_of,
    option,
    parsed,
    text,
    whole,
)
from outrider.cli.terminal.environment import backend_from_environment
from outrider.cli.terminal.report import CommandReport, exit_code, show_progress
from outrider.cli.terminal.torch_probe import require_torch
from outrider.device.errors import CapabilityError, ConfigError, OutriderError
from outrider.engine.fences import FENCES
from outrider.registry import Registry
from outrider_proof.explorations import (
    CORPUS,
    DECODE,
    ITERATIONS,
    DecodeExploration,
    explore_corpus,
    explore_decode,
)
from outrider_proof.rank_exploration import RANKS, RanksWanted, explore_ranks
from outrider_sanitizer.scripts import SIMULATED

if TYPE_CHECKING:
    from outrider.device import Backend


_STRATEGIES = ("program", "lazy", "slowest", "fastest", "random", "pct", "exhaustive", "mixed")


def _check_strategy(given: str) -> None:
    name = given.partition(":")[0]
    if name not in (*_STRATEGIES, "replay"):
        raise ConfigError(f"expected one of {', '.join(_STRATEGIES)}{closest(name, _STRATEGIES)}")


NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME|MODULE:FUNCTION", help="A program of the corpus, or a function that takes a backend."),
]
StrategyOption = Annotated[
    str | None,
    option(
        "--strategy",
        value=parsed("NAME[:KEY=VALUE]", _check_strategy),
        help="program, lazy, slowest:stream=S, fastest:stream=S, random, pct:d=3, exhaustive or mixed, the default. A "
        "device that decides its schedules itself runs decode alone, in the order of the program.",
    ),
]
DropFenceOption = Annotated[
    str | None,
    option(
        "--drop-fence",
        value=one_of(*(fence.name for fence in FENCES), "every", metavar="NAME|every"),
        help="decode: leave this fence out; every: one by one, each where it is needed.",
    ),
]
DropOption = Annotated[
    str, option("--drop", value=one_of("wait", "record"), help="decode: the half of the fence that is left out.")
]
ExploredProposerOption = Annotated[
    str, option("--speculate", value=one_of("eagle", "ngram", "none"), help="decode: the proposer.")
]
DraftTopkOption = Annotated[
    int, option("--draft-topk", value=whole(1, 1024), help="decode: 1 drafts chains, more drafts trees.")
]
ExploredModeOption = Annotated[
    str, option("--mode", value=one_of("staged", "fused"), help="decode: how iterations are launched.")
]
ImagesOption = Annotated[
    bool, option("--images", help="decode: a tiny model over text and images, with positions on three axes.")
]
RanksOption = Annotated[
    int | None, option("--ranks", value=whole(2, 64), help="ranks: how many; 2 unless --tensor or --data say.")
]
InjectOption = Annotated[
    str | None,
    option("--inject", value=text("NAME|every"), help="ranks: what brings the ranks apart, in a program of the corpus."),
]


class ProgramExit(OutriderError):
    """Raised if the explored program called ``sys.exit`` with a nonzero ``code``."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def explore(
    context: typer.Context,
    name: NameArgument = None,
    backend: BackendOption = None,
    strategy: StrategyOption = None,
    iterations: Annotated[
        int | None,
        option(
            "--iterations",
            value=whole(1),
            help="Schedules to try at most: 100, or 4 for each fence of --drop-fence every.",
        ),
    ] = None,
    seed: Annotated[int, option("--seed", value=whole(0), help="Seed of the strategy's draws.")] = 0,
    replay: Annotated[str | None, option("--replay", value=text("SCHEDULE"), help="One run, with this schedule.")] = None,
    drop_fence: DropFenceOption = None,
    drop: DropOption = "wait",
    speculate: ExploredProposerOption = "eagle",
    draft_topk: DraftTopkOption = 1,
    mode: ExploredModeOption = "staged",
    graphs: Annotated[bool, option("--graphs", help="decode: replay stages from graphs in staged mode too.")] = False,
    images: ImagesOption = False,
    corrected: Annotated[bool, option("--corrected", help="The corrected program of the corpus.")] = False,
    ranks: RanksOption = None,
    tensor: Annotated[int | None, option("--tensor", value=whole(1, 64), help="ranks: tensor-parallel ones.")] = None,
    data: Annotated[int | None, option("--data", value=whole(1, 64), help="ranks: data-parallel ones.")] = None,
    inject: InjectOption = None,
) -> CommandReport:
    """Run a program under many schedules. The exit code is 1, with the shrunk schedule, if the program fails.

    A program is a function of one argument, the backend. It creates its streams and tensors there, and raises an exception if
    a result is wrong. ``decode`` is the engine on random host programs: its tokens are compared with non-speculative
    decoding, and the sanitizer watches. ``ranks`` is the engine on several simulated ranks, or with ``--inject`` the corpus
    of ranks that differ. ``corpus`` runs all corrected programs, in which the sanitizer must find nothing. No name lists the
    corpus.
    """
    if name is None:
        return _listing()
    require_torch()
    tell = context.with_resource(show_progress())
    tell("exploring", 0, 0)
    registry, device_spec = Registry(), backend or backend_from_environment()
    tries = iterations or ITERATIONS
    chosen = f"replay:{replay}" if replay is not None else strategy
    if name == DECODE:
        return explore_decode(
            DecodeExploration(
                registry=registry,
                backend=device_spec,
                strategy=chosen,
                iterations=iterations,
                seed=seed,
                drop_fence=drop_fence,
                drop=drop,
                setup={"speculate": speculate, "draft_topk": draft_topk, "mode": mode, "graphs": graphs, "images": images},
                progress=lambda done, total: tell("exploring", done, total),
            )
        )
    if name == RANKS:
        return explore_ranks(
            RanksWanted(
                registry=registry,
                iterations=tries,
                seed=seed,
                ranks=ranks or ((tensor or 1) * (data or 1) if tensor or data else 2),
                tensor=tensor,
                data=data,
                inject=inject,
                corrected=corrected,
                strategy=strategy or "mixed",
            )
        )
    if name == CORPUS:
        return explore_corpus(registry, iterations=tries, seed=seed, strategy=chosen or "mixed", backend=device_spec)
    device = registry.create(device_spec or SIMULATED)
    return _explore_program(name, backend, device, chosen or "mixed", tries, seed, corrected)


def _explore_program(
    name: str, backend: str | None, device: Backend, strategy: str, iterations: int, seed: int, corrected: bool
) -> CommandReport:
    """Run one program of the corpus, or one function, under many schedules; ``backend`` is the option of the command."""
    from outrider_sanitizer.races.race import control_of

    control = control_of(device)
    program = _ending_normally(_program(name, corrected, device))
    result = control.explore(program, strategy=strategy, iterations=iterations, seed=seed)
    failure = result.failure
    record: dict[str, Any] = {
        "program": name,
        "strategy": strategy,
        "seed": seed,
        "runs": result.runs,
        "exhausted": result.exhausted,
        "failed": failure is not None,
    }
    if failure is not None:
        record |= {
            "run": failure.run,
            "error": {"type": type(failure.error).__name__, "message": str(failure.error)},
            "schedule": str(failure.schedule),
            "shrunk": str(failure.shrunk),
            "orderings": list(failure.orderings),
        }

    def render(console: Console) -> None:
        if failure is None:
            every = ", and there are no others" if result.exhausted else ""
            console.print(Text(f"{name} passed {result.runs} schedules{every}", style="green"))
            return
        console.print(Text(f"{name} failed in run {failure.run}: {type(failure.error).__name__}", style="bold red"))
        console.print(str(failure.error))
        for ordering in failure.orderings:
            console.print(Text(f"  {ordering}", style="yellow"))
        if not failure.orderings:
            console.print("  in the order of the program itself")
        console.print(f"replay with: outrider explore {name}{_options(backend, corrected)} --replay {failure.shrunk}")

    code = failure.error.code if failure is not None and isinstance(failure.error, ProgramExit) else 1
    return CommandReport(data=record, render=render, exit_code=code if failure is not None else 0)


def _ending_normally(program: Callable[[Backend], None]) -> Callable[[Backend], None]:
    """Wrap a program: ``sys.exit(0)`` ends it normally, any other exit code raises :class:`ProgramExit`."""

    def run(device: Backend) -> None:
        try:
            program(device)
        except SystemExit as error:
            code = exit_code(error)
            if code:
                raise ProgramExit(f"the program ended itself with exit code {code}: {error.code}", code) from None

    return run


def _options(backend: str | None, corrected: bool) -> str:
    return (f" --backend {backend}" if backend else "") + (" --corrected" if corrected else "")


def _listing() -> CommandReport:
    from outrider_sanitizer.races import RACES, RANK_RACES

    rows = [
        {"name": race.name, "about": race.about, "kind": race.kind.value if race.kind else None, "needs": race.needs}
        for race in RACES.values()
    ]
    rows += [
        {"name": f"ranks --inject {race.name}", "about": race.about, "kind": race.kind_text, "needs": "collectives"}
        for race in RANK_RACES.values()
    ]

    def render(console: Console) -> None:
        table = Table("name", "needs", "about", box=None, pad_edge=False)
        for row in rows:
            table.add_row(row["name"], row["needs"], row["about"])
        console.print(table)

    return CommandReport(data={"programs": rows}, render=render)


def _program(name: str, corrected: bool, device: Backend) -> Callable[[Backend], None]:
    from outrider_sanitizer.races import RACES

    module, colon, function = name.partition(":")
    if not colon:
        race = RACES.get(name)
        if race is None:
            raise UsageError(f"the corpus has no program {name!r}; `outrider explore` lists it, or give MODULE:FUNCTION")
        if race.needs and not getattr(device.capabilities, race.needs):
            raise CapabilityError(f"{name!r} needs a backend with {race.needs}, which {device.label} doesn't declare")
        return race.right if corrected else race.wrong
    sys.path.insert(0, "")  # modules of the working directory, as with `python -m`
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"program {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"program {name!r}: importing {module!r} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise UsageError(f"program {name!r}: module {module!r} has no function {function!r}")
    return found  # type: ignore[no-any-return]
