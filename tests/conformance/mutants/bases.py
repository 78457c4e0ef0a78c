"""The correct backends that are broken, and what a fault needs to know of each."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

from outrider.device import ENTRY_POINT_GROUP, SpeculativeSync
from outrider.registry import Registry

ROOT = Path(__file__).resolve().parents[3]
OUTSIDE = (ROOT / "examples/threads_backend", ROOT / "examples/toy_driver", ROOT / "examples/toy_backend/src")


class Base:
    """A backend's classes. In the process that makes one they're patched at will: it runs one mutant and ends."""

    package = ""
    spec = ""
    classes: tuple[str, ...] = ()

    def __init__(self) -> None:
        sys.path[:0] = [str(path) for path in OUTSIDE if str(path) not in sys.path]
        self.plugin = importlib.import_module(f"{self.package}.plugin")
        module = importlib.import_module(f"{self.package}.backend")
        found = [getattr(module, name) if name else None for name in self.classes]
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
        raise NotImplementedError

    def set_record(self, event, record) -> None:
        raise NotImplementedError


class Cpu(Base):
    package, spec = "outrider_cpu", "cpu"
    classes = ("CpuStream", "CpuEvent", "", "", "CpuBackend")


class Threads(Base):
    package, spec = "outrider_threads", "threads"
    classes = ("ThreadStream", "ThreadEvent", "ThreadFlag", "ThreadGraph", "ThreadsBackend")

    def get_record(self, event):
        return getattr(event, "mark", None)

    def set_record(self, event, record):
        event.mark = record


class Sim(Base):
    package, spec = "outrider_sim", "sim"
    classes = ("SimStream", "SimEvent", "SimFlag", "SimGraph", "SimBackend")

    def get_record(self, event):
        return event.state.latest

    def set_record(self, event, record):
        event.state.latest = record


class SimLikeNpu(Sim):
    spec = "sim:like=npu"


class Toy(Base):
    package, spec = "outrider_toy", "toy"
    classes = ("ToyStream", "ToyEvent", "", "ToyGraph", "ToyBackend")


BASES = {"cpu": Cpu, "threads": Threads, "sim": Sim, "sim like npu": SimLikeNpu, "toy": Toy}
