"""Check of the extra ``models``: the packages that the model layer needs."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.device.errors import ConfigError

REQUIRED_PACKAGES = ("transformers", "tokenizers", "safetensors", "PIL")


def require_models() -> None:
    """Raise :class:`ConfigError` if a package of the extra ``models`` is missing. The message names the package and the
    command that installs it.
    """
    missing = ["pillow" if name == "PIL" else name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"models need {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "run: pip install 'outrider[models]'"
        )
