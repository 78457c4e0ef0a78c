"""The load of a server on an engine without one, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_bench.child import answer
from outrider_bench.http_load import load_of, summary
from outrider_bench.served import make_engine, run_bare


def _work(given: Mapping[str, Any]) -> Mapping[str, object]:
    engine = make_engine(given["setup"])
    results = []
    for number, size in enumerate(given["sizes"], 1):
        load = load_of(given["load"]).again(clients=size, number=number)
        run_bare(engine, load.warm_up)
        results.append({"concurrency": size, **summary(run_bare(engine, load))})
    return {"results": results}


if __name__ == "__main__":
    answer(_work)
