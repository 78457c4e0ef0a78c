"""The load of a server on an engine without one, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider_bench.child import answer
from outrider_bench.http_load import load_of, summary
from outrider_bench.served import make_engine, run_bare


def _work(given: Mapping[str, Any]) -> Mapping[str, object]:
    engine = make_engine(given["setup"])
    results = []
    for size in given["sizes"]:
        load = replace(load_of(given["load"]), clients=size)
        run_bare(engine, replace(load, rounds=1, first=100_000))
        results.append({"concurrency": size, **summary(run_bare(engine, load))})
    return {"results": results}


if __name__ == "__main__":
    answer(_work)
