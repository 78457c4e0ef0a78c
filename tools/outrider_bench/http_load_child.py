"""A part of the load on a server, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from outrider_bench.child import answer
from outrider_bench.http_load import load_of, run_load, told


def _work(given: Mapping[str, Any]) -> Mapping[str, object]:
    if find_spec("uvloop") is not None:
        import uvloop

        return told(uvloop.run(run_load(load_of(given))))
    return told(asyncio.run(run_load(load_of(given))))


if __name__ == "__main__":
    answer(_work)
