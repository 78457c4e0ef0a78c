"""Operators with device operands and lengths in host memory, on which the results' shapes depend.

The host reads the lengths when it enqueues the operator. If the lengths are on the device, the host waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider_sim.machine.queue import Op, OperationKind
from outrider_sim.torch_device.operands import extent
from outrider_sim.torch_device.tensor import SimTensor

if TYPE_CHECKING:
    from outrider_sim.torch_device.dispatch import Dispatcher

_ATEN = torch.ops.aten


class HostLengthOperators:
    """Implementations of packed sequences and of connectionist temporal classification (CTC)."""

    def __init__(self, core: Dispatcher) -> None:
        self._core = core

    def kernels(self) -> Mapping[str, Callable[..., Any]]:
        """Return the operators' implementations, by name with overload."""
        return {
            "aten::_pack_padded_sequence": self._pack,
            "aten::_pack_padded_sequence_backward": self._pack_backward,
            "aten::_ctc_loss.Tensor": self._ctc,
            "aten::_ctc_loss_backward.Tensor": self._ctc_backward,
        }

    def _pack(self, sequences: SimTensor, lengths: Tensor, batch_first: bool) -> tuple[SimTensor, Tensor]:
        """Return the packed rows on the device, and on the host the number of sequences that have each time step."""
        if isinstance(lengths, SimTensor):
            raise RuntimeError("aten::_pack_padded_sequence: 'lengths' must be on the host, and they're on the device")
        lengths = lengths.clone()
        shape = sequences._meta.shape
        sizes: Tensor = _ATEN._pack_padded_sequence(torch.empty(shape[:2]), lengths, batch_first)[1]
        rows = int(lengths.sum())

        def run(inner: Tensor) -> Tensor:
            packed: Tensor = _ATEN._pack_padded_sequence(inner, lengths, batch_first)[0]
            return packed

        return self._queue("aten::_pack_padded_sequence", run, sequences, "input", (rows, *shape[2:])), sizes

    def _pack_backward(self, grad: SimTensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool) -> SimTensor:
        sizes = batch_sizes.cpu().clone()

        def run(inner: Tensor) -> Tensor:
            made: Tensor = _ATEN._pack_padded_sequence_backward(inner, input_size, sizes, batch_first)
            return made

        return self._queue("aten::_pack_padded_sequence_backward", run, grad, "grad", tuple(input_size))

    def _queue(
        self, name: str, run: Callable[[Tensor], Tensor], operand: SimTensor, argument: str, shape: Sequence[int]
    ) -> SimTensor:
        sim = self._core.current
        stream = sim.machine.stream
        made = self._core.creation.empty(shape, operand.dtype)
        op = Op(OperationKind.KERNEL, name, run, (operand._inner,), {}, made._inner.copy_, cost=sim.machine.like.kernel_us)
        self._core.note(op, extent(operand, False, argument), extent(made, True, "out"))
        sim.machine.enqueue(op, stream)
        return made

    def _ctc(
        self,
        log_probs: SimTensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        blank: int = 0,
        zero_infinity: bool = False,
    ) -> Any:
        return self._core(
            _ATEN._ctc_loss.default,
            (log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, zero_infinity),
            None,
        )

    def _ctc_backward(
        self,
        grad: SimTensor,
        log_probs: SimTensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        *rest: Any,
    ) -> Any:
        return self._core(
            _ATEN._ctc_loss_backward.default,
            (grad, log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), *rest),
            None,
        )
