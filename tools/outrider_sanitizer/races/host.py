"""Faults between the host and the device, and between host threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from outrider.device import Backend
from outrider_sanitizer.races.race import Race, expect, expect_values, filled, order, race
from outrider_sanitizer.report.findings import FindingKind

RACES: list[Race] = []


@race(RACES, FindingKind.READ_AFTER_WRITE, names=("record an event on 'copy'", "synchronize host thread"))
def host_read_early(backend: Backend, fixed: bool) -> None:
    """The host reads pinned memory before the copy into it is complete.

    The host reads a result before its copy has arrived.
    """
    copy = backend.create_stream("copy")
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
def pinned_overwritten(backend: Backend, fixed: bool) -> None:
    """The host overwrites pinned memory that a copy still reads.

    The host fills its staging buffer again while a copy reads the buffer.
    """
    schedule = backend.create_stream("schedule")
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
def pinned_renewed(backend: Backend, fixed: bool) -> None:
    """A pinned buffer is read after its renewal and before the host has filled it again."""
    copy = backend.create_stream("copy")
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
def stale_mirror(backend: Backend, fixed: bool) -> None:
    """The host's copy of a value is older than the device's.

    The host plans with lengths that verification has changed since.
    """
    forward = backend.create_stream("forward")
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
def beside_another_thread(backend: Backend, fixed: bool) -> None:
    """A host thread writes pinned memory for whose copy only another thread has waited.

    One thread sends a buffer and waits for the copy; another thread fills the buffer without waiting.
    """
    copy = backend.create_stream("copy")
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
def branch_on_query(backend: Backend, fixed: bool) -> None:
    """The host's next operation depends on how far the device happens to be.

    The host takes another branch if the result isn't ready, and the branch gives another answer.
    """
    forward, copy = backend.create_stream("forward"), backend.create_stream("copy")
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
def thread_on_the_default_stream(backend: Backend, fixed: bool) -> None:
    """A new thread begins on the default stream, whichever stream was current where it started.

    A thread started inside a stream scope works on the default stream, not on the scope's.
    """
    side = backend.create_stream("side")
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
def loop_over_query(backend: Backend, fixed: bool) -> None:
    """The host reads a result without a successful query.

    The corrected host polls until the copy is complete; the wrong one queries once and reads the result anyway.
    """
    copy = backend.create_stream("copy")
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
