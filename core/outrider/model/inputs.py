"""What a forward is given: the new tokens of a ragged batch. Letters: T new tokens, H hidden size, S kept rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of a batch whose states are read behind its last layer; of the others only keys and values there are.

    ``index`` int64 [S]: which of the T tokens. ``attention``: that of these tokens alone, each as the one new token of a
    sequence of its own whose cached tokens end with it. Both live as long as the batch's other tensors.
    """

    index: Tensor
    attention: AttentionMetadata

    @classmethod
    def ends(cls, attention: AttentionMetadata, last: Tensor) -> KeptRows:
        """The last token of each sequence, at ``last`` int64 [S], whose cached tokens all lie before it or are itself.

        A sequence without tokens keeps a row all the same: that of another one's token, which sees nothing but the first
        place of its own page. What comes of it is never read.
        """
        starts = torch.arange(last.shape[0] + 1, dtype=torch.int32, device=last.device)
        return cls.one_each(attention, last, starts, attention.seq_lens.clamp(min=1))

    @classmethod
    def one_each(cls, attention: AttentionMetadata, index: Tensor, starts: Tensor, seq_lens: Tensor) -> KeptRows:
        """The token at ``index`` int64 [S] of each sequence, whose cached tokens up to it, itself included, are ``seq_lens``
        int32 [S], at least 1. ``starts`` int32 [S + 1]: 0, 1, and so on.
        """
        return cls(
            index,
            replace(
                attention,
                query_start=starts,
                seq_lens=seq_lens,
                block_table=attention.block_table[: index.shape[0]],
                max_query=1,
                tree_mask=None,
                uniform=True,
                plan=None,  # what was planned has all the tokens
                host_query_start=None,
                shapes=(),
                settled=False,  # the layer that asks has just written what is context here
            ),
        )


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """A ragged batch of T new tokens, padding included; every tensor is on the model's device.

    ``tokens`` int64 [T]. ``positions`` int64 [T], or [3, T] for a model with mrope. ``slots`` int64 [T]: where each
    token's key and value go (page * page size + offset); padding goes to page 0. ``attention`` says which tokens belong
    to which sequence and where its pages are.

    ``embeddings`` [T, H] in the model's dtype with ``embedded`` bool [T]: rows that replace the embedding of their token
    (image and video features). Both or none.

    ``prompt_lens`` int64 [T], only for a rope with dynamic scaling: the length of each token's prompt, needed for the
    tokens of prompts alone. A batch that decodes leaves it out.

    ``kept``: the rows of which a result is wanted; None: of all. A stack of layers writes keys and values of all tokens in
    every layer, and behind the last one's it goes on with these.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata
    embeddings: Tensor | None = None
    embedded: Tensor | None = None
    prompt_lens: Tensor | None = None
    kept: KeptRows | None = None

    @property
    def whole(self) -> ForwardInput:
        """The batch where every row goes on, as in all layers but the last."""
        return self if self.kept is None else replace(self, kept=None)

    def keep(self, state: Tensor, kernels: KernelSet) -> Tensor:
        """The rows [S, ...] of ``state`` [T, ...] that are kept; ``state`` itself where all are."""
        return state if self.kept is None else kernels.gather_rows(state, self.kept.index)

    def behind_a_layer(self) -> ForwardInput:
        """The batch for layers behind the first one of a stack: its ``attention`` is ``settled``."""
        return replace(self, attention=replace(self.attention, settled=True))
