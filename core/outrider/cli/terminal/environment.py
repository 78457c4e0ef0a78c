"""Access to environment variables: no other module reads or sets them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.device.errors import BackendError, ConfigError
from outrider.registry import Registry
from outrider.registry.probing import PluginProbe

if TYPE_CHECKING:
    from outrider.device import Backend

BACKEND_VARIABLE = "OUTRIDER_BACKEND"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CACHE_VARIABLE = "XDG_CACHE_HOME"
API_KEY_VARIABLE = "OUTRIDER_API_KEY"
RANK_VARIABLE = "RANK"
SPANS_VARIABLE = "OTEL_TRACES_EXPORTER"
SPIN_VARIABLE = "GOMP_SPINCOUNT"
_WAIT_VARIABLES = (SPIN_VARIABLE, "OMP_WAIT_POLICY")
_SPINS = "1000"
"""Checks of a waiting OpenMP thread before it sleeps, about 20 µs: the number of libgomp if threads outnumber processors."""


def backend_from_environment() -> str | None:
    """Return the backend that the variable ``OUTRIDER_BACKEND`` names, or None if the variable is empty or unset."""
    return os.environ.get(BACKEND_VARIABLE) or None


def api_keys_from_environment() -> tuple[str, ...]:
    """Return the API keys in the variable ``OUTRIDER_API_KEY``, separated by commas; none if it is empty or unset.

    Raises :class:`ConfigError` for a text without a key, which would leave the server open.
    """
    given = os.environ.get(API_KEY_VARIABLE, "")
    keys = tuple(key.strip() for key in given.split(",") if key.strip())
    if given and not keys:
        raise ConfigError(f"{API_KEY_VARIABLE} is {given!r}, which has no key; expected keys, or an empty text for none")
    return keys


def spans_from_environment() -> bool:
    """Return True if one of OpenTelemetry's own variables requests the export of spans over OTLP.

    Raises :class:`ConfigError` for an exporter that isn't supported.
    """
    exporter = os.environ.get(SPANS_VARIABLE, "")
    if exporter not in ("", "none", "otlp"):
        raise ConfigError(f"{SPANS_VARIABLE} is {exporter!r}; expected otlp, or none for no spans")
    return exporter == "otlp"


def plugin_probe() -> PluginProbe:
    """Return the probe of plugins, which caches its results in the user's cache directory."""
    cache = _cache_directory()
    return PluginProbe() if cache is None else PluginProbe(cache=cache)  # without a home directory each command probes again


def open_backend(name: str | None, *, local: int | None = None) -> Backend:
    """Open the backend that ``name`` or else ``OUTRIDER_BACKEND`` names, or the usable one of highest priority.

    ``local``: the device number of a rank, unless the backend has a single device. Raises :class:`ConfigError` if a rank's
    backend is named with a device number.
    """
    registry = Registry(probe=plugin_probe())
    spec = registry.select(name, backend_from_environment())
    if local is None:
        return registry.create(spec)
    if spec.ordinal:
        raise ConfigError(f"backend {spec} names a device, and each rank takes its own; leave the number out")
    try:
        return registry.create(replace(spec, ordinal=local))
    except BackendError:
        first = registry.create(spec)
        index: int | None = first.device.index  # torch types it as a number, and the host has none
        if index is None:  # all ranks share the host
            return first
        raise


def tuned_directory() -> Path | None:
    """Return the directory of tuned kernel choices, or None without a home directory."""
    cache = _cache_directory()
    return None if cache is None else cache / "tuned"


def rank_environment() -> dict[str, str] | None:
    """Return the torchrun variables of this process by name; None if the process isn't one of several ranks."""
    if RANK_VARIABLE not in os.environ:
        return None
    # torch prints its own stack many times when a peer is gone. The variable is read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return dict(os.environ)


def rank_variables(*, rank: int, world: int, port: int, pipe: int) -> dict[str, str]:
    """Return the environment of a rank that this process starts, in torchrun's form.

    ``pipe``: a file descriptor that is closed when this process ends.
    """
    return {
        **os.environ,
        RANK_VARIABLE: str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OUTRIDER_RANK_PIPE": str(pipe),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def limit_spinning() -> None:
    """Let waiting OpenMP threads sleep soon, unless the user chose how they wait. libgomp reads this when torch is imported.

    By default a thread spins for milliseconds at the end of each operator. If other processes use the processors, it takes
    the time from the thread that it waits for: two threads then decode many times slower than one.
    """
    if not any(variable in os.environ for variable in _WAIT_VARIABLES):
        os.environ[SPIN_VARIABLE] = _SPINS


def _cache_directory() -> Path | None:
    given = os.environ.get(CACHE_VARIABLE, "")
    try:
        root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "outrider"


def autoload_setting() -> str:
    """Return the value of the variable that decides whether torch loads device extensions on import; empty if it
    isn't set.
    """
    return os.environ.get(AUTOLOAD_VARIABLE, "")


def without_autoload() -> dict[str, str]:
    """Return an environment for a child process in which torch loads no device extensions."""
    return {**os.environ, AUTOLOAD_VARIABLE: "0"}


def disable_autoload() -> None:
    """Prevent a later ``import torch`` of this process from loading device extensions."""
    os.environ[AUTOLOAD_VARIABLE] = "0"
