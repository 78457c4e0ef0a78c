"""A pytest fixture: ``pytest -p outrider_sanitizer.pytest_plugin``, or in a conftest
``from outrider_sanitizer.pytest_plugin import sanitized``.

    def test_my_step(sanitized):
        backend = get_backend("sim")
        with sanitized(backend):
            step(backend)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

import pytest

from outrider.device import Backend
from outrider_sanitizer import watch
from outrider_sanitizer.findings import Report

Sanitized = Callable[[Backend], AbstractContextManager[Report]]


@pytest.fixture
def sanitized() -> Sanitized:
    """A function of a backend: what runs inside its ``with`` must be clean, or the test fails with the report."""

    @contextmanager
    def clean(backend: Backend) -> Generator[Report]:
        with watch(backend) as report:
            yield report
        report.raise_if_any()

    return clean
