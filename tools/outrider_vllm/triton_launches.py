"""Launches of Triton kernels on tensors of the simulated device.

Triton's own interpreter runs the unmodified kernel, later, when the simulated stream comes to it. What the kernel touches
is known at the launch, from its source: each tensor as a whole. What it reaches through a table of addresses isn't seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.device import ConfigError
from outrider_sim.launches import host_view, launch
from outrider_sim.tensor import SimTensor
from outrider_vllm.triton_accesses import AccessTable


class Launches:
    """Takes the place of `InterpretedFunction.run`."""

    def __init__(self, executor: Callable[..., Any]) -> None:
        self.executor = executor
        self.table = AccessTable()
        self.counts: dict[str, int] = {}

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
        for parameter, value in given.items():
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, SimTensor):
                raise ConfigError(f"{name}: {parameter!r} is on {value.device}; a kernel takes tensors of the device")
            if parameter in directions.reads:
                reads.append((parameter, value))
            if parameter in directions.writes:
                writes.append((parameter, value))
        hosts = {k: host_view(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        if callable(grid):
            grid = grid(dict(given))
        sizes = tuple(int(n) for n in (grid if isinstance(grid, tuple | list) else (grid,)))
        if 0 in sizes:
            return
        executor = self.executor

        def now() -> None:
            executor(rewritten, names, sizes)(**hosts)

        launch(name, now, reads=reads, writes=writes)
