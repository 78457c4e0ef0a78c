"""Kernels that compute together with the other ranks of a group."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.device.kernels.composition import composes

if TYPE_CHECKING:
    from outrider.device.collectives import Group
    from outrider.device.stream import Stream


class CollectiveKernels:
    """Kernels that take part in a collective. Rules and letters: :class:`~outrider.device.KernelSet`.

    The rules for calls of a group (:class:`~outrider.device.Group`) also hold: each rank makes the same calls in the same
    order.
    """

    @composes("add_rms_norm")
    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, group: Group, stream: Stream
    ) -> Tensor:
        """Sum ``x`` [T, H] over the ranks of ``group``, then return :meth:`add_rms_norm` of the sum → [T, H].

        ``x`` is contiguous; its contents are undefined afterwards. The sum is added in place to ``residual`` [T, H], which
        is equal on all ranks. Each rank gets the same bits. ``stream`` is the stream of the scope that the caller opened.

        Faster kernels count and report the call as ``Group.all_reduce`` does (``Group.announce``).
        """
        group.all_reduce(x, stream=stream)
        return self.add_rms_norm(x, residual, weight, eps)

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the norm of ``x + residual``: see :class:`ModelKernels`."""
