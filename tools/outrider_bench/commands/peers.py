"""``outrider bench peers``: the same work on other engines that are installed, and on this one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.environment import backend_from_environment
from outrider.cli.files import check_directory, check_output
from outrider.cli.models import (
    DraftOutputHeadOption,
    DraftTokensOption,
    DraftVocabularyOption,
)
from outrider.cli.report import BackendOption, Interrupted, JsonOption, Report
from outrider.cli.starting import show_progress
from outrider.cli.streams import note
from outrider.device.errors import ConfigError
from outrider.registry import Registry
from outrider_bench.child import ChildFailed
from outrider_bench.commands.decode import sizes_of
from outrider_bench.engines import DraftQuantizeOption
from outrider_bench.launch_options import ModeOption, PrefillChunkOption, TuneOption
from outrider_bench.mixed_load import length_range
from outrider_bench.outputs import write_output, write_plot
from outrider_bench.peers.comparing import OURS, Found, compared, render
from outrider_bench.peers.session import Session, session
from outrider_bench.peers.sglang import variables as _sglang_variables
from outrider_bench.peers.work import PHASES, Work
from outrider_bench.random_model import check_draft_quantize

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.registry import BackendSpec

PEERS: Mapping[str, tuple[str, ...]] = {"transformers": ("none",), "vllm": ("none", "eagle"), "sglang": ("none", "eagle")}
"""Each engine, and what it can be measured with."""
_ORDER = (OURS, *PEERS)
_ACROSS: Mapping[str, tuple[str, str]] = {
    "decode": ("batch size", "ms an iteration"),
    "context": ("prompt tokens", "ms an iteration"),
    "prefill": ("prompt tokens", "ms to the first token"),
}
"""What a plot of each phase has along its axes."""
_KEEPS = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Where the engines keep what they compile."""

Tell = Callable[[str, int, int], None]


def peers(
    shape: Annotated[
        str, typer.Option("--shape", metavar="NAME|config.json", help="Random weights of this shape.")
    ] = "llama-3.1-8b",
    phases: Annotated[
        str, typer.Option(metavar="decode,prefill,mixed,context", help="What is measured, by commas.")
    ] = "decode",
    batch: Annotated[str, typer.Option(metavar="1,8,32", help="Batch sizes of decode, by commas.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, metavar="N", help="Of a request of decode.")] = 512,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, metavar="N", help="Of a request of decode.")] = 256,
    prefill_tokens: Annotated[
        str, typer.Option("--prefill-tokens", metavar="512,4096", help="Prompts of prefill, by commas.")
    ] = "512,4096,16384",
    contexts: Annotated[
        str, typer.Option(metavar="512,32768", help="Prompts of context: one request that decodes behind each, by commas.")
    ] = "512,2048,8192,32768",
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests of mixed, all at once.")] = 256,
    seed: Annotated[int, typer.Option(metavar="S", help="Draws the lengths of mixed.")] = 7,
    prompts: Annotated[str, typer.Option(metavar="A-B", help="Tokens of prompts of mixed, uniform.")] = "32-1036",
    outputs: Annotated[str, typer.Option(metavar="A-B", help="Tokens of outputs of mixed, uniform.")] = "16-400",
    max_requests: Annotated[
        int | None,
        typer.Option("--max-requests", min=1, metavar="N", help="Requests that run at the same time. Default: enough; 128."),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option("--max-context", min=2, metavar="N", help="Tokens of a request, for engines. Default: enough."),
    ] = None,
    draft_tokens: DraftTokensOption = 3,
    accept_length: Annotated[
        float,
        typer.Option(
            "--accept-length", metavar="A", help="Synthetic acceptance, the same for all that have it; by equal chances."
        ),
    ] = 2.98,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE")] = "bfloat16",
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="FORMAT",
            help="How layers are quantised, also the draft's, for outrider and vllm: fp8, fp8-tensor, fp8-block, int8, int4, "
            "int4-zeros, int4-32.",
        ),
    ] = None,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="With --quantize, the output head too.")] = False,
    draft_output_head: DraftOutputHeadOption = None,
    draft_vocabulary: DraftVocabularyOption = None,
    draft_quantize: DraftQuantizeOption = None,
    engines: Annotated[str, typer.Option(metavar="outrider,vllm", help="Which engines.")] = ",".join(_ORDER),
    speculate: Annotated[str, typer.Option("--speculate", metavar="eagle,none", help="With drafts, without, or both.")] = (
        "eagle,none"
    ),
    repeat: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Runs of each. From 2 on all engines are there at once, and take turns."),
    ] = 3,
    memory: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of the device's memory, for an engine that takes a share.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep what engines compile and print there, for the next time.")
    ] = None,
    mode: ModeOption = None,
    prefill_chunk: PrefillChunkOption = None,
    tune_seconds: TuneOption = 0.0,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="F.svg", help="Draw iterations over batch sizes and contexts, first tokens over prompts."),
    ] = None,
    so_far: Annotated[
        Path | None,
        typer.Option(
            "--so-far", metavar="F.json", help="After each run write there what was measured, and a line to standard error."
        ),
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that an engine may take to start, or for one run.")] = 900.0,
    backend: BackendOption = None,
    json_output: JsonOption = False,
) -> Report:
    """Run the same work on this engine and on whichever of transformers, vLLM and SGLang is installed.

    Each engine runs in a process of its own; their runs alternate, everything once before anything twice, and each figure is
    the median of its runs. Acceptance is synthetic, by each engine's own setting for that, with the same chance for each
    drafted place; transformers has none and decodes plainly. What isn't installed is listed as such.
    """
    del json_output
    chosen = _some("--engines", engines, _ORDER)
    kinds = _some("--speculate", speculate, ("eagle", "none"))
    check_output("--plot", plot, ".svg")
    check_output("--so-far", so_far)
    if keep is not None:
        check_directory("--keep", keep)
    if memory is not None and not 0 < memory <= 1:
        raise ConfigError(f"--memory is {memory:g}; expected a share of the device's memory, above 0 and at most 1")
    if plot is not None and not set(_ACROSS) & set(_some("--phases", phases, PHASES)):
        raise ConfigError(f"--plot has nothing to draw of --phases {phases!r}; add {', '.join(_ACROSS)}, or leave it out")
    if quantize is not None:
        _check_quantized(quantize, lm_head, shape, chosen)
    elif lm_head:
        raise ConfigError("--lm-head says what --quantize takes too; leave it out, or name a format with --quantize")
    ours = {
        "--draft-output-head": draft_output_head,
        "--draft-vocabulary": draft_vocabulary,
        "--draft-quantize": draft_quantize,
    }
    given = [option for option, value in ours.items() if value is not None]
    if given and not (OURS in chosen and "eagle" in kinds):
        raise ConfigError(
            f"{given[0]} is for drafts of {OURS}, and --engines {engines!r} with --speculate {speculate!r} has none; leave "
            "it out"
        )
    check_draft_quantize(draft_quantize, shape, quantize)
    registry = Registry()
    spec = registry.select(backend, backend_from_environment())
    from outrider_bench.synthetic import rates_of_length

    measured = tuple(_some("--phases", phases, PHASES))
    batches = tuple(sizes_of(batch))
    at_once = max(batches) if "decode" in measured else 1
    if "mixed" in measured:
        at_once = max(at_once, min(requests, 128))
    sharing = len(chosen) if repeat > 1 else 1
    work = Work(
        shape=shape,
        dtype=dtype,
        batches=batches,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        draft_tokens=draft_tokens,
        accept_length=accept_length,
        rates=rates_of_length(accept_length, draft_tokens),
        device=str(registry.create(spec).device),
        phases=measured,
        lengths=tuple(sizes_of(prefill_tokens, "--prefill-tokens", "512,4096")),
        contexts=tuple(sizes_of(contexts, "--contexts", "512,4096")),
        requests=requests,
        seed=seed,
        prompts=length_range(prompts, "--prompts"),
        outputs=length_range(outputs, "--outputs"),
        max_requests=max_requests or at_once,
        max_context=max_context,
        memory=memory or (0.85 if sharing == 1 else round(0.9 / sharing, 3)),
        keep=None if keep is None else str(keep.absolute()),
        quantize=quantize,
        quantize_head=lm_head,
        draft_output_head=draft_output_head,
        draft_vocabulary=draft_vocabulary,
        draft_quantize=draft_quantize,
    )
    tokens, whose = work.longest
    room = min(max_context or work.shape_context, work.shape_context)
    if tokens > room:
        raise ConfigError(f"a request of {whose} has {tokens} tokens, and {room} are there for one; ask for fewer")
    if "decode" in measured and work.max_requests < max(batches):
        raise ConfigError(
            f"--max-requests is {work.max_requests}, and --batch {max(batches)} requests decode together; raise it"
        )
    jobs = [(name, kind) for kind in kinds for name in _ORDER if name in chosen and (name == OURS or kind in PEERS[name])]
    groups = [[job] for job in jobs] if repeat == 1 else [[job for job in jobs if job[1] == kind] for kind in kinds]
    found = [Found(engine=name, speculate=kind) for name, kind in jobs]
    data: dict[str, object] = {
        **asdict(work),
        "backend": str(spec),
        "quantized": work.quantized,
        "acceptance": f"synthetic, mean {accept_length:g}",
        "repeat": repeat,
        "mixed": work.load.described() if "mixed" in measured else None,
    }

    def described() -> dict[str, object]:
        return data | compared([each for each in found if each.settled], work)

    options = {"mode": mode, "prefill_chunk": prefill_chunk, "tune_seconds": tune_seconds}

    def told(line: str) -> None:
        if so_far is not None:
            write_output("--so-far", so_far, json.dumps(described(), indent=1) + "\n")
            note(line + "\n")

    runs = _Alternating(work, spec, options, limit, told)
    with show_progress() as tell:
        for group in groups:
            try:
                runs.run([each for each in found if (each.engine, each.speculate) in group], repeat, tell)
            except KeyboardInterrupt:
                done = sum(each.settled for each in found)
                where = "; ".join(f"{name}, {kind}" for name, kind in group)
                reached = f"interrupted at {where}, after {done} of {len(jobs)} measurements"
                raise Interrupted(reached, described(), _renderer(described()) if done else None) from None
    result = described()
    code = 0 if plot is None else write_plot(plot, _drawn(found, measured, f"{shape}, {dtype}"), result)
    return Report(data=result, render=_renderer(result), exit_code=code)


def _check_quantized(quantize: str, head: bool, shape: str, engines: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for an unknown format, and for what can't be made of it on both sides."""
    from outrider.model.shapes import shape_config
    from outrider_tune.quantized import random_format

    random_format(quantize)
    others = sorted(set(engines) - {OURS, "vllm"})
    if others:
        raise ConfigError(f"--quantize is for outrider and vllm, not for {', '.join(others)}; say --engines outrider,vllm")
    if head and shape_config(shape).tie_embeddings:
        raise ConfigError(f"the output head of {shape} is its embedding, which stays plain; leave out --lm-head")


def _drawn(found: Sequence[Found], phases: Sequence[str], title: str) -> str | None:
    """A plot for each phase that one can draw, one below the other; None where nothing was measured."""
    from outrider_bench.peers.comparing import over
    from outrider_bench.plot import series_svg, stacked

    drawings = []
    for phase, (across, up) in _ACROSS.items():
        series = over(found, phase) if phase in phases else {}
        if series:
            drawings.append(series_svg(series, title=f"{title}: {phase}", across=across, up=up))
    return stacked(drawings) if drawings else None


def _renderer(data: dict[str, Any]) -> Callable[[Console], None]:
    return lambda console: render(console, data)


def _some(option: str, given: str, known: tuple[str, ...]) -> list[str]:
    """Names by commas, each known and there once. Raises :class:`ConfigError`."""
    names = [name.strip() for name in given.split(",")]
    if set(names) - set(known) or len(set(names)) != len(names):
        raise ConfigError(f"{option} is {','.join(names)!r}; expected some of {', '.join(known)}, each once")
    return names


class _Alternating:
    """The runs of some engines that are there at the same time, in turns."""

    def __init__(
        self,
        work: Work,
        spec: BackendSpec,
        options: Mapping[str, object],
        limit_s: float,
        told: Callable[[str], None],
    ) -> None:
        self._work = work
        self._spec = spec
        self._options = options
        self._limit_s = limit_s
        self._told = told

    def run(self, group: list[Found], repeat: int, tell: Tell) -> None:
        """Start them, one after the other; then each run of each, ``repeat`` times, all once before any twice; end them."""
        with ExitStack() as stack:
            sessions: list[tuple[Found, Session]] = []
            for each in group:
                tell(f"starting {each.engine}, {each.speculate}", 0, 1)
                opened = self._opened(each, stack)
                if opened is not None:
                    sessions.append((each, opened))
            first = self._cases()
            # Who is stopped in the middle has something of everything.
            cases = first + [(phase, case) for phase, case in first if case != "latency"] * (repeat - 1)
            for number, (phase, case) in enumerate(cases):
                for each, opened in sessions:
                    tell(f"{each.engine}, {each.speculate}", number, len(cases))
                    self._once(each, opened, phase, case)

    def _cases(self) -> list[tuple[str, Any]]:
        work = self._work
        cases: list[tuple[str, Any]] = []
        for phase in work.phases:
            of_phase: dict[str, tuple[Any, ...]] = {
                "decode": work.batches,
                "prefill": work.lengths,
                "mixed": ("seconds", "latency"),
                "context": work.contexts,
            }
            cases += [(phase, case) for case in of_phase[phase]]
        return cases

    def _opened(self, each: Found, stack: ExitStack) -> Session | None:
        if each.engine != OURS and find_spec(each.engine) is None:
            each.status = "not installed"
            return None
        variables = _sglang_variables(self._work.accept_length, each.speculate) if each.engine == "sglang" else {}
        log = None
        if self._work.keep is not None:
            keep = Path(self._work.keep)
            keep.mkdir(parents=True, exist_ok=True)
            variables |= {name: str(keep / name.lower()) for name in _KEEPS}
            log = keep / f"{each.engine}-{each.speculate}.log"
        given = {**asdict(self._work), "speculate": each.speculate, "backend": str(self._spec), "options": self._options}
        module = f"outrider_bench.peers.{each.engine}"
        try:
            opened = stack.enter_context(session(module, given, variables=variables, limit_s=self._limit_s, log=log))
        except ChildFailed as error:
            each.status = f"failed: {error}"
            self._told(f"{each.engine}, {each.speculate}: {each.status}")
            return None
        each.status, each.about = "measured", opened.about
        self._told(f"{each.engine}, {each.speculate}: started, {_line(opened.about)}")
        return opened

    def _once(self, each: Found, opened: Session, phase: str, case: Any) -> None:
        try:
            answer = opened.ask({"phase": phase, "case": case}, limit_s=self._limit_s)
        except ChildFailed as error:
            each.failures[phase, case] = str(error)
            self._told(f"{each.engine}, {each.speculate}: {phase} {case} failed: {error}")
            return
        each.runs.setdefault((phase, case), []).append(answer)
        self._told(f"{each.engine}, {each.speculate}: {phase} {case}: {_line(answer)}")


def _line(figures: Mapping[str, object]) -> str:
    """Those that are numbers, shortly."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, int | float))
