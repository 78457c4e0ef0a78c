"""Preparation of a device's kernels for a model: stored tuning choices are loaded, and kernels are tuned on demand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.device import Backend, CapabilityError, TuningProgress, TuningResult
from outrider.model.config.model_config import ModelConfig
from outrider.model.config.shapes import decoder_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedKernels:
    """Summary of the kernels that were compiled or tuned before the first request."""

    num_loaded: int
    """Number of stored tuning choices that were loaded."""
    result: TuningResult | None = None
    """Result of the tuning, or None if nothing was tuned."""

    def __str__(self) -> str:
        parts = [f"{self.num_loaded} tuned choices of this machine"] if self.num_loaded else []
        if self.result is not None:
            suffix = "" if self.result.complete else ", until the deadline"
            parts.append(f"tuned for {self.result.seconds:.0f} s{suffix}: {self.result.kept} choices kept")
        return "kernels: " + ("; ".join(parts) or "nothing was tuned on this machine")


def prepare_kernels(
    backend: Backend,
    config: ModelConfig,
    *,
    directory: Path | None,
    seconds: float = 0.0,
    progress: TuningProgress | None = None,
) -> PreparedKernels:
    """Load the tuning choices in ``directory`` for this device, and tune for ``config`` for at most ``seconds`` (0: not at
    all).

    Call it before loading weights and creating an engine: tuning needs memory and the device for itself. Without a
    ``directory`` no choices are loaded or stored.

    Raises :class:`CapabilityError` if tuning is requested without a directory, or for kernels that don't tune.
    """
    kernels = backend.kernels_in_use
    taken = 0 if directory is None else kernels.use_tuned(directory)
    if not seconds:
        return PreparedKernels(num_loaded=taken)
    if directory is None:
        raise CapabilityError("there is no directory to keep tuned choices in: set XDG_CACHE_HOME or HOME, or don't tune")
    if not kernels.tunes:
        raise CapabilityError(
            f"the kernels of {backend.label}, {kernels.name!r}, don't tune; leave tuning out, or choose kernels that do"
        )
    (result,) = kernels.tune(
        [decoder_shape(config, torch.bfloat16)], deadline_s=seconds, directory=directory, progress=progress
    )
    return PreparedKernels(num_loaded=taken, result=result)
