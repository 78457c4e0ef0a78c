"""The log of a training run, and the clock of its stages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch


class Log:
    """Events of a run, printed one a line and kept in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path, self.start_time = path, time.monotonic()
        self.events: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []

    def note(self, event: str, **facts: object) -> None:
        """Print a line and append it to the file."""
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}
        seconds = round(time.monotonic() - self.start_time, 1)
        self.events.append({"event": event, "seconds": seconds, **rounded})
        print(f"[{seconds:6.1f}s] {event}: " + "  ".join(f"{k} {v}" for k, v in rounded.items()), flush=True)
        self.path.write_text(json.dumps(self.events, indent=1) + "\n")


def start_clock(device: torch.device, *, minutes: float, steps: int) -> Callable[[int], float]:
    """Return a function from a step number to a stage's progress, from 0 to 1: by ``steps``, or by time if that is 0."""
    start_time = time.monotonic()
    queued: list[torch.cuda.Event] = []

    def progress(step: int) -> float:
        if steps:
            return step / steps
        if device.type == "cuda":  # launch at most four steps ahead of the device, so that the clock measures its progress
            queued.append(torch.cuda.Event())
            queued[-1].record()
            if len(queued) > 4:
                queued.pop(0).synchronize()
        return (time.monotonic() - start_time) / (60 * minutes)

    return progress
