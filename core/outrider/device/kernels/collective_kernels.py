"""What a KernelSet computes together with the other ranks of a group."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from outrider.device.collectives import Group
    from outrider.device.stream import Stream


class CollectiveKernels:
    """Kernels that take part in a collective. Rules and letters: :class:`~outrider.device.KernelSet`; what holds for the
    calls of a group holds for these (:class:`~outrider.device.Group`): the same calls on each rank, in the same order.
    """

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, group: Group, stream: Stream
    ) -> Tensor:
        """Add up ``x`` [T, H] over the ranks of ``group``, then :meth:`add_rms_norm` of the sum → [T, H].

        ``x`` is contiguous; what it holds afterwards is undefined. ``residual`` [T, H], the same on all ranks, grows in
        place by the sum. Each rank gets the same bits. ``stream`` is that of the scope that the caller opened.

        Faster kernels count and report the call as ``Group.all_reduce`` does (``Group.announce``).
        """
        group.all_reduce(x, stream=stream)
        return self.add_rms_norm(x, residual, weight, eps)

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """That of the model's kernels."""
