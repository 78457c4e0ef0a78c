"""Errors about what Outrider is asked to run: a checkpoint, a request. The tree that they belong to is in
:mod:`outrider.device.errors`, whose other errors are about devices and those who drive them.
"""

from __future__ import annotations

from outrider.device.errors import OutriderError


class CheckpointError(OutriderError):
    """A checkpoint that is truncated, incomplete, of the wrong shape or of an unknown kind."""


class RequestError(OutriderError):
    """A request that can't be served: empty, too long for the context, or of an unknown id."""
