"""Operators for which the host waits: they return values, or results whose shape depends on device values.

The results' shapes of other operators depend on lengths in host memory. The host reads these lengths when it enqueues the
operator. If the lengths are on the device, the host waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import CaptureError
from outrider_sim.machine.device_state import SimDeviceState
from outrider_sim.machine.memory import meta_of
from outrider_sim.machine.queue import Op, OperationKind, StreamQueue
from outrider_sim.torch_device.opinfo import OpInfo, extent
from outrider_sim.torch_device.tensor import SimTensor

if TYPE_CHECKING:
    from outrider_sim.torch_device.dispatch import Dispatcher


_ATEN = torch.ops.aten


class HostOperators:
    """Implementations of operators of kind READ, and of packed sequences."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def kernels(self) -> Mapping[str, Callable[..., Any]]:
        """Return the operators' implementations, by name with overload."""
        return {
            "aten::repeat_interleave.Tensor": self._repeat_interleave,
            "aten::histc": self._histc,
            "aten::_pack_padded_sequence": self._pack,
            "aten::_pack_padded_sequence_backward": self._pack_backward,
        }

    def read_result(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Queue the operator's kernel, wait for it, then allocate results of the shape that the kernel returned.

        Raises `CaptureError` in a capture, and `RuntimeError` if the device failed before the kernel.
        """
        sim = self._dispatcher.current
        machine = sim.machine
        stream = machine.stream
        if stream.capture is not None:
            raise CaptureError(f"{info.name} reads device values on the host: nothing runs in a capture")
        targets = {name: value for name, value in kwargs.items() if name in info.outs}
        given = {name: value for name, value in kwargs.items() if name not in info.outs}
        key: list[Any] = []
        inner = tuple(self._dispatcher.convert(value, key, info) for value in args)
        named = {name: self._dispatcher.convert(value, key, info) for name, value in given.items()}
        # The host's kernel gives these the shape that comes out, which tensors of the device can't be given while it runs.
        named.update((name, torch.empty(0, dtype=value.dtype)) for name, value in targets.items())
        box: list[Any] = []
        op = Op(OperationKind.KERNEL, info.name, info.run, inner, named, box.append, None, machine.like.kernel_us)
        if machine.tracks:
            self._dispatcher.describe(op, info, args, given, ())
        machine.enqueue(op, stream)
        sim.synchronize(stream, info.name)
        if not box:
            raise RuntimeError(f"{info.name} didn't run: the device failed before it")
        if targets:
            return self._fill(info, targets, box[0], sim, stream)
        return self._place(box[0], sim, stream)

    def _fill(self, info: OpInfo, targets: Mapping[str, Any], result: Any, sim: SimDeviceState, stream: StreamQueue) -> Any:
        """Enqueue copies of the results to the `out` tensors; an empty `out` tensor gets the shape of its result."""
        filled = []
        for name, value in zip(info.returns, result if isinstance(result, tuple) else (result,), strict=True):
            assert name is not None
            target = targets[name]
            if target.shape != value.shape:
                if target.numel():
                    raise RuntimeError(
                        f"{info.name}: the result has shape {tuple(value.shape)}, but {name!r} has {tuple(target.shape)}: a "
                        "tensor of the simulated device can't be resized by an operation; pass one of the right shape"
                    )
                self._dispatcher.tensor_operators.renew(target, meta_of(value))
            self._write(target, value, sim, stream)
            filled.append(target)
        return filled[0] if len(filled) == 1 else tuple(filled)

    def _place(self, value: Any, sim: SimDeviceState, stream: StreamQueue) -> Any:
        if isinstance(value, Tensor):
            made = self._dispatcher.allocate(sim, meta_of(value), stream)
            self._write(made, value, sim, stream)
            return made
        if isinstance(value, list | tuple):
            return type(value)(self._place(item, sim, stream) for item in value)
        return value

    def _write(self, target: SimTensor, value: Tensor, sim: SimDeviceState, stream: StreamQueue) -> None:
        op = Op(OperationKind.KERNEL, "results", target._inner.copy_, (value,), cost=sim.machine.like.kernel_us)
        self._dispatcher.enqueue(op, stream, extent(target, True, "out"))

    def _histc(self, values: SimTensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
        """Compute a histogram; unlike torch's host kernel, an accelerator's kernel also accepts integers."""
        if not values.is_floating_point():
            return torch.histc(values.double(), bins, min, max).to(values.dtype)
        return self.read_result(self._dispatcher.info(torch.ops.aten.histc.default), (values, bins, min, max), {})

    def _repeat_interleave(self, repeats: SimTensor, output_size: int | None = None) -> Any:
        info = self._dispatcher.info(torch.ops.aten.repeat_interleave.Tensor)
        if output_size is None:
            return self.read_result(info, (repeats,), {})
        # With the size known nothing needs to be waited for.
        return self._queue(info.name, partial(info.run, output_size=output_size), repeats, "repeats", (output_size,))

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
        sim = self._dispatcher.current
        stream = sim.machine.stream
        made = self._dispatcher.tensor_operators.empty(shape, operand.dtype)
        op = Op(OperationKind.KERNEL, name, run, (operand._inner,), {}, made._inner.copy_, cost=sim.machine.like.kernel_us)
        self._dispatcher.enqueue(op, stream, extent(operand, False, argument), extent(made, True, "out"))
        return made
