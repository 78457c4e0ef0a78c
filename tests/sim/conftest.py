"""Simulated devices with options, as a test asks for them."""

import pytest
import torch

from outrider_sim.plugin import create_backend


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def sim():
    """`sim(strategy="lazy")` makes a fresh simulated device."""

    def make(**options):
        return create_backend(0, options)

    return make
