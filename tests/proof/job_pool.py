"""A pool of processes that runs the jobs of a long proof and continues where an earlier call stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Job = tuple[Any, ...]
"""The arguments of one call of the job function: JSON-compatible values."""


def run_jobs(
    run_job: Callable[..., dict[str, Any]], jobs: Iterable[Job], *, processes: int, seconds: float, out: Path
) -> list[dict[str, Any]]:
    """Run each job that has no line in ``out`` yet, and return the records of all jobs that are done.

    ``run_job`` returns a record with its arguments under "job". Each record becomes a line of ``out`` when the job ends. No
    job begins after ``seconds``.
    """
    began = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = out.read_text().splitlines() if out.exists() else []
    done: list[dict[str, Any]] = [json.loads(line) for line in lines]
    known = {tuple(record["job"]) for record in done}
    queue = (job for job in list(jobs) if job not in known)
    running: set[Future[dict[str, Any]]] = set()
    with out.open("a") as file, ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        while True:
            while len(running) < processes and time.monotonic() - began < seconds:
                job = next(queue, None)
                if job is None:
                    break
                running.add(pool.submit(run_job, *job))
            if not running:
                return done
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done.append(future.result())
                file.write(json.dumps(done[-1]) + "\n")
                file.flush()
