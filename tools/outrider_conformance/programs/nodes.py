"""What the model is made of: nodes with vector clocks, memory with who wrote and read it, and what reads must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from outrider_conformance.programs import language as lang
from outrider_conformance.programs.language import Path, Span

if TYPE_CHECKING:
    from outrider_conformance.programs.flows import Flows

Key = tuple[str, int]
"""``("buffer", 2)``: memory, or something else that is read and written: a graph, its host parameter, a flag."""

ORDER, LAUNCH = "Stream", "launch"
"""Edges that every step has. The others are named by the verb that makes them."""


class Unordered(Exception):
    """A step would race: ``earlier`` are the nodes that it must come after and doesn't."""

    def __init__(self, earlier: Sequence[Node]) -> None:
        super().__init__(f"{len(earlier)} accesses aren't ordered")
        self.earlier = tuple(earlier)


class Senseless(Exception):
    """A step that the contract forbids here, such as a wait for an event that was never recorded."""


@dataclass(eq=False, slots=True)
class Node:
    """One thing that a stream or a host thread does. ``verb`` is the member of the backend interface that does it.

    ``opaque``: what the memory that it writes held just before isn't promised, so that not even a racy read may meet it.
    """

    actor: int
    clock: tuple[int, ...]
    causes: tuple[tuple[Node, str], ...]
    path: Path
    verb: str
    effect: Effect | None = None
    opaque: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """``to`` of ``target`` becomes ``make(source)``; ``seen`` is the content of ``source`` at the time."""

    target: Key
    to: Span
    make: Callable[[Tensor | None], Tensor]
    source: Key | None = None
    span: Span | None = None
    seen: Cell | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One memory now: its contents, who wrote it last and who has read it since. ``before`` is what it was before that."""

    data: Tensor | None
    writer: Node | None = None
    readers: tuple[Node, ...] = ()
    peeks: tuple[Node, ...] = ()
    before: Cell | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """What a host-visible read must find: for each element one of ``allowed``. ``certain``: a query must answer yes."""

    reader: Node
    key: Key
    allowed: tuple[Tensor, ...]
    cell: Cell
    certain: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Glance:
    """A racy download: ``node`` made ``version`` of its slot, with ``span`` of ``source`` in its ``to``."""

    node: Node
    version: Tensor
    to: Span
    source: Key
    span: Span


@dataclass(slots=True)
class State:
    """All that changes; lists are replaced or copied, contents never written in place."""

    clocks: list[tuple[int, ...]]
    lasts: list[Node | None]
    events: list[Node | None]
    cells: dict[Key, Cell]
    flows: Flows
    graphs: dict[int, lang.Capture] = field(default_factory=dict)
    params: dict[int, int] = field(default_factory=dict)
    glances: tuple[Glance, ...] = ()
    host: int = 0
    expectations: dict[Path, Expectation] = field(default_factory=dict)

    def copy(self) -> State:
        """For going back."""
        return replace(
            self,
            clocks=list(self.clocks),
            lasts=list(self.lasts),
            events=list(self.events),
            cells=dict(self.cells),
            flows=self.flows.copy(),
            graphs=dict(self.graphs),
            params=dict(self.params),
            expectations=dict(self.expectations),
        )


def join(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """What is over for whoever knows both."""
    return one if one is other else tuple(map(max, one, other))
