"""Entry point `vllm.platform_plugins`: vLLM asks each for the qualified name of a platform class, or None."""

from __future__ import annotations

import sys


def platform() -> str | None:
    """The simulated platform where the program called `outrider_vllm.install.install()` before, else None."""
    module = sys.modules.get("outrider_vllm.install")
    return "outrider_vllm.platform.SimPlatform" if module is not None and module.installed() else None
