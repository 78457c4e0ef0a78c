"""Preparing a device's kernels for a model: what this machine measured is taken over, and more is measured on demand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.device import Backend, CapabilityError, TuningProgress, TuningResult
from outrider.model.config import ModelConfig
from outrider.model.shapes import decoder_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """``taken``: choices that were there. ``result``: of the tuning, None where there was none."""

    taken: int
    result: TuningResult | None = None

    def __str__(self) -> str:
        said = [f"{self.taken} tuned choices of this machine"] if self.taken else []
        if self.result is not None:
            end = "" if self.result.complete else ", until the deadline"
            said.append(f"tuned for {self.result.seconds:.0f} s{end}: {self.result.kept} choices kept")
        return "kernels: " + ("; ".join(said) or "nothing was tuned on this machine")


def prepare_kernels(
    backend: Backend,
    config: ModelConfig,
    *,
    directory: Path | None,
    seconds: float = 0.0,
    progress: TuningProgress | None = None,
) -> Prepared:
    """Take over what ``directory`` has for this device, and tune for ``config`` for at most ``seconds``; 0: not at all.

    To be called before weights are loaded and an engine is made: tuning wants memory and the device for itself. Without a
    ``directory`` there is nothing to take over and no place to keep anything.

    Raises :class:`CapabilityError` where tuning is asked of kernels that don't tune, or without a directory.
    """
    kernels = backend.kernels_in_use
    taken = 0 if directory is None else kernels.use_tuned(directory)
    if not seconds:
        return Prepared(taken=taken)
    if directory is None:
        raise CapabilityError("there is no directory to keep tuned choices in: set XDG_CACHE_HOME or HOME, or don't tune")
    if not kernels.tunes:
        raise CapabilityError(
            f"the kernels of {backend.label}, {kernels.name!r}, don't tune; leave tuning out, or choose kernels that do"
        )
    (result,) = kernels.tune(
        [decoder_shape(config, torch.bfloat16)], deadline_s=seconds, directory=directory, progress=progress
    )
    return Prepared(taken=taken, result=result)
