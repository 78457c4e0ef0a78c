"""Probes: device checks of values before a copy to a static buffer.

A probe writes the index and value of the first bad element of each request. The host reads them with the results of the
iteration and ends the request with an error that names the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.device import KernelSet
from outrider.engine.guides.guidance import MASK_TIME_LIMIT_S
from outrider.speculative.proposer import Proposer

HOST = "host"
"""The name of host failures, which aren't a buffer. A rank publishes its failure so that all ranks end the request."""
GUIDE_LATE, MEDIA_FAILED = range(2)
_HOST_FAILURES = {
    GUIDE_LATE: f"finding what its guide allows took more than {MASK_TIME_LIMIT_S:g} s; write the guide with fewer ways to "
    "read a text",
    MEDIA_FAILED: "its media can't be read by the rank that does so",
}


@dataclass(frozen=True, slots=True)
class ValueProbe:
    """The declared check of one buffer's values."""

    buffer: str
    bounds: tuple[int, int] | None
    """Inclusive lower and exclusive upper bound of integers; None: floats that must not be NaN."""


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first bad value that a probe found in one request."""

    buffer: str
    index: int
    """The flat index in the request's part of ``buffer``. For :data:`HOST`: the reason of the host failure."""
    value: int | None
    bounds: tuple[int, int] | None
    text: str = ""
    """The message of a host failure, on the rank that published it."""

    @property
    def may_corrupt_cache(self) -> bool:
        """Return True if the request's keys and values may be bad too."""
        return (self.buffer, self.index) != (HOST, GUIDE_LATE)

    def __str__(self) -> str:
        if self.buffer == HOST:
            return self.text or _HOST_FAILURES[self.index]
        if self.bounds is None:
            return f"{self.buffer} holds NaN at index {self.index}"
        return f"{self.buffer} holds {self.value} at index {self.index}, expected {self.bounds[0]} to {self.bounds[1] - 1}"


class Probes:
    """All probes of an engine in a fixed order. Each probe has two columns in the results: index and value."""

    def __init__(self, kernels: KernelSet, proposer: Proposer, *, vocabulary: int, ranks: bool = False) -> None:
        """Create the probes of an engine. ``ranks``: the engine has several ranks, which publish host failures
        (:data:`HOST`).
        """
        self._kernels = kernels
        token_bounds = (0, vocabulary)
        probes = [
            ValueProbe(f"relay.{spec.name}", None if spec.dtype.is_floating_point else spec.bounds or token_bounds)
            for spec in proposer.relay
        ]
        if proposer.nodes:
            probes.append(ValueProbe("draft.tokens", token_bounds))
            if not proposer.is_tree:
                probes.append(ValueProbe("draft.probs", None))
        probes.append(ValueProbe("target.logits", None))
        if ranks:
            probes.append(ValueProbe(HOST, None))
        self.probes = tuple(probes)
        self._index = {probe.buffer: i for i, probe in enumerate(probes)}

    def columns(self, buffer: str) -> slice:
        """Return the two columns of one probe in a request's probe results."""
        start = 2 * self._index[buffer]
        return slice(start, start + 2)

    @property
    def width(self) -> int:
        """The number of columns of a request's probe results."""
        return 2 * len(self.probes)

    def check_for_nan(self, name: str, value: Tensor, found: Tensor) -> None:
        """Check the floats ``value`` [B, ...] for NaN. Writes the columns of probe ``name`` in ``found`` int64 [B, width]."""
        self._kernels.find_nan(value.reshape(value.shape[0], -1), self.result_columns(name, found))

    def result_columns(self, name: str, found: Tensor) -> Tensor:
        """Return the columns of probe ``name`` in ``found``, int64 [B, 2]."""
        return found[:, self.columns(name)]

    def copy_checked(self, name: str, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor) -> None:
        """Copy ``rows`` int64 [B] of ``source`` (None: all rows) to ``out`` [B, ...] and check them with probe ``name``.

        If a request has an integer out of bounds, all its integers in ``out`` become the lower bound, so that later kernels
        can use them as indices.
        """
        bounds = self.probes[self._index[name]].bounds
        self._kernels.gather_checked(source, rows, out, self.result_columns(name, found), bounds=bounds)

    def findings_of_row(self, row: Sequence[int], text: str = "") -> tuple[BadValue, ...]:
        """Return the bad values in one request's probe results. ``text``: this host's message about the request."""
        bad_values = []
        for i, probe in enumerate(self.probes):
            index, value = row[2 * i], row[2 * i + 1]
            if index >= 0:
                message = text if probe.buffer == HOST else ""
                value_found = None if probe.bounds is None else value
                bad_values.append(BadValue(probe.buffer, index, value_found, probe.bounds, message))
        return tuple(bad_values)
