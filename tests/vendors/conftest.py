"""The vendors' packages as files."""

from pathlib import Path

import pytest
import torch

from vendors.surface import Surface
from vendors.wheel import FLASHINFER, Installed, NotRun, Wheel, fetch


@pytest.fixture(scope="session")
def wheel(pytestconfig):
    """torch_npu's wheel; tests that need it are skipped as "not run" where it can't be had."""
    try:
        return Wheel(fetch(Path(pytestconfig.cache.mkdir("torch_npu"))))
    except NotRun as error:
        pytest.skip(f"not run: {error}")


@pytest.fixture(scope="session")
def torch_npu_surface(wheel):
    return Surface(wheel, operators_of="torch_npu", extensions=("torch_npu._C",))


@pytest.fixture(scope="session")
def flashinfer_wheel(pytestconfig):
    """FlashInfer's wheel, in the same way."""
    try:
        return Wheel(fetch(Path(pytestconfig.cache.mkdir("flashinfer")), FLASHINFER))
    except NotRun as error:
        pytest.skip(f"not run: {error}")


@pytest.fixture(scope="session")
def torch_surface():
    """torch as it's installed here, by its source."""
    return Surface(Installed(Path(torch.__file__).parents[1]))
