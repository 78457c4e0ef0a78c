"""The child process of :mod:`outrider.registry.probing`: loads plugins one after another and reports its progress."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from types import ModuleType
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

    torch_as_imported = _TorchAsImported()
    sys.meta_path.insert(0, torch_as_imported)
    for index, plugin in enumerate(work["plugins"]):
        say(begin=index)
        before = _state(environment)
        with suppress(BaseException):  # the parent meets it again, behind its guard
            _load(plugin)
        after = _state(environment)
        # The first plugin that imports torch is held against torch as it was right after its import.
        say(end=index, changes=_changes({**torch_as_imported.state, **before}, after))
    say(done=True)
    os._exit(0)


def _load(plugin: Mapping[str, str]) -> None:
    """Load one plugin and let it describe itself, as the parent will."""
    manager = pluggy.PluginManager("outrider")
    loaded = EntryPoint(plugin["name"], plugin["value"], plugin["group"]).load()
    if manager.parse_hookimpl_opts(loaded, plugin["describe"]) is not None:
        getattr(loaded, plugin["describe"])()


class _TorchAsImported(MetaPathFinder):
    """Notes torch's global state right after torch was imported, whoever imports it."""

    def __init__(self) -> None:
        self.state: Mapping[str, object] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that takes the note."""
        del path, target
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def noting(module: ModuleType) -> None:
            load(module)
            self.state = _torch_state(module)

        spec.loader.exec_module = noting  # type: ignore[method-assign]
        return spec


def _state(environment: Mapping[str, str]) -> dict[str, object]:
    """Global state that a plugin must not change. The import path isn't among it: the parent sets it. torch's is only there
    once torch is imported.
    """
    torch = sys.modules.get("torch")
    return {
        "the environment": dict(environment),
        "the working directory": os.getcwd(),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "the recursion limit": sys.getrecursionlimit(),
        "running threads": threading.active_count(),
        **(_torch_state(torch) if torch is not None else {}),
    }


def _torch_state(torch: Any) -> dict[str, object]:
    return {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "torch's number of threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's precision of float32 products": torch.get_float32_matmul_precision(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's seed": torch.initial_seed(),
    }


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> Sequence[str]:
    return [what for what, value in before.items() if what in after and after[what] != value]
