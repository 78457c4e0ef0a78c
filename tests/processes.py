"""Processes that tests start: whether they still run, as /proc says, and several of them at a time."""

import time


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid, *, seconds):
    """Whether the process is gone, or is within ``seconds``: a kill isn't carried out at once."""
    patience = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > patience:
            return False
        time.sleep(0.01)
    return True
