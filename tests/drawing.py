"""Tests in two sizes: some examples or cases in `make test`, all of them in `make test-slow`."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable
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


def leave_repeats_to_slow(items: Iterable[pytest.Item]) -> None:
    """Mark all but some cases of each test with ``@pytest.mark.sample`` as slow.

    ``sample(3)`` keeps three random cases of a test, the same ones each time. ``sample(1, per="dtype")`` keeps one of each
    value of the parameter ``dtype``; commas separate several names. Cases that are slow already are not counted.
    """
    groups: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is not None and isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            names = sample.kwargs["per"].split(",") if sample.kwargs else []
            values = [item.callspec.params[name] for name in names]
            same = [value if isinstance(value, Hashable) else id(value) for value in values]
            groups.setdefault((item.path, item.cls, item.originalname, sample.args[0], *same), []).append(item)
    for (_, _, name, some, *_), cases in groups.items():
        assert isinstance(some, int)
        # Not the hash of a string: each process would keep other cases.
        kept = random.Random(f"{name} {cases[0].name}").sample(cases, min(some, len(cases)))
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.slow)
