"""A decoder with as many rows in its vocabulary as another model has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.device import Backend
from outrider.errors import CheckpointError
from outrider.model.decoder import Decoder
from outrider.model.tensors import placed
from outrider.model.tokenizer import Tokenizer, has_tokenizer


def of_vocabulary(model: Decoder, size: int, *, directory: Path, backend: Backend) -> Decoder:
    """``model``, which was loaded from ``directory``, with ``size`` rows of embeddings and of its head: checkpoints of one
    family differ in how many rows lie behind the tokenizer's tokens. What lacks of the embeddings repeats the last row; what
    lacks of the head is never drawn, its logits are -inf.

    Raises :class:`CheckpointError` where the tokenizer has a token among those rows, or isn't there to say so, and where the
    head is quantised or shared out among ranks.
    """
    own, weights = model.config.vocab_size, model.weights
    if own == size:
        return model
    told = f"{directory / 'config.json'}: the draft model's vocab_size is {own}, the target's is {size}"
    if not has_tokenizer(directory):
        raise CheckpointError(f"{told}: drafts must be tokens of the target, and no tokenizer says which are used")
    used = 1 + max(Tokenizer.from_checkpoint(directory).spellings(), default=-1)
    if used > min(own, size):
        raise CheckpointError(f"{told}: drafts must be tokens of the target, and the draft's tokenizer has {used}")
    if model.ranks is not None or not isinstance(weights.head, Tensor):
        how = "is shared out among ranks" if model.ranks is not None else "is quantised"
        raise CheckpointError(
            f"{told}, which is alike but for rows that no token uses; the draft's head {how}, so they can't be made as many; "
            "expected a draft with as many rows, or one with a plain head on one rank"
        )
    with placed(backend, model.dtype):
        embedding = _rows(weights.embedding, size)
        head = weights.head[:size]
    made = replace(weights, embedding=embedding, head=head)
    return (_Wider if own < size else Decoder)(replace(model.config, vocab_size=size), made, backend.kernels_in_use)


class _Wider(Decoder):
    """A decoder whose head has fewer rows than its vocabulary.

    Rows of the same numbers wouldn't do: a library may add up the last ones of a product in another order.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`Decoder.logits`."""
        known = super().logits(hidden)
        return torch.nn.functional.pad(known, (0, self.config.vocab_size - known.shape[-1]), value=-torch.inf)


def _rows(table: Tensor, size: int) -> Tensor:
    lacking = size - table.shape[0]
    return table[:size] if lacking <= 0 else torch.cat((table, table[-1:].expand(lacking, -1)))
