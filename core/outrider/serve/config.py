"""What a server is configured with."""

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
METRIC_NAMES = ("outrider", "vllm")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Limits and choices of a server, validated when made.

    ``names``: what the model is called; the first is shown, each is accepted. ``max_queued``: samples that may wait beyond
    those that the engine runs at a time; more are refused with status 429. ``max_prompt``: tokens of a prompt at most; None:
    as many as the context holds. ``max_body_bytes``: of a request's body. ``request_timeout_s``: from the request's arrival
    to its last token; ``body_timeout_s``: for its body to arrive; ``write_timeout_s``: for a client to read a piece of its
    answer. ``drain_s``: what running requests have when the server is told to end.

    ``api_keys``: one of them is asked for on ``/v1``; empty: none is. ``allow_origins``: origins of web pages that may call
    the server from a browser. ``metric_names``: ``vllm`` exports the gauges and histograms under vLLM's names as well.
    """

    names: tuple[str, ...]
    max_queued: int = 256
    max_prompt: int | None = None
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 3600.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    drain_s: float = 30.0
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    metric_names: str = "outrider"

    def __post_init__(self) -> None:
        for name, (least, most) in _NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ConfigError(f"{name} is {shown(value)}; expected a number from {least:g} to {most:g}")
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise ConfigError(f"names is {shown(self.names)}; expected at least one name of the model")
        if self.max_prompt is not None and (not isinstance(self.max_prompt, int) or self.max_prompt < 1):
            raise ConfigError(f"max_prompt is {shown(self.max_prompt)}; expected a positive number of tokens")
        if not all(isinstance(key, str) and key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or has characters that a header can't carry; expected printable ASCII")
        if self.metric_names not in METRIC_NAMES:
            raise ConfigError(f"metric_names is {shown(self.metric_names)}; expected one of {', '.join(METRIC_NAMES)}")
