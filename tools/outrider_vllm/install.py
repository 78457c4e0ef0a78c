"""Installation of the simulated device in vLLM. Call `install()` before the first import of a vLLM module."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from outrider.device import BackendLoadError

if TYPE_CHECKING:
    from outrider_vllm.interpreted_launches import InterpretedLaunches


VLLM_VERSION = "0.33.0"
"""The vLLM version that this package supports."""


@cache
def install() -> InterpretedLaunches:
    """Install the simulated device in vLLM: Triton's interpreter, the names of `torch.cuda` and the platform.

    Returns the object that runs the Triton kernels; further calls in the process return the same object. A backend `sim` must
    exist. Raises `BackendLoadError` if vLLM or Triton has been imported, or if vLLM has another version.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed_version = version("vllm")
    except PackageNotFoundError as error:
        raise BackendLoadError(f"vLLM isn't installed; install its wheel, version {VLLM_VERSION}") from error
    if installed_version != VLLM_VERSION:
        raise BackendLoadError(f"vLLM {installed_version} is installed; this package is for {VLLM_VERSION}")
    for early in ("triton", "vllm.platforms"):
        if early in sys.modules:
            raise BackendLoadError(f"{early} was imported before; call outrider_vllm.install.install() first")
    # Triton reads the variable at import. Its own library functions follow no other switch.
    os.environ["TRITON_INTERPRET"] = "1"
    # vLLM's switches: the engine runs in this process, and kernels use their first configuration without timing.
    for name in ("VLLM_TRITON_FORCE_FIRST_CONFIG", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_NO_USAGE_STATS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    launches = install_triton()
    from outrider_vllm.torch_cuda import install_names

    install_names(launches.host_address)
    return launches


def install_triton() -> InterpretedLaunches:
    """Make each Triton launch of this process an operation of the simulated device.

    Call it before Triton is imported, with `TRITON_INTERPRET` set. Returns the object that runs the kernels.
    """
    import triton
    from triton.backends import backends
    from triton.runtime import interpreter

    from outrider_vllm.interpreted_launches import InterpretedLaunches

    launches = InterpretedLaunches(interpreter.GridExecutor, interpreter.interpreter_builder)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        launches.queue_launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    interpreter.InterpretedFunction.run = run
    # vLLM uses Triton if exactly one driver is active.
    driver = next(b.driver for name, b in backends.items() if name == "nvidia")
    driver.is_active = staticmethod(lambda: True)
    del triton
    return launches


def platform() -> str | None:
    """Return the qualified name of the simulated platform if the program has called `install()`, else None.

    vLLM calls this plugin of the entry-point group `vllm.platform_plugins`.
    """
    return "outrider_vllm.platform.SimPlatform" if install.cache_info().currsize else None
