"""Checks of values on the device, before they are copied into a static buffer. Findings come with the next results.

A probe says of each request which value is the first bad one. The host learns of it with the results of the iteration, and
ends the request with an error that names it. No value is corrected silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.device import KernelSet
from outrider.engine.requests.guidance import WALK_SECONDS
from outrider.speculative.proposer import Proposer

HOST = "host"
"""Not a buffer: what a host that is alone with it says of a request, so that the other ranks end the request too."""
GUIDE_LATE, MEDIA_FAILED = range(2)
_SAID = {
    GUIDE_LATE: f"finding what its guide allows took more than {WALK_SECONDS:g} s; write the guide with fewer ways to read a "
    "text",
    MEDIA_FAILED: "its media can't be read by the rank that does so",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """One checked value. ``bounds``: a whole number must be at least the first and below the second; None: a number that
    mustn't be NaN.
    """

    buffer: str
    bounds: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class BadValue:
    """What a probe found in one request: the flat index of the first bad value in the request's part of ``buffer``. Of
    :data:`HOST` it's the reason; ``text`` is what this rank itself says of it.
    """

    buffer: str
    index: int
    value: int | None
    bounds: tuple[int, int] | None
    text: str = ""

    @property
    def spoils(self) -> bool:
        """Whether the request's keys and values may be bad as well."""
        return (self.buffer, self.index) != (HOST, GUIDE_LATE)

    def __str__(self) -> str:
        if self.buffer == HOST:
            return self.text or _SAID[self.index]
        if self.bounds is None:
            return f"{self.buffer} holds NaN at index {self.index}"
        return f"{self.buffer} holds {self.value} at index {self.index}, expected {self.bounds[0]} to {self.bounds[1] - 1}"


class Probes:
    """The probes of an engine, in a fixed order, so that each has its columns in the results. ``ranks``: there are several,
    whose hosts can say something of a request (:data:`HOST`).
    """

    def __init__(self, kernels: KernelSet, proposer: Proposer, *, vocabulary: int, ranks: bool = False) -> None:
        self._kernels = kernels
        tokens = (0, vocabulary)
        found = [
            Probe(f"relay.{spec.name}", None if spec.dtype.is_floating_point else spec.bounds or tokens)
            for spec in proposer.relay
        ]
        if proposer.nodes:
            found.append(Probe("draft.tokens", tokens))
            if not proposer.is_tree:
                found.append(Probe("draft.probs", None))
        found.append(Probe("target.logits", None))
        if ranks:
            found.append(Probe(HOST, None))
        self.probes = tuple(found)
        self._index = {probe.buffer: i for i, probe in enumerate(found)}

    def columns(self, buffer: str) -> slice:
        """Where the findings of one probe lie among those of a request: index and value."""
        start = 2 * self._index[buffer]
        return slice(start, start + 2)

    @property
    def width(self) -> int:
        """Numbers that a request's findings take."""
        return 2 * len(self.probes)

    def look(self, name: str, value: Tensor, found: Tensor) -> None:
        """Look at numbers [B, ...] by the name of their probe; write into ``found`` int64 [B, width]."""
        self._kernels.find_nan(value.reshape(value.shape[0], -1), self.part(name, found))

    def part(self, name: str, found: Tensor) -> Tensor:
        """Where in ``found`` the probe of that name says what it finds, int64 [B, 2]."""
        return found[:, self.columns(name)]

    def take(self, name: str, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor) -> None:
        """Copy ``rows`` int64 [B] of ``source`` (None: all) into ``out`` [B, ...], and look at them on the way.

        The copy is the same, but whole numbers of a request with a bad one are its lower bound, so that they can be used.
        """
        bounds = self.probes[self._index[name]].bounds
        self._kernels.gather_checked(source, rows, out, self.part(name, found), bounds=bounds)

    def read(self, row: Sequence[int], text: str = "") -> tuple[BadValue, ...]:
        """Host: what one request's ``width`` numbers say. ``text``: what this host said of it."""
        bad = []
        for i, probe in enumerate(self.probes):
            index, value = row[2 * i], row[2 * i + 1]
            if index >= 0:
                said = text if probe.buffer == HOST else ""
                bad.append(BadValue(probe.buffer, index, None if probe.bounds is None else value, probe.bounds, said))
        return tuple(bad)
