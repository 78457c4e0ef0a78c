"""Waiting with a time limit, by polling."""

from __future__ import annotations

import time
from collections.abc import Callable

_BUSY_POLL_S = 0.02
"""Seconds of polling without a pause, except to yield to other threads: most iterations end within this time."""
_MAX_PAUSE_S = 0.01
_PAUSE_FRACTION = 1 / 500
"""Length of a pause as a fraction of the time waited so far: this bounds the relative delay of a wait."""


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Poll ``done`` until it returns True or ``seconds`` have passed; return its last result.

    The pause between two polls grows with the time waited, so that the caller learns of the end soon after it.
    """
    start = time.monotonic()
    pause = 0.0
    while not done():
        spent = time.monotonic() - start
        if spent >= seconds:
            return done()  # the caller's thread may have slept through the end
        if spent > _BUSY_POLL_S:
            pause = min(spent * _PAUSE_FRACTION, _MAX_PAUSE_S, seconds - spent)
        time.sleep(pause)
    return True
