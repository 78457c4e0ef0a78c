"""The configuration of a server."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import ConfigError
from outrider.errors import shown

_NUMBERS = {
    "max_queued": (0, 2**20),
    "max_body_bytes": (1024, 2**34),
    "request_timeout_s": (0.001, 1e9),
    "body_timeout_s": (0.001, 1e9),
    "write_timeout_s": (0.001, 1e9),
    "drain_s": (0.0, 1e9),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Limits and choices of a server, validated when made.

    ``names``: names of the model for clients; the first one is shown, each one is accepted. ``max_queued``: samples that may
    wait in addition to those that the engine runs; further requests get status 429. ``max_body_bytes``: maximum size of a
    request's body. ``request_timeout_s``: from the request's arrival to its last token; ``body_timeout_s``: for its body to
    arrive; ``write_timeout_s``: for a client to read a piece of its answer. ``drain_s``: time that running requests have once
    the server is told to end.

    ``api_keys``: a request to ``/v1`` must have one of them; empty: no key is needed. ``allow_origins``: origins of web pages
    that may call the server from a browser.
    """

    names: tuple[str, ...]
    max_queued: int = 256
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 3600.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    drain_s: float = 30.0
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in _NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ConfigError(f"{name} is {shown(value)}; expected a number from {least:g} to {most:g}")
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise ConfigError(f"names is {shown(self.names)}; expected at least one name of the model")
        if not all(isinstance(key, str) and key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or has characters that a header can't carry; expected printable ASCII")
