"""Changes spread over processes, each of which forks once for a change."""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from outrider_proof.mutations.sites import Site


def run(todo: list[Site], *, processes: int, seconds: float, limit: float, out: Path | None = None) -> list[dict[str, Any]]:
    """A record of each change that was tried: the site, ``by`` what it was killed (None: it survived) and where.

    ``out``: a file to which each is appended as a line of JSON. What it has already isn't tried again.
    """
    end = time.time() + seconds
    known = {record["name"]: record for record in _lines(out)}
    records = [known[site.name] for site in todo if site.name in known]
    missing = [site for site in todo if site.name not in known]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_warm) as pool:
        for future in as_completed([pool.submit(work, site, end, limit) for site in missing]):
            record = future.result()
            if record is None:
                continue
            records.append(record)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    return sorted(records, key=lambda record: (record["module"], record["number"]))


def _lines(out: Path | None) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _warm() -> None:
    import torch

    torch.set_num_threads(1)
    from outrider_proof.mutations import deck

    deck.warm()


def work(site: Site, end: float, limit: float) -> dict[str, Any] | None:
    """One change, in a process forked from this one; None once it's too late."""
    from outrider_proof.mutations import deck

    if time.time() > end:
        return None
    began = time.perf_counter()
    by, at = deck.judge(site, limit)
    return asdict(site) | {"name": site.name, "by": by, "at": at, "seconds": round(time.perf_counter() - began, 2)}
