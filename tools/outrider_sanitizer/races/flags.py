"""Faults with resettable flags."""

from __future__ import annotations

from outrider.device import Backend, DeadlockError
from outrider_sanitizer.races.race import Race, WrongValue, expect, filled, order, race
from outrider_sanitizer.report.findings import FindingKind

RACES: list[Race] = []


@race(RACES, FindingKind.FLAG_LOST, names=("flag 'bound'",), needs="flags")
def flag_set_twice(backend: Backend, fixed: bool) -> None:
    """A second set of a flag before its reset is lost.

    The set of the second round comes before the reset of the first round, so the second wait is never released.
    """
    update, forward = backend.create_stream("update"), backend.create_stream("forward")
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
    _expect(backend, x, 2.0)


@race(RACES, FindingKind.FLAG_NEVER_SET, names=("flag 'bound'", "'forward' hangs"), needs="flags")
def flag_never_set(backend: Backend, fixed: bool) -> None:
    """A flag that is waited for and never set.

    A wait for a flag that is never set hangs its stream.
    """
    update, forward = backend.create_stream("update"), backend.create_stream("forward")
    flag = backend.create_flag("bound")
    flag.wait(forward)
    if fixed:
        flag.set(update)
    x = filled(backend, forward, 1.0)
    _expect(backend, x, 1.0)


@race(RACES, FindingKind.FLAG_LOST, names=("make 'update' wait",), needs="flags")
def reset_beside_the_next_set(backend: Backend, fixed: bool) -> None:
    """A reset may remove the set of the next round.

    The next round's set isn't ordered after this round's reset, which may then remove it.
    """
    update, forward = backend.create_stream("update"), backend.create_stream("forward")
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
    _expect(backend, x, 1.0)


def _expect(backend: Backend, x: object, value: float) -> None:
    try:
        expect(backend, x, value)  # type: ignore[arg-type]
    except DeadlockError as error:
        raise WrongValue(f"the device hangs: {error}") from None
