"""The only place that reads environment variables, or sets them."""

from __future__ import annotations

import os

BACKEND_VARIABLE = "OUTRIDER_BACKEND"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def backend_from_environment() -> str | None:
    """The backend that the environment asks for; empty counts as unset."""
    return os.environ.get(BACKEND_VARIABLE) or None


def without_autoload() -> dict[str, str]:
    """The environment with torch's loading of device extensions turned off, for a child process."""
    return {**os.environ, AUTOLOAD_VARIABLE: "0"}


def disable_autoload() -> None:
    """Keep a later ``import torch`` of this process from loading device extensions."""
    os.environ[AUTOLOAD_VARIABLE] = "0"
