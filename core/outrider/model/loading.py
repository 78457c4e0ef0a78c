"""Loading a decoder: its checkpoint, checked and fused, on a device."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.device import Backend
from outrider.errors import CheckpointError
from outrider.model.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.files import CheckpointFiles, open_checkpoint
from outrider.model.mapping import decoder_targets, decoder_weights, vision_name
from outrider.model.tensors import Progress, check_tensors, load_tensors, placed


def load_decoder(directory: str | Path, *, backend: Backend, dtype: torch.dtype, progress: Progress | None = None) -> Decoder:
    """Load a decoder's checkpoint onto ``backend`` in ``dtype``.

    Blocks until the weights are on the device, so that any stream may read them. Raises :class:`CheckpointError` that
    names file and tensor when anything is missing, superfluous, of the wrong shape or unreadable, and
    :class:`CapabilityError` when the backend doesn't compute in ``dtype``.
    """
    config = ModelConfig.from_checkpoint(directory)
    files = open_checkpoint(Path(directory))
    targets = decoder_targets(config, files.tensors)
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    if config.vision is not None:
        optional |= {key for key in files.tensors if vision_name(key) is not None}  # load_vision checks them
    check_tensors(files, targets, optional=optional)
    if config.tie_embeddings and "lm_head.weight" in files.tensors:
        _check_tied(files, "lm_head.weight", targets[0].pieces[0].key)
    with placed(backend, dtype) as stream:
        weights = load_tensors(files, targets, dtype=dtype, backend=backend, stream=stream, progress=progress)
        return Decoder(config, decoder_weights(config, weights), backend.kernels_in_use)


def _check_tied(files: CheckpointFiles, head: str, embedding: str) -> None:
    """A config that ties the embeddings may come with a copy of them, but not with another head."""
    if files.shape(head) != files.shape(embedding) or not torch.equal(files.read(head), files.read(embedding)):
        raise CheckpointError(
            f"{files.tensors[head].path}: tensor {head!r} differs from {embedding!r}, but the config ties them"
        )
