"""BaseDraftHead: the part that all heads share that draft for a target model."""

from __future__ import annotations

from torch import Tensor

from outrider.model.config import ModelConfig
from outrider.model.language_model import LanguageModel
from outrider.model.rotary import make_rotary


class BaseDraftHead:
    """A head that drafts for ``target``, with its kernels, dtype and device, and with rotary angles for its context.

    ``aux_hidden_state_layers`` are the target's layers whose inputs the head reads. ``reads_hidden`` is true if the head
    reads the target's final hidden states.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_hidden = False

    def __init__(self, config: ModelConfig, target: LanguageModel) -> None:
        self.config = config
        self.target = target
        self.kernels = target.kernels
        context = max(config.max_context, target.config.max_context)
        self._rotary = make_rotary(
            config.rope, config.head_size, context, kernels=target.kernels, dtype=target.dtype, device=target.device
        )

    @property
    def draft_vocab_size(self) -> int:
        """Vd, the number of tokens that drafts come from, by default those of the target's output head."""
        return self.target.output_size

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [Vd] target token of each draft token, or None if both vocabularies are the same."""
        return self.target.output_ids

    def logits(self, hidden: Tensor) -> Tensor:
        """Return draft logits [N, Vd] of ``hidden`` [N, H], by default those of the target's output head."""
        return self.target.logits(hidden)
