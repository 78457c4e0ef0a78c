"""The inputs of recurrent layers, and the commit of their states.

Speculation can't truncate a recurrent state. A pass over drafts therefore leaves the states unchanged and keeps the inputs of
each recurrent layer; :meth:`~outrider.device.BlockKernels.commit_recurrent` runs the same kernels over the accepted tokens
again and writes their states. Both passes compute the same bits.
"""

from __future__ import annotations

from outrider.device import ConfigError, LayerRows, RecurrentBatch, RecurrentTokens
from outrider.model.layers.cache import LayerState
from outrider.model.layers.inputs import ForwardInput


def recurrent_input(inputs: ForwardInput, state: LayerState, rows: LayerRows | None = None) -> RecurrentTokens:
    """Return the tokens and states that a recurrent block processes in the pass ``inputs``. Raises :class:`ConfigError` for a
    pass without states.
    """
    states, attention = inputs.states, inputs.attention
    if states is None:
        raise ConfigError("a model with recurrent layers was called without the rows of its states (ForwardInput.states)")
    operands = states.rows, attention.query_start, attention.seq_lens, attention.max_query
    batch = RecurrentBatch(*operands, settled=attention.settled, uniform=attention.uniform)
    return RecurrentTokens(batch, *state, rows or LayerRows(), states.decodes, states.counts, states.window)
