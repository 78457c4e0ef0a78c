"""The extra ``models``: whether what it installs is there."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.device.errors import ConfigError

NEEDED = ("transformers", "tokenizers", "safetensors", "PIL")


def require_models() -> None:
    """Raises :class:`ConfigError` where a package of the extra is missing."""
    missing = ["pillow" if name == "PIL" else name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"models need {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "run: pip install 'outrider[models]'"
        )
