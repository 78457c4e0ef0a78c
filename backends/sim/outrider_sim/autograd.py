"""Errors inside a backward.

Torch's engine holds a guard of the device while it runs a node, and for devices from outside the guard asks Python. A Python
error that is under way at that moment ends the process. So an operator that fails, and that the engine called with no Python
frame between, tells the failure in another way: it returns a `OperatorFailure`, which no operator's result may be. Torch
raises its own error over that, which the guard survives, and `SimAutogradEngine` raises the one that was meant.
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


class OperatorFailure:
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

    def store(self, error: BaseException) -> OperatorFailure:
        with self._lock:
            failure = OperatorFailure(error, next(self._numbers))
            self._kept[failure.mark] = error
            if len(self._kept) > 64:
                self._kept.pop(next(iter(self._kept)))
            return failure

    def pop_original_error(self, text: str) -> BaseException | None:
        """Remove and return the operator's error that caused torch's error message `text`, or None."""
        with self._lock:
            for mark in list(self._kept):
                if mark in text:
                    return self._kept.pop(mark)
            return self._kept.popitem()[1] if self._kept and "failure" in text else None


class SimAutogradEngine(torch._C._ImperativeEngine):
    """Torch's engine, which raises what an operator of the device meant to raise."""

    failures: _Failures

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass. Raises an operator's original error instead of torch's error about its result."""
        try:
            # The backward pass runs on the calling thread, so all its operations belong to one actor.
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(*args, **kwargs)
        except Exception as error:
            meant = self.failures.pop_original_error(str(error))
            if meant is None:
                raise
            raise meant from error


_BODY: CodeType = SimAutogradEngine.run_backward.__code__


def install() -> Callable[[BaseException], OperatorFailure]:
    """Make the engine ours; returns what an operator does about an error: raise it, or give back what to return instead."""
    engine = SimAutogradEngine()
    engine.failures = failures = _Failures()
    Variable._execution_engine = engine

    def failed(error: BaseException) -> OperatorFailure:
        """To be called where torch called an operator."""
        frame = sys._getframe(1).f_back
        if frame is None or frame.f_code is _BODY:  # no Python frame between, that could see an error
            return failures.store(error)
        raise error

    return failed
