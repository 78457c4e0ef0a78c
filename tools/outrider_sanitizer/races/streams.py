"""Faults between streams: missing, misplaced and insufficient waits, and resettable flags."""

from __future__ import annotations

import torch

from outrider.device import Backend, DeadlockError, Stream
from outrider_sanitizer.races.race import Race, WrongValue, expect, filled, order, race
from outrider_sanitizer.report import FindingKind

RACES: list[Race] = []


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("record an event on 'forward' after aten::fill_", "make 'plan' wait"))
def read_after_write(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """A reader on another stream doesn't wait for the writer.

    Stream plan reads a tensor that stream forward writes.
    """
    x = filled(backend, forward, 1.0)
    order(forward, plan)
    with backend.on(forward):
        x.fill_(2.0)
    if fixed:
        order(forward, plan)
    with backend.on(plan):
        y = x * 1.0
    expect(backend, y, 2.0)


@race(RACES, FindingKind.WRITE_AFTER_READ, names=("record an event on 'plan' after aten::mul", "make 'forward' wait"))
def write_after_read(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """A writer doesn't wait for a reader on another stream.

    Stream forward overwrites a tensor that stream plan still reads.
    """
    x = filled(backend, forward, 1.0)
    order(forward, plan)
    with backend.on(plan):
        y = x * 1.0
    if fixed:
        order(plan, forward)
    with backend.on(forward):
        x.fill_(2.0)
    expect(backend, y, 1.0)


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=("record an event on 'forward' after aten::fill_", "make 'plan' wait"))
def write_after_write(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """Two streams write the same memory.

    The value of the later write should remain, but no edge orders the two writes.
    """
    x = filled(backend, forward, 0.0)
    order(forward, plan)
    with backend.on(forward):
        x.fill_(1.0)
    if fixed:
        order(forward, plan)
    with backend.on(plan):
        x.fill_(2.0)
    expect(backend, x, 2.0)


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("generation 1 of event 'draft_done'", "make 'plan' wait"))
def stale_generation(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """The wait came before the record for which it was meant.

    Stream plan waits before the event is recorded again, so it waits for the previous round's generation.
    """
    done = backend.create_event("draft_done")
    x = filled(backend, forward, 1.0)
    forward.record(done)
    if not fixed:
        plan.wait(done)
    with backend.on(forward):
        x.fill_(2.0)
    forward.record(done)
    if fixed:
        plan.wait(done)
    with backend.on(plan):
        y = x * 1.0
    expect(backend, y, 2.0)


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("generation 1 of event 'accept_ready'", "make 'plan' wait"))
def optional_wait(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """A wait is skipped when an optional tensor is absent.

    The wait depends on an optional tensor, but the memory that it protects is always read.
    """
    done = backend.create_event("accept_ready")
    lengths = filled(backend, forward, 1.0)
    order(forward, plan)
    for boundary in (filled(backend, forward, 0.0), None):
        with backend.on(forward):
            lengths.add_(1.0)
        forward.record(done)
        if fixed or boundary is not None:
            plan.wait(done)
        with backend.on(plan):
            planned = lengths * 1.0
        order(plan, forward)
    expect(backend, planned, 3.0)


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("event 'published'", "make 'schedule' wait"))
def covers_a_subset(backend: Backend, fixed: bool, forward: Stream, schedule: Stream) -> None:
    """A fence is recorded before the last write that its waiter reads.

    The event was recorded after the publish, and the reader also reads the later stash.
    """
    published, stashed = backend.create_event("published"), backend.create_event("stashed")
    lengths, stash = filled(backend, forward, 0.0), filled(backend, forward, 0.0)
    order(forward, schedule)
    with backend.on(forward):
        lengths.fill_(5.0)
    forward.record(published)
    with backend.on(forward):
        stash.fill_(5.0)
    forward.record(stashed)
    schedule.wait(stashed if fixed else published)
    with backend.on(schedule):
        both = lengths + stash
    expect(backend, both, 10.0)


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("make 'plan' wait",))
def cast_in_the_wrong_scope(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """An implicit kernel runs on the stream of the scope in which it is written.

    A cast is a kernel: inside plan's scope it reads forward's memory on stream plan, before plan has waited.
    """
    done = backend.create_event("draft_outputs_ready")
    x = filled(backend, forward, 1.0)
    order(forward, plan)
    with backend.on(forward):
        x.fill_(2.0)
        if fixed:
            positions = x.to(torch.int64)
    forward.record(done)
    with backend.on(plan):
        if not fixed:
            positions = x.to(torch.int64)
        plan.wait(done)
        y = positions + 0
    expect(backend, y, 2)


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=("record an event on 'forward'", "make 'plan' wait"))
def overlapping_views(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """Two views of one storage at different offsets share bytes.

    Two streams write the views; in the wrong program the views share a row.
    """
    base = filled(backend, forward, 0.0, 6, 2)
    order(forward, plan)
    with backend.on(forward):
        base[:3].fill_(1.0)
    with backend.on(plan):
        base[3 if fixed else 2 :].fill_(2.0)
    expect(backend, base[2], 1.0 if fixed else 2.0)


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=("record an event on 'forward'", "make 'plan' wait"))
def columns(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """Interleaved columns of one matrix are written by two streams, overlapping and not.

    Disjoint columns must give no alarm, although their byte intervals overlap.
    """
    base = filled(backend, forward, 0.0, 128, 4)
    order(forward, plan)
    with backend.on(forward):
        base[:, :2].fill_(1.0)
    with backend.on(plan):
        base[:, 2 if fixed else 1 :].fill_(2.0)
    expect(backend, base[:, 1], 1.0 if fixed else 2.0)


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=("index_copy_", "make 'plan' wait"))
def scatters(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """Two streams scatter rows into one pool by index, overlapping and not.

    Disjoint rows need no order; in the wrong program both write row 2.
    """
    pool = filled(backend, forward, 0.0, 8, 2)
    with backend.on(forward):
        ours = torch.arange(3, device=backend.device)
        theirs = ours + (3 if fixed else 2)
    order(forward, plan)
    with backend.on(forward):
        pool.index_copy_(0, ours, torch.full((3, 2), 1.0, device=backend.device))
    with backend.on(plan):
        pool.index_copy_(0, theirs, torch.full((3, 2), 2.0, device=backend.device))
    expect(backend, pool[2], 1.0 if fixed else 2.0)


@race(RACES, FindingKind.REUSE, names=("keep the tensor alive until an event recorded on 'plan'",))
def reuse_across_streams(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """Memory is freed in one stream's order while another stream uses it.

    Stream forward drops a tensor that stream plan still reads; forward's next tensor may get its memory.
    """
    read = backend.create_event("plan_read")
    index = filled(backend, forward, 1.0)
    order(forward, plan)
    with backend.on(plan):
        y = index * 1.0
    plan.record(read)
    if fixed:
        backend.keep_alive([index], until=read)
    del index
    other = filled(backend, forward, 9.0)
    expect(backend, y, 1.0)
    backend.release_finished()
    del other


@race(RACES, FindingKind.UNDEFINED, names=("allocated on 'forward'",))
def read_before_write(backend: Backend, fixed: bool, forward: Stream) -> None:
    """Newly allocated memory is read before any write.

    Its contents are those of the previous allocation at the address.
    """
    with backend.on(forward):
        x = torch.empty(4, device=backend.device)
        if fixed:
            x.zero_()
        y = x + 1.0
    expect(backend, y, 1.0)


@race(RACES, FindingKind.FLAG_LOST, names=("flag 'bound'",), needs="flags")
def flag_set_twice(backend: Backend, fixed: bool, update: Stream, forward: Stream) -> None:
    """A second set of a flag before its reset is lost.

    The set of the second round comes before the reset of the first round, so the second wait is never released.
    """
    flag = backend.create_flag("bound")
    x = filled(backend, forward, 0.0)
    order(forward, update)
    for step in range(2):
        with backend.on(update):
            x.fill_(float(step + 1))
        flag.set(update)
        if fixed:
            flag.wait(forward)
            flag.reset(forward)
            order(forward, update)
    if not fixed:
        for _ in range(2):
            flag.wait(forward)
            flag.reset(forward)
    _expect_without_hang(backend, x, 2.0)


@race(RACES, FindingKind.FLAG_NEVER_SET, names=("flag 'bound'", "'forward' hangs"), needs="flags")
def flag_never_set(backend: Backend, fixed: bool, update: Stream, forward: Stream) -> None:
    """A flag that is waited for and never set.

    A wait for a flag that is never set hangs its stream.
    """
    flag = backend.create_flag("bound")
    flag.wait(forward)
    if fixed:
        flag.set(update)
    x = filled(backend, forward, 1.0)
    _expect_without_hang(backend, x, 1.0)


@race(RACES, FindingKind.FLAG_LOST, names=("make 'update' wait",), needs="flags")
def reset_beside_the_next_set(backend: Backend, fixed: bool, update: Stream, forward: Stream) -> None:
    """A reset may remove the set of the next round.

    The next round's set isn't ordered after this round's reset, which may then remove it.
    """
    flag = backend.create_flag("bound")
    x = filled(backend, forward, 0.0)
    order(forward, update)
    for _ in range(2):
        flag.set(update)
        flag.wait(forward)
        flag.reset(forward)
        if fixed:
            order(forward, update)
    with backend.on(forward):
        x.fill_(1.0)
    _expect_without_hang(backend, x, 1.0)


def _expect_without_hang(backend: Backend, x: object, value: float) -> None:
    try:
        expect(backend, x, value)  # type: ignore[arg-type]
    except DeadlockError as error:
        raise WrongValue(f"the device hangs: {error}") from None
