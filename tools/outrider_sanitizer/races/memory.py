"""Faults in memory that is shared by address, reused after its release or indexed by data, and faults of the host.

The faults of the host lie between the host and the device, and between host threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from outrider.device import Backend, CapabilityError, CaptureContext, Stream
from outrider_sanitizer.races.race import Race, expect, expect_values, filled, order, race
from outrider_sanitizer.report import FindingKind

RACES: list[Race] = []
_WRITERS_NAMED = ("record an event on 'first'", "make 'second' wait")


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=("make 'draft' wait",), visible=False)
def graphs_that_share_a_pool(backend: Backend, fixed: bool, forward: Stream, draft: Stream) -> None:
    """Temporaries of two graphs lie at one address, and nothing orders the replays.

    Two graphs take their temporaries from one pool, so these lie at one address; their replays must not overlap.
    """
    pool = backend.create_graph_pool("steps")

    def body(context: CaptureContext) -> None:
        between = context.inputs["x"] * 2.0
        context.outputs["y"].copy_(between + 1.0)

    made = []
    for stream, name, value in ((forward, "verify", 1.0), (draft, "propose", 5.0)):
        x, y = filled(backend, stream, value), filled(backend, stream, 0.0)
        backend.synchronize()
        # Captured on one stream, as pools are: a free block is that of a stream.
        graph = backend.capture(name, body, stream=forward, inputs={"x": x}, outputs={"y": y}, pool=pool)
        made.append((graph, y))
    backend.synchronize()
    made[0][0].replay(forward)
    if fixed:
        order(forward, draft)
    made[1][0].replay(draft)
    backend.synchronize()
    expect(backend, made[0][1], 3.0)
    expect(backend, made[1][1], 11.0)


@race(RACES, FindingKind.REUSE, names=("after aten::mul",))
def record_stream(backend: Backend, fixed: bool, forward: Stream, copy: Stream) -> None:
    """A tensor is freed while another stream reads it, and the allocator wasn't told.

    In the corrected program, `record_stream` makes the allocator wait for the reading stream.
    """
    x = filled(backend, forward, 7.0)
    order(forward, copy)
    recorded = fixed and backend.device.type != "cpu"  # there are no streams of torch on the host
    if recorded:
        x.record_stream(copy.native)
    with backend.on(copy):
        y = x * 1.0  # after the call: what counts is what the stream holds when the tensor is freed
    if fixed and not recorded:
        done = backend.create_event("copied")
        copy.record(done)
        backend.keep_alive([x], until=done)
    del x
    other = filled(backend, forward, 1.0)
    expect(backend, y, 7.0)
    del other


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("order host thread pinner",), visible=False)
def pin_memory(backend: Backend, fixed: bool, copy: Stream) -> None:
    """A buffer that another thread pinned is sent without waiting for that thread.

    `Tensor.pin_memory()` writes the buffer that it returns, on the thread that called it.
    """
    x = filled(backend, copy, 0.0)
    made: list[torch.Tensor] = []

    def pin() -> None:
        value = torch.full((4,), 3.0)
        made.append(value if backend.device.type == "cpu" else value.pin_memory())  # the host pins nothing for itself

    thread = threading.Thread(target=pin, name="pinner")
    thread.start()
    if fixed:
        thread.join()
    while not made and thread.is_alive():
        time.sleep(0)
    if not made:
        raise CapabilityError("torch pins no memory here: it knows no accelerator")
    backend.copy_async(x, made[0], stream=copy)
    copy.synchronize()
    thread.join()
    expect(backend, x, 3.0)


def _index(backend: Backend, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=backend.device)


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=_WRITERS_NAMED)
def indexed_columns(backend: Backend, fixed: bool) -> None:
    """Two streams write columns selected by an index, and the columns overlap."""
    mine, theirs = _index(backend, 0, 1), _index(backend, *((2, 3) if fixed else (1, 3)))
    ones, twos = torch.ones(4, 2, device=backend.device), torch.full((4, 2), 2.0, device=backend.device)
    _two_writers(
        backend, (slice(None), 1), fixed, lambda x: x.index_copy_(1, mine, ones), lambda x: x.index_copy_(1, theirs, twos)
    )


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=_WRITERS_NAMED)
def indexed_elements(backend: Backend, fixed: bool) -> None:
    """Two streams write elements selected by two indices, and the elements overlap."""
    rows = _index(backend, 0, 1, 2, 3)
    mine, theirs = _index(backend, 0, 0, 0, 0), _index(backend, *((1, 1, 1, 1) if fixed else (1, 1, 0, 1)))
    one = torch.ones((), device=backend.device)
    _two_writers(
        backend, (2, 0), fixed, lambda x: x.index_put_((rows, mine), one), lambda x: x.index_put_((rows, theirs), one * 2)
    )


def _two_writers(backend: Backend, place: object, fixed: bool, *bodies: object) -> None:
    """Run two bodies on two streams: the first writes 1, the second 2.

    In the wrong program both write the elements at `place`, where the second value should remain.
    """
    first, second = backend.create_stream("first"), backend.create_stream("second")
    x = torch.zeros(4, 4, device=backend.device)
    backend.synchronize()
    for stream, body in zip((first, second), bodies, strict=True):
        with backend.on(stream):
            body(x)  # type: ignore[operator]
    backend.synchronize()
    expect(backend, x[place], 1.0 if fixed else 2.0)  # type: ignore[index]


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=_WRITERS_NAMED)
def scatters_along_rows(backend: Backend, fixed: bool) -> None:
    """Two streams scatter into the same elements of the same rows."""
    mine = torch.zeros(4, 1, dtype=torch.int64, device=backend.device)
    theirs = torch.full((4, 1), 2 if fixed else 0, dtype=torch.int64, device=backend.device)
    _two_writers(backend, (slice(None), 0), fixed, lambda x: x.scatter_(1, mine, 1.0), lambda x: x.scatter_(1, theirs, 2.0))


@race(RACES, FindingKind.WRITE_AFTER_WRITE, names=_WRITERS_NAMED)
def masks(backend: Backend, fixed: bool) -> None:
    """Two streams fill the elements of two masks, and the masks overlap."""
    mine = torch.tensor([True, False, False, False], device=backend.device).expand(4, 4)
    theirs = torch.tensor([not fixed, True, False, False], device=backend.device).expand(4, 4)
    _two_writers(backend, (slice(None), 0), fixed, lambda x: x.masked_fill_(mine, 1.0), lambda x: x.masked_fill_(theirs, 2.0))


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("record an event on 'forward'", "make 'reduce' wait"), visible=False)
def gradient_across_streams(backend: Backend, fixed: bool, forward: Stream, reduce: Stream) -> None:
    """A gradient is read before the backward pass has written it.

    The gradient is read on another stream than the one on which the backward pass ran.
    """
    with backend.on(forward):
        weight = torch.ones(4, device=backend.device, requires_grad=True)
        loss = (weight * 3.0).sum()
        loss.backward()
    if fixed:
        order(forward, reduce)
    with backend.on(reduce):
        assert weight.grad is not None
        seen = weight.grad * 1.0
    expect(backend, seen, 3.0)


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("record an event on 'copy'", "synchronize host thread"))
def host_read_early(backend: Backend, fixed: bool, copy: Stream) -> None:
    """The host reads pinned memory before the copy into it is complete.

    The host reads a result before its copy has arrived.
    """
    landed = backend.create_event("results_copied")
    results = backend.empty_pinned("results", (4,), torch.float32)
    results.tensor.zero_()
    x = filled(backend, copy, 7.0)
    backend.copy_async(results.tensor, x, stream=copy)
    copy.record(landed)
    if fixed:
        landed.synchronize()
    expect_values(results.tensor.tolist(), 7.0)


@race(RACES, FindingKind.WRITE_AFTER_READ, names=("record an event on 'schedule'", "synchronize host thread"))
def pinned_overwritten(backend: Backend, fixed: bool, schedule: Stream) -> None:
    """The host overwrites pinned memory that a copy still reads.

    The host fills its staging buffer again while a copy reads the buffer.
    """
    free = backend.create_event("staging_free")
    staging = backend.empty_pinned("staging", (4,), torch.float32)
    x = filled(backend, schedule, 0.0)
    staging.tensor.fill_(1.0)
    backend.copy_async(x, staging.tensor, stream=schedule)
    schedule.record(free)
    if fixed:
        free.synchronize()
    staging.tensor.fill_(2.0)
    expect(backend, x, 1.0)


@race(RACES, FindingKind.STALE, names=("pinned buffer 'results'",), visible=False)
def pinned_renewed(backend: Backend, fixed: bool, copy: Stream) -> None:
    """A pinned buffer is read after its renewal and before the host has filled it again."""
    results = backend.empty_pinned("results", (4,), torch.float32)
    x = filled(backend, copy, 7.0)
    backend.copy_async(results.tensor, x, stream=copy)
    copy.synchronize()
    results.renew()
    if fixed:
        backend.copy_async(results.tensor, x, stream=copy)
        copy.synchronize()
    expect_values(results.tensor.tolist(), 7.0)


@race(RACES, FindingKind.STALE_MIRROR, names=("copy the value again after aten::add_",))
def stale_mirror(backend: Backend, fixed: bool, forward: Stream) -> None:
    """The host's copy of a value is older than the device's.

    The host plans with lengths that verification has changed since.
    """
    mirror = backend.empty_pinned("lengths", (4,), torch.float32)
    lengths = filled(backend, forward, 1.0)
    backend.mark_mirror(mirror.tensor, lengths)
    backend.copy_async(mirror.tensor, lengths, stream=forward)
    with backend.on(forward):
        lengths.add_(2.0)
    if fixed:
        backend.copy_async(mirror.tensor, lengths, stream=forward)
    forward.synchronize()
    expect_values(mirror.tensor.tolist(), 3.0)


@race(RACES, FindingKind.WRITE_AFTER_READ, names=("order host thread", "hand over"))
def beside_another_thread(backend: Backend, fixed: bool, copy: Stream) -> None:
    """A host thread writes pinned memory for whose copy only another thread has waited.

    One thread sends a buffer and waits for the copy; another thread fills the buffer without waiting.
    """
    landed = backend.create_event("staging_free")
    staging = backend.empty_pinned("staging", (4,), torch.float32)
    x = filled(backend, copy, 0.0)
    staging.tensor.fill_(1.0)

    def sender() -> None:
        backend.copy_async(x, staging.tensor, stream=copy)
        copy.record(landed)
        landed.synchronize()

    def filler() -> None:
        staging.tensor.fill_(2.0)

    if fixed:
        _run_threads(backend, sender)
        _run_threads(backend, filler)
    else:
        _run_threads(backend, sender, filler)
    expect(backend, x, 1.0)


def _run_threads(backend: Backend, *bodies: Callable[[], None]) -> None:
    if backend.control is not None:
        backend.control.run_threads(*bodies)
        return
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@race(RACES, within=10)
def branch_on_query(backend: Backend, fixed: bool, forward: Stream, copy: Stream) -> None:
    """The host's next operation depends on how far the device happens to be.

    The host takes another branch if the result isn't ready, and the branch gives another answer.
    """
    landed = backend.create_event("results_copied")
    results = backend.empty_pinned("results", (4,), torch.float32)
    x = filled(backend, forward, 7.0)
    order(forward, copy)
    backend.copy_async(results.tensor, x, stream=copy)
    copy.record(landed)
    if fixed:
        landed.synchronize()
    value = results.tensor.tolist() if landed.query() else [0.0]
    backend.synchronize()
    expect_values(value, 7.0)


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("record an event on 'side'", "make 'default' wait"))
def thread_on_the_default_stream(backend: Backend, fixed: bool, side: Stream) -> None:
    """A new thread begins on the default stream, whichever stream was current where it started.

    A thread started inside a stream scope works on the default stream, not on the scope's.
    """
    with backend.on(side):
        x = torch.zeros(4, device=backend.device)
        backend.synchronize()
        x.fill_(7.0)
        seen: list[torch.Tensor] = []

        def use() -> None:
            if fixed:
                with backend.on(side):
                    seen.append(x * 1.0)
            else:
                seen.append(x * 1.0)

        thread = threading.Thread(target=use, name="user")
        thread.start()
        thread.join()
    expect(backend, seen[0], 7.0)


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("record an event on 'copy'",))
def loop_over_query(backend: Backend, fixed: bool, copy: Stream) -> None:
    """The host reads a result without a successful query.

    The corrected host polls until the copy is complete; the wrong one queries once and reads the result anyway.
    """
    landed = backend.create_event("results_copied")
    results = backend.empty_pinned("results", (4,), torch.float32)
    results.tensor.zero_()
    x = filled(backend, copy, 7.0)
    backend.copy_async(results.tensor, x, stream=copy)
    if fixed:
        copy.record(landed)
        while not landed.query():
            pass
    expect_values(results.tensor.tolist(), 7.0)
    backend.synchronize()
