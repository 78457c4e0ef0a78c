"""Launches of Triton kernels on tensors of the simulated device.

Triton's own interpreter runs the unmodified kernel, later, when the simulated stream comes to it. What the kernel touches
is known at the launch, from its source.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from outrider_sim.launches import host_view, launch
from outrider_sim.tensor import SimTensor

from outrider.device import ConfigError
from outrider_vllm.triton_accesses import AccessTable


class Launches:
    """Takes the place of `InterpretedFunction.run`."""

    def __init__(self, executor: Callable[..., Any]) -> None:
        self.executor = executor
        self.table = AccessTable()
        self.pointees: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self.counts: dict[str, int] = {}

    def points_to(self, table: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """Remember whose addresses a tensor holds: a kernel that follows them touches those tensors."""
        table._pointees = tensors  # type: ignore[attr-defined]  # lives as long as the table

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
            for through, kept in ((directions.reads_through, reads), (directions.writes_through, writes)):
                if parameter in through:
                    kept.extend((f"*{parameter}", t) for t in getattr(value, "_pointees", ()))
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
