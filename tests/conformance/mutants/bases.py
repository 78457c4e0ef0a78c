"""The correct backends that are broken, and what a fault needs to know of each."""

from __future__ import annotations

import importlib
import sys
from functools import reduce
from importlib.metadata import EntryPoint
from pathlib import Path

from outrider.device import ENTRY_POINT_GROUP, SpeculativeSync
from outrider.registry import Registry

ROOT = Path(__file__).resolve().parents[3]
OUTSIDE = (ROOT / "examples/threads_backend", ROOT / "examples/toy_driver", ROOT / "examples/toy_backend/src")
SIMULATED = ("SimStream", "SimEvent", "SimFlag", "SimGraph", "SimBackend")


BASES = {
    "cpu": ("outrider_cpu", "cpu", ("CpuStream", "CpuEvent", "", "", "CpuBackend"), ""),
    "threads": (
        "outrider_threads",
        "threads",
        ("ThreadStream", "ThreadEvent", "ThreadFlag", "ThreadGraph", "ThreadsBackend"),
        "mark",
    ),
    "sim": ("outrider_sim", "sim", SIMULATED, "state.latest"),
    "sim like npu": ("outrider_sim", "sim:like=npu", SIMULATED, "state.latest"),
    "toy": ("outrider_toy", "toy", ("ToyStream", "ToyEvent", "", "ToyGraph", "ToyBackend"), ""),
}
"""The package, the spec, the classes (stream, event, flag, graph, backend), and the attribute with an event's record."""


class Base:
    """A backend's classes. In the process that makes one they're patched at will: it runs one mutant and ends."""

    def __init__(self, name: str) -> None:
        sys.path[:0] = [str(path) for path in OUTSIDE if str(path) not in sys.path]
        self.package, self.spec, classes, self._record = BASES[name]
        self.plugin = importlib.import_module(f"{self.package}.plugin")
        module = importlib.import_module(f"{self.package}.backend")
        found = [getattr(module, name) if name else None for name in classes]
        self.stream, self.event, self.flag, self.graph, self.backend = found
        self.sync = SpeculativeSync

    @property
    def name(self):
        return self.spec.partition(":")[0]

    def registry(self):
        return Registry([EntryPoint(self.name, f"{self.package}.plugin", ENTRY_POINT_GROUP)])

    def declare(self, **abilities):
        """Let the backend declare other abilities than it does."""
        from dataclasses import replace

        inner = self.backend.capabilities.fget
        self.backend.capabilities = property(lambda backend: replace(inner(backend), **abilities))

    def get_record(self, event):
        """What the driver holds of an event's latest record; None where it has none."""
        *within, last = self._record.split(".")
        return getattr(reduce(getattr, within, event), last, None)

    def set_record(self, event, record) -> None:
        *within, last = self._record.split(".")
        setattr(reduce(getattr, within, event), last, record)
