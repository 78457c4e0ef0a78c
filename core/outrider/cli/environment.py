"""The only place that reads environment variables, or sets them."""

from __future__ import annotations

import os
from collections.abc import Mapping

BACKEND_VARIABLE = "OUTRIDER_BACKEND"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
PROFILER_VARIABLE = "KINETO_LOG_LEVEL"


def backend_from_environment() -> str | None:
    """The backend that the environment asks for; empty counts as unset."""
    return os.environ.get(BACKEND_VARIABLE) or None


def without_autoload() -> dict[str, str]:
    """The environment with torch's loading of device extensions turned off, for a child process."""
    return {**os.environ, AUTOLOAD_VARIABLE: "0"}


def with_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment and ``variables``, for a child process."""
    return {**os.environ, **variables}


def disable_autoload() -> None:
    """Keep a later ``import torch`` of this process from loading device extensions."""
    os.environ[AUTOLOAD_VARIABLE] = "0"


def quiet_profiler() -> None:
    """Keep torch's profiler from noting its starts and stops on standard error, unless the environment says otherwise."""
    os.environ.setdefault(PROFILER_VARIABLE, "99")
