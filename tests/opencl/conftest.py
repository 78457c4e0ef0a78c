"""A device of OpenCL, or the reason why the tests don't run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from outrider.device import Backend, BackendLoadError

Create = Callable[..., Backend]


def create(**options: str) -> Backend:
    from outrider_opencl.plugin import create_backend

    return create_backend(0, options)


@pytest.fixture(scope="session")
def opencl() -> Create:
    """Create a backend with options. Skips where no OpenCL device can be used."""
    if find_spec("pyopencl") is None:
        pytest.skip("not run: pyopencl isn't installed; `make test-opencl` installs it with PoCL")
    try:
        create()
    except BackendLoadError as error:
        pytest.skip(f"not run: {error}")
    return create


@pytest.fixture(scope="session")
def with_graphs(opencl: Create) -> Backend:
    """A backend that records command buffers. Skips where the runtime has none."""
    try:
        return opencl(graphs="command-buffers")
    except BackendLoadError as error:
        pytest.skip(f"not run: {error}")
