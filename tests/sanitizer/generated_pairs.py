"""Random pairs of torch programs: one races, its twin is correct, and the generator knows the two lines that race.

`pair_programs.toml` has the classes, with the reason why the first program of each races; `pair_statements.toml` has the
statements and orderings that they choose from. Two classes need an oracle, so they are here: views, and random programs.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

IMPORTS = """\
import array, copy, io, pickle, queue, struct, threading, time
from concurrent import futures
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
"""
RANKS = 'dist.init_process_group("nccl")\nrank = dist.get_rank()\n'
PLACEHOLDER = re.compile(r"<([a-z_0-9]+)(?:\.([a-z_0-9]+))?>")
LIST = re.compile(r"@([a-z_]+)(?:\.([a-z]+))?(?:\(([a-z])\))?(?: |$)")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Pair:
    """Two programs. `races` are the pairs of lines that race in the first, if marks can't say it."""

    name: str
    racy: str
    twin: str
    options: tuple[str, ...] = ()
    races: frozenset[frozenset[int]] = frozenset()

    def expects(self, lines: frozenset[int]) -> bool:
        """Return whether these are the lines of two accesses that race."""
        return lines in (self.races or {frozenset((one, two)) for one in self.marked("#@1") for two in self.marked("#@2")})

    def marked(self, mark: str) -> list[int]:
        return [number for number, line in enumerate(self.racy.split("\n"), 1) if mark in line]


def program(body: str, ranks: int = 1) -> str:
    text = f"{IMPORTS}{RANKS if ranks > 1 else ''}{body}\ntorch.cuda.synchronize()\n"
    return in_sim_names(text) if ranks > 1 else text


def in_sim_names(text: str) -> str:
    return text.replace("torch.cuda", "torch.sim").replace("'cuda'", "'sim'").replace(".cuda(", ".to('sim', ")


class Classes:
    """The classes of the two files, ready to generate pairs."""

    def __init__(self) -> None:
        statements = tomllib.loads((HERE / "pair_statements.toml").read_text())
        programs = tomllib.loads((HERE / "pair_programs.toml").read_text())
        self._lists: Mapping[str, Any] = {**statements["statements"], **statements["orders"]}
        self._common = programs["common"]
        self._classes = programs["class"]

    def makers(self) -> list[Callable[[Random], Pair]]:
        """Return a function per class, repeated by the weight of the class."""
        made = [partial(self.pair, name) for name, about in self._classes.items() for _ in range(about.get("weight", 1))]
        return [*made, *[views] * 3, *[random_program] * 4]

    def pair(self, name: str, r: Random) -> Pair:
        """Generate a pair of a class of the file of programs."""
        about = self._inherited(self._classes[name])
        shared: dict[str, Any] = {}
        common = {**self._common, **about}
        racy, twin = (Filling(self, common, about[side], shared, r).filled(about["text"]) for side in ("racy", "twin"))
        options = ["--ranks", str(about["ranks"])] if "ranks" in about else []
        options += ["--backend", f"sim:eager_sends={about['eager_sends']}"] if "eager_sends" in about else []
        ranks = about.get("ranks", 1)
        return Pair(name, program(racy, ranks), program(twin, ranks), tuple(options))

    def _inherited(self, about: dict[str, Any]) -> dict[str, Any]:
        base = self._classes[about["like"]] if "like" in about else {}
        sides = {which: {**base.get(which, {}), **about.get(which, {})} for which in ("racy", "twin")}
        return {**base, **about, **sides}

    def alternatives(self, given: list[Any] | str) -> list[Any]:
        """Return the alternatives, with each `@list` of the file of statements replaced by its elements."""
        found: list[Any] = []
        for item in [given] if isinstance(given, str) else given:
            references = list(LIST.finditer(item)) if isinstance(item, str) else []
            for name, key, index in (match.groups() for match in references):
                entries = self._lists[name][key] if key else self._lists[name]
                entries = entries.strip().split("\n") if isinstance(entries, str) else entries
                found += [entry.replace("<index>", index) if index else entry for entry in entries]
            found += [] if references else [item]
        return found


@dataclass
class Filling:
    """The choices for one program. A placeholder of `own` is chosen for this program, any other for both in `shared`."""

    classes: Classes
    common: Mapping[str, Any]
    own: Mapping[str, Any]
    shared: dict[str, Any]
    r: Random
    chosen: dict[str, Any] = field(default_factory=dict)

    def filled(self, text: str) -> str:
        """Replace placeholders until none is left. One that is alone on its line may stand for several lines, or for none."""
        while PLACEHOLDER.search(text):
            lines = []
            for line in text.split("\n"):
                indent = line[: len(line) - len(line.lstrip())]
                lines.append(PLACEHOLDER.sub(self._value, line, count=1).replace("\n", "\n" + indent))
            text = "\n".join(line for line in lines if line.split("#@")[0].strip())
        return text

    def _value(self, match: re.Match[str]) -> str:
        name, key = match.groups()
        chosen, choices = (self.chosen, self.own) if name in self.own else (self.shared, self.common)
        if name not in chosen:
            chosen[name] = self.r.choice(self.classes.alternatives(choices[name]))
        return str(chosen[name].get(key, "") if key else chosen[name]).strip("\n")


VIEW_WRITES = ["{v}.fill_(2)", "{v}.add_(1)", "{v}.copy_({v}.new_ones(()))", "{v}.zero_()", "{v}.mul_(3)"]
VIEW_READS = ["y = {v} + 1", "y = {v}.sum()", "y = {v}.clone()", "y = {v} * {v}"]


VIEW_PROGRAM = """\
a, b = torch.cuda.Stream(), torch.cuda.Stream()
x = torch.ones({shape}, device='cuda')
torch.cuda.synchronize()
with torch.cuda.stream(a):
    {first}  #@1
with torch.cuda.stream(b):
    {second}  #@2"""


def views(r: Random) -> Pair:
    """Two streams access views of one tensor, and nothing orders them. They race if one writes an element of both views."""
    rows, columns = r.choice([4, 6]), r.choice([8, 12])
    kinds = r.choice([(VIEW_WRITES, VIEW_READS), (VIEW_READS, VIEW_WRITES), (VIEW_WRITES, VIEW_WRITES)])
    operations = [r.choice(kind) for kind in kinds]
    expressions = tomllib.loads((HERE / "pair_statements.toml").read_text())["statements"]["views"].strip().split("\n")
    found: dict[bool, str] = {}
    while len(found) < 2:
        i, j = str(r.randrange(1, 4)), str(r.randrange(1, 6))
        both = [r.choice(expressions).replace("<i>", i).replace("<j>", j) for _ in "ab"]
        first, second = (operation.format(v=view) for operation, view in zip(operations, both, strict=True))
        if not any(operation in VIEW_WRITES and "expand" in view for operation, view in zip(operations, both, strict=True)):
            overlap = bool(elements(both[0], rows, columns) & elements(both[1], rows, columns))
            found[overlap] = program(VIEW_PROGRAM.format(shape=(rows, columns), first=first, second=second))
    return Pair("views", found[True], found[False])


def elements(view: str, rows: int, columns: int) -> set[int]:
    x = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    viewed = eval(view.replace(".view(torch.int32)", ""), {"x": x, "torch": torch})
    return {int(element) for element in viewed.reshape(-1).tolist()}


@dataclass(frozen=True)
class Step:
    """An operation on `stream`, or a wait of stream or host thread (-1) `waiter` for `stream`."""

    text: str
    stream: int
    waiter: int | None = None
    tensors: frozenset[str] = frozenset()
    written: str = ""
    span: tuple[int, int] = (0, 0)

    def conflicts(self, other: Step) -> bool:
        overlap = self.span[0] < other.span[1] and other.span[0] < self.span[1]
        return overlap and (self.written in other.tensors or other.written in self.tensors)


def races_of(steps: list[Step | None]) -> list[tuple[int, int]]:
    """Return the conflicts that nothing orders, as positions.

    A launch follows what its stream and the host thread waited for.
    """
    known: list[set[int]] = [set(), set(), set(), set()]  # of three streams and, last, of the host thread
    races, ran = [], list[int]()
    for k, step in enumerate(steps):
        if step is not None and step.waiter is not None:
            known[step.waiter] |= known[step.stream]
        elif step is not None:
            known[step.stream] |= known[-1]
            races += [(other, k) for other in ran if other not in known[step.stream] and step.conflicts(steps[other] or step)]
            known[step.stream].add(k)
            ran.append(k)
    return races


def random_program(r: Random) -> Pair:
    """Random operations, waits and records on three streams and three tensors.

    The twin is a random program whose races were mended by waits. The racy one lacks one of these waits, and has a race.
    """
    while True:
        steps: list[Step | None] = []
        while (races := races_of(steps)) or len(steps) < 14:
            steps.insert(races[0][1], random_wait(r, steps, *races[0])) if races else steps.append(random_operation(r))
        waits = [k for k, step in enumerate(steps) if step is not None and step.waiter is not None]
        for cut in r.sample(waits, k=len(waits)):
            broken = [None if k == cut else step for k, step in enumerate(steps)]
            if races := races_of(broken):
                racy, lines = script_of(broken)
                expected = frozenset(frozenset((lines[early], lines[late])) for early, late in races)
                return Pair("random_program", racy, script_of(steps)[0], races=expected)


def random_operation(r: Random) -> Step:
    low, high = r.choice([(0, 8), (0, 4), (4, 8), (2, 6)])
    target, source = r.sample("tuv", 2)
    text = r.choice(["{t}.add_({s})", "{t}.copy_({s})", "torch.mul({s}, 2, out={t})", "{t} += {s}", "{t}[:] = {s}"])
    text = text.format(t=f"{target}[{low}:{high}]", s=f"{source}[{low}:{high}]")
    return Step(text, r.randrange(3), None, frozenset((target, source)), target, (low, high))


def random_wait(r: Random, steps: list[Step | None], early: int, late: int) -> Step:
    """Return a wait that orders two operations."""
    first, second = steps[early], steps[late]
    assert first is not None
    assert second is not None
    a, b = first.stream, second.stream
    by_host = Step(r.choice([f"s[{a}].synchronize()", f"e.record(s[{a}])\ne.synchronize()"]), a, -1)
    by_stream = Step(r.choice([f"s[{b}].wait_stream(s[{a}])", f"e.record(s[{a}])\ns[{b}].wait_event(e)"]), a, b)
    return r.choice([by_host, by_stream, by_stream])


def script_of(steps: list[Step | None]) -> tuple[str, list[int]]:
    """Return the program and the line of each operation."""
    body = "s, e = [torch.cuda.Stream() for _ in range(3)], torch.cuda.Event()\n"
    body += "t, u, v = (torch.zeros(8, device='cuda') for _ in range(3))\ntorch.cuda.synchronize()"
    lines = []
    for step in steps:
        if step is not None:
            body += (
                f"\n{step.text}"
                if step.waiter is not None
                else f"\nwith torch.cuda.stream(s[{step.stream}]):\n    {step.text}"
            )
        lines.append((IMPORTS + body).count("\n") + 1)
    return program(body), lines


def pairs(count: int, seed: int) -> Iterator[Pair]:
    """Generate pairs: of each class in proportion to its weight, a third of them in the names of `torch.sim`."""
    r = Random(seed)
    makers = Classes().makers()
    order = [makers[k % len(makers)] for k in range(count)] if count >= len(makers) else r.sample(makers, count)
    for make in order:
        pair = make(r)
        if r.random() < 0.3:
            pair = Pair(pair.name, in_sim_names(pair.racy), in_sim_names(pair.twin), pair.options, pair.races)
        yield pair
