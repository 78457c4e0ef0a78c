"""Errors inside a backward.

Torch's engine holds a device guard while it runs a node. For external devices the guard calls Python, and a pending Python
error at that moment ends the process. An operator that the engine calls without a Python frame in between therefore
returns a `Failure` instead of raising. Torch raises its own error for the invalid result, which the guard survives.
`Engine` replaces torch's error with the operator's original error.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.autograd import Variable


class Failure:
    """A stand-in that a failed operator returns instead of raising. Torch's own error about it contains its text."""

    def __init__(self, error: BaseException, number: int) -> None:
        self._text = f"{error} (failure {number} of the simulated device)"
        self.mark = f"(failure {number} of the simulated device)"

    def __str__(self) -> str:
        return self._text


class _Failures:
    """Original errors of failed operators, until the engine's call raises them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._kept: dict[str, BaseException] = {}

    def keep(self, error: BaseException) -> Failure:
        with self._lock:
            failure = Failure(error, next(self._numbers))
            self._kept[failure.mark] = error
            if len(self._kept) > 64:
                self._kept.pop(next(iter(self._kept)))
            return failure

    def meant(self, text: str) -> BaseException | None:
        """Remove and return the operator's error that caused torch's error message `text`, or None."""
        with self._lock:
            for mark in list(self._kept):
                if mark in text:
                    return self._kept.pop(mark)
            return self._kept.popitem()[1] if self._kept and "failure" in text else None


class Engine(torch._C._ImperativeEngine):
    """Torch's autograd engine, which raises the original error of a failed device operator."""

    failures: _Failures

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass. Raises an operator's original error instead of torch's error about its result."""
        try:
            # The backward pass runs on the calling thread, so all its operations belong to one actor.
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(*args, **kwargs)
        except Exception as error:
            meant = self.failures.meant(str(error))
            if meant is None:
                raise
            raise meant from error


_BODY: CodeType = Engine.run_backward.__code__


def install() -> Callable[[BaseException], Failure]:
    """Make the engine ours; returns what an operator does about an error: raise it, or give back what to return instead."""
    engine = Engine()
    engine.failures = failures = _Failures()
    Variable._execution_engine = engine

    def failed(error: BaseException) -> Failure:
        """To be called where torch called an operator."""
        frame = sys._getframe(1).f_back
        if frame is None or frame.f_code is _BODY:  # no Python frame between, that could see an error
            return failures.keep(error)
        raise error

    return failed
