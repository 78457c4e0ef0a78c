"""Options of a ROCm device, such as ``rocm:0,published=host``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.device.errors import ConfigError

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "published": "who waits for published lengths: stream, host, or auto (default) by architecture",
        "kernels": "torch (default): its own operators; triton: Triton's kernels, which nobody has run on such a device yet",
        "results": "the stream that copies results out: forward (default) or copy",
    }
)
_VALUES = {"kernels": ("torch", "triton"), "published": ("auto", "stream", "host"), "results": ("forward", "copy")}


@dataclass(frozen=True, kw_only=True, slots=True)
class RocmOptions:
    """Validated options of a ROCm device."""

    kernels: str = "torch"
    """The kernel set: ``torch`` (references) or ``triton``."""
    published: str = "auto"
    """The waiter for published lengths: ``auto``, ``stream`` or ``host``."""
    results_on_forward: bool = True
    """True if the forward stream copies results to the host; otherwise the copy stream does."""


def parse_options(options: Mapping[str, str]) -> RocmOptions:
    """Parse the options. Raises :class:`ConfigError` for an unknown option or value."""
    for key, value in options.items():
        if key not in OPTIONS:
            raise ConfigError(f"backend 'rocm' has no option {key!r}; known: {', '.join(OPTIONS)}")
        if value not in _VALUES[key]:
            raise ConfigError(f"option {key}={value!r}: expected one of {', '.join(_VALUES[key])}")
    return RocmOptions(
        kernels=options.get("kernels", "torch"),
        published=options.get("published", "auto"),
        results_on_forward=options.get("results", "forward") == "forward",
    )
