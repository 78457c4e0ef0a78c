"""The table of fences: every edge that crosses streams, or leads to the host, has a name here.

The backend's SpeculativeSync supplies the mechanism of each. Edges that need no fence, because both ends are on one
stream: the stash is written and gathered on forward; every access to KV pages is on forward, so that the reuse of a page
is ordered; a gather precedes the *inputs ready* of its own iteration; the plan of an iteration never meets the verify of
the one before, since *shared reads done* comes behind that on forward; a fused iteration unpacks its inputs on forward,
behind the reads of the one before. And the rings of staging, results and lengths, pinned and on the device: an entry is
filled again only after the host has read the results of the iteration that it was filled for; lengths leave before results
do. So is the buffer of masks, since an iteration with a guided request is launched when no other is in flight.

``network`` is no stream of the engine: a network card is ordered by nothing but the host, which gives it work and asks what
is over. The host waits by asking, between two iterations. Where a link's copies are work of the backend, the link signals
these fences; a real card has completions and notifications of its own in their place (:mod:`outrider.transports.link`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from outrider.device import Fence, SpeculativeSync


class Hazard(StrEnum):
    """What happens without the fence."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_READ = "write after read"
    BOTH = "read after write, write after read"


@dataclass(frozen=True, slots=True)
class FenceSpec:
    """One row of the table. ``consumers`` are streams, or ``host``."""

    name: str
    producer: str
    consumers: tuple[str, ...]
    hazard: Hazard
    resources: str


FENCES: tuple[FenceSpec, ...] = (
    FenceSpec(
        "inputs_ready",
        "schedule",
        ("forward",),
        Hazard.READ_AFTER_WRITE,
        "uploaded inputs; of a staged iteration also what schedule unpacks of them, block-table rows, sampling rows, and "
        "resolved lengths",
    ),
    FenceSpec(
        "shared_reads_done",
        "forward",
        ("plan", "schedule"),
        Hazard.BOTH,
        "private copies of lengths and tables, for the plan's first part; staged inputs, rows and table entries, against a "
        "staged iteration that comes next, and reuse by another request; masks of prompts, against the next ones",
    ),
    FenceSpec(
        "draft_outputs_ready",
        "forward",
        ("plan", "copy"),
        Hazard.READ_AFTER_WRITE,
        "draft tokens, a tree's shape",
    ),
    FenceSpec(
        "draft_on_host",
        "copy",
        ("host",),
        Hazard.READ_AFTER_WRITE,
        "draft tokens and a tree's shape in pinned memory, where a request is guided",
    ),
    FenceSpec(
        "masks_ready",
        "schedule",
        ("forward",),
        Hazard.READ_AFTER_WRITE,
        "masks of guided requests, one behind each token of a draft",
    ),
    FenceSpec("plan_ready", "plan", ("forward",), Hazard.READ_AFTER_WRITE, "static inputs and metadata of verify"),
    FenceSpec("accept_ready", "forward", ("plan",), Hazard.READ_AFTER_WRITE, "accepted tokens, their number and their path"),
    FenceSpec(
        "extend_plan_ready",
        "plan",
        ("forward",),
        Hazard.READ_AFTER_WRITE,
        "static inputs and metadata of draft-extend, and the moves of a tree's keys and values",
    ),
    FenceSpec("published", "forward", ("schedule", "copy"), Hazard.READ_AFTER_WRITE, "new lengths, a generation per row"),
    FenceSpec(
        "lengths_on_host",
        "copy",
        ("host",),
        Hazard.READ_AFTER_WRITE,
        "published lengths in pinned memory, where attention takes host integers or is planned from them",
    ),
    FenceSpec(
        "params_free",
        "forward",
        ("update",),
        Hazard.WRITE_AFTER_READ,
        "host parameters of captured stages against the replays of the iteration before",
    ),
    FenceSpec(
        "params_bound", "update", ("forward",), Hazard.READ_AFTER_WRITE, "host parameters that were bound for this iteration"
    ),
    FenceSpec("results_ready", "forward", ("copy",), Hazard.READ_AFTER_WRITE, "kept results of the iteration"),
    FenceSpec("results_copied", "copy", ("host",), Hazard.READ_AFTER_WRITE, "pinned results"),
    FenceSpec(
        "handed_over",
        "forward",
        ("forward of another engine", "host"),
        Hazard.READ_AFTER_WRITE,
        "keys, values, draft caches and relay of a request that leaves for another engine",
    ),
    FenceSpec(
        "pages_ready",
        "forward",
        ("host",),
        Hazard.READ_AFTER_WRITE,
        "pages and relay of a request that leaves for an engine elsewhere, against the network card's reads",
    ),
    FenceSpec(
        "pages_read",
        "network",
        ("host",),
        Hazard.WRITE_AFTER_READ,
        "those pages, against the next request that gets them",
    ),
    FenceSpec(
        "pages_free",
        "forward",
        ("host",),
        Hazard.WRITE_AFTER_READ,
        "pages reserved for a request that comes from elsewhere, against the network card's writes",
    ),
    FenceSpec(
        "pages_written",
        "network",
        ("host",),
        Hazard.READ_AFTER_WRITE,
        "what the network card wrote to those pages, against the iteration that the request enters in",
    ),
)


class FenceSet:
    """The fences of one engine, by name; those of pinned memory have one for each entry of its ring, those of the network one
    for each of ``transfers``: requests that may be on their way in one direction at a time.

    ``wrap`` is put around each fence: the way in for tools that prove them.
    """

    def __init__(
        self, sync: SpeculativeSync, *, entries: int, transfers: int, wrap: Callable[[Fence], Fence] | None = None
    ) -> None:
        def create(name: str) -> Fence:
            fence = sync.create_fence(name)
            return fence if wrap is None else wrap(fence)

        self.inputs_ready = create("inputs_ready")
        self.shared_reads_done = create("shared_reads_done")
        self.draft_outputs_ready = create("draft_outputs_ready")
        self.draft_on_host = tuple(create(f"draft_on_host[{entry}]") for entry in range(entries))
        self.masks_ready = create("masks_ready")
        self.plan_ready = create("plan_ready")
        self.accept_ready = create("accept_ready")
        self.extend_plan_ready = create("extend_plan_ready")
        self.published = create("published")
        self.lengths_on_host = tuple(create(f"lengths_on_host[{entry}]") for entry in range(entries))
        self.params_free = create("params_free")
        self.params_bound = create("params_bound")
        self.results_ready = create("results_ready")
        self.results_copied = tuple(create(f"results_copied[{entry}]") for entry in range(entries))
        self.handed_over = create("handed_over")
        self.pages_ready = tuple(create(f"pages_ready[{slot}]") for slot in range(transfers))
        self.pages_read = tuple(create(f"pages_read[{slot}]") for slot in range(transfers))
        self.pages_free = tuple(create(f"pages_free[{slot}]") for slot in range(transfers))
        self.pages_written = tuple(create(f"pages_written[{slot}]") for slot in range(transfers))
