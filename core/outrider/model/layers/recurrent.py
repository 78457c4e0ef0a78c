"""Recurrent layers of a model: their weights, their inputs, and the commit of their states.

Speculation can't truncate a recurrent state. A pass over drafts therefore leaves the states unchanged and keeps the inputs of
each recurrent layer; :meth:`~outrider.device.BlockKernels.commit_recurrent` runs the same kernels over the accepted tokens
again and writes their states. Both passes compute the same bits.

Letters: B sequences, H hidden size, C channels of the convolution, Hv value heads, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.device import ConfigError, LayerRows, RecurrentBatch, RecurrentTokens, Weight
from outrider.model.layers.cache import LayerState
from outrider.model.layers.inputs import ForwardInput


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


def recurrent_input(inputs: ForwardInput, state: LayerState, rows: LayerRows | None = None) -> RecurrentTokens:
    """Return the tokens of a recurrent block. Raises :class:`ConfigError` for a pass without states."""
    states, attention = inputs.states, inputs.attention
    if states is None:
        raise ConfigError("a model with recurrent layers was called without the rows of its states (ForwardInput.states)")
    batch = RecurrentBatch(states.rows, attention.query_start, attention.seq_lens, attention.max_query)
    return RecurrentTokens(batch, *state, rows or LayerRows(), states.decodes, states.window)
