"""L2: random programs with graphs end as the contract says."""

from __future__ import annotations

from collections.abc import Callable

from outrider_conformance.promises import promise


@promise("Graph", "``replay`` enqueues the whole graph on a stream like one operation.")
def test_random_programs_with_graphs(random_programs: Callable[[str], None]) -> None:
    """Several graphs are replayed in turn and concurrently, and dropped while they run."""
    random_programs("graphs")
