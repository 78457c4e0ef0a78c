"""The extra ``serve``: whether what it installs is there."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.device.errors import ConfigError

NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


def require_serve() -> None:
    """Raises :class:`ConfigError` where a package of the extra is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the server needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "run: pip install 'outrider[serve]'"
        )
