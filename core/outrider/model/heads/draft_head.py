"""BaseDraftHead: the part that all heads share that draft for a target model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.device import ResidualStream
from outrider.device.kernels.weights import Weight, linear, prepare
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel
from outrider.model.layers.layer import create_layers
from outrider.model.layers.layer_weights import LayerWeights
from outrider.model.layers.rotary import make_rotary


class BaseDraftHead:
    """A head with ``layers`` that drafts for ``target``, with its kernels, dtype and device, and with rotary angles for its
    context.

    ``head`` is the head's own output head, over tokens ``ids`` int64 [Vd] of the target or over the vocabulary; None means
    that of :attr:`output`. ``aux_hidden_state_layers`` are the target's layers whose inputs the head reads.
    ``reads_hidden`` is true if the head reads the target's final hidden states.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_hidden = False

    def __init__(
        self,
        config: ModelConfig,
        target: LanguageModel,
        layers: Sequence[LayerWeights],
        *,
        head: Weight | None = None,
        ids: Tensor | None = None,
    ) -> None:
        self.config = config
        self.target = target
        self.output: LanguageModel = target
        """The model whose output head drafts are sampled with: the target, or a copy of the target with a smaller head."""
        self.kernels = target.kernels
        self._head, self._ids = head, ids
        self._layers = create_layers(config, layers, self.kernels, target.ranks)
        prepare(self.kernels, head)
        context = max(config.max_context, target.config.max_context)
        self._rotary = make_rotary(
            config.rope, config.head_size, context, kernels=target.kernels, dtype=target.dtype, device=target.device
        )

    @property
    def draft_vocab_size(self) -> int:
        """Vd, the number of tokens that the output head covers."""
        if self._head is None:
            return self.output.output_size
        return self.config.vocab_size if self._ids is None else self._ids.shape[0]

    @property
    def target_ids(self) -> Tensor | None:
        """Target token of each draft token, int64 [Vd]; None if both vocabularies are the same."""
        return self.output.output_ids if self._head is None else self._ids

    def to_target_tokens(self, drafted: Tensor) -> Tensor:
        """Return the target's token number for each draft token number in ``drafted``, int64 of any shape, in the same
        shape.
        """
        ids = self.target_ids
        return drafted if ids is None else self.kernels.gather_rows(ids, drafted.flatten()).view(drafted.shape)

    def expand_to_target(self, probs: Tensor) -> Tensor:
        """Expand distributions [B, K, Vd] over the draft vocabulary to the target's vocabulary [B, K, V]."""
        ids = self.target_ids
        if ids is None:
            return probs
        full = probs.new_zeros((*probs.shape[:-1], self.target.config.vocab_size))
        return full.index_copy_(-1, ids, probs)

    @property
    def has_own_output_head(self) -> bool:
        """True if the draft's checkpoint has an output head that isn't the target's."""
        return self._head is not None

    def condition(self, final: Tensor | None, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the states that the head reads: by default the target's final hidden states [T, H]."""
        del aux_hidden_states
        assert final is not None  # required by reads_hidden
        return final

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, Vd] of the draft vocabulary for hidden states ``hidden`` [N, H]."""
        if self._head is None:
            return self.output.logits(hidden)
        return self.target.ranks.logits(linear(self.kernels, hidden, self._head), self.draft_vocab_size)

    def _forward_layers(
        self, x: ResidualStream, inputs: ForwardInput, cos_sin: tuple[Tensor, Tensor], cache: KVCache
    ) -> ResidualStream:
        """Return the residual stream after all layers, with all rows or only those that ``inputs`` keeps."""
        self.target.begin_pass(inputs)
        whole = inputs.whole
        for layer, pages in zip(self._layers, cache.layers, strict=True):
            x = layer.forward(x, inputs if layer is self._layers[-1] else whole, cos_sin, pages)
        return x
