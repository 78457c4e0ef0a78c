"""L1: random programs of streams, events, copies, memory and host threads end as the contract says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider_conformance.promises import promise


@promise("Stream", "A queue of device work that runs in the order in which it was enqueued.")
@pytest.mark.parametrize("family", ["order", "copies", "memory", "threads"])
def test_random_programs(random_programs: Callable[[str], None], family: str) -> None:
    """Each value that the host reads is allowed by the model of the contract. The report shows the smallest failing
    program.
    """
    random_programs(family)
