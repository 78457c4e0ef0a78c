"""Errors that an operator of the simulated device raises inside a backward pass.

Torch's autograd engine holds a device guard while it runs a node, and for an external device the guard calls Python. A Python
error that is pending at that moment ends the process. An operator that fails without a Python frame between the engine and
itself therefore returns an `OperatorFailure` instead of raising. Torch rejects this result with an error of its own, which
the guard survives; `SimAutogradEngine` then raises the operator's original error.
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
    """A placeholder that a failed operator returns instead of raising. Torch's error about the placeholder
    contains its text.
    """

    def __init__(self, error: BaseException, number: int) -> None:
        self._text = f"{error} (failure {number} of the simulated device)"
        self.mark = f"(failure {number} of the simulated device)"

    def __str__(self) -> str:
        return self._text


class SimAutogradEngine(torch._C._ImperativeEngine):
    """Torch's autograd engine, extended to raise the original error of a failed operator of the simulated device.

    The engine keeps the original errors of failed operators until its call raises them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._kept: dict[str, BaseException] = {}

    def store(self, error: BaseException) -> OperatorFailure:
        """Keep the error of a failed operator, and return the placeholder that the operator returns."""
        with self._lock:
            failure = OperatorFailure(error, next(self._numbers))
            self._kept[failure.mark] = error
            if len(self._kept) > 64:
                self._kept.pop(next(iter(self._kept)))
            return failure

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass. Raises an operator's original error instead of torch's error about its result."""
        try:
            # The backward pass runs on the calling thread, so all its operations belong to one actor.
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(*args, **kwargs)
        except Exception as error:
            meant = self._pop_original_error(str(error))
            if meant is None:
                raise
            raise meant from error

    def _pop_original_error(self, text: str) -> BaseException | None:
        """Remove and return the operator's error that caused torch's error message `text`, or None."""
        with self._lock:
            for mark in list(self._kept):
                if mark in text:
                    return self._kept.pop(mark)
            return self._kept.popitem()[1] if self._kept and "failure" in text else None


_BODY: CodeType = SimAutogradEngine.run_backward.__code__


def install() -> Callable[[BaseException], OperatorFailure]:
    """Replace torch's autograd engine by `SimAutogradEngine`.

    Returns the function that an operator calls with its error: the function raises the error, or returns a placeholder that
    the operator must return.
    """
    engine = SimAutogradEngine()
    Variable._execution_engine = engine

    def failed(error: BaseException) -> OperatorFailure:
        """Raise `error`, or return a placeholder for it if torch's engine called the operator without a Python
        frame between.
        """
        frame = sys._getframe(1).f_back
        if frame is None or frame.f_code is _BODY:  # no Python frame between, that could see an error
            return engine.store(error)
        raise error

    return failed
