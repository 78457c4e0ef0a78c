import pytest
import torch
from hypothesis import settings

from outrider_cpu.backend import CpuBackend

settings.register_profile("model", deadline=None)  # two cores are shared, so a time limit would be a matter of luck
settings.load_profile("model")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def backend():
    return CpuBackend()
