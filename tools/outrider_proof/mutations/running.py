"""Changes spread over processes, each of which forks once for a change."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

from outrider_proof.mutations.sites import Site


def run(todo: list[Site], *, processes: int, seconds: float, limit: float) -> list[dict[str, Any]]:
    """A record of each change that was tried: the site, ``by`` what it was killed (None: it survived) and where."""
    end = time.time() + seconds
    shares = [todo[i::processes] for i in range(min(processes, len(todo)))]
    records: list[dict[str, Any]] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, share, end, limit) for share in shares]):
            records += future.result()
    return sorted(records, key=lambda record: (record["module"], record["number"]))


def work(share: list[Site], end: float, limit: float) -> list[dict[str, Any]]:
    """Some of the changes, one after the other, in processes forked from this one."""
    import torch

    torch.set_num_threads(1)
    from outrider_proof.mutations import deck

    deck.warm()
    records = []
    for site in share:
        if time.time() > end:
            break
        began = time.perf_counter()
        by, at = deck.judge(site, limit)
        records.append(
            asdict(site) | {"name": site.name, "by": by, "at": at, "seconds": round(time.perf_counter() - began, 2)}
        )
    return records
