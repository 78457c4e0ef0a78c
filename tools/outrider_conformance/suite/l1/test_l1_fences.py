"""L1: a fence of the policy reports completion to the host, and waits up to the given limit."""

from __future__ import annotations

from outrider_conformance.lab import Lab, expect, in_every_order
from outrider_conformance.promises import promise

_ASKED = 4


@promise(
    "Fence.wait_host_within",
    "Block the calling thread for at most ``seconds``; return True if the visible generation completed.",
)
@in_every_order()
def test_the_host_waits_for_a_fence_within_a_limit(lab: Lab) -> None:
    """A wait with a distant limit returns True, and True with limit 0 means completion."""
    a, x = lab.one_stream()
    fence = lab.backend.speculative_sync.create_fence("fence")
    for turn in (1.0, 2.0):
        lab.fill_late(a, x, turn)
        fence.signal(a)
        if fence.wait_host_within(0.0):
            expect(lab.current_values(x), turn, "what the host read when a fence came at once")
        assert fence.wait_host_within(60.0), "a minute wasn't enough"
        expect(lab.current_values(x), turn, "what the host read after the fence")


@promise("Fence.done", "Return True if the visible generation has completed.")
@in_every_order()
def test_a_fence_that_is_done_is_done(lab: Lab) -> None:
    """Repeated queries of a fence return True only after the work has run."""
    a, x = lab.one_stream()
    fence = lab.backend.speculative_sync.create_fence("fence")
    for turn in (1.0, 2.0):
        lab.fill_late(a, x, turn)
        fence.signal(a)
        for _ in range(_ASKED):
            if fence.done():
                expect(lab.current_values(x), turn, "the write before the signal that is done")
        fence.wait_host()
        assert fence.done(), "done is False after wait_host"


@promise("SpeculativeSync.create_fence", "Create the mechanism of the fence ``name``; called once per fence and engine.")
@in_every_order()
def test_fences_of_two_engines_are_two(lab: Lab) -> None:
    """A wait for one engine's late fence does not pass when another engine signals a fence of the same name."""
    a, b, c = lab.streams("a", "b", "c")
    x, y = lab.full(a, 0), lab.full(c, 0)
    late, early = (lab.backend.speculative_sync.create_fence("fence") for _ in range(2))
    lab.fill_late(a, x, 1)
    late.signal(a)
    early.signal(b)
    late.wait(c)
    lab.expect_read(c, y, x, 1.0, "what was read after one engine's fence while the other's was open")
