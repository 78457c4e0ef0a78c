"""Loading a decoder: its checkpoint, checked and fused, on a device."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.device import Backend
from outrider.errors import CheckpointError
from outrider.model.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.expert_mapping import check_count
from outrider.model.files import CheckpointFiles, open_checkpoint
from outrider.model.mapping import Piece, decoder_targets, decoder_weights, vision_name
from outrider.model.ranks import ModelRanks
from outrider.model.shards import Shards
from outrider.model.tensors import Progress, check_tensors, load_tensors, placed


def load_decoder(
    directory: str | Path,
    *,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    ranks: ModelRanks | None = None,
) -> Decoder:
    """Load a decoder's checkpoint onto ``backend`` in ``dtype``; with ``ranks`` the part of it that is this rank's, of which
    alone the tensors are read.

    Blocks until the weights are on the device, so that any stream may read them. Raises :class:`CheckpointError` that
    names file and tensor when anything is missing, superfluous, of the wrong shape or unreadable, and
    :class:`CapabilityError` when the backend doesn't compute in ``dtype``.
    """
    config = ModelConfig.from_checkpoint(directory)
    shards = Shards() if ranks is None else ranks.shards
    local = shards.local(config, str(directory))
    files = open_checkpoint(Path(directory))
    check_count(config, files.tensors, files.origin)
    targets = decoder_targets(config, files.tensors, shards)
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    if config.vision is not None:
        optional |= {key for key in files.tensors if vision_name(key) is not None}  # load_vision checks them
    check_tensors(files, decoder_targets(config, files.tensors), optional=optional)
    if config.tie_embeddings and "lm_head.weight" in files.tensors:
        _check_tied(files, "lm_head.weight", targets[0].pieces[0])
    with placed(backend, dtype) as stream:
        weights = load_tensors(files, targets, dtype=dtype, backend=backend, stream=stream, progress=progress)
        return Decoder(local, decoder_weights(local, weights), backend.kernels_in_use, ranks)


def _check_tied(files: CheckpointFiles, head: str, embedding: Piece) -> None:
    """A config that ties the embeddings may come with a copy of them, but not with another head."""
    key, cut = embedding.key, embedding.cut
    if files.shape(head) != files.shape(key) or not torch.equal(files.read(head, cut), files.read(key, cut)):
        raise CheckpointError(f"{files.tensors[head].path}: tensor {head!r} differs from {key!r}, but the config ties them")
