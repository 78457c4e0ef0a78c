"""Launches of Triton kernels on tensors of the simulated device.

Triton's own interpreter runs the unmodified kernel, later, when the simulated stream comes to it. At the launch its source
says which tensors it may touch; when it has run, the interpreter says which bytes (`triton_touched`), also of memory that it
reached through a table of addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.device import Access, ConfigError
from outrider_sim.launches import host_view, launch
from outrider_sim.tensor import SimTensor
from outrider_vllm.triton_accesses import AccessTable
from outrider_vllm.triton_touched import Place, Recorder, Touched


class Launches:
    """Takes the place of `InterpretedFunction.run`. Loads and stores go through the interpreter's `builder`."""

    def __init__(self, executor: Callable[..., Any], builder: Any) -> None:
        self.executor = executor
        self.recorder = Recorder(builder)
        self.table = AccessTable()
        self.counts: dict[str, int] = {}
        self.nowhere: dict[str, int] = {}
        """Ranges by kernel that lie in no known memory of the device: accesses that nobody was told of."""
        self._shown: dict[int, Place] = {}

    def show(self, tensor: SimTensor) -> int:
        """The host's address of a tensor, for a table of addresses. A kernel that follows it reaches a known place."""
        place = _place(tensor, "behind a table of addresses")
        self._shown[place.base] = place
        return int(tensor._inner.data_ptr())

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Queue one launch."""
        if warmup:
            return
        names = list(kernel.arg_names)
        function, rewritten = kernel.fn, kernel.rewrite()
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        name = f"triton::{function.__name__}"
        self.counts[name] = self.counts.get(name, 0) + 1
        directions = self.table.of(function)
        reads: list[tuple[str, torch.Tensor]] = []
        writes: list[tuple[str, torch.Tensor]] = []
        places: dict[int, Place] = {}
        for parameter, value in given.items():
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, SimTensor):
                raise ConfigError(f"{name}: {parameter!r} is on {value.device}; a kernel takes tensors of the device")
            place = _place(value, parameter)
            places.setdefault(place.base, place)
            # Read where in doubt: what it did is told when it has run, and an operation without operands isn't asked.
            if parameter in directions.reads or parameter not in directions.writes:
                reads.append((parameter, value))
            if parameter in directions.writes:
                writes.append((parameter, value))
        hosts = {k: host_view(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        for parameter, value in given.items():
            # The interpreter refuses a truth value that isn't a constant of the kernel: it makes it of 32 bits, and of one.
            if isinstance(value, bool) and "constexpr" not in str(function.__annotations__.get(parameter, "")):
                hosts[parameter] = int(value)
        if callable(grid):
            grid = grid(dict(given))
        sizes = tuple(int(n) for n in (grid if isinstance(grid, tuple | list) else (grid,)))
        if 0 in sizes:
            return
        executor, recorder, seen = self.executor, self.recorder, Touched()

        def now() -> None:
            with recorder.of(seen):
                executor(rewritten, names, sizes)(**hosts)

        def touched() -> tuple[Access, ...]:
            found, nowhere = seen.accesses({**self._shown, **places}.values())
            if nowhere:
                self.nowhere[name] = self.nowhere.get(name, 0) + nowhere
            return tuple(found)

        launch(name, now, reads=reads, writes=writes, touched=touched)


def _place(tensor: SimTensor, argument: str) -> Place:
    base = int(tensor._inner.untyped_storage().data_ptr())
    return Place(base=base, nbytes=tensor._inner.untyped_storage().nbytes(), storage=tensor._alloc.id, argument=argument)
