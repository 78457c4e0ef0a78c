"""What every transport promises: bytes, notices, order, refusals, and what happens when the other side goes."""

import time

import pytest
import torch

from outrider.device import ConfigError
from outrider.registry.engine_plugins import get_transport
from outrider.transports import LinkDown
from outrider.transports.link import LocalTransport
from outrider_cpu.backend import CpuBackend

BACKEND = CpuBackend()
LIMIT_S = 60


def until(condition):
    end = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end, "it didn't come"
        time.sleep(0.001)
    return found


TRANSPORTS = ["local", "torch", pytest.param("nixl", marks=pytest.mark.needs_nixl)]


def make(name):
    return LocalTransport() if name == "local" else get_transport(name)


class Pair:
    def __init__(self, name, blocks=(6, 9)):
        transport = make(name)
        self.memory = [
            (torch.arange(n * 4, dtype=torch.float32).view(n, 2, 2) + 100 * side, torch.zeros(n, 3, dtype=torch.int64) + side)
            for side, n in enumerate(blocks)
        ]
        self.links = [
            transport.open(memory, BACKEND, accepts=not side, host="127.0.0.1") for side, memory in enumerate(self.memory)
        ]
        offers = [link.offer() for link in self.links]
        self.links[0].connect(offers[1])
        self.links[1].connect(offers[0])

    def close(self):
        for link in self.links:
            link.close()


@pytest.fixture(params=TRANSPORTS)
def pair(request):
    made = Pair(request.param)
    yield made
    made.close()


def test_blocks_are_written_and_told_of(pair):
    """Both ways, in the order given; nothing else changes."""
    for side in (0, 1):
        here, there = pair.memory[side], pair.memory[1 - side]
        before, sent = [each.clone() for each in there], [each.clone() for each in here]
        transfer, other = pair.links[side].start_write([1, 4, 2], [5, 0, 3], b"hello"), pair.links[1 - side]
        # Both sides go on asking.
        assert until(lambda given=(transfer, other): given[1].notices() or (given[0].done() and None)) == [b"hello"]
        for region, old, new in zip(there, before, sent, strict=True):
            old[[5, 0, 3]] = new[[1, 4, 2]]
            assert torch.equal(region, old)
        until(transfer.done)
        assert pair.links[1 - side].notices() == []


@pytest.mark.parametrize("name", TRANSPORTS)
def test_blocks_with_gaps_between_them_are_written(name):
    """A region may be every second part of a tensor, as the KV heads of one rank are."""
    transport, whole = make(name), torch.arange(24, dtype=torch.float32)
    parts, landed = whole.view(6, 2, 2), torch.zeros(8, 2)
    here = transport.open([parts[:, 1]], BACKEND, accepts=True, host="127.0.0.1")
    there = transport.open([landed], BACKEND, accepts=False, host="127.0.0.1")
    here.connect(there.offer())
    there.connect(here.offer())
    transfer = here.start_write([1, 2, 5], [3, 4, 0], b"part")
    assert until(lambda: there.notices() or (transfer.done() and None)) == [b"part"]
    assert landed[[3, 4, 0]].tolist() == [[6, 7], [10, 11], [22, 23]]
    assert landed.count_nonzero() == 6
    back = there.start_write([3], [0], b"back")
    assert until(lambda: here.notices() or (back.done() and None)) == [b"back"]
    assert whole.tolist() == [0, 1, 6, 7, *range(4, 24)]
    for link in (here, there):
        link.close()


def with_states(name, pages, rows):
    """A transport's sides, each with pages, a state in float64, and the parts of one tensor as two further states."""
    transport, sides = make(name), []
    for side, (count, held) in enumerate(zip(pages, rows, strict=True)):
        memory = [torch.zeros(count, 2), torch.zeros(held, 3, dtype=torch.float64), torch.zeros(held, 2, 5)]
        for each in memory if not side else ():
            each.copy_(torch.arange(1, each.numel() + 1).view(each.shape))
        states = [memory[1], memory[2][:, 0, :2], memory[2][:, 1, 2:]]
        link = transport.open(memory[:1], BACKEND, accepts=not side, host="127.0.0.1", states=states)
        sides.append((link, *memory))
    for (link, *_), (other, *_) in zip(sides, reversed(sides), strict=True):
        link.connect(other.offer())
    return sides


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_row_of_states_is_written_with_blocks_of_pages(name):
    (here, *given), (there, pages, state, parts) = with_states(name, (6, 9), (3, 5))
    transfer = here.start_write([6 + 1, 2], [9 + 4, 0], b"both")
    assert until(lambda: there.notices() or (transfer.done() and None)) == [b"both"]
    assert torch.equal(pages[0], given[0][2])
    assert torch.equal(state[4], given[1][1])
    assert torch.equal(parts[4, 0, :2], given[2][1, 0, :2])
    assert torch.equal(parts[4, 1, 2:], given[2][1, 1, 2:])
    assert [each.count_nonzero() for each in (pages, state, parts)] == [2, 3, 5]
    for ours, theirs in (([6], [0]), ([0], [9]), ([6 + 3], [9]), ([6], [9 + 5])):
        with pytest.raises(ConfigError, match="block of pages can't go to a block of states|blocks, and was asked for"):
            here.start_write(ours, theirs, b"")
    for link in (here, there):
        link.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "notice", "message"),
    [
        ([6], [0], b"", "this side has 6 blocks"),
        ([0], [9], b"", "the other side has 9 blocks"),
        ([0, 1], [2], b"", "2 blocks can't go to 1"),
        ([0, 1], [2, 2], b"", "named twice"),
        ([], [], b"", "at least one"),
        ([0], [0], b"x" * 257, "is too long"),
    ],
)
def test_what_does_not_fit_is_refused(pair, ours, theirs, notice, message):
    with pytest.raises(ConfigError, match=message):
        pair.links[0].start_write(ours, theirs, notice)


def test_after_a_close_both_sides_are_down_and_no_byte_lands(pair):
    before = [each.clone() for each in pair.memory[0]]
    pair.links[0].close()
    with pytest.raises(LinkDown):
        pair.links[0].start_write([0], [0], b"")

    def down():
        try:
            transfer = pair.links[1].start_write([1], [1], b"late")
            until(transfer.done)
        except LinkDown:
            return True
        return False

    assert down()
    assert all(torch.equal(a, b) for a, b in zip(before, pair.memory[0], strict=True))
    pair.links[0].close()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_regions_that_differ_do_not_connect(name):
    transport = make(name)
    one = transport.open([torch.zeros(4, 2)], BACKEND, accepts=True, host="127.0.0.1")
    two = transport.open([torch.zeros(4, 3)], BACKEND, accepts=False, host="127.0.0.1")
    with pytest.raises(ConfigError, match="need the same model, dtype, page size and proposer"):
        one.connect(two.offer())
    row = transport.open([torch.zeros(4, 2)], BACKEND, accepts=False, host="127.0.0.1", states=[torch.zeros(2, 3)])
    with pytest.raises(
        ConfigError, match=r"recurrent states of \[12\] bytes a row, this one \[\]: the engines need the same"
    ):
        one.connect(row.offer())
    for broken in (b"", b"[]", b"{", b'{"transport": "x"}', two.offer()[:-9] + b'"}', b"[" * 100_000):
        with pytest.raises(ConfigError):
            one.connect(broken)
    for link in (one, two, row):
        link.close()


def test_unknown_names_and_options():
    with pytest.raises(ConfigError, match="there is no transport 'pigeon'; expected one of"):
        get_transport("pigeon")
    with pytest.raises(ConfigError, match="'torch' has no option 'colour'"):
        get_transport("torch:colour=red")
