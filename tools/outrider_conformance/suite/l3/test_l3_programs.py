"""L3: random programs with flags, and with graphs whose host parameters are rebound, end as the contract says."""

from __future__ import annotations

from collections.abc import Callable

from outrider_conformance.promises import promise


@promise("Graph.update_params", "Rebind host parameters for the replays enqueued after this call.")
def test_random_programs_with_flags_and_parameters(random_programs: Callable[[str], None]) -> None:
    """Programs use flags and host parameters as far as the backend declares them."""
    random_programs("bound")
