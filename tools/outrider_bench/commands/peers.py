"""``outrider bench peers``: run the same work on this engine and on other installed engines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.options.models import DraftTokensOption
from outrider.cli.options.option_records import with_options
from outrider.cli.options.option_values import (
    DIRECTORY,
    DTYPES,
    INPUT_FILE,
    UsageError,
    checking_options,
    number,
    one_of,
    option,
    output_file,
    parsed,
    whole,
)
from outrider.cli.terminal.environment import backend_from_environment
from outrider.cli.terminal.files import check_directory, check_distinct
from outrider.cli.terminal.report import CommandReport, Interrupted, note, show_progress
from outrider.device.errors import ConfigError
from outrider.registry import Registry
from outrider_bench.acceptance import acceptance_rates
from outrider_bench.child import BenchFailed, ChildSession, open_session
from outrider_bench.load import MixedLoad
from outrider_bench.options import (
    ACCEPTANCE,
    PROMPT_BATCHES,
    SIZES,
    BatchOption,
    MixedLoadOptions,
    ModeOption,
    PlotOption,
    PrefillChunkOption,
    PromptTokensOption,
    RandomWeightOptions,
    RequiredShapeOption,
    TimedTokensOption,
    parse_names,
    parse_prompt_batches,
    parse_sizes,
    some_of,
)
from outrider_bench.peers.comparing import OURS, EngineRuns, compare_engines, plot_points, render_engines
from outrider_bench.peers.work import PHASES, PeerWork
from outrider_bench.plot import series_svg, stack_drawings, write_output, write_plot

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.registry import BackendSpec

PEERS: Mapping[str, tuple[str, ...]] = {"transformers": ("none",), "vllm": ("none", "eagle", "mtp")}
"""The other engines, and the proposers that each can be measured with."""
_ORDER = (OURS, *PEERS)
_PROPOSERS = ("eagle", "mtp", "none")
_AXES: Mapping[str, tuple[str, str]] = {
    "decode": ("batch size", "ms an iteration"),
    "context": ("prompt tokens", "ms an iteration"),
    "prefill": ("prompt tokens", "ms to the first token"),
}
"""Names of the horizontal and the vertical axis of a plot of each phase."""
_CACHE_VARIABLES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Environment variables of the directories for compiled kernels."""


def parse_arguments(given: str) -> dict[str, object]:
    """Return the object that ``given`` is as JSON. Raises :class:`ConfigError` for other text."""
    try:
        found = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"expected a JSON object; {error}") from error
    if not isinstance(found, dict):
        raise ConfigError('expected a JSON object, such as {"max_num_batched_tokens": 8192}')
    return found


_ARGUMENTS = parsed("JSON", parse_arguments)

ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class PeerWorkOptions(RandomWeightOptions):
    """Options of a comparison, equal for all engines: random weights, acceptance, and the sizes of each phase."""

    shape: RequiredShapeOption = "llama-3.1-8b"
    draft_tokens: DraftTokensOption = 3
    accept_length: Annotated[
        str,
        option(
            "--accept-length",
            value=ACCEPTANCE,
            help="Synthetic acceptance for all engines: mean tokens an iteration yields, or HEAD:KIND of a measured head.",
        ),
    ] = "2.98"
    dtype: Annotated[str, option("--dtype", value=one_of(*DTYPES), help="Dtype.")] = "bfloat16"
    phases: Annotated[str, option("--phases", value=some_of(*PHASES), help="Phases to measure.")] = "decode"
    batch: BatchOption = "1,8,32"
    prompt_tokens: PromptTokensOption = 512
    new_tokens: TimedTokensOption = 256
    prefill_tokens: Annotated[str, option("--prefill-tokens", value=SIZES, help="Prompt lengths of prefill.")] = (
        "512,4096,16384"
    )
    prefill_batches: Annotated[
        str,
        option("--prefill-batches", value=PROMPT_BATCHES, help="Prompts of batch-prefill, all at once, and tokens of each."),
    ] = "16x4096"
    contexts: Annotated[
        str, option("--contexts", value=SIZES, help="Prompt lengths of context, where one request decodes.")
    ] = "512,2048,8192,32768"
    max_requests: Annotated[
        int | None,
        option(
            "--max-requests",
            value=whole(1, 4096),
            help="Maximum number of concurrent requests. Default: as needed, at most 128.",
        ),
    ] = None
    max_context: Annotated[
        int | None,
        option("--max-context", value=whole(2), help="Maximum tokens of a request. Default: as needed."),
    ] = None
    memory: Annotated[
        float | None,
        option("--memory", value=number(0, 1, above=True), help="Share of the device's memory, for engines that take one."),
    ] = None
    keep: Annotated[
        Path | None,
        option(
            "--keep", value=DIRECTORY, help="Directory for compiled kernels and output of the engines, for the next run too."
        ),
    ] = None

    def check(self, engines: Sequence[str], proposers: Sequence[str]) -> None:
        """Raise :class:`ConfigError` for options that ``engines`` with ``proposers`` can't use."""
        if self.keep is not None:
            check_directory("--keep", self.keep)
        if self.quantize is not None:
            self._check_quantized(engines)
        own = {
            "--draft-weights": self.draft_weights,
            "--draft-vocabulary": self.draft_vocabulary,
        }
        given = [option for option, value in own.items() if value is not None]
        if "mtp" in proposers:
            self._check_hybrid()
        if given and not (OURS in engines and set(proposers) & {"eagle", "mtp"}):
            raise UsageError(
                f"{given[0]} is for drafts of {OURS}, and --engines {','.join(engines)!r} with --speculate "
                f"{','.join(proposers)!r} has none; leave it out"
            )

    def _check_hybrid(self) -> None:
        from outrider.model.config.shapes import shape_config

        if shape_config(self.shape).recurrent is None:
            raise UsageError(
                f"--speculate mtp is for a shape with the head in its checkpoint, as qwen3.5-27b, and {self.shape} has none; "
                "say --speculate eagle"
            )

    def _check_quantized(self, engines: Sequence[str]) -> None:
        from outrider.model.config.shapes import shape_config

        others = sorted(set(engines) - {OURS, "vllm"})
        if others:
            raise UsageError(f"--quantize is for outrider and vllm, not for {', '.join(others)}; say --engines outrider,vllm")
        if self.lm_head and shape_config(self.shape).tie_embeddings:
            raise UsageError(
                f"the output head of {self.shape} is its embedding, which stays unquantized; leave out --lm-head"
            )

    def make_work(self, mixed: MixedLoad, *, device: str, engines: int) -> PeerWork:
        """Return the work for engines on ``device``, ``engines`` of which share its memory. Raises :class:`ConfigError`."""
        measured = tuple(parse_names(self.phases, tuple(PHASES)))
        batches = tuple(parse_sizes(self.batch))
        work = PeerWork(
            model=self.random_model(self.shape, "eagle"),
            dtype=self.dtype,
            batches=batches,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            rates=acceptance_rates(self.accept_length, self.draft_tokens),
            device=device,
            phases=measured,
            lengths=tuple(parse_sizes(self.prefill_tokens)),
            prompt_batches=tuple(parse_prompt_batches(self.prefill_batches)),
            contexts=tuple(parse_sizes(self.contexts)),
            load=mixed,
            max_requests=self.max_requests or 1,
            max_context=self.max_context,
            memory=self.memory or (0.85 if engines == 1 else round(0.9 / engines, 3)),
            keep=None if self.keep is None else str(self.keep.absolute()),
        )
        if self.max_requests is None:
            work = replace(work, max_requests=work.concurrent)
        tokens, whose = work.longest
        room = min(self.max_context or work.shape_context, work.shape_context)
        if tokens > room:
            raise UsageError(f"a request of {whose} has {tokens} tokens, and {room} are there for one; ask for fewer")
        if "decode" in measured and work.max_requests < max(batches):
            raise UsageError(
                f"--max-requests is {work.max_requests}, and --batch {max(batches)} requests decode together; raise it"
            )
        return work


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """Options of vLLM's process, since vLLM and this project may need different versions of torch."""

    vllm_python: Annotated[
        Path | None,
        option(
            "--vllm-python",
            value=INPUT_FILE,
            help="Interpreter of vLLM's environment, which needs this project's packages too. Default: this one.",
        ),
    ] = None
    vllm_packages: Annotated[
        Path | None,
        option("--vllm-packages", value=DIRECTORY, help="Directory of packages that precede others in vLLM's process alone."),
    ] = None
    vllm_arguments: Annotated[
        str, option("--vllm-arguments", value=_ARGUMENTS, help="Further arguments of vllm.LLM; the report names them.")
    ] = "{}"

    def can_start(self) -> bool:
        """Return False if vLLM has no environment of its own and isn't installed in this one."""
        return self.vllm_python is not None or self.vllm_packages is not None or find_spec("vllm") is not None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that make vLLM's packages importable."""
        if self.vllm_packages is None:
            return {}
        paths = [str(self.vllm_packages.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths)}


@with_options
def peers(
    *,
    options: PeerWorkOptions,
    load: MixedLoadOptions,
    vllm: VllmOptions,
    engines: Annotated[str, option("--engines", value=some_of(*_ORDER), help="Engines.")] = ",".join(_ORDER),
    speculate: Annotated[str, option("--speculate", value=some_of(*_PROPOSERS), help="Proposers.")] = "eagle,none",
    repeat: Annotated[
        int,
        option("--repeat", value=whole(1), help="Runs of each case. From 2 on all engines are open at once and take turns."),
    ] = 5,
    mode: ModeOption = None,
    prefill_chunk: PrefillChunkOption = None,
    tune_seconds: Annotated[
        float, option("--tune-seconds", value=number(0), help="Time limit of tuning this engine's kernels first.")
    ] = 0.0,
    plot: PlotOption = None,
    so_far: Annotated[
        Path | None, option("--so-far", value=output_file(), help="File for the results, written after each run.")
    ] = None,
    limit: Annotated[float, option("--limit", value=number(1), help="Seconds for a start, and for one run.")] = 900.0,
) -> CommandReport:
    """Run the same work on this engine and on each of transformers and vLLM that is installed.

    Each engine runs in a process of its own. Their runs alternate: every case runs once before a case runs twice, and each
    figure is the median of its runs. Every case follows a short run of itself that isn't measured. Acceptance is synthetic,
    by each engine's own setting, with the same chance for each draft token. transformers has no such setting and doesn't
    speculate. Engines that aren't installed are listed. The report names the versions and the settings of each engine.
    """
    chosen, kinds = parse_names(engines, _ORDER), parse_names(speculate, _PROPOSERS)
    if plot is not None and not set(_AXES) & set(parse_names(options.phases, tuple(PHASES))):
        raise UsageError(
            f"--plot has nothing to draw of --phases {options.phases!r}; add {', '.join(_AXES)}, or leave it out"
        )
    if so_far is not None:
        with checking_options():
            check_distinct("--so-far", so_far, filter(None, (plot, Path(options.shape))))
    options.check(chosen, kinds)
    registry = Registry()
    spec = registry.select(options.backend, backend_from_environment())
    work = options.make_work(load.load(), device=str(registry.create(spec).device), engines=len(chosen) if repeat > 1 else 1)
    groups = _engine_groups(chosen, kinds, repeat)
    found = [each for group in groups for each in group]
    data = work.describe() | {"backend": str(spec), "repeat": repeat}

    def describe() -> dict[str, object]:
        return data | compare_engines([each for each in found if each.has_result], work)

    settings = {
        "mode": mode,
        "prefill_chunk": prefill_chunk,
        "tune_seconds": tune_seconds,
        "vllm_arguments": parse_arguments(vllm.vllm_arguments),
    }

    def report_progress(line: str) -> None:
        if so_far is not None:
            write_output("--so-far", so_far, json.dumps(describe(), indent=1) + "\n")
            note(line + "\n")

    race = _PeerRace(work, spec, settings, vllm, limit, report_progress)
    with show_progress() as report_bar:
        for group in groups:
            try:
                race.measure_group(group, repeat, report_bar)
            except KeyboardInterrupt:
                done = sum(each.has_result for each in found)
                where = "; ".join(f"{each.engine}, {each.speculate}" for each in group)
                reached = f"interrupted at {where}, after {done} of {len(found)} measurements"
                raise Interrupted(reached, describe(), _renderer(describe()) if done else None) from None
    result = describe()
    code = 0 if plot is None else write_plot(plot, _draw(found, work.phases, f"{work.model.shape}, {work.dtype}"), result)
    return CommandReport(data=result, render=_renderer(result), exit_code=code)


def _engine_groups(engines: Sequence[str], proposers: Sequence[str], repeat: int) -> list[list[EngineRuns]]:
    """Return the engines that are open at the same time: all with one proposer, or a single one if nothing is repeated."""
    groups = [
        [
            EngineRuns(engine=name, speculate=kind)
            for name in _ORDER
            if name in engines and (name == OURS or kind in PEERS[name])
        ]
        for kind in proposers
    ]
    return [[each] for group in groups for each in group] if repeat == 1 else groups


def _draw(found: Sequence[EngineRuns], phases: Sequence[str], title: str) -> str | None:
    """Return the plots of the measured phases as one SVG, one below the other; None if nothing was measured."""
    drawings = []
    for phase, (across, up) in _AXES.items():
        series = plot_points(found, phase) if phase in phases else {}
        if series:
            drawings.append(series_svg(series, title=f"{title}: {phase}", across=across, up=up))
    return stack_drawings(drawings) if drawings else None


def _renderer(data: dict[str, Any]) -> Callable[[Console], None]:
    return lambda console: render_engines(console, data)


@dataclass(frozen=True, slots=True)
class _PeerRace:
    """A measurement of engines that are open at the same time and take turns."""

    work: PeerWork
    spec: BackendSpec
    options: Mapping[str, object]
    vllm: VllmOptions
    limit_s: float
    report_progress: Callable[[str], None]

    def measure_group(self, group: list[EngineRuns], repeat: int, show_progress: ProgressCallback) -> None:
        """Open the engines, measure every case ``repeat`` times, all cases once before any case twice, and close
        the engines.
        """
        with ExitStack() as stack:
            sessions: list[tuple[EngineRuns, ChildSession]] = []
            for each in group:
                show_progress(f"starting {each.engine}, {each.speculate}", 0, 1)
                opened = self._open(each, stack)
                if opened is not None:
                    sessions.append((each, opened))
            first = [(phase, case) for phase in self.work.phases for case in self.work.cases(phase)]
            # An interrupted run has figures of every case.
            cases = first + [(phase, case) for phase, case in first if case != "latency"] * (repeat - 1)
            for number, (phase, case) in enumerate(cases):
                for each, opened in sessions:
                    show_progress(f"{each.engine}, {each.speculate}", number, len(cases))
                    self._measure_case(each, opened, phase, case)

    def _open(self, each: EngineRuns, stack: ExitStack) -> ChildSession | None:
        vllm = self.vllm if each.engine == "vllm" else None
        if not (each.engine == OURS or (find_spec(each.engine) if vllm is None else vllm.can_start())):
            each.status = "not installed"
            return None
        variables = {} if vllm is None else vllm.variables()
        log = None
        if self.work.keep is not None:
            keep = Path(self.work.keep)
            keep.mkdir(parents=True, exist_ok=True)
            variables |= {name: str(keep / name.lower()) for name in _CACHE_VARIABLES}
            log = keep / f"{each.engine}-{each.speculate}.log"
        given = {**asdict(self.work), "speculate": each.speculate, "backend": str(self.spec), "options": self.options}
        function = f"outrider_bench.peers.{each.engine}:serve"
        python = sys.executable if vllm is None else str(vllm.vllm_python or sys.executable)
        session = open_session(function, given, variables=variables, limit_s=self.limit_s, log=log, python=python)
        try:
            opened = stack.enter_context(session)
        except BenchFailed as error:
            each.status = f"failed: {error}"
            self.report_progress(f"{each.engine}, {each.speculate}: {each.status}")
            return None
        each.status, each.about = "measured", opened.about
        self.report_progress(f"{each.engine}, {each.speculate}: started, {_format_numbers(opened.about)}")
        return opened

    def _measure_case(self, each: EngineRuns, opened: ChildSession, phase: str, case: Any) -> None:
        try:
            answer = opened.ask({"phase": phase, "case": case}, limit_s=self.limit_s)
        except BenchFailed as error:
            each.failures[phase, case] = str(error)
            self.report_progress(f"{each.engine}, {each.speculate}: {phase} {case} failed: {error}")
            return
        each.runs.setdefault((phase, case), []).append(answer)
        self.report_progress(f"{each.engine}, {each.speculate}: {phase} {case}: {_format_numbers(answer)}")


def _format_numbers(figures: Mapping[str, object]) -> str:
    """Return the numbers among ``figures`` as text for a progress line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, int | float))
