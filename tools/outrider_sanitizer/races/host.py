"""Faults between the host and the device, and between host threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from outrider.device import Backend
from outrider_sanitizer.findings import Kind
from outrider_sanitizer.races.program import Race, WrongValue, expect, filled, order


def _check(seen: list[float], *values: float) -> None:
    if any(value not in values for value in seen):
        raise WrongValue(f"expected {' or '.join(map(str, values))}, found {seen}")


def host_read_early(backend: Backend, fixed: bool) -> None:
    """The host reads a result before its copy has landed."""
    copy = backend.create_stream("copy")
    landed = backend.create_event("results_copied")
    results = backend.empty_pinned("results", (4,), torch.float32)
    results.tensor.zero_()
    x = filled(backend, copy, 7.0)
    backend.copy_async(results.tensor, x, stream=copy)
    copy.record(landed)
    if fixed:
        landed.synchronize()
    _check(results.tensor.tolist(), 7.0)


def pinned_overwritten(backend: Backend, fixed: bool) -> None:
    """The host fills its staging buffer again while the copy out of it is under way."""
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


def pinned_renewed(backend: Backend, fixed: bool) -> None:
    """A buffer that was renewed is read before it's filled again."""
    copy = backend.create_stream("copy")
    results = backend.empty_pinned("results", (4,), torch.float32)
    x = filled(backend, copy, 7.0)
    backend.copy_async(results.tensor, x, stream=copy)
    copy.synchronize()
    results.renew()
    if fixed:
        backend.copy_async(results.tensor, x, stream=copy)
        copy.synchronize()
    _check(results.tensor.tolist(), 7.0)


def stale_mirror(backend: Backend, fixed: bool) -> None:
    """The host plans with lengths that the verify has changed since."""
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
    _check(mirror.tensor.tolist(), 3.0)


def beside_another_thread(backend: Backend, fixed: bool) -> None:
    """One thread sends a buffer and waits; another, which doesn't wait, fills it."""
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


def branch_on_query(backend: Backend, fixed: bool) -> None:
    """The host takes a shortcut when the result isn't there yet, and the shortcut gives another answer."""
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
    _check(value, 7.0)


RACES = (
    Race(
        name="host-read-early",
        about="The host reads pinned memory before the copy into it is over.",
        body=host_read_early,
        kind=Kind.READ_AFTER_WRITE,
        names=("record an event on 'copy'", "synchronize host thread"),
    ),
    Race(
        name="pinned-overwritten",
        about="The host overwrites pinned memory that a copy still reads.",
        body=pinned_overwritten,
        kind=Kind.WRITE_AFTER_READ,
        names=("record an event on 'schedule'", "synchronize host thread"),
    ),
    Race(
        name="pinned-renewed",
        about="A pinned buffer is read after it was renewed and before it was filled.",
        body=pinned_renewed,
        kind=Kind.STALE,
        names=("pinned buffer 'results'",),
        visible=False,
    ),
    Race(
        name="stale-mirror",
        about="The host's copy of a value is behind the device's.",
        body=stale_mirror,
        kind=Kind.STALE_MIRROR,
        names=("copy the value again after aten::add_",),
    ),
    Race(
        name="beside-another-thread",
        about="A host thread touches pinned memory that only another thread has waited for.",
        body=beside_another_thread,
        kind=Kind.WRITE_AFTER_READ,
        names=("synchronize host thread",),
    ),
    Race(
        name="branch-on-query",
        about="What the host does depends on how far the device happens to be.",
        body=branch_on_query,
        within=10,
    ),
)
