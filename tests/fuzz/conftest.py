import pytest
import torch

from fuzz.checkpoints import write_all


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("sound"))
