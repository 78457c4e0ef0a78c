"""One part of another engine under the sanitizer: `python PROGRAM [--revert]` prints what was seen as JSON."""

import json
import os
import sys
from collections import deque

import torch

from outrider import get_backend
from outrider_sanitizer import watch


class Keeps(dict):
    """Attributes of an engine's object that this part doesn't use: asked for one, it says which."""


def on_sim():
    """The simulated device, with the names of `torch.cuda` that engines call."""
    backend = get_backend("sim")
    for name in ("Event", "Stream", "current_stream", "stream", "set_stream", "default_stream", "synchronize"):
        setattr(torch.cuda, name, getattr(torch.sim, name))
    torch.Event = torch.sim.Event
    return backend


def watched(backend, steps):
    """Run `steps()` under the sanitizer, print, end. `steps` returns how often the ordering in question was met."""
    with watch(backend) as report:
        met = steps("--revert" in sys.argv)
        backend.synchronize()
    print("OUTCOME " + json.dumps({"met": met, "operations": report.operations, "findings": [str(f) for f in report]}))
    sys.stdout.flush()
    os._exit(0)  # an engine's threads and its ends of process aren't the matter


__all__ = ["deque", "on_sim", "watched"]
