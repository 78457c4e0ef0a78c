"""The only place that reads environment variables, or sets them."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.device.errors import ConfigError
from outrider.registry.probing import Probe

BACKEND_VARIABLE = "OUTRIDER_BACKEND"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CACHE_VARIABLE = "XDG_CACHE_HOME"
API_KEY_VARIABLE = "OUTRIDER_API_KEY"
RANK_VARIABLE = "RANK"
SPANS_VARIABLE = "OTEL_TRACES_EXPORTER"


def backend_from_environment() -> str | None:
    """The backend that the environment asks for; empty counts as unset."""
    return os.environ.get(BACKEND_VARIABLE) or None


def api_keys_from_environment() -> tuple[str, ...]:
    """Keys that clients of the server must have one of, separated by commas; empty counts as unset."""
    return tuple(key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key.strip())


def spans_from_environment() -> bool:
    """Return True if OpenTelemetry's own variable requests spans over OTLP.

    Raises :class:`ConfigError` for an exporter that isn't supported.
    """
    exporter = os.environ.get(SPANS_VARIABLE, "")
    if exporter not in ("", "none", "otlp"):
        raise ConfigError(f"{SPANS_VARIABLE} is {exporter!r}; expected otlp, or none for no spans")
    return exporter == "otlp"


def plugin_probe() -> Probe:
    """How the command line probes plugins: verdicts are kept in the user's cache directory."""
    cache = _cache_directory()
    return Probe() if cache is None else Probe(cache=cache)  # no home directory: every command tries them anew


def tuned_directory() -> Path | None:
    """Where what kernels' tuning found is kept; None: there is no place, without a home directory."""
    cache = _cache_directory()
    return None if cache is None else cache / "tuned"


def rank_environment() -> dict[str, str] | None:
    """What torchrun, or a command that starts ranks, says to one of them; None: this process isn't one."""
    if RANK_VARIABLE not in os.environ:
        return None
    # Where a peer is gone torch prints its own stack, many times. Read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return dict(os.environ)


def rank_variables(*, rank: int, world: int, port: int, pipe: int) -> dict[str, str]:
    """The environment of a rank that this process starts, as torchrun's is; ``pipe``: a descriptor that ends with this."""
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


def become_rank(*, rank: int, world: int, port: int) -> None:
    """Give this process the environment of a rank, as torchrun does. It ends by itself when its starter does."""
    variables = rank_variables(rank=rank, world=world, port=port, pipe=-1)
    del variables["OUTRIDER_RANK_PIPE"]
    os.environ.update(variables)


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
