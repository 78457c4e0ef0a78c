"""Probe of ``import torch`` in a child process.

A failed import leaves torch half imported, so that further imports fail with confusing errors, and a library that crashes
ends the process. Both happen in the child.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from outrider.cli.terminal.environment import autoload_setting, without_autoload
from outrider.cli.terminal.report import show_progress
from outrider.device.errors import BackendLoadError
from outrider.registry.plugins import installed_entry_points
from outrider.registry.probing import PluginProbe

_PROBE = """
import json
import os
try:
    import torch
    report = {"version": torch.__version__}
except BaseException as error:
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    report = {"errors": texts}
print("\\n" + json.dumps(report), flush=True)
os._exit(0)  # Python's own end looks through all that torch has imported
"""
_LIMIT_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchState:
    """The result of a probe. ``errors``: the chain of exceptions, outermost first. ``version_without_autoload``: the version
    that imports without device extensions, or None.
    """

    version: str | None
    errors: tuple[str, ...] = ()
    explanation: str = ""
    advice: tuple[str, ...] = ()
    version_without_autoload: str | None = None
    extensions: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Return True if torch imports in the unchanged environment."""
        return self.version is not None


def probe_torch() -> TorchState:
    """Import torch in a child process, and again without its device extensions if that failed."""
    extensions = _extensions()
    version, errors = _import(None)
    if version is not None:
        return TorchState(version=version, extensions=extensions)
    without, _ = _import(without_autoload())
    explanation, advice = explain("\n".join(errors))
    return TorchState(
        version=None,
        errors=errors,
        explanation=explanation,
        advice=advice,
        version_without_autoload=without,
        extensions=extensions,
    )


def known_torch(probe: PluginProbe) -> TorchState:
    """Return the state of torch like :func:`probe_torch`, without a child process if this torch was imported before.

    If torch imports, it is imported in this process afterwards.
    """
    if (loaded := loaded_torch()) is not None:
        return loaded
    key = _fingerprint()
    if key is None or key not in probe.cached_changes():
        state = probe_torch()
        if not state.ok:
            return state
        if key is not None:
            probe.add_to_cache({key: ()})
    try:
        torch = importlib.import_module("torch")
    except Exception:  # the key misses a change, such as a library's path
        return probe_torch()
    return TorchState(version=torch.__version__, extensions=_extensions())


def loaded_torch() -> TorchState | None:
    """Return the state of the torch that this process has imported, or None."""
    torch = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)
    return TorchState(version=version, extensions=_extensions()) if version is not None else None


def _fingerprint() -> str | None:
    """Return a key that changes with torch's files, its extensions and Python; None without torch."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = Path(spec.origin).stat()
    except OSError:
        return None
    given = (spec.origin, found.st_mtime_ns, found.st_size, _extensions(), autoload_setting(), sys.version)
    return "torch " + hashlib.sha256(repr(given).encode("utf-8", "surrogateescape")).hexdigest()


def _extensions() -> tuple[str, ...]:
    """Return the device extensions that torch loads on import."""
    return tuple(
        f"{ep.name} ({ep.dist.name} {ep.dist.version})" if ep.dist else ep.name
        for ep in installed_entry_points("torch.backends").entry_points
    )


def explain(text: str) -> tuple[str, tuple[str, ...]]:
    """Return an explanation of a failed import of torch, and advice, from the error's ``text``."""
    source = resources.files("outrider.cli.terminal").joinpath("known_failures.toml").read_text(encoding="utf-8")
    for failure in tomllib.loads(source)["failure"]:
        if re.search(failure["match"], text):
            return failure["says"], tuple(failure["advice"])
    return "torch can't be imported.", ("Reinstall torch; the error above comes from torch itself.",)


def _import(environment: dict[str, str] | None) -> tuple[str | None, tuple[str, ...]]:
    command = [sys.executable, "-c", _PROBE]
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, (f"import torch didn't finish within {_LIMIT_S} s",)
    try:
        report = json.loads(result.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        tail = result.stderr.strip().splitlines()[-3:]
        return None, (f"import torch ended the process with status {result.returncode}", *tail)
    return report.get("version"), tuple(report.get("errors", ()))


def require_torch() -> None:
    """Import torch. If that fails, raise :class:`BackendLoadError` with an explanation and advice."""
    try:
        with show_progress("torch" not in sys.modules) as tell:
            tell("importing torch", 0, 0)
            importlib.import_module("torch")
    except Exception as error:
        chain: list[str] = []
        seen: BaseException | None = error
        while seen is not None:
            chain.append(f"{type(seen).__name__}: {seen}")
            seen = seen.__cause__
        says, advice = explain("\n".join(chain))
        text = "; ".join(chain)
        raise BackendLoadError(
            f"torch can't be imported: {text}. {says} {' '.join(advice)} `outrider doctor` says more"
        ) from error
