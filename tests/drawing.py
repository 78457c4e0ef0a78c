"""Tests over drawn inputs in two sizes: some examples in the ordinary run, all of them behind the marker `slow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

Test = Callable[..., Any]


def some_and_many(body: Test, given: Callable[[Test], Test], *marks: Any, some: int, many: int) -> tuple[Test, Test]:
    """Two tests of ``body`` with the inputs of ``given``, of so many examples each; ``marks`` are around both."""

    def made(examples: int, *more: Any) -> Test:
        # The fixtures are an engine's weights and the like, which no example changes.
        quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
        test = settings(max_examples=examples, deadline=None, suppress_health_check=quiet)(given(body))
        for mark in (*marks, *more):
            test = mark(test)
        return test

    return made(some), made(many, pytest.mark.slow)
