"""Make vLLM run on the simulated device: call `install()` before anything of vLLM is imported."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from outrider.device import BackendLoadError

if TYPE_CHECKING:
    from outrider_vllm.triton_launches import Launches

VLLM_VERSION = "0.33.0"
"""The version that this package is made and tested for."""


class _State:
    """vLLM and Triton are one for the process, and neither can be told twice."""

    launches: Launches | None = None


def installed() -> bool:
    """Whether `install` was called."""
    return _State.launches is not None


def install() -> Launches:
    """Prepare this process: Triton's interpreter, the names of torch that vLLM calls, and the platform. Idempotent.

    A backend `sim` must exist. Raises `BackendLoadError` where vLLM or Triton were imported before, or where vLLM has
    another version.
    """
    if _State.launches is not None:
        return _State.launches
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("vllm")
    except PackageNotFoundError as error:
        raise BackendLoadError(f"vLLM isn't installed; install its wheel, version {VLLM_VERSION}") from error
    if found != VLLM_VERSION:
        raise BackendLoadError(f"vLLM {found} is installed; this package is for {VLLM_VERSION}")
    for early in ("triton", "vllm.platforms"):
        if early in sys.modules:
            raise BackendLoadError(f"{early} was imported before; call outrider_vllm.install.install() first")
    # Triton reads this when it's imported, and has no other switch that reaches its own library of functions.
    os.environ["TRITON_INTERPRET"] = "1"
    # vLLM's own switches: the engine in this process, kernels that take their first configuration without timing it.
    for name in ("VLLM_TRITON_FORCE_FIRST_CONFIG", "VLLM_USE_V2_MODEL_RUNNER"):
        os.environ.setdefault(name, "1")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        os.environ.setdefault(name, {"VLLM_NO_USAGE_STATS": "1"}.get(name, "0"))
    _State.launches = triton_on_sim()
    from outrider_vllm.torch_cuda import install_names

    install_names(_State.launches.show)
    return _State.launches


def triton_on_sim() -> Launches:
    """Let each launch of a Triton kernel of this process go to the simulated device. Call it before Triton is imported, with
    `TRITON_INTERPRET` set.
    """
    import triton
    from triton.backends import backends
    from triton.runtime import interpreter

    from outrider_vllm.triton_launches import Launches

    launches = Launches(interpreter.GridExecutor, interpreter.interpreter_builder)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        launches.run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    interpreter.InterpretedFunction.run = run
    # vLLM uses Triton where exactly one driver says that it's active.
    driver = next(b.driver for name, b in backends.items() if name == "nvidia")
    driver.is_active = staticmethod(lambda: True)
    del triton
    return launches
