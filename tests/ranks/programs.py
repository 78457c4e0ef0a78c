"""Host programs that are drawn: requests that come, go and are guided, on an engine of some layout."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from threads import run

from outrider import Engine, SamplingParams
from outrider.engine.guides.guides import Regex
from outrider.engine.ranks.ranks import ParallelConfig, Ranks
from outrider.engine.requests.draft_length import LengthSchedule
from outrider_cpu.backend import CpuBackend
from outrider_proof import proposers, tiny
from outrider_proof.decode_program import ResidueGrammars
from outrider_proof.tiny import VOCABULARY, plain_config

LAYOUTS = (ParallelConfig(tensor=2), ParallelConfig(data=2), ParallelConfig(tensor=2, data=2), ParallelConfig(tensor=4))
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "staged", "graphs": False},
    {"mode": "staged", "graphs": True},
    {"mode": "fused"},
)


@dataclass(frozen=True)
class Program:
    """``prompts`` with their parameters come at iterations ``arrivals``; ``aborts``: after so many iterations, which."""

    layout: ParallelConfig
    proposer: str
    config: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    arrivals: tuple[int, ...]
    aborts: dict[int, int]
    lengths: tuple[int, ...] = ()
    """Draft lengths of consecutive requests in all iterations; empty: all drafts are verified."""


def drawn(seed: int) -> Program:
    """A program; few pages make some requests give theirs up, equal beginnings share theirs."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    shared = tuple(draw.randrange(6, VOCABULARY) for _ in range(8))
    prompts = tuple(
        (*(shared if draw.random() < 0.4 else ()), *(draw.randrange(6, VOCABULARY) for _ in range(draw.randint(1, 9))))
        for _ in range(count)
    )
    params = tuple(
        SamplingParams(
            max_tokens=draw.randint(1, 9),
            temperature=draw.choice((0.0, 0.0, 0.8)),
            seed=draw.randrange(100),
            presence_penalty=draw.choice((0.0, 0.5)),
            ignore_eos=draw.random() < 0.5,
        )
        for _ in range(count)
    )
    guiding = random.Random(f"guide {seed}")  # apart, so that it changes nothing else of a program
    if guiding.random() < 0.5:
        params = tuple(replace(each, guide=Regex("residues") if guiding.random() < 0.6 else None) for each in params)
    layout, mode = LAYOUTS[seed % len(LAYOUTS)], MODES[seed // len(LAYOUTS) % len(MODES)]
    config = {
        "max_context": 48,
        "max_requests": draw.randint(1, 4),
        "page_size": 4,
        "prefill_chunk": draw.choice((3, 8)),
        "overlap": draw.random() < 0.5,
        "prefix_cache": draw.random() < 0.7,
        "num_pages": draw.choice((None, 16)),
    }
    name = draw.choice(sorted(proposers.MAKERS))
    arrivals = tuple(sorted(draw.randint(0, 4) for _ in range(count)))
    aborts = {draw.randint(2, 6): draw.randrange(count)} if draw.random() < 0.4 else {}
    return Program(layout, name, config | mode, prompts, params, arrivals, aborts)


def engine_of(program: Program, backend: Any, ranks: Ranks | None = None) -> Engine:
    """The engine of one rank, or of all there is."""
    target = proposers.decoder(tiny.target(), backend, None if ranks is None else ranks.model)
    proposer = proposers.MAKERS[program.proposer](target, backend)
    config = plain_config(dtype="float64", **program.config)
    policy = LengthSchedule(program.lengths, tuple(range(2, max(program.lengths) + 2))) if program.lengths else None
    engine = Engine(target, backend, proposer=proposer, config=config, ranks=ranks, draft_length=policy)
    ResidueGrammars.into(engine)
    return engine


def lead(program: Program, engine: Engine) -> dict[int, tuple[tuple[int, ...], str]]:
    """Run it: tokens and why they ended, of each prompt."""
    numbers: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    iteration = 0
    while len(numbers) < len(program.prompts) or engine.has_unfinished:
        for index, when in enumerate(program.arrivals):
            if when <= iteration and index not in numbers.values():
                numbers[engine.add_request(program.prompts[index], program.params[index])] = index
                tokens[index] = []
        victim = program.aborts.get(iteration)
        for number, index in numbers.items():
            if index == victim and number in engine.open_requests:
                engine.abort(number)
        for output in engine.step():
            tokens[numbers[output.request_id]] += output.tokens
            if output.finish_reason is not None:
                reasons[numbers[output.request_id]] = str(output.finish_reason)
        iteration += 1
    return {index: (tuple(tokens[index]), reasons[index]) for index in tokens}


def alone(program: Program) -> dict[int, tuple[tuple[int, ...], str]]:
    """What one rank gives."""
    return lead(program, engine_of(program, CpuBackend()))


def together(program: Program) -> dict[int, tuple[tuple[int, ...], str]]:
    """What the ranks of its layout give."""
    made: dict[int, tuple[tuple[int, ...], str]] = run(
        program.layout, lambda ranks: engine_of(program, ranks.backend, ranks), lambda engine: lead(program, engine)
    )
    return made


def compare(program: Program) -> None:
    """Raise where ranks give something else than one rank; of an aborted request one is the beginning of the other."""
    one, several = alone(program), together(program)
    assert one.keys() == several.keys()
    # Each data-parallel group has its own pages, so it preempts others. A preemption changes what is drawn along a chain.
    preempts_others = program.layout.data > 1 and program.config["num_pages"] is not None
    for index, (tokens, reason) in one.items():
        theirs, why = several[index]
        if preempts_others and program.params[index].temperature:
            continue
        if "abort" in (reason, why):
            length = min(len(tokens), len(theirs))
            assert tokens[:length] == theirs[:length], (index, tokens, theirs)
        else:
            assert (tokens, reason) == (theirs, why), (index, program)
