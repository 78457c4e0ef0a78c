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


def run_concurrently(jobs, at_a_time, seconds=1e9):
    """Start the ``jobs``, pairs (key, function), at most ``at_a_time`` at once; yield (key, outcome) as they end.

    A function starts a process and returns an object whose ``outcome()`` is None while the process runs. No job starts after
    ``seconds``. The calling process stays without threads, so that its children can be forks.
    """
    waiting, running, end = list(jobs), {}, time.monotonic() + seconds
    while waiting or running:
        if time.monotonic() > end:
            waiting.clear()
        while waiting and len(running) < at_a_time:
            key, start = waiting.pop(0)
            running[key] = start()
        for key, process in list(running.items()):
            outcome = process.outcome()
            if outcome is not None:
                del running[key]
                yield key, outcome
        time.sleep(0.02)
