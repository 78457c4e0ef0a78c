import pytest
import torch

from outrider_cpu.backend import CpuBackend


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def backend():
    return CpuBackend()
