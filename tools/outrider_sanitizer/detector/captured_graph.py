"""The steps of a captured graph, which each replay repeats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.device import Access, Operation
from outrider_sanitizer.detector.actors import StreamActor
from outrider_sanitizer.detector.memory import Shadow


class CapturedStep(NamedTuple):
    """One captured step on a branch: an operation, or a record, wait, set or reset of an event or flag object."""

    what: str  # launch, allocate, record, wait, join, set, await, reset, collective
    branch: str
    subject: Any


@dataclass(eq=False)
class CapturedGraph:
    """The steps of one graph, in the order of capture."""

    main: str
    steps: list[CapturedStep] = field(default_factory=list)
    branches: dict[str, StreamActor] = field(default_factory=dict)
    summary: list[tuple[Operation, list[Access]]] | None = None
    """For a graph without branches and flags: each operation, with the accesses that operations outside can conflict with.

    All accesses of a replay then lie in one epoch of one stream, so one check per region is enough.
    """
    temporaries: set[int] = field(default_factory=set)
    dead: dict[int, tuple[Shadow, str]] = field(default_factory=dict)
    """Storages that the graph uses and that were freed after capture, with the location of the release."""

    def outside(self) -> set[int]:
        """Return the storages that the graph uses and does not own."""
        launched = [step.subject.accesses for step in self.steps if step.what == "launch"]
        launched += [step.subject[2] for step in self.steps if step.what == "collective"]
        return {access.storage for accesses in launched for access in accesses} - self.temporaries

    def has_collective(self, storage: int) -> bool:
        """Return True if a captured collective reads or writes the storage."""
        calls = (step.subject[2] for step in self.steps if step.what == "collective")
        return any(access.storage == storage for accesses in calls for access in accesses)

    def finish(self) -> None:
        """Build the summary of the graph's storages and flags at the end of the capture."""
        if any(step.branch != self.main or step.what not in ("launch", "allocate") for step in self.steps):
            return
        seen: set[tuple[object, ...]] = set()
        summary: list[tuple[Operation, list[Access]]] = []
        for step in self.steps:
            if step.what != "launch":
                continue
            kept = []
            for access in step.subject.accesses:
                place = (access.storage, access.start, access.end, access.shape, access.stride, access.by_rows)
                region = (*place, access.write)
                # An access that conflicts with a read of data that the graph wrote conflicts with that write, too.
                if region not in seen and (*place, True) not in seen:
                    seen.add(region)
                    kept.append(access)
            if kept:
                summary.append((step.subject, kept))
        self.summary = summary

    @property
    def waits_for_flags(self) -> bool:
        """True if a replay waits for flags."""
        return any(step.what == "await" for step in self.steps)
