"""The subject of one session of the suite: the backend under test, its registry, and the facts about it."""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from outrider.device import INTERFACE_DATES, INTERFACE_VERSION, Backend, BackendInfo
from outrider.registry import Registry
from outrider.registry.probing import ProbeVerdict, changed_state, process_state
from outrider_conformance.lab import StreamDelay

if TYPE_CHECKING:
    from outrider_conformance.kernel_calls import KernelCalls


class Kit:
    """The subject of a session: it opens the backend under test, a new object each time, and collects facts about it for the
    report.
    """

    def __init__(self, spec: str, registry: Registry | None = None) -> None:
        self.registry = registry or Registry(once=True)  # each test opens a backend
        self._installed = registry is None
        self.spec = self.registry.select(spec)
        self.pace = StreamDelay()
        self.facts: dict[str, Any] = {}
        """Device, versions, capabilities and kernels of the opened backend; empty before the first opening."""
        self._environment = dict(os.environ)  # a child must not inherit what loading the plugin here changes
        self._unopenable: Exception | None = None
        self.opening_changes: Sequence[str] = ()
        """Descriptions of the global state of the process that the first opening changed."""
        self.observed: KernelCalls | None = None
        """The kernel calls of the engines, observed once by the first test that needs them."""

    @property
    def info(self) -> BackendInfo:
        """The plugin's description of itself."""
        return self.registry.backends.info(self.spec.name)

    def open(self) -> Backend:
        """Return a new backend. After one failure, each further call raises the same exception at once."""
        if self._unopenable is not None:
            raise self._unopenable
        before = process_state() if not self.facts else {}
        try:
            with redirect_stdout(io.StringIO()) as printed:
                backend = self.registry.create(self.spec)
        except Exception as error:
            self._unopenable = error
            raise
        if not self.facts:
            self.opening_changes = [*changed_state(before, process_state()), *["standard output"] * bool(printed.getvalue())]
            self.facts = _facts(backend)
        return backend

    def loading(self) -> ProbeVerdict | None:
        """Return what loading the plugin changed in a child process, or None if a test passed its own registry."""
        with patch.dict(os.environ, self._environment, clear=True):
            return self.registry.backends.try_in_child(self.spec.name) if self._installed else None

    def described(self) -> dict[str, Any]:
        """Return the report's entry about the plugin, without facts that aren't available."""
        found: dict[str, Any] = {"name": self.spec.name, "spec": str(self.spec)}
        for candidate in self.registry.backends.candidates():
            if candidate.name == self.spec.name:
                found.update(distribution=candidate.distribution, entry_point=candidate.entry_point)
                if candidate.info is not None:
                    found["description"] = candidate.info.description
                    found["interface"] = [candidate.info.interface_min, candidate.info.interface_max]
        return found


KIT = pytest.StashKey[Kit]()


def host_facts() -> dict[str, Any]:
    """Return the report's entry about the software of this machine."""
    versions = {name: importlib.metadata.version(name) for name in ("outrider", "torch", "pytest")}
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "interface_version": INTERFACE_VERSION,
        "interface_date": INTERFACE_DATES[INTERFACE_VERSION],
        "threads": torch.get_num_threads(),
        **versions,
    }


def _facts(backend: Backend) -> dict[str, Any]:
    versions = {str(key): str(value) for key, value in backend.versions().items()}
    is_host = backend.device.type == "cpu" and not backend.capabilities.asynchronous
    kind = "simulated" if backend.control is not None else "run on the host" if is_host else "run on a device"
    return {
        "device": str(backend.device),
        "versions": versions,
        "capabilities": backend.capabilities.as_dict(),
        "kernels": backend.kernels_in_use.name,
        "tier": {"kind": kind, "device": versions.get("device", str(backend.device))},
    }
