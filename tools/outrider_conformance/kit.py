"""What one session of the suite is about: a backend's name, where it's looked up, and what is known about it."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider.device import INTERFACE_VERSION, Backend, BackendInfo
from outrider.registry import Registry
from outrider.registry.probing import Verdict
from outrider_conformance.lab import Pace

if TYPE_CHECKING:
    from outrider_conformance.observed import Observed


class Kit:
    """Opens the backend under test, a new object each time, and keeps what the report says about it."""

    def __init__(self, spec: str, registry: Registry | None = None) -> None:
        self.registry = registry or Registry(once=True)  # each test opens a backend
        self._installed = registry is None
        self.spec = self.registry.select(spec)
        self.pace = Pace()
        self._facts: dict[str, Any] = {}
        self._unopenable: Exception | None = None
        self.observed: Observed | None = None
        """How the engine's calls of kernels were answered; made once, by the first test that asks."""

    @property
    def info(self) -> BackendInfo:
        """What the plugin says about itself."""
        return self.registry.info(self.spec.name)

    def open(self) -> Backend:
        """A fresh backend. A failure is remembered: the tests after it fail at once, with the same words."""
        if self._unopenable is not None:
            raise self._unopenable
        try:
            backend = self.registry.create(self.spec)
        except Exception as error:
            self._unopenable = error
            raise
        if not self._facts:
            self._facts = _facts(backend)
        return backend

    def loading(self) -> Verdict | None:
        """What loading the plugin does to a process, tried in a child; None where the registry is one of a test's own."""
        return self.registry.tried(self.spec.name) if self._installed else None

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was learnt from opening the backend; empty until then."""
        return self._facts

    def described(self) -> dict[str, Any]:
        """The plugin, for the report; what can't be had is left out."""
        found: dict[str, Any] = {"name": self.spec.name, "spec": str(self.spec)}
        for candidate in self.registry.candidates():
            if candidate.name == self.spec.name:
                found.update(distribution=candidate.distribution, entry_point=candidate.entry_point)
                if candidate.info is not None:
                    found["description"] = candidate.info.description
                    found["interface"] = [candidate.info.interface_min, candidate.info.interface_max]
        return found


KIT = pytest.StashKey[Kit]()


def host_facts() -> dict[str, Any]:
    """The machine's software, for the report."""
    versions = {name: importlib.metadata.version(name) for name in ("outrider", "torch", "pytest")}
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "interface_version": INTERFACE_VERSION,
        "threads": torch.get_num_threads(),
        **versions,
    }


def _facts(backend: Backend) -> dict[str, Any]:
    versions = {str(key): str(value) for key, value in backend.versions().items()}
    kind = "simulated" if backend.control is not None else "run on a device"
    return {
        "device": str(backend.device),
        "versions": versions,
        "capabilities": backend.capabilities.as_dict(),
        "kernels": backend.kernels_in_use.name,
        "tier": {"kind": kind, "device": versions.get("device", str(backend.device))},
    }
