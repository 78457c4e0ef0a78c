"""Plugin of the entry-point group `vllm.platform_plugins`. vLLM calls it for the name of a platform class, or None."""

from __future__ import annotations

import sys


def platform() -> str | None:
    """Return the qualified name of the simulated platform if the program has called `install()`, else None."""
    module = sys.modules.get("outrider_vllm.install")
    return "outrider_vllm.platform.SimPlatform" if module is not None and module.installed() else None
