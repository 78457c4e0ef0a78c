"""Environment variables that benchmarks set, for their children and for torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Mapping

PROFILER_VARIABLE = "KINETO_LOG_LEVEL"


def with_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment and ``variables``, for a child process."""
    return {**os.environ, **variables}


def quiet_profiler() -> None:
    """Keep torch's profiler from noting its starts and stops on standard error, unless the environment says otherwise."""
    os.environ.setdefault(PROFILER_VARIABLE, "99")
