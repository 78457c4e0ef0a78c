"""Estimated times of a sum over ranks, by which every rank chooses the same implementation.

A *shot* is one exchange over peer memory. With one shot each rank sends all of its tensor to each other rank. With two shots
each rank sums a share of the tensor, and sends the sum of its share to each other rank: less data, one latency more. Both
send a 64-bit word for each 32 bits.

The constants follow from measurements on two H200 (2026-11-23, NVLink): 3.6 µs for 8 KiB and 9.8 µs for 1 MiB with one shot,
7.0 µs for 8 KiB with NCCL, and 255 GB/s for a copy between two GPUs. The split of the 3.6 µs into a launch and a shot, and
every time of more than two ranks, are estimates until they are measured.
"""

from __future__ import annotations

from collections.abc import Collection

LIBRARY, ONE_SHOT, TWO_SHOT = "library", "one shot", "two shot"
SHOTS = {ONE_SHOT: 1, TWO_SHOT: 2}
"""Number of shots of each implementation over peer memory."""
MAX_SUMMED_BYTES = 4 << 20
"""Maximum bytes per rank of a sum over peer memory: it limits the memory that the ranks share."""
_LAUNCH_S = 2.0e-6
_SHOT_S = 1.5e-6
_SHOT_BYTES_PER_S = 338e9
_LIBRARY_STEP_S = 3.5e-6
_LIBRARY_BYTES_PER_S = 255e9


def estimated_s(implementation: str, nbytes: int, ranks: int) -> float:
    """Return the estimated seconds of a sum of ``nbytes`` of each rank over ``ranks`` ranks."""
    others, shared = ranks - 1, 2 * nbytes * (ranks - 1) / ranks
    if implementation == LIBRARY:  # a ring: each rank sums its share in ``others`` steps, and shares go around in as many
        return 2 * others * _LIBRARY_STEP_S + shared / _LIBRARY_BYTES_PER_S
    sent = 2 * nbytes * others if implementation == ONE_SHOT else 2 * shared
    return _LAUNCH_S + SHOTS[implementation] * _SHOT_S + sent / _SHOT_BYTES_PER_S


def fastest(nbytes: int, ranks: int, implementations: Collection[str]) -> str:
    """Return the implementation with the least estimated time."""
    return min(implementations, key=lambda each: estimated_s(each, nbytes, ranks))


def max_summed_bytes(ranks: int) -> int:
    """Return the largest power of two of bytes per rank that is summed over peer memory."""
    sizes = (1 << exponent for exponent in range(MAX_SUMMED_BYTES.bit_length()))
    return max(size for size in sizes if fastest(size, ranks, (LIBRARY, *SHOTS)) != LIBRARY)
