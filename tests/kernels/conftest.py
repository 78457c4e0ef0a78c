"""Kernels in Triton, by its interpreter on the host; compiled on a device with TRITON_INTERPRET=0."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pkgutil import walk_packages

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    import triton

    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("not run: no CUDA device, and TRITON_INTERPRET=0")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def hopper(device):
    """A device with a copy engine and the matrix unit that reads shared memory itself, which no interpreter has."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("not run: it takes a device of compute capability 9, and TRITON_INTERPRET=0")
    return device


@pytest.fixture(scope="session")
def pdl(device):
    """Whether kernels start before the one ahead of them has ended, as on a device that can."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@pytest.fixture
def instead_of_launching(monkeypatch):
    """Have every module call what is given instead of ``launch``."""
    import outrider_triton

    def replace(called):
        for found in walk_packages(outrider_triton.__path__, "outrider_triton."):
            module = import_module(found.name)
            if hasattr(module, "launch") and module.__name__ != "outrider_triton.launch":
                monkeypatch.setattr(module, "launch", called)

    return replace


@pytest.fixture
def unlaunched(instead_of_launching):
    """Kernels are asked for and not run: where what is launched matters, and not what it makes."""
    instead_of_launching(lambda *operands, **settings: None)


@pytest.fixture(scope="session")
def kernels(pdl):
    """Triton's kernels for everything, on a device that is said to be small so that splits stay few."""
    from kernels.devices import SMALL
    from outrider_triton.kernelset import TritonKernels

    return TritonKernels(replace(SMALL, early_starts=pdl))
