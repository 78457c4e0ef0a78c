"""Divergence between ranks: each class of fault in a minimal program, and the corrected program.

The cause is still present in a corrected program (a tie is broken differently, a host is slow, a rank is idle). There, one
rank decides and the others read its decision, or all ranks compute it from equal inputs.
"""

from __future__ import annotations

import torch

from outrider.device import Reduction
from outrider_sanitizer.races.race import ProgramRank, RankRace, order, rank_race
from outrider_sanitizer.report import FindingKind

RANK_RACES: list[RankRace] = []
_DIFFERENT = frozenset({FindingKind.DECISION, FindingKind.COLLECTIVE})
_LEFT_OUT = frozenset({FindingKind.DECISION, FindingKind.COLLECTIVE_MISSING})
_UNORDERED = frozenset({FindingKind.COLLECTIVE_UNORDERED})

_DRAFTED = (2, 1, 0)


def _agreed(rank: ProgramRank, value: int, fixed: bool) -> int:
    """Return this rank's value in the wrong program, and rank 0's value in the corrected one."""
    if not fixed:
        return value
    record = rank.tensor([value], torch.int32)
    rank.everyone.broadcast(record, root=0, stream=rank.stream)
    return int(rank.read_tensor(record)[0])


# -- A: ranks decide differently, then leave collectives out or make more ---------------------------------------------


@rank_race(RANK_RACES, "A", _DIFFERENT, decision="accepted", inject="tie")
def accepted_counts(rank: ProgramRank, fixed: bool) -> None:
    """A tie of logits is broken differently, so ranks accept different counts.

    Two logits tie, and one rank's argmax returns the other index: ranks accept different counts, and one drafts again.
    """
    if rank.index == 1:
        rank.diverge("tie")
    logits = rank.tensor([[0.0, 1.0, 3.0], [0.0, 2.0, 2.0], [3.0, 1.0, 0.0]])
    rank.everyone.all_reduce(logits, stream=rank.stream)
    with rank.backend.on(rank.stream):
        equal = logits.argmax(-1) == torch.tensor(_DRAFTED).to(rank.backend.device)
        count = equal.int().cumprod(0).sum().to(torch.int32).reshape(1)
    if fixed:
        rank.everyone.broadcast(count, root=0, stream=rank.stream)
    accepted = int(rank.read_tensor(count)[0])
    rank.everyone.decide("accepted", accepted)
    if accepted < len(_DRAFTED):
        rank.everyone.all_reduce(rank.filled(1.0, 8), stream=rank.stream)  # the draft's layer
    rank.everyone.all_gather(rank.filled(0.0, rank.size, 4), rank.filled(1.0), stream=rank.stream)


@rank_race(RANK_RACES, "A", _DIFFERENT, decision="draft_again", inject="ulp")
def one_ulp(rank: ProgramRank, fixed: bool) -> None:
    """Activations differ in the last bit, and a threshold decides.

    Products differ in their last bit, and a threshold turns the difference into another decision.
    """
    if rank.index == 1:
        rank.diverge("ulp")
    with rank.backend.on(rank.stream):
        hidden = torch.ones(1, 4).to(rank.backend.device)
        score = hidden @ torch.full((4, 1), 0.25).to(rank.backend.device)
        confident = (score > 1.0).int().reshape(1)
    if fixed:
        rank.everyone.broadcast(confident, root=0, stream=rank.stream)
    again = int(rank.read_tensor(confident)[0])
    rank.everyone.decide("draft_again", again)
    if again:
        rank.everyone.all_reduce(rank.filled(1.0), stream=rank.stream)
    rank.everyone.all_reduce(rank.filled(1.0, 16), stream=rank.stream)


@rank_race(RANK_RACES, "A", _DIFFERENT, decision="drain", inject="slow")
def slow_host(rank: ProgramRank, fixed: bool) -> None:
    """A rank's next operation depends on how far its device happens to be.

    Each rank queries whether its results are ready; only on the rank with the late host they are.
    """
    if rank.index == 1:
        rank.diverge("slow")
    landed = rank.backend.create_event("results")
    results = rank.filled(1.0)
    rank.everyone.all_reduce(results, stream=rank.stream)
    rank.stream.record(landed)
    drain = _agreed(rank, int(landed.query()), fixed)
    rank.everyone.decide("drain", drain)
    if not drain:
        rank.everyone.all_reduce(rank.filled(1.0, 8), stream=rank.stream)
    rank.everyone.all_reduce(rank.filled(1.0, 2), stream=rank.stream)


@rank_race(RANK_RACES, "A", _DIFFERENT, decision="pages", inject="memory")
def smaller_allocation(rank: ProgramRank, fixed: bool) -> None:
    """One rank has less memory, and admits requests by its own memory.

    One rank has less free memory, so it counts fewer pages and admits fewer requests.
    """
    taken = rank.filled(0.0, 1 << 20) if rank.index == 1 else None
    pages = rank.backend.memory_info().free // (1 << 20)
    if fixed:
        least = rank.tensor([pages], torch.int64)
        rank.everyone.all_reduce(least, reduction=Reduction.MIN, stream=rank.stream)
        pages = int(rank.read_tensor(least)[0])
    rank.everyone.decide("pages", pages)
    rank.everyone.all_reduce(rank.filled(1.0, pages % 97 + 1), stream=rank.stream)
    del taken


@rank_race(RANK_RACES, "A", _DIFFERENT, decision="running", inject="abort")
def abort_on_one_rank(rank: ProgramRank, fixed: bool) -> None:
    """Only one rank is told that a client has disconnected.

    The client of request 2 has disconnected, and only one rank aborts the request.
    """
    running = (1, 2) if rank.index else (1,)
    if fixed:
        abort_seen = rank.tensor([1 if 2 in running else 0], torch.int32)
        rank.everyone.broadcast(abort_seen, root=0, stream=rank.stream)
        running = (1, 2) if rank.read_tensor(abort_seen)[0] else (1,)
    rank.everyone.decide("running", running)
    rank.everyone.all_reduce(rank.filled(1.0, len(running), 8), stream=rank.stream)


@rank_race(RANK_RACES, "A", _DIFFERENT, decision="draft", inject="length")
def draft_near_the_limit(rank: ProgramRank, fixed: bool) -> None:
    """The decision to draft hangs on a length that one host knows late.

    One rank's host has the lengths of the previous iteration, so it drafts although the other rank is at the limit.
    """
    length, limit = (14 if rank.index else 15), 16
    draft = _agreed(rank, int(length + 1 < limit), fixed)
    rank.everyone.decide("draft", draft)
    for _ in range(2 * draft):
        rank.everyone.all_reduce(rank.filled(1.0), stream=rank.stream)
    rank.everyone.all_gather(rank.filled(0.0, rank.size, 4), rank.filled(1.0), stream=rank.stream)


# -- B: an idle rank takes another path ---------------------------------------------------------------------------


@rank_race(RANK_RACES, "B", _DIFFERENT, decision="draft_passes", inject="idle")
def idle_rank_drafts_less(rank: ProgramRank, fixed: bool) -> None:
    """An idle rank makes one draft pass and the other ranks make several.

    The busy rank drafts in three passes; the idle one makes a single pass whose result is dropped.
    """
    busy = rank.index == 0
    passes = 3 if busy or fixed else 1
    rank.everyone.decide("draft_passes", passes)
    for _ in range(passes):
        rank.everyone.all_reduce(rank.filled(1.0 if busy else 0.0), stream=rank.stream)
    rank.everyone.all_reduce(rank.filled(1.0, 8), stream=rank.stream)


@rank_race(RANK_RACES, "B", _DIFFERENT, decision="bucket", inject="bucket")
def idle_rank_takes_another_bucket(rank: ProgramRank, fixed: bool) -> None:
    """A rank picks its bucket by its own number of tokens.

    The bucket of a step must follow from the largest number of tokens of all ranks.
    """
    tokens = 6 if rank.index == 0 else 1
    if fixed:
        most = rank.tensor([tokens], torch.int32)
        rank.everyone.all_reduce(most, reduction=Reduction.MAX, stream=rank.stream)
        tokens = int(rank.read_tensor(most)[0])
    bucket = next(size for size in (1, 4, 8) if size >= tokens)
    rank.everyone.decide("bucket", bucket)
    gathered = rank.filled(0.0, rank.size, bucket, 4)
    rank.everyone.all_gather(gathered, rank.filled(1.0, bucket, 4), stream=rank.stream)


@rank_race(RANK_RACES, "B", _LEFT_OUT, decision="anybody_has_work", inject="vote")
def vote_over_too_few(rank: ProgramRank, fixed: bool) -> None:
    """Ranks vote over a group that lacks some of them.

    Ranks vote on whether any rank has work, over a group that has only one rank.
    """
    alone = rank.group(f"attention {rank.index}", rank.index)
    work = rank.filled(1.0 if rank.index == 0 else 0.0, 1)
    (rank.everyone if fixed else alone).all_reduce(work, reduction=Reduction.MAX, stream=rank.stream)
    anybody = int(rank.read_tensor(work)[0])
    rank.everyone.decide("anybody_has_work", anybody)
    if anybody:
        rank.everyone.all_reduce(rank.filled(1.0), stream=rank.stream)


# -- C: what the host learns of the batch comes too early or too late ----------------------------------------------


@rank_race(
    RANK_RACES,
    "C",
    frozenset({FindingKind.DECISION, FindingKind.COLLECTIVE, FindingKind.READ_AFTER_WRITE}),
    decision="padded_tokens",
    inject="early",
    options={"late": "copies"},
)
def counts_read_early(rank: ProgramRank, fixed: bool) -> None:
    """A host reads the counts of the batch before their copy has arrived.

    A rank reads the gathered counts too early, and sees those of the previous step.
    """
    counts = rank.backend.empty_pinned("counts", (rank.size,), torch.int32)
    counts.tensor.fill_(1)
    landed = rank.backend.create_event("counts_landed")
    mine = rank.filled(4.0, 1, dtype=torch.int32)
    all_counts = rank.filled(0.0, rank.size, 1, dtype=torch.int32)
    rank.everyone.all_gather(all_counts, mine, stream=rank.stream)
    rank.backend.copy_async(counts.tensor, all_counts.view(rank.size), stream=rank.stream)
    rank.stream.record(landed)
    if fixed or rank.index == 0:
        landed.synchronize()
    padded = max(counts.tensor.tolist())
    rank.everyone.decide("padded_tokens", padded)
    rank.everyone.all_reduce(rank.filled(1.0, padded, 4), stream=rank.stream)


# -- D: device residency ----------------------------------------------------------------------------------------------


@rank_race(RANK_RACES, "D", _UNORDERED, names=("'forward'", "'side'"), inject="streams", options={"resident": "1"})
def one_group_on_two_streams(rank: ProgramRank, fixed: bool) -> None:
    """One group is used from two streams without an order.

    No edge says which call begins first, and here each rank issues another call first.
    """
    side = rank.backend.create_stream("side")
    x, y = rank.filled(1.0), rank.filled(2.0)
    order(rank.stream, side)
    rank.everyone.all_reduce(x, stream=rank.stream)
    if fixed:
        order(rank.stream, side)
    rank.everyone.all_reduce(y, stream=side)


@rank_race(
    RANK_RACES,
    "D",
    frozenset({FindingKind.DECISION, FindingKind.COLLECTIVE_ORDER}),
    decision="first",
    inject="order",
    options={"resident": "1"},
)
def two_groups_in_different_order(rank: ProgramRank, fixed: bool) -> None:
    """Ranks call two groups in different order.

    The two groups have the same ranks, and each rank calls another group first.
    """
    tensor, data = rank.group("tensor"), rank.group("data")
    side = rank.backend.create_stream("side")
    x, y = rank.filled(1.0), rank.filled(2.0)
    order(rank.stream, side)
    calls = [(tensor, x, rank.stream), (data, y, side)]
    if rank.index and not fixed:
        calls.reverse()
    rank.everyone.decide("first", calls[0][0].name)
    before = None
    for group, tensor_, stream in calls:
        if before is not None:
            order(before, stream)
        group.all_reduce(tensor_, stream=stream)
        before = stream


# -- F: capture -------------------------------------------------------------------------------------------------------


@rank_race(RANK_RACES, "F", _DIFFERENT, decision="mode", inject="mode")
def captured_on_one_rank(rank: ProgramRank, fixed: bool) -> None:
    """One rank replays a graph where the other runs the step itself.

    One rank has a graph for this bucket and replays it, the other one has none and runs the step itself.
    """
    x = rank.filled(1.0)

    def step(_: object) -> None:
        rank.everyone.all_reduce(x, stream=rank.stream)

    mode = "graph" if fixed or rank.index == 0 else "eager"
    graph = rank.backend.capture("step", step, inputs={"x": x}, outputs={"x": x}, stream=rank.stream)
    for _ in range(2):
        rank.everyone.decide("mode", mode)
        if mode == "graph":
            graph.replay(stream=rank.stream)
        else:
            step(None)


@rank_race(RANK_RACES, "F", _UNORDERED, names=("'forward'", "'side'"), inject="graphs", options={"resident": "1"})
def graphs_on_two_streams(rank: ProgramRank, fixed: bool) -> None:
    """Graphs that share a group are replayed on two streams without an order.

    Both graphs contain collectives of the group, and no edge says which replay begins first.
    """
    side = rank.backend.create_stream("side")
    x, y = rank.filled(1.0), rank.filled(2.0)

    graphs = [
        rank.backend.capture(
            name,
            lambda _, tensor=tensor, stream=stream: rank.everyone.all_reduce(tensor, stream=stream),  # type: ignore[misc]
            inputs={"x": tensor},
            outputs={"x": tensor},
            stream=stream,
        )
        for name, tensor, stream in (("one", x, rank.stream), ("two", y, side))
    ]
    order(rank.stream, side)
    graphs[0].replay(stream=rank.stream)
    if fixed:
        order(rank.stream, side)
    graphs[1].replay(stream=side)


# -- E: tokens between the stages of a pipeline ---------------------------------------------------------------------


@rank_race(RANK_RACES, "E", _DIFFERENT, decision="token_width", inject="width")
def width_of_tokens(rank: ProgramRank, fixed: bool) -> None:
    """Stages of a pipeline differ in the width of the tokens that they pass on.

    The last stage sends the sampled tokens, [requests, 1]; the first stage receives a tensor of the maximum width.
    """
    requests, most = 3, 4
    width = most if fixed or rank.index == 0 else 1
    rank.everyone.decide("token_width", width)
    tokens = rank.filled(7.0, requests, width, dtype=torch.int32)
    if rank.index == rank.size - 1:
        rank.everyone.send(tokens, to=0, stream=rank.stream)
    elif rank.index == 0:
        rank.everyone.receive(tokens, source=rank.size - 1, stream=rank.stream)


# -- G: tokens sent to the ranks of their experts ----------------------------------------------------------------------


def _dispatch(rank: ProgramRank, room: int) -> None:
    """Send ``room`` tokens to the experts of each rank, and their results back."""
    sent, received = rank.filled(1.0, rank.size, room, 4), rank.filled(0.0, rank.size, room, 4)
    rank.everyone.all_to_all(received, sent, stream=rank.stream)
    rank.everyone.all_to_all(sent, received, stream=rank.stream)


@rank_race(RANK_RACES, "G", _DIFFERENT, decision="room", inject="room")
def room_by_own_router(rank: ProgramRank, fixed: bool) -> None:
    """A rank sizes the exchange with the experts by where its own router sends its tokens.

    The room for each pair of ranks must hold the most tokens that any rank sends to another.
    """
    with rank.backend.on(rank.stream):
        owner = rank.tensor([0, 0, 0, 1] if rank.index == 0 else [0, 1, 0, 1], torch.int64)
        most = torch.bincount(owner, minlength=rank.size).max().reshape(1)
    if fixed:
        rank.everyone.all_reduce(most, reduction=Reduction.MAX, stream=rank.stream)
    room = int(rank.read_tensor(most)[0])
    rank.everyone.decide("room", room)
    _dispatch(rank, room)


@rank_race(RANK_RACES, "G", _LEFT_OUT, decision="dispatches", inject="dispatch")
def idle_rank_keeps_its_experts(rank: ProgramRank, fixed: bool) -> None:
    """A rank without tokens leaves the exchange out, although other ranks need its experts."""
    dispatches = fixed or rank.index == 0
    rank.everyone.decide("dispatches", int(dispatches))
    if dispatches:
        _dispatch(rank, 2)


@rank_race(RANK_RACES, "G", _DIFFERENT, decision="first", inject="shared expert")
def shared_expert_first(rank: ProgramRank, fixed: bool) -> None:
    """Ranks differ in whether they sum the shared expert or exchange tokens first."""
    shared_first = rank.index == 0 or fixed
    rank.everyone.decide("first", "shared" if shared_first else "routed")
    shared = rank.filled(1.0, 4)
    if not shared_first:
        _dispatch(rank, 2)
    rank.everyone.all_reduce(shared, stream=rank.stream)
    if shared_first:
        _dispatch(rank, 2)


# -- messages and memory between ranks ---------------------------------------------------------------------------------


@rank_race(RANK_RACES, "C", frozenset({FindingKind.SENDS}), names=("receive first",), options={"eager_sends": "2"})
def sends_before_receives(rank: ProgramRank, fixed: bool) -> None:
    """Every rank sends before it receives, so the sends end only while buffers take them."""
    following, previous = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    mine, theirs = rank.filled(1.0), rank.filled(0.0)
    if fixed and rank.index == rank.size - 1:
        rank.everyone.receive(theirs, source=previous, stream=rank.stream)
        rank.everyone.send(mine, to=following, stream=rank.stream)
    else:
        rank.everyone.send(mine, to=following, stream=rank.stream)
        rank.everyone.receive(theirs, source=previous, stream=rank.stream)
