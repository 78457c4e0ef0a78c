"""Byte regions of accesses, and the exact test for a shared byte.

An access is an interval, or a strided set of runs inside an interval. Intervals are enough to find candidates. The exact test
runs only for two accesses that conflict by their intervals, so that disjoint columns of one matrix raise no alarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from outrider.device import Access

_MAX_ENUMERATED_RUNS = 1 << 16
"""Maximum number of runs that the exact test enumerates; two regions that both have more runs count as overlapping."""


class ByteRuns(NamedTuple):
    """A strided region as equal runs of bytes: ``count`` indices at ``stride`` for each dimension, largest stride first."""

    start: int
    length: int
    dims: tuple[tuple[int, int], ...]

    @property
    def number(self) -> int:
        """The number of runs of the region."""
        return prod(count for count, _ in self.dims)

    @property
    def extent(self) -> int:
        """The distance in bytes from the region's first byte to the end of its last run."""
        return self.length + sum((count - 1) * stride for count, stride in self.dims)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the start offsets of the region's runs, in bytes."""
        return self._starts(self.start, 0)

    def _starts(self, base: int, dim: int) -> Iterator[int]:
        if dim == len(self.dims):
            yield base
            return
        count, stride = self.dims[dim]
        for i in range(count):
            yield from self._starts(base + i * stride, dim + 1)


def byte_runs(access: Access) -> ByteRuns:
    """Return the runs of an access; contiguous dimensions are merged."""
    if access.shape is None or access.stride is None:
        return ByteRuns(access.start, access.end - access.start, ())
    pairs = [(n, abs(s)) for n, s in zip(access.shape, access.stride, strict=True) if n > 1 and s != 0]
    length = access.end - access.start - sum((n - 1) * s for n, s in pairs)
    dims: list[tuple[int, int]] = []
    for count, stride in sorted(pairs, key=lambda pair: pair[1]):
        if not dims and stride <= length:
            length += (count - 1) * stride
        elif dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * count, dims[-1][1])
        else:
            dims.append((count, stride))
    return ByteRuns(access.start, length, tuple(reversed(dims)))


def overlap(one: Access, other: Access) -> bool:
    """Return True if two accesses of one storage share a byte."""
    if one.start >= other.end or other.start >= one.end:
        return False
    if one.shape is None and other.shape is None:
        return True
    a, b = byte_runs(one), byte_runs(other)
    if a.number > b.number:
        a, b = b, a
    if a.number > _MAX_ENUMERATED_RUNS:
        return True
    return any(_hits(b, b.start, 0, start, start + a.length) for start in a)


def _hits(region: ByteRuns, base: int, dim: int, low: int, high: int) -> bool:
    """Return True if the runs of ``region`` from dimension ``dim`` on, based at ``base``, have a byte in [low, high)."""
    if dim == len(region.dims):
        return base < high and low < base + region.length
    count, stride = region.dims[dim]
    inner = region.length + sum((n - 1) * s for n, s in region.dims[dim + 1 :])
    first = max(0, -((base + inner - 1 - low) // stride) if base + inner <= low else 0)
    last = min(count - 1, (high - 1 - base) // stride)
    return any(_hits(region, base + i * stride, dim + 1, low, high) for i in range(first, last + 1))


def dense_parts(access: Access, most: int) -> tuple[tuple[int, int], ...] | None:
    """Return the access as at most ``most`` intervals, or None if it has more runs."""
    if access.shape is None:
        return ((access.start, access.end),)
    region = byte_runs(access)
    if region.number > most:
        return None
    return tuple((start, start + region.length) for start in region)
