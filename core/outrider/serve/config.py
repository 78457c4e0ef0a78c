"""The configuration of an HTTP server: limits, API keys and the model's names; and checks that its packages are installed."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import ConfigError
from outrider.errors import require_packages, shown

_RANGES = {
    "max_queued": (0, 2**20),
    "max_body_bytes": (1024, 2**34),
    "request_timeout_s": (0.001, 1e9),
    "body_timeout_s": (0.001, 1e9),
    "write_timeout_s": (0.001, 1e9),
    "drain_s": (0.0, 1e9),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """The configuration of a server. The constructor checks it and raises :class:`ConfigError`."""

    names: tuple[str, ...]
    """Names of the model for clients. The server reports the first name and accepts all of them."""
    max_queued: int = 256
    """Maximum number of waiting samples, in addition to those that the engine runs. Further requests get status 429."""
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 3600.0
    """Maximum time from a request's arrival to its last token."""
    body_timeout_s: float = 60.0
    """Maximum time until the whole body of a request has arrived."""
    write_timeout_s: float = 60.0
    """Maximum time in which a client must read one piece of a streamed response."""
    drain_s: float = 30.0
    """Time that running requests have to finish after SIGTERM or SIGINT."""
    api_keys: tuple[str, ...] = ()
    """A request to ``/v1`` must have one of these keys. If there is none, no key is needed."""
    allow_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server from a browser."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{name} is {shown(value)}; expected a number from {low:g} to {high:g}")
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise ConfigError(f"names is {shown(self.names)}; expected at least one name of the model")
        if not all(isinstance(key, str) and key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or has characters that a header can't carry; expected printable ASCII")


SERVE_PACKAGES = ("fastapi", "uvicorn", "httptools", "pydantic", "prometheus_client")
KV_EVENTS_PACKAGES = ("zmq", "msgspec")


def require_serve() -> None:
    """Raise :class:`ConfigError` if a package of the extra ``serve`` is missing."""
    require_packages("the server", SERVE_PACKAGES, "serve")


def require_kv_events() -> None:
    """Raise :class:`ConfigError` if a package of the extra ``kv-events`` is missing."""
    require_packages("--kv-events", KV_EVENTS_PACKAGES, "kv-events")
