"""Collectives of small tensors by kernels that write into other ranks' memory (:mod:`outrider_triton.jit.peers`).

A *shot* is one exchange over peer memory. With one shot each rank sends all of its tensor to each other rank. With two shots
each rank sums a share of the tensor, and sends the sum of its share to each other rank: less data, one latency more. Both
send a 64-bit word for each 32 bits. Every rank chooses the same implementation by the estimated times.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch
from torch import Tensor

from outrider.device import InterfaceError
from outrider_triton.jit import peers as jit
from outrider_triton.launch import launch, power_of_two

if TYPE_CHECKING:
    from outrider.device import Group


LIBRARY, ONE_SHOT, TWO_SHOT = "library", "one shot", "two shot"
SHOTS = {ONE_SHOT: 1, TWO_SHOT: 2}
"""Number of shots of each implementation over peer memory."""
MAX_SUMMED_BYTES = 4 << 20
"""Maximum bytes per rank of a sum over peer memory: it limits the memory that the ranks share."""
# Two H200 (2026-11-23, NVLink) took 3.6 us for 8 KiB and 9.8 us for 1 MiB with one shot, 7.0 us for 8 KiB with NCCL, and
# copied 255 GB/s. The split of the 3.6 us into a launch and a shot, and every time of more than two ranks, are estimates.
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


MAX_MOVED_BYTES = 512 << 10
"""Maximum bytes per rank of a gather or a broadcast."""
_BLOCK = 1024
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GATHER, _SUM, _ROOT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _SharedMemory:
    """The slots of peer memory that the ranks of a group write to, and the calls counted so far."""

    memory: tuple[Tensor, ...]
    """The memory of each rank, int64 [2, ranks, words], as mapped on this device."""
    addresses: Tensor
    """Address of each rank's memory, int64 [ranks]."""
    epochs: Tensor
    """Number of calls of each program so far, int32 [programs]."""
    words: int
    """Maximum number of 32-bit words that one rank sends in a call."""


class PeerExchange:
    """Direct exchanges between the ranks of one group.

    A method returns True if it enqueued the exchange. It returns False, on every rank alike, for operands of another kind and
    for sizes that the library is estimated to do faster (:func:`fastest`). Kernels go to the ambient
    stream. The first call of a kind allocates memory together with the other ranks, so it must not be inside a capture. The
    group orders its calls.
    """

    def __init__(self, group: Group, *, pdl: bool) -> None:
        # References from this cache must not keep the group alive.
        self._allocate, self._allows = WeakMethod(group.peer_buffers), WeakMethod(group.allows_implementation)
        self._rank, self._size = group.rank, group.size
        self._max_summed_bytes = max_summed_bytes(self._size)
        self._pdl = pdl
        self._memories: dict[tuple[str, int], _SharedMemory] = {}

    def all_reduce(self, tensor: Tensor) -> bool:
        """Sum a tensor of 16 or 32 bit floats over the ranks, in place."""
        kind = _KINDS.get(tensor.dtype)
        shots = self._shots(tensor.nbytes, (tensor.nbytes // 4 - 1) % _BLOCK + 1)
        if kind is None or not shots:
            return False
        return self._exchange(tensor, tensor, _SUM, kind, shots=shots)

    def all_gather(self, output: Tensor, tensor: Tensor) -> bool:
        """Gather all ranks' ``tensor`` into ``output``, in rank order."""
        return self._exchange(tensor, output, _GATHER, 0)

    def broadcast(self, tensor: Tensor, root: int) -> bool:
        """Copy the ``tensor`` of rank ``root`` to all ranks, in place."""
        return self._exchange(tensor, tensor, _ROOT, 0, root)

    def row_shots(self, x: Tensor, residual: Tensor, weight: Tensor) -> int:
        """Return the number of exchanges (shots) that :meth:`all_reduce_rms_norm` makes for these operands, 1 or 2; 0 if the
        library must sum them, because their dtypes or sizes are not supported or the library is faster.
        """
        operands = (x, residual, weight)
        same = x.dtype in _KINDS and all(each.dtype is x.dtype and _in_words(each) for each in operands)
        if not same or not x.nbytes or x.shape[-1] * x.itemsize % 4:
            return 0
        return self._shots(x.nbytes, x.shape[-1] * x.itemsize // 4)

    def _shots(self, nbytes: int, fewest_words: int) -> int:
        """Return the number of exchanges (shots) of a sum of ``nbytes``, 1 or 2; 0 if the library must compute the sum.
        ``fewest_words`` is the size in 32-bit words of the smallest piece that two shots divide among the ranks.
        """
        allows = self._allows()
        allowed = [each for each in SHOTS if allows is not None and allows(each)]
        if nbytes > self._max_summed_bytes:
            return 0
        candidates = [each for each in allowed if SHOTS[each] == 1 or fewest_words > (self._size - 1) ** 2]
        if len(allowed) == len(SHOTS):
            candidates.append(LIBRARY)
        return SHOTS.get(fastest(nbytes, self._size, candidates), 0) if candidates else 0

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, *, shots: int
    ) -> None:
        """Reduce over ranks, add to the residual and normalise into ``out``, which is shaped like ``residual``.

        ``shots`` is the number that :meth:`row_shots` returned, at least 1.
        """
        rows, columns = x.shape
        words = columns * x.itemsize // 4
        max_rows = max(self._max_summed_bytes // (4 * words), 1)
        shared = self._shared_memory("rows", words, max_rows * words, max_rows)
        block = power_of_two(words)
        launch(
            jit.all_reduce_rms_norm,
            (rows,),
            *(_words(x), _words(residual), _words(weight), _words(out)),
            *(shared.addresses, shared.epochs, eps, words, shared.words),
            RANK=self._rank,
            SIZE=self._size,
            KIND=_KINDS[x.dtype],
            SHOTS=shots,
            BLOCK=block,
            pdl=self._pdl,
            warps=_warps(block),
        )

    def _exchange(self, tensor: Tensor, out: Tensor, mode: int, kind: int, root: int = 0, *, shots: int = 1) -> bool:
        if not (_in_words(tensor) and _in_words(out)) or (mode != _SUM and tensor.nbytes > MAX_MOVED_BYTES):
            return False
        max_programs = -(-max(self._max_summed_bytes, MAX_MOVED_BYTES) // (4 * _BLOCK))
        shared = self._shared_memory("parts", _BLOCK, max_programs * _BLOCK, max_programs)
        count = tensor.nbytes // 4
        block = min(_BLOCK, power_of_two(count)) if count < _BLOCK else _BLOCK
        launch(
            jit.exchange,
            (-(-count // block),),
            *(_words(tensor), _words(out), shared.addresses, shared.epochs, count, root, shared.words),
            RANK=self._rank,
            SIZE=self._size,
            MODE=mode,
            KIND=kind,
            SHOTS=shots,
            BLOCK=max(block, 32),
            pdl=self._pdl,
            warps=_warps(block),
        )
        return True

    def _shared_memory(self, purpose: str, row: int, words: int, programs: int) -> _SharedMemory:
        key = (purpose, row)
        if key not in self._memories:
            allocate = self._allocate()
            if allocate is None:
                raise InterfaceError(f"the group of {purpose!r} is gone; keep it for as long as ranks exchange anything")
            memory = allocate(f"{purpose} of {row} words", (2, self._size, words), torch.int64)
            device = memory[self._rank].device
            addresses = torch.tensor([each.data_ptr() for each in memory], dtype=torch.int64, device=device)
            epochs = torch.zeros(programs, dtype=torch.int32, device=device)
            self._memories[key] = _SharedMemory(memory, addresses, epochs, words)
        return self._memories[key]


def _warps(block: int) -> int:
    """Return the number of warps of a program: about four words per thread."""
    return min(max(block // 128, 1), 16)


def _in_words(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0


def _words(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as 32-bit words."""
    return tensor.view(-1).view(torch.int32)
