"""The report of a watched run: findings, waits that can be removed, and the source lines that both name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from outrider.device import OutriderError


class FindingKind(StrEnum):
    """The kind of fault that a finding reports."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_READ = "write after read"
    WRITE_AFTER_WRITE = "write after write"
    ALLOCATION = "used before its allocation is ordered"
    REUSE = "freed while in use"
    TWO_WRITERS = "two writers in one operation"
    REBIND = "parameter rebound during a replay"
    FLAG_LOST = "flag set twice"
    FLAG_RESET = "flag reset too early"
    FLAG_NEVER_SET = "flag never set"
    UNDEFINED = "read before it was written"
    STALE = "read after its contents were over"
    STALE_PADDING = "stale padding"
    STALE_OUTPUT = "graph output read after its next replay"
    STALE_MIRROR = "mirror behind its source"
    NOT_REBOUND = "parameter not rebound"
    DECISION = "ranks decide differently"
    COLLECTIVE = "ranks call different collectives"
    COLLECTIVE_MISSING = "collective that a rank never makes"
    COLLECTIVE_UNORDERED = "collectives that nothing orders"
    SENDS = "sends that wait for each other without buffers"
    COLLECTIVE_ORDER = "ranks call groups in different order"


class RaceError(OutriderError):
    """Raised for a report with findings. The text is that of the report, and ``report`` is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True, slots=True)
class AccessSite:
    """One access, or another step that a finding names.

    ``actor`` is a stream or a host thread, and ``index`` the operation's position among the operations of the actor, -1 if
    the device does not report it. In replay ``generation`` of ``graph`` (0 outside graphs), ``index`` counts from the
    beginning of the replay, and ``launch`` is the position of the replay on its stream, -1 if unknown. ``rank`` is the
    device's rank, -1 for a single device.
    """

    operation: str
    actor: str
    host: bool
    index: int
    location: str
    graph: str = ""
    generation: int = 0
    launch: int = -1
    argument: str = ""
    start: int = 0
    end: int = 0
    between: bool = False
    rank: int = -1

    def __str__(self) -> str:
        where = f" at {self.location}" if self.location else ""
        rank = f" of rank {self.rank}" if self.rank >= 0 and not self.actor.startswith("rank ") else ""
        graph = f" in replay {self.generation} of graph {self.graph!r}" if self.graph else ""
        place = f"on {self.actor}" if self.host or self.index < 0 else f"on stream {self.actor!r} (operation {self.index})"
        argument = f", operand {self.argument!r}" if self.argument else ""
        extent = f", bytes {self.start} to {self.end}" if self.end else ""
        return f"{self.operation} {place}{rank}{graph}{argument}{extent}{where}"

    @property
    def position(self) -> int:
        """Index among the operations of its stream or thread, counted after the launch in a replay; -1 if unknown."""
        return self.index if self.launch < 0 else self.launch + 1 + self.index

    @property
    def last(self) -> int:
        """Index of the last step of the actor that is complete once this access is complete."""
        return self.position - self.between

    @property
    def brief(self) -> str:
        """Operation name and source line, without the stream."""
        return f"{self.operation} at {self.location}" if self.location else self.operation


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, with the facts needed to repair it.

    ``first`` precedes ``second`` in program order. ``missing`` is the edge to add, or the value to refresh. ``hint`` names
    the existing ordering and why it is insufficient. ``schedule`` makes the fault visible on a controllable device. ``count``
    is the number of occurrences.
    """

    kind: FindingKind
    first: AccessSite | None
    second: AccessSite
    missing: str
    memory: str = ""
    hint: str = ""
    schedule: str | None = None
    count: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """The key by which equal findings are merged."""
        one, two = self.first, self.second
        return (
            self.kind,
            two.operation,
            two.actor,
            two.location,
            two.graph,
            *((one.operation, one.actor, one.location, one.graph) if one else ()),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return {**asdict(self), "kind": self.kind.name.lower(), "title": self.kind.value}

    @property
    def heading(self) -> str:
        """The kind, and the number of occurrences of more than one."""
        return f"{self.kind.value}{f' ({self.count} times)' if self.count > 1 else ''}"

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Title and text of each part that the finding has."""
        parts = (
            ("first", self.first),
            ("then" if self.first else "at", self.second),
            ("memory", self.memory),
            ("now", self.hint),
            ("fix", self.missing),
            ("replay", self.schedule),
        )
        return [(title, str(text)) for title, text in parts if text]

    def __str__(self) -> str:
        return "\n".join([self.heading, *(f"  {title + ':':<8} {text}" for title, text in self.rows)])


@dataclass
class Report:
    """The findings of one watched run; the sanitizer fills the report during the run.

    ``operations``, ``streams`` (streams with operations) and ``replays`` (of graphs) count the watched work. A report without
    any watched work is clean, too. ``blind_spots`` lists work that the sanitizer cannot see; ``advice`` lists waits that can
    be removed.
    """

    backend: str = ""
    blind_spots: list[str] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    operations: int = 0
    streams: int = 0
    replays: int = 0
    most: int = 200
    left_out: int = 0
    _found: dict[tuple[object, ...], Finding] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Add a finding to the report, or increase the count of an equal one."""
        known = self._found.get(finding.key)
        if known is not None:
            self._found[finding.key] = replace(known, count=known.count + 1)
        elif len(self._found) < self.most:
            self._found[finding.key] = finding
        else:
            self.left_out += 1

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, in the order of discovery."""
        return tuple(self._found.values())

    @property
    def clean(self) -> bool:
        """True if there is no finding."""
        return not self._found

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self._found)

    def __bool__(self) -> bool:
        return True  # a report is there, also when it's clean

    def raise_if_any(self) -> None:
        """Raise :class:`RaceError` if the report has a finding."""
        if self._found:
            raise RaceError(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return {
            "backend": self.backend,
            "clean": self.clean,
            "operations": self.operations,
            "streams": self.streams,
            "replays": self.replays,
            "findings": [finding.as_dict() for finding in self.findings],
            "left_out": self.left_out,
            "advice": [asdict(item) for item in self.advice],
            "blind_spots": list(self.blind_spots),
        }

    @property
    def watched(self) -> str:
        """Return the watched counts and the backend as text."""
        counts = f"{self.operations} operations, {self.streams} streams and {self.replays} replays"
        return f"{counts} on {self.backend}"

    @property
    def summary(self) -> str:
        """Return the number of findings and what was watched, as one line. A run without operations isn't called clean."""
        if self.clean:
            return f"{'clean' if self.operations else 'nothing was watched'}: {self.watched}"
        return f"{len(self)} finding{'s' if len(self) > 1 else ''} in {self.watched}"

    def __str__(self) -> str:
        if self.clean:
            return self.summary
        parts = [self.summary]
        parts += [f"{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        if self.left_out:
            parts.append(f"and {self.left_out} more that aren't listed")
        parts += [f"not seen: {spot}" for spot in self.blind_spots]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Advice:
    """A wait that added no order in any of the ``count`` times that its line ran in the watched run.

    An earlier wait of the stream, or a wait of the host, had already ordered the stream after the record.
    """

    stream: str
    event: str
    location: str
    count: int

    def __str__(self) -> str:
        return (
            f"{self.stream!r} waits for event {self.event!r} at {self.location} ({self.count} times), which orders nothing "
            "that wasn't ordered already"
        )


_INSIDE = ("outrider.device", "outrider_", "torch", "triton", "numpy", "typing_extensions")
_PROGRAMS = "outrider_sanitizer.races"


def caller_location() -> str:
    """Return ``file:line`` of the innermost caller outside torch, the interface, the sanitizer and plugins, or ""."""
    frame = sys._getframe(1)
    while frame is not None:
        if not _inside(frame.f_globals.get("__name__", "")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


@lru_cache(1 << 12)
def _inside(module: str) -> bool:
    """Return True if the module belongs to a library and not to the watched program."""
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return True
    return module.startswith(_INSIDE) and not module.startswith(_PROGRAMS)
