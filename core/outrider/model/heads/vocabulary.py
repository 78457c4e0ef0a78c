"""Adjustment of a decoder's vocabulary to the number of rows of another model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.device import Backend
from outrider.errors import CheckpointError
from outrider.model.checkpoint.tensor_loading import loading_stream
from outrider.model.layers.decoder import Decoder
from outrider.model.media.tokenizer import Tokenizer, has_tokenizer


def with_vocabulary_size(model: Decoder, size: int, *, directory: Path, backend: Backend) -> Decoder:
    """Return ``model``, loaded from ``directory``, with ``size`` rows of embeddings and of its output head.

    Checkpoints of one family may have different numbers of unused rows after the tokenizer's tokens. Missing embedding rows
    repeat the last row. Missing rows of the head get logits of -inf, so their tokens are never sampled.

    Raises :class:`CheckpointError` if the tokenizer uses one of these rows or is missing, or if the head is quantized or
    split over ranks.
    """
    rows, weights = model.config.vocab_size, model.weights
    if rows == size:
        return model
    mismatch = f"{directory / 'config.json'}: the draft model's vocab_size is {rows}, the target's is {size}"
    if not has_tokenizer(directory):
        raise CheckpointError(f"{mismatch}: drafts must be tokens of the target, and no tokenizer says which are used")
    used = 1 + max(Tokenizer.from_checkpoint(directory).spellings(), default=-1)
    if used > min(rows, size):
        raise CheckpointError(f"{mismatch}: drafts must be tokens of the target, and the draft's tokenizer has {used}")
    if model.ranks is not None or not isinstance(weights.head, Tensor):
        state = "is shared out among ranks" if model.ranks is not None else "is quantised"
        raise CheckpointError(
            f"{mismatch}, which is alike but for rows that no token uses; the draft's head {state}, so they can't be made as "
            "many; expected a draft with as many rows, or one with a plain head on one rank"
        )
    with loading_stream(backend, model.dtype):
        embedding = _resize_table(weights.embedding, size)
        head = weights.head[:size]
    adjusted = replace(weights, embedding=embedding, head=head)
    kind = _PaddedLogitsDecoder if rows < size else Decoder
    return kind(replace(model.config, vocab_size=size), adjusted, backend.kernels_in_use)


class _PaddedLogitsDecoder(Decoder):
    """A decoder whose head has fewer rows than its vocabulary.

    Padding the head's rows instead could change results: a library may sum the last rows of a product in another order.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V], with -inf for the tokens that the head lacks."""
        known = super().logits(hidden)
        return torch.nn.functional.pad(known, (0, self.config.vocab_size - known.shape[-1]), value=-torch.inf)


def _resize_table(table: Tensor, size: int) -> Tensor:
    missing = size - table.shape[0]
    return table[:size] if missing <= 0 else torch.cat((table, table[-1:].expand(missing, -1)))
