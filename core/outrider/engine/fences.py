"""The table of fences: every edge that crosses streams, or leads to the host, has a name here.

The backend's SpeculativeSync supplies the mechanism of each fence. These edges need no fence, because one stream orders both
ends:

- The stash is written and gathered on forward.
- Every access to KV pages is on forward, so the reuse of a page is ordered.
- Every access of the engine to the states of recurrent layers and to their windows is on forward: prefill, verify, draft and
  draft-extend, settling, and the copies of the prefix cache. So the reuse of a row or of a checkpoint is ordered.
- Sequence lengths are resolved on schedule before the *inputs ready* of their own iteration.
- The plan of an iteration never meets the verify of the iteration before: *shared reads done* follows that verify on forward.
- A fused iteration unpacks its inputs on forward, after the reads of the iteration before.

The rings of staging, results and lengths, pinned and on the device, need no fence either: the host fills an entry again only
after it has read the results of the iteration that used the entry, and lengths leave before results. The buffer of masks is
safe because an iteration with a guided request is launched only if no other iteration is in flight.

``network`` is not a stream of the engine. Only the host orders a network card: it hands over work and polls for completions
between two iterations. If a link copies with the backend, the link signals these fences; a real card has completions and
notifications instead (:mod:`outrider.transports.link`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.device import Fence, SpeculativeSync, Stream

READ_AFTER_WRITE, WRITE_AFTER_READ = "read after write", "write after read"
"""The kinds of wrong accesses that a fence prevents."""


@dataclass(frozen=True, slots=True)
class FenceSpec:
    """One row of the table: an edge from the stream ``producer`` to each of ``consumers``, which are streams or ``host``."""

    name: str
    producer: str
    consumers: tuple[str, ...]
    hazard: str
    """The kinds of wrong accesses that the fence prevents."""
    resources: str


FENCES: tuple[FenceSpec, ...] = (
    FenceSpec(
        "inputs_ready",
        "schedule",
        ("forward",),
        READ_AFTER_WRITE,
        "uploaded inputs, and masks of prompts; in staged mode also the request rows, block tables and sampling options that "
        "schedule unpacks, and resolved lengths",
    ),
    FenceSpec(
        "shared_reads_done",
        "forward",
        ("plan", "schedule"),
        f"{READ_AFTER_WRITE}, {WRITE_AFTER_READ}",
        "inputs.*, for plan positions; staged inputs, request rows and block tables, against the unpack of the next "
        "iteration in staged mode and against reuse by another request; masks of prompts, against the next masks",
    ),
    FenceSpec(
        "draft_outputs_ready",
        "forward",
        ("plan", "copy"),
        READ_AFTER_WRITE,
        "draft.*: draft tokens, a tree's shape",
    ),
    FenceSpec(
        "draft_on_host",
        "copy",
        ("host",),
        READ_AFTER_WRITE,
        "draft tokens and a tree's shape in pinned memory, where a request is guided",
    ),
    FenceSpec(
        "masks_ready",
        "schedule",
        ("forward",),
        READ_AFTER_WRITE,
        "masks of guided requests, one for the position after each token of a draft",
    ),
    FenceSpec("plan_ready", "plan", ("forward",), READ_AFTER_WRITE, "verify.*: static inputs and metadata of verify"),
    FenceSpec(
        "accept_ready",
        "forward",
        ("plan",),
        READ_AFTER_WRITE,
        "outputs.*: accepted tokens, their number and their path",
    ),
    FenceSpec(
        "extend_plan_ready",
        "plan",
        ("forward",),
        READ_AFTER_WRITE,
        "extend.*: static inputs and metadata of draft-extend, and the moves of a tree's keys and values",
    ),
    FenceSpec("published", "forward", ("schedule", "copy"), READ_AFTER_WRITE, "new lengths, a generation per row"),
    FenceSpec(
        "lengths_on_host",
        "copy",
        ("host",),
        READ_AFTER_WRITE,
        "published lengths in pinned memory, where attention takes host integers or is planned from them",
    ),
    FenceSpec(
        "params_free",
        "forward",
        ("update",),
        WRITE_AFTER_READ,
        "host parameters of captured stages against the replays of the iteration before",
    ),
    FenceSpec("params_bound", "update", ("forward",), READ_AFTER_WRITE, "host parameters that were bound for this iteration"),
    FenceSpec("results_ready", "forward", ("copy",), READ_AFTER_WRITE, "results of the iteration in the device ring"),
    FenceSpec("results_copied", "copy", ("host",), READ_AFTER_WRITE, "pinned results"),
    FenceSpec(
        "handed_over",
        "forward",
        ("forward of another engine", "host"),
        READ_AFTER_WRITE,
        "keys, values, draft caches, recurrent states and relay of a request that leaves for another engine",
    ),
    FenceSpec(
        "pages_ready",
        "forward",
        ("host",),
        READ_AFTER_WRITE,
        "pages, recurrent states and relay of a request that leaves for elsewhere, against the network card's reads",
    ),
    FenceSpec(
        "pages_read",
        "network",
        ("host",),
        WRITE_AFTER_READ,
        "pages and recurrent states of a request that left, against the next request that gets these pages and this row",
    ),
    FenceSpec(
        "pages_free",
        "forward",
        ("host",),
        WRITE_AFTER_READ,
        "pages and row of states reserved for a request that comes from elsewhere, against the network card's writes",
    ),
    FenceSpec(
        "pages_written",
        "network",
        ("host",),
        READ_AFTER_WRITE,
        "pages and recurrent states that the network card wrote, against the iteration that the request enters in",
    ),
)


class FenceSet:
    """The fences of one engine, by name.

    Fences of pinned memory exist once per ring entry. Fences of the network exist once per transfer; ``transfers`` is the
    number of requests that may be on their way in one direction at a time. ``wrap`` replaces each fence by its return value;
    tools that prove the fences use it.
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


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of an engine. ``plan`` and ``copy`` may be ``forward`` itself. ``update`` rebinds host parameters of
    graphs; None on devices without such parameters.
    """

    schedule: Stream
    forward: Stream
    plan: Stream
    copy: Stream
    update: Stream | None = None

    @property
    def all(self) -> tuple[Stream, ...]:
        """Return each stream once, in the order of their creation."""
        streams = (self.schedule, self.forward, self.plan, self.copy, self.update)
        return tuple(dict.fromkeys(stream for stream in streams if stream is not None))
