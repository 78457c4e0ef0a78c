"""The extras ``serve`` and ``kv-events``: whether what they install is there."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.device.errors import ConfigError

NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")
NEEDED_BY_KV_EVENTS = ("zmq", "msgspec")


def require_serve() -> None:
    """Raises :class:`ConfigError` where a package of the extra is missing."""
    _require("the server", NEEDED, "serve")


def require_kv_events() -> None:
    """Raises :class:`ConfigError` where a package of the extra is missing."""
    _require("--kv-events", NEEDED_BY_KV_EVENTS, "kv-events")


def _require(what: str, needed: tuple[str, ...], extra: str) -> None:
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            f"run: pip install 'outrider[{extra}]'"
        )
