"""Collectives of small tensors by kernels that write into the other ranks' memory (:mod:`outrider_triton.jit.peers`)."""

from __future__ import annotations

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

FUSED_BYTES = 1 << 20
"""Of one rank, up to which the fused kernel takes rows."""
_BLOCK = 1024
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GATHER, _SUM, _ROOT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory that the ranks share: int64 [2, ranks, words] of each rank, seen from here; ``epochs`` int32 [programs]."""

    memory: tuple[Tensor, ...]
    addresses: Tensor
    epochs: Tensor
    words: int


class PeerExchange:
    """What the ranks of one group send each other directly. ``most_bytes``: of one rank, beyond which nothing is taken.

    A method returns whether it did the call; False: the operands are too large for it, or of another kind, on every rank
    alike. It enqueues on the ambient stream. The first call of a kind makes its memory together with the other ranks, so it
    isn't made in a capture; calls of one group are ordered as the group says.
    """

    def __init__(self, group: Group, *, most_bytes: int, pdl: bool) -> None:
        self._make = WeakMethod(group.peer_buffers)  # whoever keeps this for a group doesn't keep the group
        self._rank, self._size = group.rank, group.size
        self.most_bytes = most_bytes
        self._pdl = pdl
        self._rooms: dict[tuple[str, int], _Room] = {}

    def all_reduce(self, tensor: Tensor) -> bool:
        """The sum over the ranks, in place, for 16 and 32 bit floats."""
        kind = _KINDS.get(tensor.dtype)
        if kind is None:
            return False
        return self._exchange(tensor, tensor, _SUM, kind)

    def all_gather(self, output: Tensor, tensor: Tensor) -> bool:
        """All ranks' ``tensor``, one behind the other."""
        return self._exchange(tensor, output, _GATHER, 0)

    def broadcast(self, tensor: Tensor, root: int) -> bool:
        """The ``tensor`` of rank ``root``, in place."""
        return self._exchange(tensor, tensor, _ROOT, 0, root)

    def takes_rows(self, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
        """Whether :meth:`all_reduce_rms_norm` takes these."""
        operands = (x, residual, weight)
        same = x.dtype in _KINDS and all(each.dtype is x.dtype and _in_words(each) for each in operands)
        return same and 0 < x.nbytes <= self.most_bytes and x.shape[-1] * x.itemsize % 4 == 0

    def all_reduce_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """:meth:`KernelSet.all_reduce_rms_norm` of rows that it takes, into ``out``, which is like ``residual``."""
        rows, columns = x.shape
        words = columns * x.itemsize // 4
        most = max(self.most_bytes // (4 * words), 1)
        room = self._room("rows", words, most * words, most)
        block = power_of_two(words)
        launch(
            jit.all_reduce_rms_norm,
            (rows,),
            *(_words(x), _words(residual), _words(weight), _words(out), room.addresses, room.epochs, eps, words, room.words),
            RANK=self._rank,
            SIZE=self._size,
            KIND=_KINDS[x.dtype],
            BLOCK=block,
            pdl=self._pdl,
            warps=_warps(block),
        )

    def _exchange(self, tensor: Tensor, out: Tensor, mode: int, kind: int, root: int = 0) -> bool:
        if tensor.nbytes > self.most_bytes or not (_in_words(tensor) and _in_words(out)):
            return False
        most = -(-self.most_bytes // (4 * _BLOCK))
        room = self._room("parts", _BLOCK, most * _BLOCK, most)
        count = tensor.nbytes // 4
        block = min(_BLOCK, power_of_two(count)) if count < _BLOCK else _BLOCK
        launch(
            jit.exchange,
            (-(-count // block),),
            *(_words(tensor), _words(out), room.addresses, room.epochs, count, root, room.words),
            RANK=self._rank,
            SIZE=self._size,
            MODE=mode,
            KIND=kind,
            BLOCK=max(block, 32),
            pdl=self._pdl,
            warps=_warps(block),
        )
        return True

    def _room(self, purpose: str, row: int, words: int, programs: int) -> _Room:
        key = (purpose, row)
        if key not in self._rooms:
            make = self._make()
            if make is None:
                raise InterfaceError(f"the group of {purpose!r} is gone; keep it for as long as ranks exchange anything")
            memory = make(f"{purpose} of {row} words", (2, self._size, words), torch.int64)
            device = memory[self._rank].device
            addresses = torch.tensor([each.data_ptr() for each in memory], dtype=torch.int64, device=device)
            epochs = torch.zeros(programs, dtype=torch.int32, device=device)
            self._rooms[key] = _Room(memory, addresses, epochs, words)
        return self._rooms[key]


def _warps(block: int) -> int:
    """About four words a thread."""
    return min(max(block // 128, 1), 16)


def _in_words(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0


def _words(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as words of 32 bits."""
    return tensor.view(-1).view(torch.int32)
