"""The child process of :mod:`outrider.registry.probing`: loads plugins one after another and reports its progress."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from outrider.registry.children import end_with_parent


def main(work: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """``work``: ``plugins``, each with ``name``, ``value``, ``group`` and ``describe``, the hook to call. ``environment``:
    the process's own, as it is at any time.

    Standard output gets lines of JSON: ``{"begin": i}`` before plugin i, ``{"end": i, "changes": [...]}`` after it, and
    ``{"done": true}``. What plugins print goes nowhere.
    """
    end_with_parent()
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def say(**line: object) -> None:
        os.write(report, (json.dumps(line) + "\n").encode())

    for index, plugin in enumerate(work["plugins"]):
        say(begin=index)
        before = _state(environment)
        with suppress(BaseException):  # the parent meets it again, behind its guard
            _load(plugin)
        say(end=index, changes=_changes(before, _state(environment)))
    say(done=True)
    os._exit(0)


def _load(plugin: Mapping[str, str]) -> None:
    """Load one plugin and let it describe itself, as the parent will."""
    manager = pluggy.PluginManager("outrider")
    loaded = EntryPoint(plugin["name"], plugin["value"], plugin["group"]).load()
    if manager.parse_hookimpl_opts(loaded, plugin["describe"]) is not None:
        getattr(loaded, plugin["describe"])()


def _state(environment: Mapping[str, str]) -> dict[str, object]:
    """Global state that a plugin must not change. The import path isn't among it: the parent sets it."""
    torch = sys.modules.get("torch")
    return {
        "the environment": dict(environment),
        "the working directory": os.getcwd(),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "torch's default dtype": str(torch.get_default_dtype()) if torch else "torch.float32",
        "torch's number of threads": torch.get_num_threads() if torch else None,
    }


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> Sequence[str]:
    # Not known before torch was there: importing torch changes nothing that counts.
    return [what for what, value in before.items() if value is not None and after[what] != value]
