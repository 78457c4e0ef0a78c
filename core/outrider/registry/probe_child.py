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
    """Load the plugins of ``work`` and report each one's effects on this process.

    ``work["plugins"]`` has one mapping for each plugin with its ``name``, ``value``, ``group`` and ``describe``, the hook to
    call. ``environment`` is ``os.environ``. The child writes JSON lines to standard output: ``{"begin": i}`` before plugin
    i, ``{"end": i, "changes": [...]}`` after it, and finally ``{"done": true}``. Output of the plugins is discarded.
    """
    end_with_parent()
    report = os.dup(1)
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.dup2(null_device, 2)

    def write_line(**line: object) -> None:
        os.write(report, (json.dumps(line) + "\n").encode())

    torch_as_imported = _TorchAsImported()
    sys.meta_path.insert(0, torch_as_imported)
    for index, plugin in enumerate(work["plugins"]):
        write_line(begin=index)
        before = _state(environment)
        with suppress(BaseException):  # the parent loads the plugin again and reports the error
            _load(plugin)
        after = _state(environment)
        # If this plugin imports torch, compare with torch's state right after the import.
        write_line(end=index, changes=_changes({**torch_as_imported.state, **before}, after))
    write_line(done=True)
    os._exit(0)


def _load(plugin: Mapping[str, str]) -> None:
    """Import one plugin and call its describing hook, as the parent process does later."""
    manager = pluggy.PluginManager("outrider")
    loaded = EntryPoint(plugin["name"], plugin["value"], plugin["group"]).load()
    if manager.parse_hookimpl_opts(loaded, plugin["describe"]) is not None:
        getattr(loaded, plugin["describe"])()


class _TorchAsImported(MetaPathFinder):
    """An import hook that records torch's global state right after the first import of torch."""

    def __init__(self) -> None:
        self.state: Mapping[str, object] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return torch's usual spec with a loader that records the state; None for every other module."""
        del path, target
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_and_record(module: ModuleType) -> None:
            exec_module(module)
            self.state = _torch_state(module)

        spec.loader.exec_module = exec_and_record  # type: ignore[method-assign]
        return spec


def _state(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the global state that a plugin must not change, including torch's if torch is imported.

    The import path isn't part of the state, because the parent process sets it.
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
    return [name for name, value in before.items() if name in after and after[name] != value]
