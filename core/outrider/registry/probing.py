"""Finds out in a child process whether plugins can be loaded without harm to this one.

An import can hang, or end the process; no guard in the same process helps against that. The child loads the plugins one
after another and reports which one it loads. If it hangs or dies, that plugin is the cause, and another child goes on with
the rest. A plugin that loads without harm is remembered while its files stay the same. Whether a plugin can run here isn't
remembered: it's asked each time.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from outrider.registry.children import started

LIMIT_S = 10.0
"""Seconds that a plugin may take to be loaded and to describe itself."""

_TRUSTED = "outrider"
_NOTICED = 2  # counts what is noticed of a plugin: what was remembered of less is found out again
_FILES = 2000  # a larger package has no fingerprint
_ENTRIES = 500  # of the cache: the newest stay
_CHILD = (
    "import sys, json, os; work = json.loads(sys.stdin.read()); sys.path[:] = work['path']; "
    "from outrider.registry.probe_child import main; main(work, os.environ)"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What loading a plugin does. ``harm``: how it harms the process; empty: it doesn't. ``changes``: the global state that
    it changes.
    """

    harm: str = ""
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """How plugins are probed. ``limit_s``: seconds for each. ``cache``: the directory in which verdicts are remembered; None:
    nowhere. A verdict holds as long as the probe.
    """

    limit_s: float = LIMIT_S
    cache: Path | None = None
    _verdicts: dict[EntryPoint, Verdict] = field(default_factory=dict, init=False, repr=False, compare=False)

    def verdicts(self, plugins: Sequence[EntryPoint], describe: str) -> dict[EntryPoint, Verdict]:
        """A verdict for each plugin; ``describe`` is the hook by which it describes itself.

        Plugins of Outrider's own distribution, and those whose module this process has imported already, aren't probed.
        """
        found = self._verdicts
        unknown = [plugin for plugin in plugins if plugin not in found]
        known = self.remembered() if unknown else {}
        keys: dict[EntryPoint, str | None] = {}
        for plugin in unknown:
            if _is_trusted(plugin):
                found[plugin] = Verdict()
                continue
            keys[plugin] = key = fingerprint(plugin)
            if key is not None and key in known:
                found[plugin] = Verdict(changes=known[key])
        probed = in_child([plugin for plugin in plugins if plugin not in found], describe, limit_s=self.limit_s)
        fresh = {key: verdict.changes for plugin, verdict in probed.items() if (key := keys[plugin]) and not verdict.harm}
        if fresh:
            self.remember(fresh)
        found.update(probed)
        return {plugin: found[plugin] for plugin in plugins}

    def remembered(self) -> dict[str, tuple[str, ...]]:
        """What was loaded without harm: a key for each, with the global state that it changes."""
        if self.cache is None:
            return {}
        try:
            data = json.loads((self.cache / "plugins.json").read_text(encoding="utf-8"))
            return {str(key): tuple(map(str, changes)) for key, changes in data.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}  # not there, or not ours: it's made anew

    def remember(self, fresh: Mapping[str, tuple[str, ...]]) -> None:
        """Add to what :meth:`remembered` gives."""
        if self.cache is None:
            return
        known = {**self.remembered(), **fresh}
        with suppress(OSError):  # a cache that can't be written costs time, nothing else
            self.cache.mkdir(parents=True, exist_ok=True)
            scratch = self.cache / f"plugins.json.{os.getpid()}"
            scratch.write_text(json.dumps(dict(list(known.items())[-_ENTRIES:])), encoding="utf-8")
            scratch.replace(self.cache / "plugins.json")


def fingerprint(plugin: EntryPoint) -> str | None:
    """A key that changes with the plugin's version and files, with torch and with Python; None where there are no files to
    look at. Imports nothing.
    """
    top = plugin.value.partition(":")[0].partition(".")[0].strip()
    try:
        spec = importlib.machinery.PathFinder.find_spec(top)
    except (ImportError, ValueError, OSError):
        return None
    if spec is None:
        return None
    files: list[Path] = []
    for place in spec.submodule_search_locations or ():
        for path in Path(place).rglob("*"):
            if path.suffix in (".py", ".so", ".pyd"):
                files.append(path)
            if len(files) > _FILES:
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
    given = (
        plugin.group,
        plugin.name,
        plugin.value,
        version,
        _version("torch"),
        _version("outrider"),
        sys.version,
        stats,
        _NOTICED,
    )
    return hashlib.sha256(repr(given).encode("utf-8", "surrogateescape")).hexdigest()


def in_child(plugins: Sequence[EntryPoint], describe: str, *, limit_s: float) -> dict[EntryPoint, Verdict]:
    """Load the plugins in child processes: one, and one more for each plugin that ends it."""
    found: dict[EntryPoint, Verdict] = {}
    rest = list(plugins)
    while rest:
        verdicts = _run(rest, describe, limit_s)
        found |= zip(rest, verdicts, strict=False)
        rest = rest[len(verdicts) :]
    return found


def _run(plugins: Sequence[EntryPoint], describe: str, limit_s: float) -> list[Verdict]:
    """The verdicts of one child, up to the plugin that ended it; at least one."""
    offered = [{"name": p.name, "value": p.value, "group": p.group, "describe": describe} for p in plugins]
    work = json.dumps({"path": [str(Path(entry).absolute()) for entry in sys.path], "plugins": offered})
    verdicts: list[Verdict] = []
    try:
        with started(
            [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            with suppress(BrokenPipeError):
                child.stdin.write(work.encode())
                child.stdin.close()
            lines = _Lines(child.stdout.fileno())
            while True:
                line = lines.next(limit_s)
                if line is None:
                    return [*verdicts, Verdict(harm=f"it wasn't loaded within {limit_s:g} s")]
                if not line:
                    return [*verdicts, Verdict(harm=_ending(child.wait()))]
                if "end" in line:
                    verdicts.append(Verdict(changes=tuple(line["changes"])))
                if "done" in line:
                    return verdicts
    except OSError as error:
        harm = f"no child process could be started to try it in: {error.strerror or error}"
        return [*verdicts, *[Verdict(harm=harm)] * (len(plugins) - len(verdicts))]


class _Lines:
    """Lines of JSON from a file descriptor, each with a time limit."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = b""

    def next(self, limit_s: float) -> dict[str, Any] | None:
        """The next line; empty at the end of the file, None when the time is over."""
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            while b"\n" not in self._read:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                piece = os.read(self._descriptor, 65536)
                if not piece:
                    return {}
                self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


def _ending(code: int) -> str:
    if code >= 0:
        return f"loading it ends the process with exit code {code}"
    with suppress(ValueError):
        return f"loading it ends the process with {signal.Signals(-code).name}"
    return f"loading it ends the process with signal {-code}"


def _is_trusted(plugin: EntryPoint) -> bool:
    module = plugin.value.partition(":")[0].strip()
    return module in sys.modules or (plugin.dist is not None and plugin.dist.name == _TRUSTED)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except Exception:  # not there, or unreadable: both are one state
        return ""
