"""Probe: load plugins in a child process first, to find those that hang or end a process.

The child loads the plugins one by one and reports each start. If the child hangs or dies, the current plugin is the cause,
and another child continues with the following plugins. The probe caches harmless plugins until their files change. It
doesn't cache whether a plugin can run on this machine.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from outrider.registry.children import JsonLines, child_session, end_with_parent

LIMIT_S = 10.0
"""Time limit for loading one plugin and calling its describing hook, in seconds."""

_TRUSTED_DISTRIBUTION = "outrider"
_PROBE_VERSION = 4  # part of the cache key; increase it when the child reports more effects
_MAX_FINGERPRINT_FILES = 2000  # a package with more files has no fingerprint
_MAX_CACHE_ENTRIES = 500  # the cache drops the oldest entries
_CHILD_CODE = (
    "import sys, json, os; work = json.loads(sys.stdin.read()); sys.path[:] = work['path']; "
    "from outrider.registry.probing import load_in_child; load_in_child(work, os.environ)"
)


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """The result of loading a plugin in a child process: what it changed there, and why it is unsafe to load."""

    harm: str = ""
    """The reason why the plugin can't be loaded safely; empty if it can."""
    changes: tuple[str, ...] = ()
    """Descriptions of the global process state that loading the plugin changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginProbe:
    """The check of plugins in child processes. An object keeps its verdicts; a directory caches them between processes."""

    limit_s: float = LIMIT_S
    """Time limit for each plugin, in seconds."""
    cache: Path | None = None
    """The directory of the cache; None: no cache."""
    _verdicts: dict[EntryPoint, ProbeVerdict] = field(default_factory=dict, init=False, repr=False, compare=False)

    def verdicts(self, plugins: Sequence[EntryPoint], describe: str) -> dict[EntryPoint, ProbeVerdict]:
        """Return a verdict for each plugin. ``describe``: the name of the describing hook.

        Plugins of Outrider's distribution, and plugins whose module is already imported, count as harmless.
        """
        verdicts = self._verdicts
        unknown = [plugin for plugin in plugins if plugin not in verdicts]
        cached = self.cached_changes() if unknown else {}
        keys: dict[EntryPoint, str | None] = {}
        for plugin in unknown:
            if _is_trusted(plugin):
                verdicts[plugin] = ProbeVerdict()
                continue
            keys[plugin] = key = fingerprint(plugin)
            if key is not None and key in cached:
                verdicts[plugin] = ProbeVerdict(changes=cached[key])
        probed = in_child([plugin for plugin in plugins if plugin not in verdicts], describe, limit_s=self.limit_s)
        harmless = {key: verdict.changes for plugin, verdict in probed.items() if (key := keys[plugin]) and not verdict.harm}
        if harmless:
            self.add_to_cache(harmless)
        verdicts.update(probed)
        return {plugin: verdicts[plugin] for plugin in plugins}

    def cached_changes(self) -> dict[str, tuple[str, ...]]:
        """Return the changes of global process state for each cached harmless plugin, by :func:`fingerprint`."""
        if self.cache is None:
            return {}
        try:
            data = json.loads((self.cache / "plugins.json").read_text(encoding="utf-8"))
            return {str(key): tuple(map(str, changes)) for key, changes in data.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}  # a missing or invalid cache is written again

    def add_to_cache(self, harmless: Mapping[str, tuple[str, ...]]) -> None:
        """Add harmless plugins to the cache file, in the form of :meth:`cached_changes`."""
        if self.cache is None:
            return
        entries = {**self.cached_changes(), **harmless}
        with suppress(OSError):  # without a cache the next process probes again
            self.cache.mkdir(parents=True, exist_ok=True)
            temporary = self.cache / f"plugins.json.{os.getpid()}"
            temporary.write_text(json.dumps(dict(list(entries.items())[-_MAX_CACHE_ENTRIES:])), encoding="utf-8")
            temporary.replace(self.cache / "plugins.json")


def fingerprint(plugin: EntryPoint) -> str | None:
    """Return a cache key that changes with the plugin's version and files, with torch, Outrider and Python.

    Returns None if the plugin's package can't be found or has too many files. Imports nothing.
    """
    top = plugin.value.partition(":")[0].partition(".")[0].strip()
    try:
        spec = importlib.machinery.PathFinder.find_spec(top)
    except (ImportError, ValueError, OSError):
        return None
    if spec is None:
        return None
    files: list[Path] = []
    for directory in spec.submodule_search_locations or ():
        for path in Path(directory).rglob("*"):
            if path.suffix in (".py", ".so", ".pyd"):
                files.append(path)
            if len(files) > _MAX_FINGERPRINT_FILES:
                return None
    if spec.origin is not None:
        files.append(Path(spec.origin))
    if not files:
        return None
    try:
        stats = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(files)]
    except OSError:
        return None
    version = plugin.dist.version if plugin.dist is not None else ""
    identity = (
        plugin.group,
        plugin.name,
        plugin.value,
        version,
        _version("torch"),
        _version("outrider"),
        sys.version,
        stats,
        _PROBE_VERSION,
    )
    return hashlib.sha256(repr(identity).encode("utf-8", "surrogateescape")).hexdigest()


def in_child(plugins: Sequence[EntryPoint], describe: str, *, limit_s: float) -> dict[EntryPoint, ProbeVerdict]:
    """Return a verdict for each plugin after loading it in a child process. A plugin that ends the child costs a new one."""
    verdicts: dict[EntryPoint, ProbeVerdict] = {}
    remaining = list(plugins)
    while remaining:
        next_verdicts = _run_child(remaining, describe, limit_s)
        verdicts |= zip(remaining, next_verdicts, strict=False)
        remaining = remaining[len(next_verdicts) :]
    return verdicts


def _run_child(plugins: Sequence[EntryPoint], describe: str, limit_s: float) -> list[ProbeVerdict]:
    """Return the verdicts of one child process, in order, up to the plugin that ended it. The list is never empty."""
    entry_points = [{"name": p.name, "value": p.value, "group": p.group, "describe": describe} for p in plugins]
    work = json.dumps({"path": [str(Path(entry).absolute()) for entry in sys.path], "plugins": entry_points})
    verdicts: list[ProbeVerdict] = []
    try:
        with child_session(
            [sys.executable, "-c", _CHILD_CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            with suppress(BrokenPipeError):
                child.stdin.write(work.encode())
                child.stdin.close()
            lines = JsonLines(child.stdout.fileno())
            while True:
                line = lines.read_line(limit_s)
                if line is None:
                    return [*verdicts, ProbeVerdict(harm=f"it wasn't loaded within {limit_s:g} s")]
                if not line:
                    return [*verdicts, ProbeVerdict(harm=_describe_exit(child.wait()))]
                if "end" in line:
                    verdicts.append(ProbeVerdict(changes=tuple(line["changes"])))
                if "done" in line:
                    return verdicts
    except OSError as error:
        harm = f"no child process could be started to try it in: {error.strerror or error}"
        return [*verdicts, *[ProbeVerdict(harm=harm)] * (len(plugins) - len(verdicts))]


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"loading it ends the process with exit code {code}"
    with suppress(ValueError):
        return f"loading it ends the process with {signal.Signals(-code).name}"
    return f"loading it ends the process with signal {-code}"


def _is_trusted(plugin: EntryPoint) -> bool:
    module = plugin.value.partition(":")[0].strip()
    return module in sys.modules or (plugin.dist is not None and plugin.dist.name == _TRUSTED_DISTRIBUTION)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except Exception:  # missing and unreadable distributions count alike
        return ""


def load_in_child(work: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Load the plugins of ``work`` and report each one's effects on this process.

    ``work["plugins"]`` has one mapping for each plugin with its ``name``, ``value``, ``group`` and ``describe``, the hook to
    call. ``environment`` is ``os.environ``. The child writes JSON lines to standard output: ``{"begin": i}`` before plugin
    i, ``{"end": i, "changes": [...]}`` after it, and finally ``{"done": true}``. Output of the plugins is discarded.
    """
    end_with_parent()
    report = os.dup(1)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 1)  # the size of the file says whether a plugin prints
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def write_line(**line: object) -> None:
        os.write(report, (json.dumps(line) + "\n").encode())

    torch_as_imported = _TorchAsImported()
    sys.meta_path.insert(0, torch_as_imported)
    for index, plugin in enumerate(work["plugins"]):
        write_line(begin=index)
        before = {**process_state(), **_effects(environment)}
        with suppress(BaseException):  # the parent loads the plugin again and reports the error
            _load(plugin)
        after = {**process_state(), **_effects(environment)}
        # If this plugin imports torch, compare with torch's state right after the import.
        write_line(end=index, changes=changed_state({**torch_as_imported.state, **before}, after))
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


def process_state() -> dict[str, object]:
    """Return the global state that no plugin may change, by its description, including torch's if torch is imported."""
    torch = sys.modules.get("torch")
    return {
        "the working directory": os.getcwd(),
        "signal handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "the recursion limit": sys.getrecursionlimit(),
        "the arithmetic of denormal numbers": sys.float_info.min / 2 > 0,
        **(_torch_state(torch) if torch is not None else {}),
    }


def _effects(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the state that a plugin may change when it opens a device, but not when it is loaded.

    The import path isn't part of the state, because the parent process sets it.
    """
    with suppress(Exception):  # a plugin may close or replace sys.stdout
        sys.stdout.flush()
    return {
        "the environment": dict(environment),
        "running threads": threading.active_count(),
        "standard output (it prints)": os.fstat(1).st_size,
    }


def changed_state(before: Mapping[str, object], after: Mapping[str, object]) -> Sequence[str]:
    """Return the descriptions of the parts of :func:`process_state` that differ."""
    return [name for name, value in before.items() if name in after and after[name] != value]


def _torch_state(torch: Any) -> dict[str, object]:
    return {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "torch's number of threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's precision of float32 products": torch.get_float32_matmul_precision(),
        "torch's gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch's random state": bytes(torch.get_rng_state().numpy()),
    }
