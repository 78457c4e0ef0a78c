"""The only place that reads environment variables, or sets them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.registry.probing import Probe

BACKEND_VARIABLE = "OUTRIDER_BACKEND"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CACHE_VARIABLE = "XDG_CACHE_HOME"


def backend_from_environment() -> str | None:
    """The backend that the environment asks for; empty counts as unset."""
    return os.environ.get(BACKEND_VARIABLE) or None


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


class RankEnvironment:
    """The process's environment and arguments as a rank that is one of its threads sees them (a ``ProcessView``)."""

    def save(self) -> tuple[Any, list[str]]:
        """What the running rank sees."""
        return os.environ, sys.argv

    def restore(self, saved: tuple[Any, list[str]]) -> None:
        """The rank that saved it runs again."""
        os.environ, sys.argv = saved

    def begin(self, rank: int, ranks: int, argv: Sequence[str]) -> None:
        """Let the calling rank have an environment of its own, as torchrun makes it, and its own arguments."""
        mine = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
        own: Any = {**os.environ, **{name: str(value) for name, value in mine.items()}}
        self.restore((own, list(argv)))
