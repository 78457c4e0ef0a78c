"""Waiting with a time limit, by polling."""

from __future__ import annotations

import time
from collections.abc import Callable

_EAGER_S = 0.02
"""An iteration is over within this, mostly: ask as often as possible, and give way to other threads in between."""
_LONGEST_S = 0.01
_SHARE = 1 / 500
"""Of the time waited so far: a pause, and so the most that a wait takes longer than what it waits for."""


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Poll ``done`` until it is true, or ``seconds`` have passed. Sleeps between polls, the longer the longer it has
    waited, so that an answer is found soon after it's there.
    """
    start = time.monotonic()
    pause = 0.0
    while not done():
        spent = time.monotonic() - start
        if spent >= seconds:
            return done()  # the caller's thread may have slept through the end
        if spent > _EAGER_S:
            pause = min(spent * _SHARE, _LONGEST_S, seconds - spent)
        time.sleep(pause)
    return True
