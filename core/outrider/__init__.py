"""Outrider: overlapped speculative decoding of LLMs over a small hardware-backend interface.

Importing this package touches no accelerator, imports no vendor package and not even torch: the public names load
on first use (PEP 562), so that ``outrider doctor`` still runs where ``import torch`` itself fails.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.device.errors import OutriderError
    from outrider.disaggregation.decode_client import DecodeClient
    from outrider.engine.async_engine import AsyncEngine
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.requests.request import StepOutput
    from outrider.engine.requests.sampling import SamplingParams
    from outrider.registry import get_backend

_MODULE_OF_NAME = {
    "AsyncEngine": "outrider.engine.async_engine",
    "DecodeClient": "outrider.disaggregation.decode_client",
    "Engine": "outrider.engine.engine",
    "EngineConfig": "outrider.engine.config",
    "OutriderError": "outrider.device.errors",
    "SamplingParams": "outrider.engine.requests.sampling",
    "StepOutput": "outrider.engine.requests.request",
    "get_backend": "outrider.registry",
}

__all__ = [
    "AsyncEngine",
    "DecodeClient",
    "Engine",
    "EngineConfig",
    "OutriderError",
    "SamplingParams",
    "StepOutput",
    "get_backend",
]

if not TYPE_CHECKING:  # a type checker must see a misspelt name as an error

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF_NAME:
            return getattr(import_module(_MODULE_OF_NAME[name]), name)
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
