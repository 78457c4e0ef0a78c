"""What a forward is given: the new tokens of a ragged batch. Letters: T new tokens, H hidden size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from outrider.device import AttentionMetadata


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
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata
    embeddings: Tensor | None = None
    embedded: Tensor | None = None
    prompt_lens: Tensor | None = None

    def behind_a_layer(self) -> ForwardInput:
        """The batch for layers behind the first one of a stack: its ``attention`` is ``settled``."""
        return replace(self, attention=replace(self.attention, settled=True))
