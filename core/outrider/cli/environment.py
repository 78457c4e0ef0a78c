"""The only place that reads environment variables, or sets them."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.registry.probing import Probe

BACKEND_VARIABLE = "OUTRIDER_BACKEND"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CACHE_VARIABLE = "XDG_CACHE_HOME"
API_KEY_VARIABLE = "OUTRIDER_API_KEY"


def backend_from_environment() -> str | None:
    """The backend that the environment asks for; empty counts as unset."""
    return os.environ.get(BACKEND_VARIABLE) or None


def api_keys_from_environment() -> tuple[str, ...]:
    """Keys that clients of the server must have one of, separated by commas; empty counts as unset."""
    return tuple(key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key.strip())


def plugin_probe() -> Probe:
    """How the command line probes plugins: verdicts are kept in the user's cache directory."""
    cache = _cache_directory()
    return Probe() if cache is None else Probe(cache=cache)  # no home directory: every command tries them anew


def tuned_directory() -> Path | None:
    """Where what kernels' tuning found is kept; None: there is no place, without a home directory."""
    cache = _cache_directory()
    return None if cache is None else cache / "tuned"


def _cache_directory() -> Path | None:
    given = os.environ.get(CACHE_VARIABLE, "")
    try:
        root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "outrider"


def autoload_setting() -> str:
    """Whether torch loads device extensions by itself, as the environment has it; empty: it isn't set."""
    return os.environ.get(AUTOLOAD_VARIABLE, "")


def without_autoload() -> dict[str, str]:
    """The environment with torch's loading of device extensions turned off, for a child process."""
    return {**os.environ, AUTOLOAD_VARIABLE: "0"}


def disable_autoload() -> None:
    """Keep a later ``import torch`` of this process from loading device extensions."""
    os.environ[AUTOLOAD_VARIABLE] = "0"
