"""Checks that the packages of the extras ``serve`` and ``kv-events`` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.device.errors import ConfigError

SERVE_PACKAGES = ("fastapi", "uvicorn", "httptools", "pydantic", "prometheus_client")
KV_EVENTS_PACKAGES = ("zmq", "msgspec")


def require_serve() -> None:
    """Raise :class:`ConfigError` if a package of the extra ``serve`` is missing."""
    _require_packages("the server", SERVE_PACKAGES, "serve")


def require_kv_events() -> None:
    """Raise :class:`ConfigError` if a package of the extra ``kv-events`` is missing."""
    _require_packages("--kv-events", KV_EVENTS_PACKAGES, "kv-events")


def _require_packages(feature: str, packages: tuple[str, ...], extra: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{feature} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            f"run: pip install 'outrider[{extra}]'"
        )
