"""``outrider explore decode``: the real engine on drawn host programs, under schedules that a tool decides.

A host program is a batch mix: prompts, lengths, arrivals, aborts, sizes of the engine. Each is run once under a schedule,
with the sanitizer watching, and its tokens are compared with plain greedy decoding on the reference backend.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from outrider.cli.models import bundled
from outrider.cli.report import Report
from outrider.device.errors import CapabilityError, ConfigError, OutriderError
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider.engine.engine import Engine
    from outrider.engine.fence_log import FenceLog
    from outrider.engine.request import Completion
    from outrider.model import Decoder
    from outrider.sanitizer import Report as Findings

DECODE = "decode"
_CONTEXT = 96
_LONGEST = 14


class WrongTokens(OutriderError):
    """The engine's output isn't what plain decoding gives, or it lost a page or a row."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: a slice of the text, how much it may write, when it comes and when, if ever, it's aborted."""

    start: int
    length: int
    max_tokens: int
    step: int
    abort_after: int | None


@dataclass(frozen=True, slots=True)
class HostProgram:
    """Requests, and the sizes of the engine that serves them."""

    arrivals: tuple[Arrival, ...]
    max_requests: int
    page_size: int
    spare_pages: int
    prefill_chunk: int
    draft_tokens: int

    @classmethod
    def draw(cls, seed: int, text: int) -> HostProgram:
        """The program numbered ``seed`` over a text of ``text`` tokens."""
        rng = random.Random(seed)
        arrivals = []
        for _ in range(rng.randint(1, 4)):
            length = rng.randint(1, 40)
            start = rng.randrange(text - length) if rng.random() < 0.7 else 0  # prompts that share a prefix
            abort = rng.randint(0, 4) if rng.random() < 0.25 else None
            arrivals.append(Arrival(start, length, rng.randint(1, _LONGEST), rng.randint(0, 4), abort))
        return cls(
            arrivals=tuple(arrivals),
            max_requests=rng.randint(1, 4),
            page_size=rng.choice((2, 4, 16)),
            spare_pages=rng.randint(0, 20),
            prefill_chunk=rng.choice((5, 16, 64)),
            draft_tokens=rng.randint(2, 4),
        )


class DecodeExplorer:
    """The bundled model on a backend whose schedule is decided, and the reference to compare with.

    Weights are loaded once, before anything is scheduled; each run builds an engine of its own.
    """

    def __init__(
        self, backend: Backend, *, speculate: str, draft_topk: int = 1, drop: str | None = None, half: str = "wait"
    ) -> None:
        import torch

        from outrider.engine.engine import Engine
        from outrider.engine.fence_log import Drop
        from outrider.engine.fences import FENCES
        from outrider.model import Tokenizer, load_decoder

        if speculate not in ("eagle", "ngram", "none"):
            raise ConfigError(f"--speculate is {speculate!r}; decode explores eagle, ngram and none")
        if drop is not None and drop not in {fence.name for fence in FENCES}:
            raise ConfigError(f"there is no fence {drop!r}; `outrider fences` lists them")
        if half not in tuple(Drop):
            raise ConfigError(f"--drop is {half!r}; expected wait or record")
        self.backend = backend
        self._speculate, self._topk, self._drop, self._half = speculate, draft_topk, drop, Drop(half)
        self._model = load_decoder(bundled("target"), backend=backend, dtype=torch.float32)
        backend.synchronize()
        self._text = Tokenizer.from_checkpoint(bundled("target")).encode(inspect.getsource(Engine))
        self._plain: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._reference = _reference_model()
        self.findings: Findings | None = None
        self.log: FenceLog | None = None

    def program(self, seed: int) -> HostProgram:
        """The host program numbered ``seed``."""
        return HostProgram.draw(seed, len(self._text))

    def expected(self, arrival: Arrival) -> tuple[int, ...]:
        """Plain greedy tokens for the whole length that any request may write."""
        prompt = self._prompt(arrival)
        if prompt not in self._plain:
            self._plain[prompt] = _plain(self._reference, prompt).token_ids
        return self._plain[prompt][: arrival.max_tokens]

    def run(self, program: HostProgram, backend: Backend) -> None:
        """Run it once, watched. Raises :class:`WrongTokens`, or the sanitizer's RaceError, or what the engine raised."""
        from outrider.engine.fence_log import FenceLog
        from outrider.sanitizer import watch

        expected = [self.expected(arrival) for arrival in program.arrivals]
        control = backend.control
        if control is None:
            raise CapabilityError(f"{backend.label} decides its schedules itself; explore needs one such as 'sim'")
        self.log = FenceLog(lambda stream: control.steps(stream)[1], drop=self._drop, half=self._half)
        with watch(backend) as self.findings:
            problem: Exception | None = None
            try:
                self._serve(program, expected)
                backend.synchronize()
            except Exception as error:
                problem = error
        # A race explains a wrong token, not the other way round.
        self.findings.raise_if_any()
        if problem is not None:
            raise problem

    def implied(self) -> tuple[str, ...]:
        """The fences that the findings of the last run imply."""
        if self.findings is None or self.log is None:
            return ()
        names: dict[str, None] = {}
        for finding in self.findings.findings:
            if finding.first is None:
                continue
            first, second = finding.first, finding.second
            sites = [("host", -1) if site.host else (site.actor, site.index) for site in (first, second)]
            names.update(dict.fromkeys(self.log.implied(sites[0], sites[1])))
        return tuple(names)

    def _prompt(self, arrival: Arrival) -> tuple[int, ...]:
        return tuple(self._text[arrival.start : arrival.start + arrival.length])

    def _engine(self, program: HostProgram) -> Engine:
        from outrider.engine.config import EngineConfig
        from outrider.engine.engine import Engine
        from outrider.speculative.build import DraftOptions, build

        config = EngineConfig(
            max_requests=program.max_requests,
            page_size=program.page_size,
            num_pages=1 + -(-(_CONTEXT + 16) // program.page_size) + program.spare_pages,
            prefill_chunk=program.prefill_chunk,
            draft_tokens=program.draft_tokens,
            max_context=_CONTEXT,
            overlap=True,
        )
        options = DraftOptions(
            target=self._model,
            backend=self.backend,
            dtype=config.torch_dtype,
            directory=bundled("eagle") if self._speculate == "eagle" else None,
            draft_tokens=config.draft_tokens,
            topk=self._topk,
        )
        assert self.log is not None
        proposer = build(self._speculate, options)
        return Engine(self._model, self.backend, proposer=proposer, config=config, wrap_fence=self.log.wrap)

    def _serve(self, program: HostProgram, expected: list[tuple[int, ...]]) -> None:
        from outrider.engine.request import FinishReason, SamplingParams

        engine = self._engine(program)
        pages, rows = engine.free_pages, engine.free_rows
        waiting = sorted(range(len(program.arrivals)), key=lambda i: program.arrivals[i].step)
        live: dict[int, tuple[int, int]] = {}
        got: dict[int, list[int]] = {i: [] for i in waiting}
        ended: dict[int, FinishReason] = {}
        step = 0
        while waiting or engine.has_unfinished:
            while waiting and program.arrivals[waiting[0]].step <= step:
                index = waiting.pop(0)
                arrival = program.arrivals[index]
                request = engine.add_request(self._prompt(arrival), SamplingParams(max_tokens=arrival.max_tokens))
                live[request] = (index, step)
            for request, (index, since) in list(live.items()):
                after = program.arrivals[index].abort_after
                if after is not None and step - since >= after and index not in ended:
                    engine.abort(request)
            for output in engine.step():
                index = live[output.request_id][0]
                got[index].extend(output.tokens)
                if output.finish_reason is not None:
                    ended[index] = output.finish_reason
            step += 1
        engine.drain()
        for index, tokens in got.items():
            wanted = expected[index]
            if ended[index] is FinishReason.ABORT:
                wanted = wanted[: len(tokens)]
            if tuple(tokens) != wanted:
                raise WrongTokens(f"request {index} got {tokens}, plain decoding gives {list(wanted)}")
        if (engine.free_pages, engine.free_rows) != (pages, rows):
            raise WrongTokens(
                f"{pages - engine.free_pages} pages and {rows - engine.free_rows} rows weren't given back at the end"
            )


def _reference_model() -> Decoder:
    import torch

    from outrider.model import load_decoder

    return load_decoder(bundled("target"), backend=Registry().create("cpu"), dtype=torch.float32)


def _plain(model: Decoder, prompt: tuple[int, ...]) -> Completion:
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.request import SamplingParams

    config = EngineConfig(max_requests=1, max_context=_CONTEXT)
    engine = Engine(model, Registry().create("cpu"), config=config)
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=_LONGEST))
    return completion


def explore_decode(
    device: Backend,
    *,
    strategy: str,
    iterations: int,
    seed: int,
    drop_fence: str | None,
    drop: str,
    speculate: str,
    draft_topk: int,
) -> Report:
    """Run ``iterations`` host programs, each under a schedule of its own; stop at the first that fails."""
    explorer = DecodeExplorer(device, speculate=speculate, draft_topk=draft_topk, drop=drop_fence, half=drop)
    control = device.control
    assert control is not None  # the caller has checked
    data: dict[str, Any] = {
        "program": DECODE,
        "strategy": strategy,
        "seed": seed,
        "speculate": speculate,
        "draft_topk": draft_topk,
        "dropped": f"{drop} of {drop_fence}" if drop_fence else None,
        "runs": 0,
        "failed": False,
    }
    for number in range(seed, seed + iterations):
        program = explorer.program(number)

        def once(backend: Backend, program: HostProgram = program) -> None:
            explorer.run(program, backend)

        control.reset()
        result = control.explore(once, strategy=strategy, iterations=1, seed=number)
        data["runs"] += 1
        if result.failure is not None:
            error = result.failure.error
            data |= {
                "failed": True,
                "run": number,
                "host_program": asdict(program),
                "error": {"type": type(error).__name__, "message": str(error)},
                "implied": list(explorer.implied()),
                "shrunk": str(result.failure.shrunk),
                "orderings": list(result.failure.orderings),
            }
            break

    def render(console: Console) -> None:
        if not data["failed"]:
            console.print(Text(f"{data['runs']} host programs, each under a schedule of its own: all right", style="green"))
            return
        console.print(Text(f"host program {data['run']} failed: {data['error']['type']}", style="bold red"))
        console.print(data["error"]["message"], markup=False)
        if data["implied"]:
            console.print(Text(f"the finding implies: {', '.join(data['implied'])}", style="bold yellow"))
        console.print(f"run it again with: outrider explore decode --seed {data['run']} --iterations 1", markup=False)

    return Report(data=data, render=render, exit_code=1 if data["failed"] else 0)
