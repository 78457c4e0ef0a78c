"""Launches of Triton kernels on tensors of the simulated device.

Triton's interpreter runs the unmodified kernel when the simulated stream reaches the launch. At the launch, each tensor is
declared as one that the kernel may read and write. After the run, the interpreter reports the accessed bytes
(`triton_recorder`). They include memory that the kernel reached through a table of addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.device import Access, ConfigError
from outrider_sim.torch_device.launches import host_view, launch
from outrider_sim.torch_device.tensor import SimTensor
from outrider_vllm.triton_recorder import AccessRecorder, RecordedAccesses, StorageRange


class TritonLaunches:
    """The launches of Triton kernels of this process. It replaces `InterpretedFunction.run`.

    `executor` is Triton's grid executor. Loads and stores go through the interpreter's `builder`, which is observed.
    """

    def __init__(self, executor: Callable[..., Any], builder: Any) -> None:
        self.executor = executor
        self.recorder = AccessRecorder(builder)
        self.counts: dict[str, int] = {}
        """Number of launches by kernel."""
        self.unknown_accesses: dict[str, int] = {}
        """Number of accessed address ranges outside known memory, by kernel. The sanitizer doesn't see these accesses."""
        self._in_tables: dict[int, StorageRange] = {}
        """Storages whose addresses may be in tables of addresses, by base address."""

    def host_address(self, tensor: SimTensor) -> int:
        """Return the host address of a tensor, and register its storage: a kernel may load the address from a table."""
        place = _storage_range(tensor, "in a table of addresses")
        self._in_tables[place.base] = place
        return int(tensor._inner.data_ptr())

    def queue_launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Enqueue one launch of `kernel` on the current simulated stream, with Triton's arguments. A warm-up does nothing.

        Raises `ConfigError` for a tensor on another device.
        """
        if warmup:
            return
        names = list(kernel.arg_names)
        function, rewritten = kernel.fn, kernel.rewrite()
        arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        name = f"triton::{function.__name__}"
        self.counts[name] = self.counts.get(name, 0) + 1
        tensors: list[tuple[str, torch.Tensor]] = []
        operands: dict[int, StorageRange] = {}
        for parameter, value in arguments.items():
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, SimTensor):
                raise ConfigError(f"{name}: {parameter!r} is on {value.device}; a kernel takes tensors of the device")
            place = _storage_range(value, parameter)
            operands.setdefault(place.base, place)
            tensors.append((parameter, value))
        hosts = {k: host_view(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        for parameter, value in arguments.items():
            # The interpreter rejects a bool that isn't a constexpr, because it would have both 32 bits and one bit.
            if isinstance(value, bool) and "constexpr" not in str(function.__annotations__.get(parameter, "")):
                hosts[parameter] = int(value)
        if callable(grid):
            grid = grid(dict(arguments))
        sizes = tuple(int(n) for n in (grid if isinstance(grid, tuple | list) else (grid,)))
        if 0 in sizes:
            return
        executor, recorder, recorded_accesses = self.executor, self.recorder, RecordedAccesses()

        def run_kernel() -> None:
            with recorder.recording(recorded_accesses):
                executor(rewritten, names, sizes)(**hosts)

        def accesses() -> tuple[Access, ...]:
            known, nowhere = recorded_accesses.accesses({**self._in_tables, **operands}.values())
            if nowhere:
                self.unknown_accesses[name] = self.unknown_accesses.get(name, 0) + nowhere
            return tuple(known)

        launch(name, run_kernel, reads=tensors, writes=tensors, touched=accesses)


def _storage_range(tensor: SimTensor, argument: str) -> StorageRange:
    base = int(tensor._inner.untyped_storage().data_ptr())
    return StorageRange(
        base=base, nbytes=tensor._inner.untyped_storage().nbytes(), storage=tensor._alloc.id, argument=argument
    )
