"""Parts of the model: nodes with vector clocks, memory with its writer and readers, and the expected values of reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from outrider_conformance.programs import language as lang
from outrider_conformance.programs.language import ElementSpan, Path

Key = tuple[str, int]
"""The key of a resource that is read and written, such as ``("buffer", 2)``: memory, a graph, its host parameter
or a flag.
"""

ORDER, LAUNCH = "Stream", "launch"
"""Labels of the edges that every step has. Other edges are named by the verb that makes them."""


class Unordered(Exception):
    """Raised for a step that would race. ``earlier`` are the nodes that must precede the step and do not."""

    def __init__(self, earlier: Sequence[Node]) -> None:
        super().__init__(f"{len(earlier)} accesses aren't ordered")
        self.earlier = tuple(earlier)


class ForbiddenStep(Exception):
    """Raised for a step that the contract forbids, for example a wait for an event that was never recorded."""


@dataclass(eq=False, slots=True)
class Node:
    """One action of a stream or of a host thread. ``verb`` is the member of the backend interface that performs it."""

    actor: int
    clock: tuple[int, ...]
    causes: tuple[tuple[Node, str], ...]
    path: Path
    verb: str
    effect: Effect | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """A write: ``to`` of ``target`` becomes ``make(source)``. ``seen`` is the state of ``source`` at that time."""

    target: Key
    to: ElementSpan
    make: Callable[[Tensor | None], Tensor]
    source: Key | None = None
    span: ElementSpan | None = None
    seen: Cell | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """The current state of one memory: contents, last writer, readers since then, and the previous state ``before``."""

    data: Tensor | None
    writer: Node | None = None
    readers: tuple[Node, ...] = ()
    before: Cell | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """The contents that a host read must find. ``certain``: a query must return True."""

    reader: Node
    key: Key
    wanted: Tensor
    cell: Cell
    certain: bool = False


@dataclass(slots=True)
class ModelState:
    """The mutable state of the model. Lists are replaced or copied; contents are never written in place."""

    clocks: list[tuple[int, ...]]
    lasts: list[Node | None]
    events: list[Node | None]
    cells: dict[Key, Cell]
    graphs: dict[int, lang.CaptureStep] = field(default_factory=dict)
    params: dict[int, int] = field(default_factory=dict)
    host: int = 0
    expectations: dict[Path, Expectation] = field(default_factory=dict)

    def copy(self) -> ModelState:
        """Return a copy of the state, so that the model can undo a failed step."""
        return replace(
            self,
            clocks=list(self.clocks),
            lasts=list(self.lasts),
            events=list(self.events),
            cells=dict(self.cells),
            graphs=dict(self.graphs),
            params=dict(self.params),
            expectations=dict(self.expectations),
        )


def join(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the union of two clocks: the nodes that have completed for either."""
    return one if one is other else tuple(map(max, one, other))
