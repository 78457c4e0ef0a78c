"""What the scripts that run kernels on a real device share."""

from __future__ import annotations

import os
import threading
import time

import torch

_LONG = 30
beat = [time.monotonic(), "the start"]


def watched() -> None:
    """From now on the process ends where nothing has gone on for long: a kernel that hangs would keep it for ever."""

    def watch() -> None:
        while True:
            time.sleep(1)
            if time.monotonic() - beat[0] > _LONG:
                print(f"HANGS in {beat[1]}", flush=True)
                os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def going(on: str) -> None:
    """Something has gone on."""
    beat[:] = [time.monotonic(), on]


def waited(futures, end):
    """Those of the jobs that are compiled in other processes; the others say why."""
    done = set()
    for job, future in futures.items():
        going(f"compiling {job}")
        try:
            why = future.result(timeout=max(0.1, min(end - time.monotonic(), _LONG - 5)))
        except Exception as error:
            why = f"{type(error).__name__} {error}"
        if why is None:
            done.add(job)
        else:
            print(f"NOT COMPILED {job}: {why}", flush=True)
    return done


def wrong(made, right):
    """How far off the worst number is, relative to its row's largest; infinite for NaN."""
    off = (made.double() - right).abs().amax(-1) / right.abs().amax(-1).clamp(min=1e-30)
    return float(off.nan_to_num(float("inf")).max())


def in_a_graph(call, *, times=1):
    """What ``call`` makes, ``times`` behind each other, when it's replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            made = call()
    for each in made if isinstance(made, tuple) else (made,):
        each.fill_(float("nan") if each.is_floating_point() else 0)
    graph.replay()
    torch.cuda.synchronize()
    return made
