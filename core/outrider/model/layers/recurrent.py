"""RecurrentBlock: a gated delta rule with a short convolution, in place of a layer's attention (Yang et al. 2024).

Speculation can't truncate a recurrent state. A pass over drafts therefore leaves the states unchanged and keeps the inputs of
each recurrent layer; :meth:`RecurrentBlock.commit` runs the same kernels over the accepted tokens again and writes their
states. Both passes compute the same bits.

Letters: T new tokens, B sequences, H hidden size, C channels of the convolution, Hv value heads, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.device import ConfigError, KernelSet, RecurrentBatch
from outrider.model.config.model_config import RecurrentConfig
from outrider.model.layers.cache import LayerState
from outrider.model.layers.inputs import ForwardInput, StateInput
from outrider.model.layers.products import Weight, linear


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentWeights:
    """Device tensors of a recurrent layer besides its large products, which are ``qkv`` and ``output`` of the layer."""

    gates: Weight
    """[2 Hv, H]: b, then a, one row for each value head."""
    convolution: Tensor
    """[C, K]."""
    a_log: Tensor
    """[Hv], in float32 or wider."""
    dt_bias: Tensor
    """[Hv], in float32 or wider."""
    norm: Tensor
    """[E]: norm of each head's result."""


class RecurrentBlock:
    """The recurrent part of one layer. ``projection`` [C + Hv E, H] has the rows of q, k, v and the output gate."""

    def __init__(
        self, config: RecurrentConfig, projection: Weight, weights: RecurrentWeights, kernels: KernelSet, *, eps: float
    ) -> None:
        self._config = config
        self._projection = projection
        self._weights = weights
        self._kernels = kernels
        self._eps = eps

    def forward(self, normed: Tensor, inputs: ForwardInput, state: LayerState) -> Tensor:
        """Return the gated results of the kept rows [S, Hv E] for normed input [T, H], before the output product."""
        states, config, kernels = inputs.states, self._config, self._kernels
        if states is None:
            raise ConfigError("a model with recurrent layers was called without the rows of its states (ForwardInput.states)")
        projected = linear(kernels, normed, self._projection)
        mixed, gate = projected.split((config.channels, config.value_width), dim=1)
        gates = linear(kernels, normed, self._weights.gates)
        batch = _batch_of(inputs, states)
        if states.window is None:
            made = self._run(mixed, gates, state, batch, batch.token_counts, decodes=states.decodes)
        else:
            states.window.append((mixed, gates))
            made = self._run(mixed, gates, state, batch, None, decodes=True)
        made, gate = (inputs.select_rows(x, kernels) for x in (made, gate.contiguous()))
        normed_heads = kernels.gated_rms_norm(made, gate.view(made.shape), self._weights.norm, self._eps)
        return normed_heads.flatten(1)

    def commit(self, kept: tuple[Tensor, Tensor], state: LayerState, batch: RecurrentBatch, counts: Tensor) -> None:
        """Write the states after ``counts`` int64 [B] of the tokens whose inputs :meth:`forward` ``kept``."""
        self._run(*kept, state, batch, counts, decodes=True)

    def _run(
        self, mixed: Tensor, gates: Tensor, state: LayerState, batch: RecurrentBatch, commit: Tensor | None, *, decodes: bool
    ) -> Tensor:
        kernels, weights = self._kernels, self._weights
        convolved = kernels.short_convolution(mixed, weights.convolution, state.convolution, batch, commit)
        operands = convolved, gates, weights.a_log, weights.dt_bias, state.delta, batch
        return kernels.gated_delta_rule(*operands, commit) if decodes else kernels.chunk_gated_delta_rule(*operands)


def _batch_of(inputs: ForwardInput, states: StateInput) -> RecurrentBatch:
    attention = inputs.attention
    return RecurrentBatch(states.rows, attention.query_start, attention.seq_lens, attention.max_query)


def commit_states(
    blocks: tuple[RecurrentBlock, ...], states: tuple[LayerState, ...], inputs: ForwardInput, accepted: Tensor
) -> None:
    """Write the states after the accepted drafts of a pass over ``inputs``, which kept its window.

    ``accepted`` int64 [B] is the number of drafts that were accepted after each sequence's first token.
    """
    assert inputs.states is not None  # the caller verified drafts
    assert inputs.states.window is not None
    batch, counts = _batch_of(inputs, inputs.states), accepted + 1
    for block, kept, state in zip(blocks, inputs.states.window, states, strict=True):
        block.commit(kept, state, batch, counts)
