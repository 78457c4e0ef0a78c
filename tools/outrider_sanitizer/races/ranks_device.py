"""How ranks come apart on their devices: one communicator on two streams, two in different order, graphs on one rank."""

from __future__ import annotations

from outrider_sanitizer.findings import Kind
from outrider_sanitizer.races.program import order
from outrider_sanitizer.races.rank_program import Rank, RankRace

# -- D: device residency ----------------------------------------------------------------------------------------------


def two_streams(rank: Rank, fixed: bool) -> None:
    """One group is used from two streams, and nothing says which call begins first: here each rank issues another one so."""
    side = rank.backend.create_stream("side")
    x, y = rank.filled(1.0), rank.filled(2.0)
    order(rank.stream, side)
    rank.everyone.all_reduce(x, stream=rank.stream)
    if fixed:
        order(rank.stream, side)
    rank.everyone.all_reduce(y, stream=side)


def two_groups(rank: Rank, fixed: bool) -> None:
    """Two groups of the same ranks, and each rank calls another one first."""
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


def captured_on_one_rank(rank: Rank, fixed: bool) -> None:
    """One rank has a graph for this bucket and replays it, the other one has none and runs the step itself."""
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


def graphs_on_two_streams(rank: Rank, fixed: bool) -> None:
    """Two graphs with collectives of one group are replayed on two streams that nothing orders."""
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


DEVICE_RACES = (
    RankRace(
        name="one-group-on-two-streams",
        of="D",
        about="One group is used from two streams that nothing orders.",
        body=two_streams,
        kinds=frozenset({Kind.COLLECTIVE_UNORDERED}),
        names=("'forward'", "'side'"),
        inject="streams",
        options={"resident": "1"},
    ),
    RankRace(
        name="two-groups-in-different-order",
        of="D",
        about="Ranks call two groups in different order.",
        body=two_groups,
        kinds=frozenset({Kind.DECISION, Kind.COLLECTIVE_ORDER}),
        decision="first",
        inject="order",
        options={"resident": "1"},
    ),
    RankRace(
        name="captured-on-one-rank",
        of="F",
        about="One rank replays a graph where the other runs the step itself.",
        body=captured_on_one_rank,
        kinds=frozenset({Kind.DECISION, Kind.COLLECTIVE}),
        decision="mode",
        inject="mode",
    ),
    RankRace(
        name="graphs-on-two-streams",
        of="F",
        about="Graphs that share a group are replayed on two streams that nothing orders.",
        body=graphs_on_two_streams,
        kinds=frozenset({Kind.COLLECTIVE_UNORDERED}),
        names=("'forward'", "'side'"),
        inject="graphs",
        options={"resident": "1"},
    ),
)
