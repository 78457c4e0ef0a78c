"""What a captured graph does at each replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.device import Access, Operation
from outrider_sanitizer.clocks import Actor
from outrider_sanitizer.memory import Shadow


class Verb(NamedTuple):
    """One captured step: an operation, or an event or flag by its object, on a branch."""

    what: str  # launch, allocate, record, wait, join, set, await, reset, collective
    branch: str
    subject: Any


@dataclass(eq=False)
class Captured:
    """The steps of one graph, in the order of capture.

    ``summary`` holds, for a graph without branches and flags, each operation with those of its accesses that an outsider
    can conflict with: all its accesses lie in one epoch of one stream, so the same region needs to be looked at once.
    ``dead`` are storages that it uses and that were freed since, with where that was.
    """

    main: str
    verbs: list[Verb] = field(default_factory=list)
    branches: dict[str, Actor] = field(default_factory=dict)
    summary: list[tuple[Operation, list[Access]]] | None = None
    temporaries: set[int] = field(default_factory=set)
    dead: dict[int, tuple[Shadow, str]] = field(default_factory=dict)

    def outside(self) -> set[int]:
        """Storages that it uses and doesn't own."""
        launched = (verb.subject.accesses for verb in self.verbs if verb.what == "launch")
        return {access.storage for accesses in launched for access in accesses} - self.temporaries

    def finish(self) -> None:
        """The capture is over: make the summary."""
        if any(verb.branch != self.main or verb.what not in ("launch", "allocate") for verb in self.verbs):
            return
        seen: set[tuple[object, ...]] = set()
        summary: list[tuple[Operation, list[Access]]] = []
        for verb in self.verbs:
            if verb.what != "launch":
                continue
            kept = []
            for access in verb.subject.accesses:
                place = (access.storage, access.start, access.end, access.shape, access.stride, access.by_rows)
                region = (*place, access.write)
                # Whoever conflicts with a read of what the graph itself wrote conflicts with that write.
                if region not in seen and (*place, True) not in seen:
                    seen.add(region)
                    kept.append(access)
            if kept:
                summary.append((verb.subject, kept))
        self.summary = summary

    @property
    def flags(self) -> bool:
        """Whether a replay waits for flags."""
        return any(verb.what == "await" for verb in self.verbs)
