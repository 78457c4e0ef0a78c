"""Pinned memory from torch's factories on the simulated device, only for tests that ask for it.

The simulated device replaces the kernels of ``torch.empty`` on the host by functions in Python. Each operator that allocates
its result calls them, also where no device is used: 12 microseconds each, several times the time of the operator.
"""

from __future__ import annotations

import sys
from typing import Any

TESTS_WITH_FACTORIES = ("tests/docs/", "tests/foreign/", "tests/races/", "tests/sanitizer/", "tests/sim/")
_replaced: list[Any] = []
"""The library of the replaced kernels, or None while torch's own are in use; empty before the first registration."""


def select_factories(nodeid: str) -> None:
    """Replace torch's kernels for a test that may pin memory by a factory, and put them back for other tests."""
    module = sys.modules.get("outrider_sim.torch_device.torch_registration")
    current = None if module is None else module.TorchRegistration.current
    if module is None or current is None:
        return
    if not _replaced:
        _replaced.append(current._kept[-1])
    if nodeid.startswith(TESTS_WITH_FACTORIES):
        _replaced[0] = _replaced[0] or module._pinned_factories(current.dispatcher)
    elif _replaced[0] is not None:
        _replaced[0]._destroy()
        _replaced[0] = None
